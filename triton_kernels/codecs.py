"""Block codecs on tiles float32 [ROWS, COLS], one block per row: encode to headers and codes, and decode.

``KIND`` is ``"symmetric"`` (int8, int4), ``"asymmetric"`` (with a zero point), ``"nf4"`` or ``"fp8"``. Headers are
int32 [ROWS]: the scale in the low 16 bits, the zero point in the high 16 bits. Codes are a message's bytes, uint8
[ROWS, COLS * BITS / 8].

On NVIDIA GPUs most codecs use the PTX of ptx.py; the functions here compute the same, for all other targets.
"""

from __future__ import annotations

from itertools import pairwise

import triton
import triton.language as tl

from .arithmetic import (
    INFINITY_BITS,
    INTERPRETED,
    ONE_BITS,
    TINY_BITS,
    UPPER_HALF,
    absmax_bits,
    bits_of,
    clamped,
    divided,
    float_of,
    inverse_of,
    rounded,
    scale_of,
    scale_up,
    stochastic,
)
from .ptx import (
    DECODE_FP8,
    DECODE_FP8_BITS,
    DECODE_INT4,
    DECODE_INT8,
    DECODE_NF4,
    ENCODE_FP8,
    ENCODE_INT4,
    ENCODE_INT8,
    ENCODE_NF4,
    FOUR_FROM_BYTES,
    FOUR_TO_BYTES,
    MULTIPLY_ADD,
    NF4_LEVELS,
    PAIRS_FROM_BYTES,
    PAIRS_TO_BYTES,
    capability,
)

NAN_HEADER = tl.constexpr(0x7FC0)
TINY = tl.constexpr(2.0**-100)
LARGEST_ASYMMETRIC = tl.constexpr(2.0**126)
CLAMPED_FROM = tl.constexpr(0x7B000000)  # the bits of 2^119: no code is above 480, so smaller scales need no clamp
FP8_CLAMPED_FROM = tl.constexpr(0x43800000)  # of 2^8: a scale of e4m3 times FP8_FACTOR is finite below it
FP8_FACTOR = tl.constexpr(2.0**120)  # the difference of float32's bias and e4m3's
FP8_LARGEST = tl.constexpr(0x7E)
FP8_SMALLEST_NORMAL_BITS = tl.constexpr(0x3C800000)  # 2^-6

LEVELS = tl.constexpr(NF4_LEVELS)
MIDPOINTS = tl.constexpr(tuple((low + high) / 2 for low, high in pairwise(NF4_LEVELS)))


@triton.jit
def encode_tile(
    values, mask, uniform, KIND: tl.constexpr, BITS: tl.constexpr, QMAX: tl.constexpr, IS_RANDOM: tl.constexpr
):
    """Headers, codes and whether blocks are finite, of ``values``, which are 0 where ``mask`` is not set."""
    absmax = absmax_bits(values)
    is_finite = absmax < INFINITY_BITS
    if KIND == "asymmetric":
        headers, codes = _encode_asymmetric(values, mask, uniform, is_finite, QMAX, IS_RANDOM)
        codes = packed(codes, BITS)
    else:
        headers, inverse = _scales_of(absmax, is_finite, QMAX)
        scaled = values * inverse[:, None]
        CAPABILITY: tl.constexpr = 0 if INTERPRETED else capability()
        if KIND != "asymmetric" and not IS_RANDOM and CAPABILITY >= (89 if KIND == "fp8" else 80):
            if BITS == 4:
                low, high = tl.split(tl.reshape(scaled, (scaled.shape[0], scaled.shape[1] // 2, 2)))
                codes = _pairs_by_ptx(low, high, is_finite, KIND)
            else:
                codes = _bytes_by_ptx(scaled, is_finite, KIND)
        else:
            codes = tl.where(is_finite[:, None], _codes_of(scaled, uniform, KIND, QMAX, IS_RANDOM), 0)
            codes = packed(codes, BITS)
    return headers, codes, is_finite


@triton.jit
def encode_pairs(low, high, KIND: tl.constexpr, QMAX: tl.constexpr):
    """Headers and codes of 4 bits, to nearest, of the even and the odd elements, float32 [ROWS, COLS / 2] each."""
    absmax = tl.maximum(absmax_bits(low), absmax_bits(high))
    is_finite = absmax < INFINITY_BITS
    headers, inverse = _scales_of(absmax, is_finite, QMAX)
    low, high = low * inverse[:, None], high * inverse[:, None]
    CAPABILITY: tl.constexpr = 0 if INTERPRETED else capability()
    if CAPABILITY >= 80:
        codes = _pairs_by_ptx(low, high, is_finite, KIND)
    else:
        low, high = _codes_of(low, 0.0, KIND, QMAX, False), _codes_of(high, 0.0, KIND, QMAX, False)
        codes = tl.where(is_finite[:, None], (low & 0xF) | ((high & 0xF) << 4), 0).to(tl.uint8)
    return headers, codes


@triton.jit
def _scales_of(absmax, is_finite, QMAX: tl.constexpr):
    """Headers, and what values are multiplied by, of the bits of blocks' largest magnitudes."""
    is_normal = is_finite & (absmax >= TINY_BITS)
    scale_bits = scale_of(float_of(tl.where(is_normal, absmax, ONE_BITS)), QMAX)
    headers = tl.where(is_normal, scale_bits >> 16, tl.where(is_finite, 0, NAN_HEADER))
    return headers, tl.where(is_normal, inverse_of(scale_bits), 0.0)


@triton.jit
def _pairs_by_ptx(low, high, is_finite, KIND: tl.constexpr):
    keep = tl.where(is_finite, 0xFF, 0).to(tl.uint8)[:, None]
    TEXT: tl.constexpr = ENCODE_NF4 if KIND == "nf4" else ENCODE_INT4
    return tl.inline_asm_elementwise(TEXT, PAIRS_TO_BYTES, [low, high, keep], tl.uint8, True, 4)


@triton.jit
def _bytes_by_ptx(scaled, is_finite, KIND: tl.constexpr):
    keep = tl.where(is_finite, 0xFF, 0).to(tl.uint8)[:, None]
    TEXT: tl.constexpr = ENCODE_FP8 if KIND == "fp8" else ENCODE_INT8
    return tl.inline_asm_elementwise(TEXT, FOUR_TO_BYTES, [scaled, keep], tl.uint8, True, 4)


@triton.jit
def packed(codes, BITS: tl.constexpr):
    """Codes int32 [ROWS, COLS] as bytes."""
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
        codes = (low & 0xF) | ((high & 0xF) << 4)
    return codes.to(tl.uint8)


@triton.jit
def _unpacked(codes, BITS: tl.constexpr):
    """Codes int32 [ROWS, COLS], their sign extended, of bytes."""
    if BITS == 8:
        numbers = codes.to(tl.int8, bitcast=True).to(tl.int32)
    else:
        pairs = codes.to(tl.int32)
        numbers = _joined((pairs << 28) >> 28, (pairs << 24) >> 28)
    return numbers


@triton.jit
def _joined(low, high):
    """[ROWS, COLS] of what the low and the high halves of bytes, [ROWS, COLS / 2], stand for."""
    return tl.reshape(tl.join(low, high), (low.shape[0], low.shape[1] * 2))


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
        product = (_unpacked(codes, BITS) & ((1 << BITS) - 1)).to(tl.float32) * scales
        values = float_of(headers & UPPER_HALF)[:, None] + product
    elif INTERPRETED or capability() < 80:
        values = _levels_of(_unpacked(codes, BITS), KIND) * scales
    else:
        values = _levels_by_ptx(codes, KIND, BITS) * scales
    return values


@triton.jit
def added_tile(total, headers, codes, KIND: tl.constexpr, BITS: tl.constexpr):
    """RN(total + value) of each value, by one instruction: the product of two numbers of 8 bits is exact.

    Only for codecs decoded by PTX, and scales below CLAMPED_FROM: there e4m3's exponents are corrected in the scale.
    """
    scales = float_of(headers << 16)[:, None]
    if KIND == "fp8":
        scales *= FP8_FACTOR
        levels = tl.inline_asm_elementwise(DECODE_FP8_BITS, FOUR_FROM_BYTES, [codes], tl.float32, True, 4)
    else:
        levels = _levels_by_ptx(codes, KIND, BITS)
    return tl.inline_asm_elementwise(MULTIPLY_ADD, "=r,r,r,r", [levels, scales, total], tl.float32, True, 1)


@triton.jit
def _levels_by_ptx(codes, KIND: tl.constexpr, BITS: tl.constexpr):
    if BITS == 4:
        TEXT: tl.constexpr = DECODE_NF4 if KIND == "nf4" else DECODE_INT4
        low, high = tl.inline_asm_elementwise(TEXT, PAIRS_FROM_BYTES, [codes], (tl.float32, tl.float32), True, 4)
        levels = _joined(low, high)
    else:
        OF_BYTES: tl.constexpr = DECODE_FP8 if KIND == "fp8" else DECODE_INT8
        levels = tl.inline_asm_elementwise(OF_BYTES, FOUR_FROM_BYTES, [codes], tl.float32, True, 4)
    return levels


@triton.jit
def _levels_of(codes, KIND: tl.constexpr):
    if KIND == "nf4":
        levels = _nf4_levels(codes & 0xF)
    elif KIND == "fp8":
        levels = _fp8_values(codes & 0xFF)
    else:
        levels = codes.to(tl.float32)
    return levels


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
