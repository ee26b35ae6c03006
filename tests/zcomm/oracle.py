"""The wire format in NumPy, block by block, written from the contract's text and sharing no code with zcomm."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

FLOAT32_MAX = np.float32(3.4028234663852886e38)
TINY = 0x0D800000
INFINITY = 0x7F800000
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


@dataclass(frozen=True)
class Wire:
    """A block format and its options."""

    name: str
    block: int
    symmetric: bool = True
    hadamard: bool = False
    random: tuple[int, int, int, int, int] | None = None
    """Stochastic rounding: seed, tensor, step, hop, rank."""

    @property
    def bits(self) -> int:
        return 8 if self.name in ("int8", "fp8_e4m3") else 4


def bits_of(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def bf16_up(value: np.float32) -> int:
    """16 bits of a non-negative value rounded up to bf16, finite."""
    bits = bits_of(value)
    return min(bits // 0x10000 + (bits % 0x10000 > 0), 0x7F7F)


def nf4_levels() -> list[np.float32]:
    """Eight times the levels, in bf16 by nearest even."""
    levels = []
    for level in NF4:
        bits = bits_of(np.float32(8 * level))
        below, rest = bits >> 16, bits & 0xFFFF
        up = rest > 0x8000 or (rest == 0x8000 and below % 2 == 1)
        levels.append(float_of((below + up) << 16))
    return levels


def fp8_values() -> list[float]:
    """The value of each code 0..126 of a float8 e4m3 without sign."""
    return [(c % 8) * 2.0**-9 if c < 8 else (1 + (c % 8) / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]


def nearest_fp8(ys: np.ndarray) -> list[int]:
    """The nearest codes by search; ties to the even code; never a negative zero."""
    distances = np.abs(np.array(fp8_values()) - np.abs(ys.astype(np.float64))[:, None])
    is_nearest = distances == distances.min(1, keepdims=True)
    best = np.where(is_nearest, np.arange(127) % 2, 2).argmin(1)
    return np.where((ys < 0) & (best > 0), best | 0x80, best).tolist()


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, written from the paper."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k, q % 2**32, (p >> 32) ^ d ^ m, p % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def uniform(element: int, random: tuple[int, int, int, int, int]) -> int:
    seed, tensor, step, hop, rank = random
    counter = [element // 4 % 2**32, step, hop + 256 * (element // 2**34), rank]
    return philox(counter, [seed, tensor])[element % 4] >> 8


def rounded(ys: np.ndarray, first: int, wire: Wire) -> list[int]:
    if wire.random is None:
        return [round(y) for y in ys.tolist()]  # Python rounds half to even
    codes = []
    for element, y in enumerate(ys.tolist(), first):
        floor = math.floor(abs(y))
        up = uniform(element, wire.random) < (abs(y) - floor) * 2**24
        codes.append(int(math.copysign(floor + up, y)))
    return codes


def rotated(values: np.ndarray) -> np.ndarray:
    """Rotate a block of 2^k float32 by butterflies."""
    values, stride = values.astype(np.float32), 1
    with np.errstate(over="ignore", invalid="ignore"):
        while stride < len(values):
            a, b = values.reshape(-1, 2, stride).transpose(1, 0, 2)
            values = np.stack([a + b, a - b], 1).reshape(-1)
            stride *= 2
    return values


def encode_block(values: np.ndarray, wire: Wire, first: int = 0) -> tuple[int, list[int]]:
    """The header's bits, and the codes, of one block of float32 whose first element has index ``first``."""
    if wire.hadamard and len(values) == wire.block:
        values = rotated(values)
    values = values.astype(np.float32)
    absmax = int((values.view(np.uint32) & 0x7FFFFFFF).max())
    if absmax >= INFINITY:
        return 0x7FC0, [0] * len(values)
    if not wire.symmetric:
        return encode_asymmetric(values, wire, first)
    qmax = {"int8": 127, "int4": 7, "nf4": 8, "fp8_e4m3": 448}[wire.name]
    scale = bf16_up(float_of(absmax) / np.float32(qmax)) if absmax >= TINY else 0
    inverse = np.float32(1) / float_of(scale << 16) if scale else np.float32(0)
    ys = values * inverse
    if wire.name == "nf4":
        middles = np.array([(float(a) + float(b)) / 2 for a, b in pairwise(nf4_levels())])
        return scale, (middles < ys.astype(np.float64)[:, None]).sum(1).tolist()
    if wire.name == "fp8_e4m3":
        return scale, nearest_fp8(ys)
    return scale, [max(-qmax, min(qmax, code)) for code in rounded(ys, first, wire)]


def encode_asymmetric(values: np.ndarray, wire: Wire, first: int) -> tuple[int, list[int]]:
    """A scale and a zero point: the zero point is in the upper 16 bits of the header."""
    largest = np.float32(2.0**126)
    values = np.clip(values, -largest, largest)
    low, high = values.min(), values.max()
    bits = bits_of(low)
    zero = (bits >> 16) + (1 if low < 0 and bits & 0xFFFF else 0)
    if bits & 0x7FFFFFFF < TINY:
        zero = 0
    zero_value, qmax = float_of(zero << 16), 2**wire.bits - 1
    spread = np.float32(high) - zero_value
    if not spread >= float_of(TINY):
        return zero << 16, [0] * len(values)
    scale = bf16_up(spread / np.float32(qmax))
    inverse = np.float32(1) / float_of(scale << 16)
    ys = (values - zero_value) * inverse
    return zero << 16 | scale, [max(0, min(qmax, code)) for code in rounded(ys, first, wire)]


def decode_block(header: int, codes: list[int], wire: Wire) -> list[np.float32]:
    scale, zero = float_of((header & 0xFFFF) << 16), float_of(header & 0xFFFF0000)
    levels = np.array(codes, np.float32)
    if wire.name == "nf4":
        levels = np.array(nf4_levels())[codes]
    elif wire.name == "fp8_e4m3":
        magnitudes = np.array(fp8_values(), np.float32)
        levels = np.array([-magnitudes[code - 0x80] if code >= 0x80 else magnitudes[code] for code in codes])
    with np.errstate(over="ignore", invalid="ignore"):
        decoded = clipped(levels * scale if wire.symmetric else zero + levels * scale)
        if wire.hadamard and len(codes) == wire.block:
            decoded = clipped(rotated(decoded) * np.float32(1 / wire.block))
    return list(decoded)


def clipped(values: np.ndarray) -> np.ndarray:
    """Finite or NaN."""
    return np.clip(values, -FLOAT32_MAX, FLOAT32_MAX)


def blocks_of(segment: np.ndarray, block: int) -> list[np.ndarray]:
    return [segment[i : i + block] for i in range(0, len(segment), block)]


def _encoded(segments: list[np.ndarray], wire: Wire) -> list[list[tuple[int, list[int]]]]:
    """Header and codes of every block, segment by segment; elements are numbered as they lie."""
    numel = len(segments[0])
    return [
        [encode_block(b, wire, s * numel + i * wire.block) for i, b in enumerate(blocks_of(segment, wire.block))]
        for s, segment in enumerate(segments)
    ]


def encode(segments: list[np.ndarray], wire: Wire, operation: str) -> bytes:
    encoded = _encoded(segments, wire)
    form = "<H" if wire.symmetric else "<I"
    headers = b"".join(struct.pack(form, header) for segment in encoded for header, _ in segment)
    codes = b"".join(_pack([c for _, block_codes in segment for c in block_codes], wire.bits) for segment in encoded)
    body = headers + b"\0" * (-len(headers) % 16) + codes
    body += b"\0" * (-(len(body) + 8) % 16)
    name = wire.name if wire.symmetric else f"{wire.name}_asym"
    kind = f"{operation}|{name}|{wire.block}|{len(segments)}|{len(segments[0])}" + "|hadamard" * wire.hadamard
    return body + struct.pack("<II", zlib.crc32(kind.encode()), 0)


def _pack(codes: list[int], bits: int) -> bytes:
    if bits == 8:
        return bytes(code & 0xFF for code in codes)
    codes = codes + [0] * (len(codes) % 2)
    return bytes((low & 0xF) | (high & 0xF) << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


def decode(segments: list[np.ndarray], wire: Wire) -> np.ndarray:
    """Decode a message of ``segments`` to float32 [num_segments, segment_numel]."""
    rows = [[v for block in segment for v in decode_block(*block, wire)] for segment in _encoded(segments, wire)]
    return np.array(rows, dtype=np.float32).reshape(len(segments), len(segments[0]))


def half_scales(values: np.ndarray, name: str, block: int) -> np.ndarray:
    """Half of the transmitted scale of each element's block, of int8 and int4."""
    halves: list[np.float32] = []
    for b in blocks_of(values.astype(np.float32), block):
        halves += [float_of(encode_block(b, Wire(name, block))[0] << 16) / 2] * len(b)
    return np.array(halves, dtype=np.float32)


def residual_blocks(numel: int) -> list[tuple[int, list[int]]]:
    """A residual of zeros: scale and codes of each int8 block of 256."""
    return [(0, [0] * min(256, numel - i)) for i in range(0, numel, 256)]


def decode_residual(blocks: list[tuple[int, list[int]]]) -> np.ndarray:
    return np.array([v for block in blocks for v in decode_block(*block, Wire("int8", 256))], np.float32)


def encode_with_residual(
    x: np.ndarray, blocks: list[tuple[int, list[int]]], wire: Wire, beta: float
) -> tuple[np.ndarray, list[tuple[int, list[int]]]]:
    """Return the decoded message of ``x`` and the new residual."""
    u = x.astype(np.float32) + np.float32(beta) * decode_residual(blocks)
    sent = decode([u], wire)[0]
    with np.errstate(invalid="ignore"):
        lost = u - sent
    encoded = [encode_block(b, Wire("int8", 256)) for b in blocks_of(lost, 256)]
    return sent, [old if new[0] == 0x7FC0 else new for old, new in zip(blocks, encoded, strict=True)]
