"""Inline PTX for the codecs: two to five times fewer instructions than Triton's own operations.

One call handles four elements, whose codes are the four bytes of a register; with 4-bit codes eight, ``low`` and
``high``, the two halves of each byte. ``keep`` has a byte 0xFF for each byte of codes to keep, and 0 for one to clear.
Every text computes exactly what codecs.py does, for all inputs that can occur: the tests execute the texts on the CPU.

nf4 needs tables of 16 entries. ``prmt`` looks up four bytes at once in a table of 8, by the digits of its last operand;
a digit of 8 or more yields the highest bit of the byte, eight times. So a table of 16 bytes takes two lookups and an
exclusive or: one in the first half, one in the second half with bit 3 of the digits flipped. That is correct if bytes
i and i + 8 have the same highest bit, and bytes of the second half are stored inverted if it is set. Entries are 16-bit
numbers in two such tables, chosen so that the highest bits agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import triton.language as tl
from triton.language import core

__all__ = [
    "DECODE_FP8", "DECODE_FP8_BITS", "DECODE_INT4", "DECODE_INT8", "DECODE_NF4", "ENCODE_FP8", "ENCODE_INT4",
    "ENCODE_INT8", "ENCODE_NF4", "FOUR_FROM_BYTES", "FOUR_TO_BYTES", "MULTIPLY_ADD", "NF4_LEVELS", "PAIRS_FROM_BYTES",
    "PAIRS_TO_BYTES", "RECIPROCAL", "capability",
]  # fmt: skip

# The levels of the contract's N5, as in zcomm._formats.blocks; a test compares them.
NF4_LEVELS = (
    *(-8.0, -5.5625, -4.1875, -3.15625, -2.28125, -1.4765625, -0.7265625, 0.0),
    *(0.63671875, 1.2890625, 1.96875, 2.703125, 3.53125, 4.5, 5.78125, 8.0),
)

# Registers of the texts: results, then arguments.
FOUR_TO_BYTES = tl.constexpr("=r,r,r,r,r,r")
PAIRS_TO_BYTES = tl.constexpr("=r,r,r,r,r,r,r,r,r,r")
FOUR_FROM_BYTES = tl.constexpr("=&r,=&r,=&r,=&r,r")
PAIRS_FROM_BYTES = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r")


@core.builtin
def capability(_semantic: Any = None) -> Any:
    """The compute capability that is compiled for, as 80, 89, 90, ...; 0 on what is not NVIDIA's.

    Nothing else may be a builtin: Triton's cache of compiled kernels does not notice when one changes. Nor may a jitted
    function return a constant: before Triton 3.7 it becomes a tensor.
    """
    options = _semantic.builder.options
    is_nvidia = getattr(options, "backend_name", "") == "cuda"
    return core.constexpr(int("".join(filter(str.isdigit, options.arch))) if is_nvidia else 0)


def _text(*lines: str) -> Any:
    return tl.constexpr("{\n" + "\n".join(lines) + "\n}")


def _registers(*names: str) -> str:
    return f".reg .b32 {', '.join(names)};"


def _gather(x: Sequence[str]) -> list[str]:
    """The lowest bytes of four registers, in the first."""
    return [
        f"prmt.b32 {x[0]}, {x[0]}, {x[1]}, 0x0040;",
        f"prmt.b32 {x[2]}, {x[2]}, {x[3]}, 0x0040;",
        f"prmt.b32 {x[0]}, {x[0]}, {x[2]}, 0x5410;",
    ]


LOW, HIGH = ("e0", "e1", "e2", "e3"), ("o0", "o1", "o2", "o3")
ROUNDER = "0f4B400000"  # 1.5 * 2^23: its neighbours are whole numbers
ALTERNATE = "0xE4"  # of lop3: a where the mask is set, else b

# RN(1 / x) of a bfloat16 x whose inverse is normal: one Newton step. It is correct for each of the 128 significands,
# whatever the approximation is within its documented error of one unit in the last place.
RECIPROCAL = _text(
    _registers("error"),
    "rcp.approx.ftz.f32 $0, $1;",
    "neg.f32 error, $1;",
    "fma.rn.f32 error, error, $0, 0f3F800000;",
    "fma.rn.f32 $0, error, $0, $0;",
)
ENCODE_INT8 = _text(
    _registers(*LOW),
    *[f"add.rn.f32 {x}, ${1 + k}, {ROUNDER};" for k, x in enumerate(LOW)],
    *_gather(LOW),
    "and.b32 $0, e0, $5;",
)
ENCODE_INT4 = _text(
    _registers(*LOW, *HIGH),
    *[f"add.rn.f32 {x}, ${1 + k}, {ROUNDER};" for k, x in enumerate(LOW + HIGH)],
    *_gather(LOW),
    *_gather(HIGH),
    "shl.b32 o0, o0, 4;",
    f"lop3.b32 e0, e0, o0, 0x0F0F0F0F, {ALTERNATE};",
    "and.b32 $0, e0, $9;",
)
MULTIPLY_ADD = tl.constexpr("fma.rn.f32 $0, $1, $2, $3;")
# From sm_89 on. The lop3, a & (b | c), clears the sign of negative zeros: a magnitude plus 0x7F has the highest bit
# unless it is 0.
ENCODE_FP8 = _text(
    ".reg .b16 h0, h1;",
    _registers("codes", "nonzero"),
    "cvt.rn.satfinite.e4m3x2.f32 h0, $2, $1;",
    "cvt.rn.satfinite.e4m3x2.f32 h1, $4, $3;",
    "mov.b32 codes, {h0, h1};",
    "and.b32 nonzero, codes, 0x7F7F7F7F;",
    "add.u32 nonzero, nonzero, 0x7F7F7F7F;",
    "lop3.b32 codes, codes, nonzero, 0x7F7F7F7F, 0xE0;",
    "and.b32 $0, codes, $5;",
)
# The byte, with its sign bit flipped, becomes the lowest byte of the float32 2^23; less 2^23 + 128 it is the code.
DECODE_INT8 = _text(
    _registers("codes"),
    "xor.b32 codes, $4, 0x80808080;",
    *[f"prmt.b32 ${k}, codes, 0x4B000000, {0x7650 + k:#06x};" for k in range(4)],
    *[f"add.rn.f32 ${k}, ${k}, 0fCB000080;" for k in range(4)],
)
DECODE_INT4 = _text(
    _registers("low", "high"),
    "xor.b32 high, $8, 0x88888888;",
    "and.b32 low, high, 0x0F0F0F0F;",
    "shr.u32 high, high, 4;",
    "and.b32 high, high, 0x0F0F0F0F;",
    *[f"prmt.b32 ${k}, low, 0x4B000000, {0x7650 + k:#06x};" for k in range(4)],
    *[f"prmt.b32 ${4 + k}, high, 0x4B000000, {0x7650 + k:#06x};" for k in range(4)],
    *[f"add.rn.f32 ${k}, ${k}, 0fCB000008;" for k in range(8)],
)
# Move sign, exponent and mantissa to their places in a float32; times 2^120 corrects the bias, for denormals too.
_FP8_BITS = (
    _registers("codes"),
    "mov.b32 codes, $4;",
    *[f"prmt.b32 ${k}, codes, 0, {k << 12 | 0x0444:#06x};" for k in range(4)],
    *[f"shr.s32 ${k}, ${k}, 4;" for k in range(4)],
    *[f"and.b32 ${k}, ${k}, 0x87F00000;" for k in range(4)],
)
DECODE_FP8_BITS = _text(*_FP8_BITS)
DECODE_FP8 = _text(*_FP8_BITS, *[f"mul.rn.f32 ${k}, ${k}, 0f7B800000;" for k in range(4)])


def _table(numbers: Sequence[int], byte: int) -> list[str]:
    """Four registers: entries 0 to 3, 4 to 7, and 8 to 15, flipped where the highest bit is set."""
    first = [number >> 8 * byte & 0xFF for number in numbers[:8]]
    second = [number >> 8 * byte & 0xFF for number in numbers[8:]]
    second = [b ^ 0xFF if b & 0x80 else b for b in second]
    words = [(first + second)[i : i + 4] for i in range(0, 16, 4)]
    return [f"0x{int.from_bytes(word, 'little'):08X}" for word in words]


def _looked_up(numbers: Sequence[int]) -> list[str]:
    """Of eight digits in ``x``, the entries' bytes: a0, a1 of the lower four digits, b0, b1 of the upper."""
    lines = ["xor.b32 y, x, 0x88888888;", "shr.u32 xs, x, 16;", "shr.u32 ys, y, 16;"]
    for name, x, y in (("a", "x", "y"), ("b", "xs", "ys")):
        for byte in (0, 1):
            table = _table(numbers, byte)
            lines += [
                f"prmt.b32 {name}{byte}, {table[0]}, {table[1]}, {x};",
                f"prmt.b32 t, {table[2]}, {table[3]}, {y};",
                f"xor.b32 {name}{byte}, {name}{byte}, t;",
            ]
    return lines


LOOKUP_REGISTERS = ("x", "y", "xs", "ys", "a0", "a1", "b0", "b1", "t")


# Levels plus 8, in 2^-8, are the lowest bits of 2^15's float32. Bit 7 is looked up as bit 6 of the upper byte, which
# leaves the highest bit of both bytes clear.
def _level_numbers() -> list[int]:
    numbers = [round(level * 256) + 2048 for level in NF4_LEVELS]
    return [(n & 0x1F00) | (n & 0x80) << 7 | (n & 0x7F) for n in numbers]


def _with_bit_7(name: str) -> list[str]:
    return [
        f"shl.b32 t, {name}1, 1;",
        f"lop3.b32 {name}0, {name}0, t, 0x80808080, 0xF8;",  # a | (b & c)
        f"and.b32 {name}1, {name}1, 0x1F1F1F1F;",
    ]


DECODE_NF4 = _text(
    _registers(*LOOKUP_REGISTERS),
    "mov.b32 x, $8;",
    *_looked_up(_level_numbers()),
    *_with_bit_7("a"),
    *_with_bit_7("b"),
    *[
        line
        for pair, (name, digits) in enumerate((("a", 0x5140), ("a", 0x7362), ("b", 0x5140), ("b", 0x7362)))
        for line in (
            f"prmt.b32 t, {name}0, {name}1, {digits:#06x};",
            f"prmt.b32 ${pair}, t, 0x47000000, 0x7610;",
            f"prmt.b32 ${4 + pair}, t, 0x47000000, 0x7632;",
        )
    ],
    *[f"add.rn.f32 ${k}, ${k}, 0fC7000800;" for k in range(8)],
)

# The code of y is how many midpoints are below. A parabola in y, |y| guesses it, or one less, in steps of 1/16 (that is
# the distance of 1.5 * 2^19's neighbours: four bits of a byte). Then one comparison decides, with the midpoint that
# the guess looks up: of y rounded up to steps of 2^-10, which all midpoints are multiples of, so that y > midpoint
# is the same as before. Both are 16-bit numbers, two in a register; bit 15 of their difference says "not above".
GUESS_SQUARE, GUESS_LINEAR = "0fBDC80000", "0f3FD70000"  # -0.09765625, 1.6796875
GUESS_CONSTANT = "0f49400074"  # 1.5 * 2^19 + 7.25


MIDPOINTS_ADDED = 8320  # one of those with which bit 7 of entries i and i + 8 agrees


def _midpoint_numbers() -> list[int]:
    middles = [round((low + high) * 512) + MIDPOINTS_ADDED for low, high in pairwise(NF4_LEVELS)]
    largest = 0x7FFF  # nothing is above it, not even a NaN, whose guess is 15: 15 + 1 would carry into the next digit
    assert middles[7] & 0x80, "bit 7 of entries 7 and 15 must agree"
    return [middle | 0x8000 for middle in (*middles, largest)]


def _guessed() -> list[str]:
    lines = []
    for k, x in enumerate(LOW + HIGH):
        lines += [
            f"abs.f32 t, ${1 + k};",
            f"fma.rn.f32 t, t, {GUESS_SQUARE}, {GUESS_LINEAR};",
            f"fma.rn.f32 {x}, t, ${1 + k}, {GUESS_CONSTANT};",
        ]
    return [
        *lines,
        *_gather(LOW),
        *_gather(HIGH),
        "shr.u32 e0, e0, 4;",
        f"lop3.b32 x, e0, o0, 0x0F0F0F0F, {ALTERNATE};",
    ]


def _compared() -> list[str]:
    """Bit 15 and 31 of d0, d1 (low) and d2, d3 (high): that two values are not above their midpoints."""
    lines = []
    sides = ((LOW, 1, 0x6240, "d0", "d1"), (HIGH, 5, 0x7351, "d2", "d3"))
    for names, first, digits, *differences in sides:
        lines += [f"add.rp.f32 {x}, ${first + k}, {STEPS};" for k, x in enumerate(names)]
        for name, (low, high), d in zip("ab", (names[:2], names[2:]), differences, strict=True):
            lines += [
                f"prmt.b32 {low}, {low}, {high}, 0x5410;",
                f"and.b32 {low}, {low}, 0x7FFF7FFF;",  # a NaN's 0xFFFF would borrow from its neighbour
                f"prmt.b32 {d}, {name}0, {name}1, {digits:#06x};",
                f"sub.u32 {d}, {d}, {low};",
            ]
    return lines


STEPS = f"0f{0x46000000 + MIDPOINTS_ADDED:08X}"  # 2^13 and what is added: steps of 2^-10

ENCODE_NF4 = _text(
    _registers(*LOOKUP_REGISTERS, *LOW, *HIGH, "d0", "d1", "d2", "d3"),
    *_guessed(),
    *_looked_up(_midpoint_numbers()),
    *_compared(),
    "prmt.b32 d0, d0, d1, 0xFDB9;",
    "prmt.b32 d2, d2, d3, 0xFDB9;",
    f"lop3.b32 d0, d0, d2, 0x0F0F0F0F, {ALTERNATE};",
    "not.b32 d0, d0;",
    "and.b32 d0, d0, 0x11111111;",
    "add.u32 x, x, d0;",
    "and.b32 $0, x, $9;",
)
