"""The namespace ``deepspeed.zero``, for code that says ``import zero as deepspeed``."""

from zero.access import GatheredParameters, register_external_parameter, unregister_external_parameter
from zero.init import Init

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]
