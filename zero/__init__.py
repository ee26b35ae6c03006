"""ZeRO for PyTorch: optimizer states, gradients and parameters sharded over the ranks, on quantized collectives."""

from zero import zero
from zero.access import GatheredParameters, register_external_parameter, unregister_external_parameter
from zero.config import NotAvailableError, precision_preset
from zero.cpu_optimizers import CPUSGD, CPUAdagrad, CPUAdam, CPULion
from zero.distributed import init_distributed
from zero.engine import Engine
from zero.estimate import Estimate, estimate
from zero.formulas import Activations, Counts
from zero.init import Init
from zero.initialize import Initialized, add_config_arguments, initialize
from zero.optimizer import ZeroOptimizer
from zero.settings import Effective, ZeroSettings
from zero.stages import model_state_nbytes

__all__ = [
    "CPUSGD",
    "Activations",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "Counts",
    "Effective",
    "Engine",
    "Estimate",
    "GatheredParameters",
    "Init",
    "Initialized",
    "NotAvailableError",
    "ZeroOptimizer",
    "ZeroSettings",
    "add_config_arguments",
    "estimate",
    "init_distributed",
    "initialize",
    "model_state_nbytes",
    "precision_preset",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero",
]
