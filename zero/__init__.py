"""ZeRO for PyTorch: optimizer states, gradients and parameters sharded over the ranks, on quantized collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zero import checkpointing, checkpoints, utils, zero
from zero.access import GatheredParameters, register_external_parameter, unregister_external_parameter
from zero.checkpointing import checkpoint
from zero.checkpoints import CheckpointError
from zero.config import NotAvailableError, precision_preset
from zero.cpu_optimizers import CPUAdagrad, CPUAdam, CPULion
from zero.distributed import init_distributed
from zero.engine import Engine
from zero.estimate import Estimate, estimate
from zero.formulas import Activations, Counts
from zero.generation import gathered_for_generation
from zero.init import Init
from zero.initialize import Initialized, add_config_arguments, initialize
from zero.large_linears import untile_linears
from zero.lion import Lion
from zero.load import Loaded, load_pretrained
from zero.offload import offload_states, reload_states
from zero.optimizer import ZeroOptimizer
from zero.settings import Effective, ZeroSettings
from zero.stages import model_state_nbytes
from zero.tiling import TiledLinear, TiledLinearReturnBias

if TYPE_CHECKING:
    from zero.checkpoints import export_checkpoint, load_checkpoint, save_checkpoint

__all__ = [
    "Activations",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "CheckpointError",
    "Counts",
    "Effective",
    "Engine",
    "Estimate",
    "GatheredParameters",
    "Init",
    "Initialized",
    "Lion",
    "Loaded",
    "NotAvailableError",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroOptimizer",
    "ZeroSettings",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "estimate",
    "export_checkpoint",
    "gathered_for_generation",
    "init_distributed",
    "initialize",
    "load_checkpoint",
    "load_pretrained",
    "model_state_nbytes",
    "offload_states",
    "precision_preset",
    "register_external_parameter",
    "reload_states",
    "save_checkpoint",
    "unregister_external_parameter",
    "untile_linears",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    """What :mod:`zero.checkpoints` imports when it is first used."""
    if name in __all__ and name in checkpoints.MODULES:
        return getattr(checkpoints, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
