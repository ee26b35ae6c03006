"""The wire format in NumPy, element by element, written from the contract's text and sharing no code with zcomm."""

from __future__ import annotations

import struct
import zlib

import numpy as np

QMAX = {"int8": 127, "int4": 7}
FLOAT32_MAX = np.float32(3.4028234663852886e38)


def bits_of(value: np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def encode_block(values: np.ndarray, qmax: int) -> tuple[int, list[int]]:
    """The 16 bits of the scale, and the codes, of one block of float32."""
    absmax = max(bits_of(v) & 0x7FFFFFFF for v in values)
    if absmax >= 0x7F800000:
        return 0x7FC0, [0] * len(values)
    if absmax < 0x0D800000:
        return 0, [0] * len(values)
    quotient = bits_of(float_of(absmax) / np.float32(qmax))
    scale = min(quotient // 0x10000 + (quotient % 0x10000 > 0), 0x7F7F)
    inverse = np.float32(1) / float_of(scale << 16)
    codes = []
    for value in values:
        y = float(np.float32(value) * inverse)
        codes.append(max(-qmax, min(qmax, round(y))))  # Python rounds half to even
    return scale, codes


def decode_block(scale: int, codes: list[int]) -> list[np.float32]:
    decoded = []
    with np.errstate(over="ignore", invalid="ignore"):
        for code in codes:
            value = np.float32(code) * float_of(scale << 16)
            decoded.append(np.clip(value, -FLOAT32_MAX, FLOAT32_MAX) if not np.isnan(value) else value)
    return decoded


def blocks_of(segment: np.ndarray, block: int) -> list[np.ndarray]:
    return [segment[i : i + block] for i in range(0, len(segment), block)]


def encode(segments: list[np.ndarray], name: str, block: int, operation: str) -> bytes:
    """One message."""
    encoded = [[encode_block(b, QMAX[name]) for b in blocks_of(s, block)] for s in segments]
    scales = b"".join(struct.pack("<H", scale) for segment in encoded for scale, _ in segment)
    codes = b"".join(_pack([c for _, block_codes in segment for c in block_codes], name) for segment in encoded)
    body = scales + b"\0" * (-len(scales) % 16) + codes
    body += b"\0" * (-(len(body) + 8) % 16)
    kind = f"{operation}|{name}|{block}|{len(segments)}|{len(segments[0])}"
    return body + struct.pack("<II", zlib.crc32(kind.encode()), 0)


def _pack(codes: list[int], name: str) -> bytes:
    if name == "int8":
        return bytes(code & 0xFF for code in codes)
    codes = codes + [0] * (len(codes) % 2)
    return bytes((low & 0xF) | (high & 0xF) << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


def decode(segments: list[np.ndarray], name: str, block: int) -> np.ndarray:
    """What a message of ``segments`` decodes to, float32 [num_segments, segment_numel]."""
    rows = [[v for b in blocks_of(s, block) for v in decode_block(*encode_block(b, QMAX[name]))] for s in segments]
    return np.array(rows, dtype=np.float32).reshape(len(segments), len(segments[0]))


def half_scales(values: np.ndarray, name: str, block: int) -> np.ndarray:
    """Half of the transmitted scale of each element's block."""
    halves: list[np.float32] = []
    for b in blocks_of(values.astype(np.float32), block):
        halves += [float_of(encode_block(b, QMAX[name])[0] << 16) / 2] * len(b)
    return np.array(halves, dtype=np.float32)
