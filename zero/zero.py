"""The namespace ``deepspeed.zero``, for code that says ``import zero as deepspeed``."""

from zero._access.gathered_parameters import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from zero._access.tiled_linear import TiledLinear, TiledLinearReturnBias
from zero._model.init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "register_external_parameter",
    "unregister_external_parameter",
]
