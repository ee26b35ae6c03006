"""The codec fp8_e4m3 in PyTorch (N5 of :mod:`zcomm._formats.reference`): float8 with bias 7 and no infinities."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 0x7E  # 448


def nearest(scaled: Tensor) -> Tensor:
    """Values up to 448 rounded half to even, without a negative zero."""
    bits = scaled.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    denormal = (magnitude.view(torch.float32) * 2.0**9).round().to(torch.int32)
    codes = torch.where(magnitude < 0x3C800000, denormal, normal).clamp(max=LARGEST)  # below 2^-6
    return torch.where((bits < 0) & (codes > 0), codes | 0x80, codes)


def levels(codes: Tensor) -> Tensor:
    """The values of codes."""
    bits = codes.to(torch.int32) & 0xFF
    exponent, mantissa = (bits >> 3) & 0xF, bits & 7
    normal = (((exponent + (127 - 7)) << 23) | (mantissa << 20)).view(torch.float32)
    values = torch.where(exponent > 0, normal, mantissa * 2.0**-9)
    return torch.where(bits >= 0x80, -values, values)
