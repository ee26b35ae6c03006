"""ZeRO for PyTorch: optimizer states, gradients and parameters sharded over the ranks, on quantized collectives."""

from zero.access import GatheredParameters, register_external_parameter
from zero.optimizer import ZeroOptimizer
from zero.settings import Effective, ZeroSettings
from zero.stages import model_state_nbytes

__all__ = [
    "Effective",
    "GatheredParameters",
    "ZeroOptimizer",
    "ZeroSettings",
    "model_state_nbytes",
    "register_external_parameter",
]
