"""Block codecs in PyTorch: float32 blocks [..., block] to headers and codes, and back (N1 to N6 and N9).

A header is an int32 [..., 1]: the bf16 scale in the low 16 bits, the bf16 zero point, if any, in the high 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._formats.formats import Codec

TINY_BITS = 0x0D800000  # 2^-100
INFINITY_BITS = 0x7F800000
NAN_SCALE_BITS = 0x7FC00000
LARGEST_SCALE_BITS = 0x7F7F0000
UPPER_HALF = -0x10000  # 0xFFFF0000 as int32
LARGEST_ASYMMETRIC = 2.0**126
"""Asymmetric codecs clamp to this magnitude: otherwise max - zero could overflow float32."""


def encode_blocks(blocks: Tensor, codec: Codec, uniform: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode float32 [..., block] as headers int32 [..., 1] and codes int8 [..., block].

    ``uniform``: integers in [0, 2^24) for stochastic rounding. Unsigned codes are stored as the same bits in int8.
    """
    if codec.has_zero_point:
        return _encode_asymmetric(blocks, codec.qmax, uniform)
    absmax_bits = (blocks.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    is_finite, is_tiny = absmax_bits < INFINITY_BITS, absmax_bits < TINY_BITS
    scale_bits = _scale_up(divided(absmax_bits.view(torch.float32), codec.qmax))
    is_normal = is_finite & ~is_tiny
    inverse = torch.where(is_normal, 1 / scale_bits.view(torch.float32), 0.0)
    scaled = torch.where(is_normal, blocks, 0.0) * inverse
    codes = torch.where(is_finite, _codes_of(scaled, codec, uniform), 0)
    header = torch.where(is_tiny, 0, torch.where(is_finite, scale_bits, NAN_SCALE_BITS)) >> 16
    return header.to(torch.int32), codes.to(torch.int8)


def _scale_up(quotients: Tensor) -> Tensor:
    """The bits of non-negative float32 values rounded up to bf16, at most the largest finite bf16.

    Rounded up, so that no scaled value exceeds qmax.
    """
    bits = quotients.view(torch.int32)
    return torch.where(bits >= LARGEST_SCALE_BITS, LARGEST_SCALE_BITS, (bits + 0xFFFF) & UPPER_HALF)


def _codes_of(scaled: Tensor, codec: Codec, uniform: Tensor | None) -> Tensor:
    if codec.nearest is not None:
        return codec.nearest(scaled)
    return _rounded(scaled, uniform).clamp(-codec.qmax, codec.qmax)


def _rounded(values: Tensor, uniform: Tensor | None) -> Tensor:
    if uniform is None:
        return values.round()  # half to even
    magnitude = values.abs()
    floor = magnitude.floor()
    return torch.copysign(floor + (uniform < (magnitude - floor) * 2.0**24), values)


def _encode_asymmetric(blocks: Tensor, qmax: int, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    is_finite = ((blocks.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)) < INFINITY_BITS
    values = torch.where(is_finite, blocks, 0.0).clamp(-LARGEST_ASYMMETRIC, LARGEST_ASYMMETRIC)
    zero_bits = _zero_point_bits(values.amin(-1, keepdim=True))
    zero = zero_bits.view(torch.float32)
    spread = values.amax(-1, keepdim=True) - zero
    is_tiny = spread.clamp(min=0.0).view(torch.int32) < TINY_BITS
    scale_bits = _scale_up(divided(torch.where(is_tiny, 1.0, spread), qmax))
    inverse = torch.where(is_tiny, 0.0, 1 / scale_bits.view(torch.float32))
    codes = _rounded((values - zero) * inverse, uniform).clamp(0, qmax)
    header = torch.where(is_tiny, 0, scale_bits >> 16) & 0xFFFF
    header = torch.where(is_finite, header | (zero_bits & UPPER_HALF), NAN_SCALE_BITS >> 16)
    return header.to(torch.int32), codes.to(torch.int32).to(torch.int8)


def _zero_point_bits(lowest: Tensor) -> Tensor:
    """The bits of each block's minimum rounded down to bf16; +0 for magnitudes below 2^-100."""
    bits = lowest.contiguous().view(torch.int32)
    down = torch.where(bits < 0, bits + 0xFFFF, bits) & UPPER_HALF  # down is away from 0 for negative numbers
    return torch.where((bits & 0x7FFFFFFF) < TINY_BITS, 0, down).to(torch.int32)


def decode_blocks(headers: Tensor, codes: Tensor, codec: Codec) -> Tensor:
    """Decode headers int32 [..., 1] and codes int8 [..., block] to float32 values, finite or NaN."""
    scales = ((headers & 0xFFFF) << 16).view(torch.float32)
    if codec.has_zero_point:
        mask = 2**codec.bits - 1
        values = (headers & UPPER_HALF).view(torch.float32) + (codes.to(torch.int32) & mask).float() * scales
    else:
        values = (codes.float() if codec.levels is None else codec.levels(codes)) * scales
    return clamped(values, torch.float32)


def divided(values: Tensor, divisor: float) -> Tensor:
    """IEEE division. With a Python number as divisor torch on CUDA multiplies by the reciprocal, which rounds twice."""
    return values / torch.full((1,), divisor, dtype=values.dtype, device=values.device)


def clamped(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp decoded values to the finite range of ``dtype``; NaN stays NaN."""
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)  # decoded values are float32
    return values.clamp(-largest, largest)
