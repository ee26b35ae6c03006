"""The namespace ``deepspeed.zero``, for code that says ``import zero as deepspeed``."""

from zero.access import GatheredParameters, register_external_parameter

__all__ = ["GatheredParameters", "register_external_parameter"]
