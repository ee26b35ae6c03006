"""The codec nf4 in PyTorch (N5 of :mod:`zcomm._formats.reference`)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# The 16 levels of NF4 ("QLoRA", arXiv:2305.14314, appendix E), times 8 and rounded to bf16.
LEVELS = (
    *(-8.0, -5.5625, -4.1875, -3.15625, -2.28125, -1.4765625, -0.7265625, 0.0),
    *(0.63671875, 1.2890625, 1.96875, 2.703125, 3.53125, 4.5, 5.78125, 8.0),
)


def nearest(scaled: Tensor) -> Tensor:
    """How many midpoints between levels are below each value: ties go down."""
    levels = _levels(scaled.device)
    return torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)  # exact


def levels(codes: Tensor) -> Tensor:
    """The levels of codes."""
    return _levels(codes.device)[codes.to(torch.int64) & 0xF]


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)
