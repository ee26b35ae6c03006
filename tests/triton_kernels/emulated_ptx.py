"""Emulates, on NumPy arrays, the PTX instructions of zcomm/triton_kernels/ptx.py as the PTX ISA documents them.

It shares no code with the kernels. Conversions to e4m3 are by a table of all its numbers, to nearest, ties to even.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Words", "execute", "floats", "words"]

Words = NDArray[np.uint32]
Registers = dict[str, Words]


def words(values: NDArray[np.float32]) -> Words:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def floats(bits: Words) -> NDArray[np.float32]:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


def _wide(bits: Words) -> NDArray[np.float64]:
    return floats(bits).astype(np.float64)


def _canonical(bits: Words) -> Words:
    """Every NaN that an operation returns is 0x7FFFFFFF."""
    return np.where(np.isnan(floats(bits)), np.uint32(0x7FFFFFFF), bits)


def _nearest(values: NDArray[np.float64]) -> Words:
    """Round to nearest; exact for sums and products of two float32 of similar size, which float64 represents."""
    return _canonical(words(values.astype(np.float32)))


def _up(values: NDArray[np.float64]) -> Words:
    nearest = values.astype(np.float32)
    return _canonical(words(np.where(nearest < values, np.nextafter(nearest, np.float32(np.inf)), nearest)))


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    pool = [(source >> np.uint32(8 * byte)) & np.uint32(0xFF) for source in (a, b) for byte in range(4)]
    out = np.zeros_like(a)
    for place in range(4):
        digit = (selector >> np.uint32(4 * place)) & np.uint32(0xF)
        byte = np.choose(digit & np.uint32(7), pool)
        sign = np.where(byte >= 0x80, np.uint32(0xFF), np.uint32(0))
        out = out | (np.where(digit >= 8, sign, byte).astype(np.uint32) << np.uint32(8 * place))
    return out


def _lop3(a: Words, b: Words, c: Words, table: int) -> Words:
    out = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            terms = [x if index >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0))]
            out = out | (terms[0] & terms[1] & terms[2])
    return out


def _e4m3_numbers() -> NDArray[np.float64]:
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)


def _to_e4m3(bits: Words) -> Words:
    numbers = _e4m3_numbers()
    magnitude = np.abs(_wide(bits))
    above = np.searchsorted(numbers, np.nan_to_num(magnitude), side="left").clip(1, 0x7E)
    below = above - 1
    to_above, to_below = numbers[above] - magnitude, magnitude - numbers[below]
    is_even = (above % 2 == 0) & (to_above == to_below)
    code = np.where((to_above < to_below) | is_even, above, below)
    code = np.where(np.isnan(magnitude), 0x7F, code)  # satfinite: what is larger than 448 became 448
    return code.astype(np.uint32) | (bits >> np.uint32(24) & np.uint32(0x80))


def _shift(bits: Words, count: Words) -> np.uint32:
    return np.uint32(np.broadcast_to(count, bits.shape).flat[0])


OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a.copy(),
    "not.b32": lambda a: ~a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "shl.b32": lambda a, b: a << _shift(a, b),
    "shr.u32": lambda a, b: a >> _shift(a, b),
    "shr.s32": lambda a, b: (a.view(np.int32) >> np.int32(_shift(a, b))).view(np.uint32),
    "prmt.b32": _prmt,
    "lop3.b32": lambda a, b, c, table: _lop3(a, b, c, int(table.flat[0])),
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "neg.f32": lambda a: a ^ np.uint32(0x80000000),
    "add.rn.f32": lambda a, b: _nearest(_wide(a) + _wide(b)),
    "add.rp.f32": lambda a, b: _up(_wide(a) + _wide(b)),
    "mul.rn.f32": lambda a, b: _nearest(_wide(a) * _wide(b)),
    "fma.rn.f32": lambda a, b, c: _nearest(_wide(a) * _wide(b) + _wide(c)),
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: _to_e4m3(high) << np.uint32(8) | _to_e4m3(low),
}


def execute(text: str, arguments: list[Words], num_results: int) -> list[Words]:
    """Execute an inline assembly text on its arguments; return the results, ``$0`` ...."""
    registers: Registers = {f"${num_results + k}": argument for k, argument in enumerate(arguments)}
    for line in filter(None, (line.strip().rstrip(";") for line in text.strip("{}\n").splitlines())):
        if line.startswith(".reg"):
            continue
        operation, rest = line.split(maxsplit=1)
        pair = re.fullmatch(r"(\w+), \{(\w+), (\w+)\}", rest)
        if pair:
            registers[pair[1]] = registers[pair[2]] | registers[pair[3]] << np.uint32(16)
            continue
        target, *operands = [operand.strip() for operand in rest.split(",")]
        values = [_operand(operand, registers, arguments[0].shape) for operand in operands]
        with np.errstate(all="ignore"):
            registers[target] = OPERATIONS[operation](*values)
    return [registers[f"${k}"] for k in range(num_results)]


def _operand(operand: str, registers: Registers, shape: tuple[int, ...]) -> Words:
    if operand in registers:
        return registers[operand]
    number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
    return np.full(shape, number, np.uint32)
