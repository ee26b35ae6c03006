"""How far a format may move a value: from its codes' definition, sharing nothing with the kernels.

A block codec rounds to the nearest level, so an element is off by at most half the widest gap between its levels,
times the scale: ``RELATIVE * absmax`` of its block. Scales are rounded up to bf16, by at most 2^-7 of themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm.formats import Format

__all__ = ["rounding_of", "step_bound"]

# Half the widest gap between levels over the largest level.
RELATIVE = {
    "int8": 1 / 2 / 127,
    "int4": 1 / 2 / 7,
    "nf4": (8 - 5.5625) / 2 / 8,
    "fp8_e4m3": 16 / 448,
}
RELATIVE_ASYMMETRIC = {"int8": 1 / 255, "int4": 1 / 15}  # the levels span at most twice absmax
SCALE_ROUNDING = 1 + 2**-7
SLACK = 1 + 2**-12
"""For the float32 arithmetic."""


def rounding_of(dtype: torch.dtype) -> float:
    """Half a unit in the last place, over the value."""
    return torch.finfo(dtype).eps / 2


def step_bound(magnitudes: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """How far one encoding and decoding may move elements of such ``magnitudes`` [n], which start with a block."""
    casts = {"none": dtype, "bf16": torch.bfloat16, "fp16": torch.float16}
    if format.name in casts:
        wire = casts[format.name]
        return magnitudes.clamp(min=torch.finfo(wire).smallest_normal) * rounding_of(wire)  # below it, of fixed size
    relative = (RELATIVE if format.symmetric else RELATIVE_ASYMMETRIC)[format.name] * SCALE_ROUNDING * SLACK
    relative *= 2 if format.is_random else 1
    padding = -magnitudes.numel() % format.block
    blocks = torch.nn.functional.pad(magnitudes, (0, padding)).view(-1, format.block)
    # A rotation adds up all elements of a block; back, it averages their errors.
    largest = blocks.sum(1) if format.rotation is not None else blocks.amax(1)
    return (largest * relative).repeat_interleave(format.block)[: magnitudes.numel()]
