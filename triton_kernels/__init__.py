"""Triton kernels of zcomm, installed as ``zcomm.triton_kernels``: they work on arrays and know no groups and ranks.

The launchers are in :mod:`zcomm.triton_kernels.launch`, which imports Triton; this module does not.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

__all__ = ["unavailable_reason"]


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
