"""Changes of 16-bit floating-point tensors in units in the last place, coded losslessly: the reference.

A value's bits, as a sign and a magnitude, map to a 16-bit integer in the order of the values. The change is the
difference of two such integers modulo 2^16, so every bit pattern has one, NaNs and both zeros included. Its zigzag form
z (0, -1, 1, -2, ... become 0, 1, 2, 3, ...) is what is coded, in chunks of 2^k elements:

    | "UL" | version u8 | k u8 | numel u64 | nbytes u64 | checksum of all after the head | checksum of the head so far |
    | for each chunk: nbytes of its payload + kind, u32 |
    | payloads |

    ZERO    nothing: no element changed
    SPARSE  | nonzeros u32 | words u32 | table of gaps | table of changes | 0 | 4 states | words | 0 | extra bits |
    DENSE   | words u32 | table of changes | 0 | 32 states | words | 0 | extra bits |
    RAW     the new bits

Z1  Everything is little endian. Every part starts on a multiple of 4 bytes, but for the second table.
Z2  A change z is symbol z if z < 2^d, for a d in the table. Otherwise its two highest bits, of which the first is 2^e,
    are symbol 2^d + 2 * (e - d) + the second, and the others e - 1 extra bits. So is a gap, the number of zeros before
    a change, with d = 1. Extra bits are in the order of elements (gap before change), from the lowest bit of u32.
Z3  Symbols are coded by interleaved range asymmetric numeral systems (rANS, arXiv:1311.2540) with frequencies of sum
    2^12, states in [2^15, 2^31) and words of 16 bits. Dense: lane i holds elements i, i + 32, ... Sparse: lane i holds
    changes i, i + 4, ... and of four changes first the gaps, then the values. Lanes take their words in order.
Z4  A table is a byte d (not for gaps), then for each symbol its frequency f: a byte if f < 128; for larger ones a byte
    128 + f % 128 and a byte f / 128; and for a run of absent symbols a byte 0 and a byte with its length, at least 1.
Z5  The bytes are a function of the changes alone (RAW: of the new bits): `frequencies`, `direct_bits`, `chunk_bits` and
    the choice of kinds are part of the format. Sparse messages have longer chunks, so that tables cost little.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, int16

from zcomm.errors import MessageError

Bits = NDArray[np.uint16]
Integers = NDArray[np.int64]

MAGIC, VERSION = b"UL", 1
HEAD = struct.Struct("<2sBBQQII")
HEAD_NBYTES = HEAD.size
DENSE_CHUNK_BITS, SPARSE_CHUNK_BITS, RARE_CHUNK_BITS = 18, 20, 22
SAMPLES, SAMPLE_NUMEL = 64, 1024
ZERO, SPARSE, DENSE, RAW = range(4)
SCALE_BITS, LOWEST_STATE = 12, 1 << 15
SCALE = 1 << SCALE_BITS
DENSE_LANES, SPARSE_LANES = 32, 4
GAP_DIRECT_BITS, GAP_SYMBOLS = 1, 2 + 2 * (RARE_CHUNK_BITS - 1)
MAX_DIRECT_BITS = 7
RARE = 64
"""At most one change in so many is not a direct symbol, where MAX_DIRECT_BITS allow."""


class Table(NamedTuple):
    """Frequencies of symbols and the sums of those before."""

    frequency: Integers
    first: Integers


def max_message_nbytes(numel: int) -> int:
    """The longest message of ``numel`` elements: all chunks raw."""
    chunks = _ceil(numel, 1 << DENSE_CHUNK_BITS)
    return HEAD_NBYTES + 4 * chunks + _up_to_4(2 * numel)


def encode(new: Tensor, old: Tensor, message: Tensor) -> int:
    """Write the change from ``old`` to ``new`` to the start of ``message``; how many bytes."""
    bits = _bits(new)
    changes = _zigzag(_ordered(bits) - _ordered(_bits(old)))
    chunk_log2 = chunk_bits(changes)
    size = 1 << chunk_log2
    chunks = [_encode_chunk(changes[i : i + size], bits[i : i + size]) for i in range(0, bits.size, size)]
    body = b"".join(struct.pack("<I", len(payload) + kind) for kind, payload in chunks)
    body += b"".join(payload for _, payload in chunks)
    nbytes = HEAD_NBYTES + len(body)
    head = HEAD.pack(MAGIC, VERSION, chunk_log2, bits.size, nbytes, checksum(body, HEAD_NBYTES // 4), 0)[:-4]
    whole = head + struct.pack("<I", checksum(head, 0)) + body
    message.numpy()[:nbytes] = np.frombuffer(whole, np.uint8)
    return nbytes


def decode(message: Tensor, values: Tensor) -> None:
    """Replace the old ``values`` by the new ones. Raises MessageError."""
    data = message.numpy().tobytes()
    chunk_log2, numel, nbytes = _read_head(data)
    bits = _bits(values)
    _check(numel == bits.size, f"a message must be of as many elements as the tensor: {numel}, {bits.size}")
    _check(nbytes <= len(data), f"a message must be whole: nbytes={len(data)}, of {nbytes}")
    body = data[HEAD_NBYTES:nbytes]
    _check(checksum(body, HEAD_NBYTES // 4) == HEAD.unpack_from(data)[5], "checksum of a message must match")
    size = 1 << chunk_log2
    starts = range(0, numel, size)
    entries = struct.unpack_from(f"<{len(starts)}I", body)
    _check(sum(entry & ~3 for entry in entries) == len(body) - 4 * len(starts), "sizes of chunks must add up")
    at = 4 * len(starts)
    for start, entry in zip(starts, entries, strict=True):
        payload = body[at : at + (entry & ~3)]
        at += entry & ~3
        _decode_chunk(entry & 3, payload, bits[start : start + size])


def message_nbytes(head: Tensor) -> int:
    """The length of the message that starts with ``head``. Raises MessageError."""
    return _read_head(head.numpy()[:HEAD_NBYTES].tobytes()).nbytes


def chunk_bits(changes: Integers) -> int:
    """The binary logarithm of the elements in a chunk, by the density of samples."""
    starts = np.arange(SAMPLES) * (changes.size // SAMPLES)
    if changes.size <= 1 << DENSE_CHUNK_BITS:
        return DENSE_CHUNK_BITS
    sample = changes[starts[:, None] + np.arange(SAMPLE_NUMEL)]
    if not _is_sparse(sample):
        return DENSE_CHUNK_BITS
    return RARE_CHUNK_BITS if np.count_nonzero(sample) * 128 < sample.size else SPARSE_CHUNK_BITS


def checksum(data: bytes, first: int) -> int:
    """The sum of mixed 32-bit words, modulo 2^32, of which the first has the index ``first`` in its message."""
    words = np.frombuffer(data, "<u4")
    with np.errstate(over="ignore"):
        mixed = words + np.arange(first + 1, first + 1 + words.size, dtype=np.uint32) * np.uint32(0x9E3779B9)
        mixed ^= mixed >> np.uint32(16)
        mixed *= np.uint32(0x85EBCA6B)
        mixed ^= mixed >> np.uint32(13)
        mixed *= np.uint32(0xC2B2AE35)
        mixed ^= mixed >> np.uint32(16)
    return int(mixed.sum(dtype=np.uint64)) & 0xFFFFFFFF


def frequencies(counts: Integers) -> Integers:
    """``counts`` scaled to the sum 2^12, at least 1 where a count is; the largest, and of those the first, give way."""
    total = int(counts.sum())
    scaled = np.where(counts > 0, np.maximum((counts * SCALE + total // 2) // total, 1), 0)
    while (missing := SCALE - int(scaled.sum())) != 0:
        largest = int(scaled.argmax())
        step = min(abs(missing), max(1, int(scaled[largest]) // 16))
        scaled[largest] += step if missing > 0 else -step
    return scaled


def direct_bits(changes: Integers) -> int:
    """The least d from 1 to MAX_DIRECT_BITS for which changes of at least 2^d are rare."""
    enough = (d for d in range(1, MAX_DIRECT_BITS) if int((changes >= 1 << d).sum()) * RARE <= changes.size)
    return next(enough, MAX_DIRECT_BITS)


def _encode_chunk(changes: Integers, bits: Bits) -> tuple[int, bytes]:
    if not changes.any():
        return ZERO, b""
    is_sparse = _is_sparse(changes)
    coded = _encode_sparse(changes) if is_sparse else _encode_dense(changes)
    raw = _padded(bits.astype("<u2").tobytes())
    if len(coded) >= len(raw):
        return RAW, raw
    return (SPARSE if is_sparse else DENSE), coded


def _is_sparse(changes: Integers) -> bool:
    return bool(np.count_nonzero(changes) * 16 < changes.size)


def _encode_dense(changes: Integers) -> bytes:
    direct = direct_bits(changes)
    symbols, widths, extra = _symbols(changes, direct)
    table = _counted(symbols, _num_symbols(direct))
    rounds = [(table, symbols[i : i + DENSE_LANES]) for i in range(0, symbols.size, DENSE_LANES)]
    states, words = _encode_rounds(rounds, DENSE_LANES)
    head = struct.pack("<I", len(words) // 2) + bytes([direct]) + _pack_table(table)
    return _padded(head) + states + _padded(words) + _pack_bits(extra, widths)


def _encode_sparse(changes: Integers) -> bytes:
    places = np.flatnonzero(changes)
    gaps, values = np.diff(places, prepend=-1) - 1, changes[places]
    direct = direct_bits(values)
    symbols, widths, extra = _symbols(values, direct)
    gap_symbols, gap_widths, gap_extra = _symbols(gaps, GAP_DIRECT_BITS)
    value_table, gap_table = _counted(symbols, _num_symbols(direct)), _counted(gap_symbols, GAP_SYMBOLS)
    rounds = []
    for i in range(0, places.size, SPARSE_LANES):
        rounds += [(gap_table, gap_symbols[i : i + SPARSE_LANES]), (value_table, symbols[i : i + SPARSE_LANES])]
    states, words = _encode_rounds(rounds, SPARSE_LANES)
    head = struct.pack("<II", places.size, len(words) // 2)
    head += _pack_table(gap_table) + bytes([direct]) + _pack_table(value_table)
    bits = _pack_bits(np.stack([gap_extra, extra], 1).reshape(-1), np.stack([gap_widths, widths], 1).reshape(-1))
    return _padded(head) + states + _padded(words) + bits


def _decode_chunk(kind: int, payload: bytes, bits: Bits) -> None:
    if kind == ZERO:
        _check(not payload, "a chunk without changes must be empty")
        return
    if kind == RAW:
        _check(len(payload) == _up_to_4(2 * bits.size), "a raw chunk must hold every element")
        bits[:] = np.frombuffer(payload, "<u2", bits.size)
        return
    reader = _Parts(payload)
    changes = _decode_sparse(reader, bits.size) if kind == SPARSE else _decode_dense(reader, bits.size)
    bits[:] = _ordered((_ordered(bits) + ((changes >> 1) ^ -(changes & 1))).astype(np.uint16))


def _decode_dense(reader: _Parts, numel: int) -> Integers:
    (num_words,) = struct.unpack("<I", reader.take(4))
    direct, table = _unpack_changes_table(reader)
    reader.align()
    decoder = _Decoder(reader, DENSE_LANES, num_words)
    symbols = [decoder.round(table, min(DENSE_LANES, numel - i)) for i in range(0, numel, DENSE_LANES)]
    decoder.check_end()
    flat = np.concatenate(symbols)
    return _joined(flat, direct, _unpack_bits(reader.rest(), _widths(flat, direct)))


def _decode_sparse(reader: _Parts, numel: int) -> Integers:
    num_changes, num_words = struct.unpack("<II", reader.take(8))
    _check(num_changes <= numel, f"changes must be at most as many as elements: {num_changes}, {numel}")
    gap_table = _unpack_table(reader, GAP_SYMBOLS)
    direct, value_table = _unpack_changes_table(reader)
    reader.align()
    decoder = _Decoder(reader, SPARSE_LANES, num_words)
    gap_parts, value_parts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for i in range(0, num_changes, SPARSE_LANES):
        gap_parts.append(decoder.round(gap_table, min(SPARSE_LANES, num_changes - i)))
        value_parts.append(decoder.round(value_table, min(SPARSE_LANES, num_changes - i)))
    decoder.check_end()
    gaps, values = np.concatenate(gap_parts), np.concatenate(value_parts)
    widths = np.stack([_widths(gaps, GAP_DIRECT_BITS), _widths(values, direct)], 1)
    extra = _unpack_bits(reader.rest(), widths.reshape(-1)).reshape(-1, 2)
    places = np.cumsum(_joined(gaps, GAP_DIRECT_BITS, extra[:, 0]) + 1) - 1
    _check(places.size == 0 or places[-1] < numel, f"a change must be within its chunk of {numel} elements")
    changes = np.zeros(numel, np.int64)
    changes[places] = _joined(values, direct, extra[:, 1])
    return changes


def _bits(values: Tensor) -> Bits:
    """A view."""
    return values.detach().view(int16).numpy().view(np.uint16)


def _ordered(bits: Bits) -> Bits:
    """Signs and magnitudes as integers in the order of the values, or back."""
    return bits ^ np.where(bits >> 15, np.uint16(0x7FFF), np.uint16(0))


def _zigzag(difference: Bits) -> Integers:
    signed = difference.view(np.int16).astype(np.int64)
    return (2 * signed) ^ (signed >> 15)


def _floor_log2(values: Integers) -> Integers:
    return np.frexp(np.maximum(values, 1))[1].astype(np.int64) - 1


def _symbols(changes: Integers, direct: int) -> tuple[Integers, Integers, Integers]:
    """Symbols, and widths and values of their extra bits."""
    octave = _floor_log2(changes)
    is_direct = changes < 1 << direct
    width = np.maximum(octave - 1, 0)
    symbols = np.where(is_direct, changes, (1 << direct) + 2 * (octave - direct - 1) + (changes >> width))
    return symbols, np.where(is_direct, 0, width), np.where(is_direct, 0, changes & ((1 << width) - 1))


def _widths(symbols: Integers, direct: int) -> Integers:
    return np.where(symbols < 1 << direct, 0, (symbols - (1 << direct) >> 1) + direct - 1)


def _joined(symbols: Integers, direct: int, extra: Integers) -> Integers:
    """The values of symbols and extra bits."""
    highest = 2 + (symbols - (1 << direct) & 1)
    return np.where(symbols < 1 << direct, symbols, (highest << _widths(symbols, direct)) + extra)


def _num_symbols(direct: int) -> int:
    """Of changes."""
    return (1 << direct) + 2 * (16 - direct)


def _counted(symbols: Integers, num_symbols: int) -> Table:
    return _table(frequencies(np.bincount(symbols, minlength=num_symbols)))


def _table(frequency: Integers) -> Table:
    return Table(frequency, np.cumsum(frequency) - frequency)


def _encode_rounds(rounds: Sequence[tuple[Table, Integers]], lanes: int) -> tuple[bytes, bytes]:
    """States and words of the symbols: a round holds the next symbol of each of the first lanes."""
    states, words = np.full(lanes, LOWEST_STATE, np.int64), []
    for table, symbols in reversed(rounds):
        x, frequency = states[: symbols.size], table.frequency[symbols]
        is_full = x >> (31 - SCALE_BITS) >= frequency
        words.append(x[is_full] & 0xFFFF)
        x = np.where(is_full, x >> 16, x)
        states[: symbols.size] = x // frequency * SCALE + x % frequency + table.first[symbols]
    return states.astype("<u4").tobytes(), np.concatenate(words[::-1]).astype("<u2").tobytes()


class _Parts:
    """The parts of a payload, one after another."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    def take(self, nbytes: int) -> bytes:
        _check(self._at + nbytes <= len(self._payload), "parts of a chunk must be within it")
        self._at += nbytes
        return self._payload[self._at - nbytes : self._at]

    def align(self) -> None:
        self.take(-self._at % 4)

    def rest(self) -> bytes:
        return self.take(len(self._payload) - self._at)


class _Decoder:
    """States and words of a chunk."""

    def __init__(self, reader: _Parts, lanes: int, num_words: int) -> None:
        self._states = np.frombuffer(reader.take(4 * lanes), "<u4").astype(np.int64)
        in_range = (self._states >= LOWEST_STATE) & (self._states < 1 << 31)
        _check(bool(in_range.all()), "states must be in range")
        self._words = np.frombuffer(reader.take(2 * num_words), "<u2").astype(np.int64)
        reader.align()
        self._at = 0

    def round(self, table: Table, numel: int) -> Integers:
        """The next symbols of the first ``numel`` lanes."""
        x = self._states[:numel]
        slots = x & (SCALE - 1)
        symbols = np.searchsorted(table.first, slots, "right") - 1
        x = table.frequency[symbols] * (x >> SCALE_BITS) + slots - table.first[symbols]
        is_low = x < LOWEST_STATE
        used = int(is_low.sum())
        _check(self._at + used <= self._words.size, "words of a chunk must suffice")
        x[is_low] = x[is_low] << 16 | self._words[self._at : self._at + used]
        self._states[:numel] = x
        self._at += used
        return symbols

    def check_end(self) -> None:
        is_used = self._at == self._words.size
        _check(is_used and bool((self._states == LOWEST_STATE).all()), "words and states of a chunk must be used up")


def _pack_table(table: Table) -> bytes:
    packed, absent = bytearray(), 0
    for frequency in [*table.frequency.tolist(), None]:
        if frequency == 0:
            absent += 1
            continue
        packed += bytes([0, absent]) if absent else b""
        absent = 0
        if frequency is not None:
            packed += bytes([frequency] if frequency < 128 else [128 + frequency % 128, frequency // 128])
    return bytes(packed)


def _unpack_table(reader: _Parts, num_symbols: int) -> Table:
    frequency: list[int] = []
    while len(frequency) < num_symbols:
        (low,) = reader.take(1)
        if low == 0:
            (length,) = reader.take(1)
            _check(length > 0, "absent symbols of a table must be at least one")
            frequency += [0] * length
        else:
            frequency.append(low if low < 128 else low - 128 + 128 * reader.take(1)[0])
    is_whole = len(frequency) == num_symbols and sum(frequency) == SCALE
    _check(is_whole, f"a table must have {num_symbols} frequencies of sum {SCALE}")
    return _table(np.array(frequency, np.int64))


def _unpack_changes_table(reader: _Parts) -> tuple[int, Table]:
    (direct,) = reader.take(1)
    _check(1 <= direct <= MAX_DIRECT_BITS, f"a table must have 1 to {MAX_DIRECT_BITS} direct bits: {direct}")
    return direct, _unpack_table(reader, _num_symbols(direct))


def _pack_bits(values: Integers, widths: Integers) -> bytes:
    """The lowest bit of the first value first."""
    which = np.repeat(np.arange(values.size), widths)
    ends = np.cumsum(widths)
    bits = values[which] >> (np.arange(which.size) - (ends - widths)[which]) & 1
    return _padded(np.packbits(bits.astype(np.uint8), bitorder="little").tobytes())


def _unpack_bits(data: bytes, widths: Integers) -> Integers:
    ends = np.cumsum(widths)
    total = int(ends[-1]) if ends.size else 0
    _check(-(-total // 32) * 4 == len(data), "extra bits of a chunk must be as many as its symbols need")
    which = np.repeat(np.arange(widths.size), widths)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=total, bitorder="little").astype(np.int64)
    values = np.zeros(widths.size, np.int64)
    np.add.at(values, which, bits << (np.arange(total) - (ends - widths)[which]))
    return values


class _Head(NamedTuple):
    chunk_bits: int
    numel: int
    nbytes: int


def _read_head(data: bytes) -> _Head:
    _check(len(data) >= HEAD_NBYTES, f"a message must have a head of {HEAD_NBYTES} bytes: nbytes={len(data)}")
    magic, version, chunk_log2, numel, nbytes, _, own_checksum = HEAD.unpack_from(data)
    _check(magic == MAGIC, f"a message must start with {MAGIC!r}: {magic!r}")
    _check(version == VERSION, f"a message must have version {VERSION}: {version}")
    _check(own_checksum == checksum(data[: HEAD_NBYTES - 4], 0), "checksum of a head must match")
    is_known = chunk_log2 in (DENSE_CHUNK_BITS, SPARSE_CHUNK_BITS, RARE_CHUNK_BITS)
    _check(is_known, f"a message must have possible chunks: {chunk_log2}")
    least = HEAD_NBYTES + 4 * _ceil(numel, 1 << chunk_log2)
    is_possible = nbytes % 4 == 0 and least <= nbytes <= max_message_nbytes(numel)
    _check(is_possible, f"a message of {numel} elements must have a possible length: nbytes={nbytes}")
    return _Head(chunk_log2, numel, nbytes)


def _ceil(numel: int, size: int) -> int:
    return -(-numel // size)


def _up_to_4(nbytes: int) -> int:
    return 4 * _ceil(nbytes, 4)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _check(holds: bool, what: str) -> None:  # noqa: FBT001
    if not holds:
        raise MessageError(what)
