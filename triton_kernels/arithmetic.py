"""The numerics contract's arithmetic in Triton: conversions, rounding, scales, butterflies, random numbers.

GPU and host must give the same bits. So division is ``tl.div_rn`` (a plain ``/`` is approximate on GPUs), kernels are
launched without fused multiply-add, and bfloat16 is converted through integers where Triton's interpreter would
truncate. Every jitted function has one return, at its end: Triton also compiles what follows a return inside an ``if``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from .ptx import RECIPROCAL, capability

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
INFINITY_BITS = tl.constexpr(0x7F800000)
TINY_BITS = tl.constexpr(0x0D800000)  # 2^-100
ONE_BITS = tl.constexpr(0x3F800000)
LARGEST_SCALE_BITS = tl.constexpr(0x7F7F0000)
UPPER_HALF = tl.constexpr(-0x10000)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: its neighbours are whole numbers
ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def bits_of(values):
    """The bits of float32 values, int32."""
    return values.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 values of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widened(values):
    """float32, bfloat16 or float16 values in float32, denormals too."""
    if values.dtype == tl.bfloat16:
        wide = float_of(values.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def narrowed(values, DTYPE: tl.constexpr):
    """float32 values rounded half to even to ``DTYPE``."""
    if DTYPE == tl.bfloat16 and INTERPRETED:
        bits = bits_of(values)
        nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > INFINITY_BITS
        narrow = tl.where(is_nan, 0x7FC0, nearest).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = values.to(DTYPE)
    return narrow


@triton.jit
def clamped(values, LARGEST: tl.constexpr):
    """Values in [-LARGEST, LARGEST]; NaN stays NaN."""
    values = tl.minimum(values, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(values, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax_bits(values):
    """Of each row of float32 values the bits of the largest magnitude; those of a NaN if one is there."""
    if INTERPRETED:  # which calls a function of ours for each element
        bits = tl.max(bits_of(values) & 0x7FFFFFFF, axis=1)
    else:
        bits = bits_of(tl.abs(tl.reduce(tl.abs(values), 1, _larger)))
    return bits


@triton.jit
def divided(values, divisor):
    """IEEE division of float32 values by a number."""
    return tl.div_rn(values, tl.zeros_like(values) + divisor)


@triton.jit
def scale_up(quotients):
    """The bits of non-negative float32 values rounded up to bfloat16, at most its largest finite value."""
    bits = bits_of(quotients)
    return tl.where(bits >= LARGEST_SCALE_BITS, LARGEST_SCALE_BITS, (bits + 0xFFFF) & UPPER_HALF)


@triton.jit
def scale_of(absmax, QMAX: tl.constexpr):
    """``scale_up(absmax / QMAX)`` of float32 values from 2^-100 on, for a QMAX of at least 7 and of 8 bits.

    Without a division: the scale is the smallest bfloat16 B with QMAX * B >= absmax, a product that is exact. For if
    absmax is larger, then by at least 2^-23 / 1.99..., relatively; and the quotient by more than half a unit of B's
    float32, which is at most 2^-24. What is rounded up here is the quotient but for at most two units, and less by
    two: it is B, or the one before.
    """
    quotient = absmax * (1.0 / QMAX)
    bits = (bits_of(quotient) + (0xFFFF - 2)) & UPPER_HALF
    return tl.where(float_of(bits) * QMAX >= absmax, bits, bits + 0x10000)


@triton.jit
def inverse_of(scale_bits):
    """RN(1 / scale), of the bits of scales."""
    scales = float_of(scale_bits)
    CAPABILITY: tl.constexpr = 0 if INTERPRETED else capability()
    if CAPABILITY >= 80:
        inverse = tl.inline_asm_elementwise(RECIPROCAL, "=&r,r", [scales], tl.float32, True, 1)
    else:
        inverse = tl.div_rn(tl.zeros_like(scales) + 1.0, scales)
    return inverse


@triton.jit
def rounded(values):
    """float32 values below 2^22 as int32, rounded half to even; anything for others, and for NaN."""
    return bits_of(values + ROUNDER) - ROUNDER_BITS


@triton.jit
def stochastic(values, uniform):
    """float32 values as int32, rounded up in magnitude iff ``uniform`` [0, 2^24) is below their fraction of 2^24."""
    magnitude = tl.abs(values)
    floor = magnitude.to(tl.int32)
    codes = floor + (uniform < (magnitude - floor.to(tl.float32)) * 16777216.0).to(tl.int32)
    return tl.where(values < 0, -codes, codes)


@triton.jit
def butterflies(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Float32 [ROWS, SIZE], SIZE = 2^k, times the Hadamard matrix of order SIZE, unnormalised: strides 1, 2, 4, ...

    The sum of a pair is a + b, and that of the pair with its second number negated is a - b: the same bits.
    """
    signs = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, :, None]
    for level in tl.static_range(0, 16):
        if (1 << level) < SIZE:
            pairs = tl.reshape(values, (ROWS * SIZE // (2 << level), 2, 1 << level))
            added = tl.sum(pairs, axis=1, keep_dims=True)
            subtracted = tl.sum(pairs * signs, axis=1, keep_dims=True)
            values = tl.reshape(tl.where(signs < 0, subtracted, added), (ROWS, SIZE))
    return values


@triton.jit
def philox_word(elements, seed, tensor, step, hop, rank):
    """The random word, uint32, of each of int64 ``elements``: word e % 4 of counter (e / 4, step, hop, rank)."""
    w0, w1, w2, w3 = philox_words(elements >> 2, seed, tensor, step, hop, rank)
    place = (elements & 3).to(tl.int32)
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def philox_words(quads, seed, tensor, step, hop, rank):
    """Philox4x32-10 of int64 counters ``quads``; the other words of the counter and the key are int32 bits."""
    zeros = tl.zeros_like(quads).to(tl.int32)
    high = ((quads >> 32) << 8).to(tl.int32) + hop
    return tl.philox_impl(
        quads.to(tl.uint32),
        (zeros + step).to(tl.uint32, bitcast=True),
        high.to(tl.uint32, bitcast=True),
        (zeros + rank).to(tl.uint32, bitcast=True),
        (zeros + seed).to(tl.uint32, bitcast=True),
        (zeros + tensor).to(tl.uint32, bitcast=True),
    )
