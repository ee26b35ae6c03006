"""Block codecs on tiles float32 [ROWS, COLS], a block a row: header bits and codes, and back.

``KIND`` is ``"symmetric"`` (int8, int4), ``"asymmetric"`` (with a zero point), ``"nf4"`` or ``"fp8"``. Headers are
int32 [ROWS], the scale's 16 bits with the zero point's 16 bits above them; codes are int32 [ROWS, COLS].
"""

from __future__ import annotations

from itertools import pairwise

import triton
import triton.language as tl

from .arithmetic import (
    INFINITY_BITS,
    ONE_BITS,
    TINY_BITS,
    UPPER_HALF,
    bits_of,
    clamped,
    divided,
    float_of,
    inverse_of,
    rounded,
    scale_up,
    stochastic,
)

NAN_HEADER = tl.constexpr(0x7FC0)
TINY = tl.constexpr(2.0**-100)
LARGEST_ASYMMETRIC = tl.constexpr(2.0**126)
FP8_LARGEST = tl.constexpr(0x7E)
FP8_SMALLEST_NORMAL_BITS = tl.constexpr(0x3C800000)  # 2^-6

# The levels of the contract's N5, as in zcomm.blocks; a test compares them.
NF4_LEVELS = (
    *(-8.0, -5.5625, -4.1875, -3.15625, -2.28125, -1.4765625, -0.7265625, 0.0),
    *(0.63671875, 1.2890625, 1.96875, 2.703125, 3.53125, 4.5, 5.78125, 8.0),
)
LEVELS = tl.constexpr(NF4_LEVELS)
MIDPOINTS = tl.constexpr(tuple((low + high) / 2 for low, high in pairwise(NF4_LEVELS)))


@triton.jit
def encode_tile(values, mask, uniform, KIND: tl.constexpr, QMAX: tl.constexpr, IS_RANDOM: tl.constexpr):
    """Headers, codes and whether blocks are finite, of ``values``, which are 0 where ``mask`` is not set."""
    absmax = tl.max(bits_of(values) & 0x7FFFFFFF, axis=1)
    is_finite = absmax < INFINITY_BITS
    if KIND == "asymmetric":
        headers, codes = _encode_asymmetric(values, mask, uniform, is_finite, QMAX, IS_RANDOM)
    else:
        is_normal = is_finite & (absmax >= TINY_BITS)
        scale_bits = scale_up(divided(float_of(tl.where(is_normal, absmax, ONE_BITS)), QMAX))
        inverse = tl.where(is_normal, inverse_of(scale_bits), 0.0)
        codes = _codes_of(values * inverse[:, None], uniform, KIND, QMAX, IS_RANDOM)
        codes = tl.where(is_finite[:, None], codes, 0)
        headers = tl.where(is_normal, scale_bits >> 16, tl.where(is_finite, 0, NAN_HEADER))
    return headers, codes, is_finite


@triton.jit
def _codes_of(scaled, uniform, KIND: tl.constexpr, QMAX: tl.constexpr, IS_RANDOM: tl.constexpr):
    if KIND == "nf4":
        codes = _nf4_codes(scaled)
    elif KIND == "fp8":
        codes = _fp8_codes(scaled)
    else:
        codes = tl.minimum(tl.maximum(_rounded(scaled, uniform, IS_RANDOM), -QMAX), QMAX)
    return codes


@triton.jit
def _nf4_codes(scaled):
    """How many midpoints are below: a binary search, by selections."""
    b3 = scaled > MIDPOINTS[7]
    b2 = scaled > tl.where(b3, MIDPOINTS[11], MIDPOINTS[3])
    low = tl.where(b2, MIDPOINTS[5], MIDPOINTS[1])
    b1 = scaled > tl.where(b3, tl.where(b2, MIDPOINTS[13], MIDPOINTS[9]), low)
    low = tl.where(b2, tl.where(b1, MIDPOINTS[6], MIDPOINTS[4]), tl.where(b1, MIDPOINTS[2], MIDPOINTS[0]))
    high = tl.where(b2, tl.where(b1, MIDPOINTS[14], MIDPOINTS[12]), tl.where(b1, MIDPOINTS[10], MIDPOINTS[8]))
    b0 = scaled > tl.where(b3, high, low)
    return (b3.to(tl.int32) << 3) | (b2.to(tl.int32) << 2) | (b1.to(tl.int32) << 1) | b0.to(tl.int32)


@triton.jit
def _rounded(values, uniform, IS_RANDOM: tl.constexpr):
    return stochastic(values, uniform) if IS_RANDOM else rounded(values)


@triton.jit
def _fp8_codes(values):
    """Float8 e4m3 by integer operations, half to even, without a negative zero."""
    bits = bits_of(values)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    is_denormal = magnitude < FP8_SMALLEST_NORMAL_BITS
    denormal = rounded(float_of(magnitude) * 512.0)
    codes = tl.minimum(tl.where(is_denormal, denormal, normal), FP8_LARGEST)
    return tl.where((bits < 0) & (codes > 0), codes | 0x80, codes)


@triton.jit
def _encode_asymmetric(values, mask, uniform, is_finite, QMAX: tl.constexpr, IS_RANDOM: tl.constexpr):
    values = clamped(tl.where(is_finite[:, None], values, 0.0), LARGEST_ASYMMETRIC)
    lowest = tl.min(tl.where(mask, values, LARGEST_ASYMMETRIC), axis=1)
    highest = tl.max(tl.where(mask, values, -LARGEST_ASYMMETRIC), axis=1)
    low_bits = bits_of(lowest)
    down = tl.where(low_bits < 0, low_bits + 0xFFFF, low_bits) & UPPER_HALF  # a negative number's magnitude goes up
    zero_bits = tl.where((low_bits & 0x7FFFFFFF) < TINY_BITS, 0, down)
    zero = float_of(zero_bits)
    spread = highest - zero
    is_wide = spread >= TINY
    scale_bits = scale_up(divided(tl.where(is_wide, spread, 1.0), QMAX))
    inverse = tl.where(is_wide, inverse_of(scale_bits), 0.0)
    scaled = (values - zero[:, None]) * inverse[:, None]
    codes = tl.minimum(tl.maximum(_rounded(scaled, uniform, IS_RANDOM), 0), QMAX)
    headers = tl.where(is_wide, scale_bits >> 16, 0) | zero_bits
    return tl.where(is_finite, headers, NAN_HEADER), codes


@triton.jit
def decode_tile(headers, codes, KIND: tl.constexpr, BITS: tl.constexpr):
    """Float32 values; those of the largest scale may be infinite, and of a block with a NaN scale are NaN."""
    scales = float_of(headers << 16)[:, None]
    if KIND == "asymmetric":
        product = (codes & ((1 << BITS) - 1)).to(tl.float32) * scales
        values = float_of(headers & UPPER_HALF)[:, None] + product
    elif KIND == "nf4":
        values = _nf4_levels(codes & 0xF) * scales
    elif KIND == "fp8":
        values = _fp8_values(codes & 0xFF) * scales
    else:
        values = codes.to(tl.float32) * scales
    return values


@triton.jit
def _nf4_levels(codes):
    """A binary tree of selections: no table in memory."""
    b0, b1, b2, b3 = (codes & 1) > 0, (codes & 2) > 0, (codes & 4) > 0, (codes & 8) > 0
    low = tl.where(b2, _four_levels(b0, b1, 4), _four_levels(b0, b1, 0))
    high = tl.where(b2, _four_levels(b0, b1, 12), _four_levels(b0, b1, 8))
    return tl.where(b3, high, low)


@triton.jit
def _four_levels(b0, b1, FIRST: tl.constexpr):
    low = tl.where(b0, LEVELS[FIRST + 1], LEVELS[FIRST])
    return tl.where(b1, tl.where(b0, LEVELS[FIRST + 3], LEVELS[FIRST + 2]), low)


@triton.jit
def _fp8_values(codes):
    exponent = (codes >> 3) & 0xF
    mantissa = codes & 7
    normal = float_of(((exponent + (127 - 7)) << 23) | (mantissa << 20))
    values = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.001953125)
    return tl.where(codes >= 0x80, values * -1.0, values)
