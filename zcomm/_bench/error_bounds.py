"""Bounds on the errors of the formats, for checking results.

They follow from the definition of the codes and share nothing with the kernels. A block codec rounds to the
nearest level. So the error of an element is at most half the widest gap between levels, times the scale, which is
``Codec.relative_rounding`` times absmax of its block. Scales are rounded up to bf16, by at most 2^-7 of themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._formats.formats import Format, codec_for

SCALE_ROUNDING = 1 + 2**-7
SLACK = 1 + 2**-12
"""Slack for rounding in float32 arithmetic."""


def rounding_of(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def step_bound(magnitudes: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """Bound the error of one encode and decode of elements of ``magnitudes`` [n], which start at a block's start."""
    codec = codec_for(format, dtype)
    if (wire := codec.dtype) is not None:
        return magnitudes.clamp(min=torch.finfo(wire).smallest_normal) * rounding_of(wire)  # subnormals: a fixed step
    relative = codec.relative_rounding * SCALE_ROUNDING * SLACK
    relative *= 2 if format.is_random else 1
    padding = -magnitudes.numel() % format.block
    blocks = torch.nn.functional.pad(magnitudes, (0, padding)).view(-1, format.block)
    # A rotated element is at most the sum of its block's magnitudes; rotating back averages the errors.
    largest = blocks.sum(1) if format.rotation is not None else blocks.amax(1)
    return (largest * relative).repeat_interleave(format.block)[: magnitudes.numel()]
