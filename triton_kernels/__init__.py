"""Triton kernels of zcomm, installed as ``zcomm.triton_kernels``: arrays in, arrays out, no groups and no ranks.

This version has no Triton kernels yet, and says so: GPU tensors take the PyTorch reference path of ``zcomm.kernels``.
"""

from __future__ import annotations

__all__ = ["available", "unavailable_reason"]


def available() -> bool:
    """Whether Triton kernels can serve a call."""
    return not unavailable_reason()


def unavailable_reason() -> str:
    """Why Triton kernels cannot serve a call; empty when they can."""
    return "this version of zcomm has no Triton kernels"
