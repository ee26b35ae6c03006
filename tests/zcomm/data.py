"""Test data: blocks of every difficult kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FINITE = ("normal", "zeros", "tiny", "denormal", "ties", "wide", "negative zero")
"""Of these kinds no sum overflows, and no block has a NaN: nothing takes a kernel off its fastest path."""
KINDS = ("normal", "zeros", "tiny", "denormal", "huge", "max", "nan", "inf", "ties", "wide", "negative zero")


def values_of(kind: str, numel: int, seed: int) -> np.ndarray:
    """Float32 [numel] of one kind."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(numel).astype(np.float32)
    factors = {"zeros": 0.0, "tiny": 2.0**-101, "denormal": 1e-40, "huge": 1e37}
    with np.errstate(over="ignore"):
        if kind in factors:
            x *= np.float32(factors[kind])
        elif kind == "negative zero":
            x = np.where(x > 0, np.float32(0), np.float32(-0.0))
        elif kind == "wide":
            x = np.ldexp(x, random.integers(-120, 120, numel)).astype(np.float32)
        elif kind == "ties":
            x = (random.integers(-254, 255, numel) / 2).astype(np.float32)
            x[::64] = 127
    spots = {"max": np.finfo(np.float32).max, "nan": np.float32(np.nan), "inf": np.float32(-np.inf)}
    if numel and kind in spots:
        x[random.integers(numel)] = spots[kind]
    return x


def mixture(
    numel: int, seed: int, dtype: torch.dtype = torch.float32, kinds: Sequence[str] = KINDS, length: int = 100
) -> Tensor:
    """Runs of ``length`` elements, each of another kind, in ``dtype``."""
    count = -(-numel // length)
    parts = [values_of(kinds[(i + seed) % len(kinds)], length, seed + i) for i in range(count)]
    flat = np.concatenate(parts)[:numel] if parts else np.zeros(0, np.float32)
    return torch.from_numpy(flat.copy()).to(dtype)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether both are equal bit for bit; NaNs by position."""
    if a.dtype.is_floating_point:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
