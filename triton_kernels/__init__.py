"""Triton kernels of zcomm, installed as ``zcomm.triton_kernels``: they work on arrays and know no groups and ranks.

The launchers are in :mod:`zcomm.triton_kernels.launch`, which imports Triton; this module does not.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

__all__ = ["KINDS", "unavailable_reason"]

KINDS = {
    **dict.fromkeys(("f32", "bf16", "fp16"), "cast"),
    **dict.fromkeys(("int8", "int4"), "symmetric"),
    **dict.fromkeys(("int8_asym", "int4_asym"), "asymmetric"),
    "nf4": "nf4",
    "fp8_e4m3": "fp8",
}
"""The codecs that the kernels have, and the branch of codecs.py that serves each."""


@cache
def unavailable_reason(device_type: str = "cuda") -> str:
    """Why Triton kernels cannot serve tensors on devices of ``device_type``; empty when they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'zcomm-zero[triton]'"
    is_interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
    if device_type == "cpu" and not is_interpreted:
        return "on CPU tensors they run in Triton's interpreter only: set TRITON_INTERPRET=1 before the start"
    if device_type not in ("cpu", "cuda"):
        return f"there are none for {device_type} tensors"
    return ""
