"""The namespace ``deepspeed.zero``, for code that says ``import zero as deepspeed``."""

from zero.access import GatheredParameters, register_external_parameter, unregister_external_parameter
from zero.init import Init
from zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "register_external_parameter",
    "unregister_external_parameter",
]
