"""Executes the inline assembly on the CPU and compares with the reference's levels, midpoints and roundings."""

# covers triton_kernels/ptx.py

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.triton_kernels.emulated_ptx import Words, execute, floats, words
from zcomm._formats import codec_nf4
from zcomm.triton_kernels import ptx

LEVELS = np.array(codec_nf4.LEVELS, np.float32)
MIDPOINTS = np.array([(low + high) / 2 for low, high in pairwise(codec_nf4.LEVELS)], np.float32)
EXCESS = 2  # units in the last place: a scaled value is at most qmax * (1 + 2^-22)


def _bits(value: float) -> int:
    return int(words(np.array([value], np.float32))[0])


def _around(points: NDArray[np.float32], largest: float, reach: int = 300) -> NDArray[np.float32]:
    """The float32 neighbours of these points and of 0, up to slightly beyond ``largest``, and values between them."""
    steps = np.arange(-reach, reach + 1, dtype=np.int64)
    bits = words(np.abs(points)).astype(np.int64)[:, None] + steps
    near = floats(bits.clip(0).astype(np.uint32).ravel())
    spread = floats(np.arange(0, _bits(largest) + 1, 9973, dtype=np.uint32))
    last = floats(words(np.full(EXCESS + 1, largest, np.float32)) + np.arange(EXCESS + 1, dtype=np.uint32))
    values = np.concatenate([near[near <= last[-1]], spread, last])
    values = np.concatenate([values, -values])
    return np.concatenate([values, np.zeros(-values.size % 8, np.float32)])


def _bytes(results: Words) -> NDArray[np.uint8]:
    return np.ascontiguousarray(results).view(np.uint8)


def _encoded(text: Any, values: NDArray[np.float32], keep: int = 0xFFFFFFFF) -> NDArray[np.uint8]:
    """Encode values, four (eight with two halves) in a call."""
    width = 8 if "$9" in text.value else 4
    columns = words(values).reshape(-1, width)
    kept = np.full(len(columns), keep, np.uint32)
    return _bytes(execute(text.value, [*columns.T, kept], 1)[0])


def _pairs(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values in the order of the operands: low halves of four bytes, then high halves."""
    return np.ascontiguousarray(values.reshape(-1, 4, 2).transpose(0, 2, 1)).ravel()


def _halves(codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.stack([codes & 0xF, codes >> 4], -1).ravel().astype(np.int64)


def test_nf4_codes_are_the_numbers_of_midpoints_below() -> None:
    values = _around(MIDPOINTS, 8.0)
    codes = _halves(_encoded(ptx.ENCODE_NF4, _pairs(values)))
    assert (codes == np.searchsorted(MIDPOINTS, values, side="left")).all()


def test_int4_and_int8_round_half_to_even() -> None:
    for text, qmax in ((ptx.ENCODE_INT4, 7), (ptx.ENCODE_INT8, 127)):
        values = _around(np.arange(0, qmax + 1, dtype=np.float32) - np.float32(0.5), float(qmax))
        expected = np.rint(values).astype(np.int64)
        if qmax == 7:
            codes = _halves(_encoded(text, _pairs(values)))
            assert (codes == expected % 16).all()
        else:
            assert (_encoded(text, values) == expected % 256).all()


@pytest.mark.parametrize("text", [ptx.ENCODE_INT8, ptx.ENCODE_INT4, ptx.ENCODE_NF4, ptx.ENCODE_FP8])
def test_blocks_that_are_not_finite_have_codes_of_0(text: Any) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1, -1, 0, 3, 400], np.float32)
    kept = _encoded(text, values, 0x00FF00FF).reshape(-1, 4)
    assert (kept[:, [1, 3]] == 0).all()
    assert (kept[:, [0, 2]] == _encoded(text, values).reshape(-1, 4)[:, [0, 2]]).all()


@pytest.mark.parametrize("text", [ptx.ENCODE_INT8, ptx.ENCODE_INT4, ptx.ENCODE_NF4, ptx.ENCODE_FP8])
def test_a_block_that_is_not_finite_changes_no_code_of_its_neighbours(text: Any) -> None:
    """A thread has elements of several blocks in one register: also where a rounded value is a midpoint itself."""
    points = MIDPOINTS if text is ptx.ENCODE_NF4 else np.arange(8, dtype=np.float32) + np.float32(0.5)
    steps = np.float32(2.0**-10) * np.linspace(-1.5, 1.5, 13, dtype=np.float32)
    values = (points[:, None] + steps).astype(np.float32).ravel()
    width = 8 if "$9" in text.value else 4
    for value in (np.nan, np.inf, -np.inf):
        for place in range(width):
            operands = np.repeat(values, width).reshape(-1, width)
            expected = _encoded(text, operands.ravel()).reshape(-1, 4)
            operands[:, place] = value
            mixed = _encoded(text, operands.ravel()).reshape(-1, 4)
            others = [byte for byte in range(4) if byte != place % 4]
            assert (mixed[:, others] == expected[:, others]).all(), (value, place)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fp8_codes_of_all_float32_bits() -> None:
    """Equal to torch's conversion, independent of the emulation, and to the reference; 2^24 patterns a time."""
    last = _bits(448.0) + EXCESS
    first = _bits(2.0**-13)  # below, all is rounded to 0: some
    for start in range(first, last + 1, 1 << 24):
        bits = np.arange(start, min(start + (1 << 24), last + 1), dtype=np.uint32)
        bits = np.concatenate([bits, np.full(-bits.size % 4, last, np.uint32)])
        expected = torch.from_numpy(floats(bits)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        changes = np.flatnonzero(np.diff(expected)) + 1  # where codes change, both sides; and 1 in 1009
        kept = np.unique(np.concatenate([changes, changes - 1, np.arange(0, bits.size, 1009), [bits.size - 1]]))
        kept = np.concatenate([kept, np.full(-kept.size % 4, kept[-1])])
        assert (_encoded(ptx.ENCODE_FP8, floats(bits[kept])) == expected[kept]).all()
        negative = _encoded(ptx.ENCODE_FP8, -floats(bits[kept]))
        assert (negative == np.where(expected[kept] > 0, expected[kept] | 0x80, 0)).all()
        reference = _reference_fp8(bits)
        assert (reference == expected).all()


def _reference_fp8(bits: Words) -> NDArray[np.uint8]:
    """The contract's integer operations on magnitudes."""
    normal = ((bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)).astype(
        np.int64
    ) - 960
    denormal = np.rint(floats(bits) * np.float32(512.0)).astype(np.int64)
    return np.minimum(np.where(bits < 0x3C800000, denormal, normal), 0x7E).astype(np.uint8)


def test_fp8_has_no_negative_zero() -> None:
    values = floats(np.array([0x80000000, 0x80000001, 0xBA800000, 0xBA800001], np.uint32))  # 0, least, 2^-10, more
    assert _encoded(ptx.ENCODE_FP8, values).tolist() == [0, 0, 0, 0x81]


def test_all_codes_decode_to_their_levels() -> None:
    codes = np.arange(256, dtype=np.uint8)
    results = execute(ptx.DECODE_INT8.value, [codes.view(np.uint32)], 4)
    assert (np.stack([floats(r) for r in results], -1).ravel() == codes.view(np.int8)).all()
    results = execute(ptx.DECODE_FP8.value, [codes.view(np.uint32)], 4)
    exponent, mantissa = (codes >> 3 & 0xF).astype(np.float64), (codes & 7).astype(np.float64)
    expected = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    expected = np.where(codes >= 0x80, -expected, expected).astype(np.float32)
    assert (np.stack(results, -1).ravel() == words(expected)).all()  # a negative zero, too


def test_all_pairs_of_codes_decode_to_their_levels() -> None:
    codes = np.random.default_rng(1).integers(0, 256, 1 << 14).astype(np.uint8)
    codes[:256] = np.arange(256)
    signed = (np.stack([codes & 0xF, codes >> 4], -1).astype(np.int64) + 8) % 16 - 8
    for text, levels in ((ptx.DECODE_INT4, signed), (ptx.DECODE_NF4, LEVELS[np.stack([codes & 0xF, codes >> 4], -1)])):
        results = [floats(result) for result in execute(text.value, [codes.view(np.uint32)], 8)]
        found = np.stack([np.stack(results[:4], -1).ravel(), np.stack(results[4:], -1).ravel()], -1)
        assert (found == levels).all()


def test_products_of_levels_and_scales_are_exact() -> None:
    """So that a sum fused with the product has the bits of the sum of the rounded product."""
    codes = np.arange(256, dtype=np.uint8).view(np.uint32)
    nibbles = (np.arange(16, dtype=np.uint8) * 0x11).view(np.uint32)
    texts = (
        (ptx.DECODE_INT8, codes, 4),
        (ptx.DECODE_FP8, codes, 4),
        (ptx.DECODE_INT4, nibbles, 8),
        (ptx.DECODE_NF4, nibbles, 8),
    )
    for text, operand, count in texts:
        levels = np.concatenate([floats(result) for result in execute(text.value, [operand], count)])
        levels = levels[np.isfinite(levels)]
        factor = 2.0**120 if text is ptx.DECODE_FP8 else 1.0
        assert float(np.abs(levels).max()) * 2.0**119 < float(np.finfo(np.float32).max), "no clamp below that scale"
        for exponent in (-108, -30, 0, 118 if factor == 1 else 7):
            scales = np.ldexp(1 + np.arange(128) / 128, exponent)
            exact = levels.astype(np.float64)[:, None] * scales
            assert (exact == exact.astype(np.float32)).all(), (text, exponent)
            assert np.isfinite((scales * factor).astype(np.float32)).all()
    results = execute(ptx.DECODE_FP8_BITS.value, [codes], 4)
    expected = execute(ptx.DECODE_FP8.value, [codes], 4)
    for got, right in zip(results, expected, strict=True):
        assert (floats(got).astype(np.float64) * 2.0**120 == floats(right)).all()


def test_reciprocals_of_scales_are_rounded_right_from_any_approximation() -> None:
    """For every result that rcp.approx may give within its documented unit in the last place, and every significand."""
    assert "rcp.approx.ftz.f32 $0, $1;" in ptx.RECIPROCAL.value
    significands = np.arange(128, dtype=np.uint32)
    for exponent in (20, 127, 250):  # scales of 2^-107 to 2^123
        scales = floats((np.uint32(exponent) << np.uint32(23)) | (significands << np.uint32(16)))
        expected = words((1 / scales.astype(np.float64)).astype(np.float32))
        for off in range(-2, 3):
            approximate = (expected.astype(np.int64) + off).astype(np.uint32)
            text = ptx.RECIPROCAL.value.replace("rcp.approx.ftz.f32 $0, $1;", "mov.b32 $0, $2;")
            registers = execute(text, [words(scales), approximate], 1)
            assert (registers[0] == expected).all(), (exponent, off)
