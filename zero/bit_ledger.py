"""The bit ledger: a 64-bit hash of every parameter's gradient and master at every step, to find where two runs part.

    folder/rank-00002.ledger:   a line of JSON, then a record for every update, gradient | parameter, and piece

The hash of a parameter is the sum, modulo 2^64, of a mix of each element's bits and its index in the parameter. So each
rank hashes what it holds, nobody communicates for it, and the sum over the ranks is that of the whole parameter,
however it is sharded: runs of other world sizes and stages can be compared (:mod:`zero.bisect`).

Gradients are hashed as reduced, before what ``step()`` itself does to unscale and clip them; of those that rest in
files nothing is recorded. Parameters are the masters after the update. Skipped steps are not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zero.agreement import on_every_rank
from zero.inside import values_of
from zero.masters import MasterPiece
from zero.runtime import Runtime

__all__ = ["GRADIENT", "MAGIC", "PARAMETER", "RECORD", "BitLedger", "file_of", "hash_bits"]

MAGIC = "zero bit ledger 1"
GRADIENT, PARAMETER = 0, 1
RECORD = np.dtype([("update", "<u4"), ("kind", "<u4"), ("parameter", "<u4"), ("spare", "<u4"), ("hash", "<u8")])
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_NUMEL = 2**18
OF_BITS, OF_INDEX, LAST = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd, as splitmix64 has them
LOW_33, LOW_35 = 2**33 - 1, 2**35 - 1


def hash_bits(values: Tensor, first: int = 0) -> int:
    """The sum over elements of a mix of bits and index, in [0, 2^64).

    Args:
        values: Contiguous, of any dtype; what is hashed are the bits, so 0 and -0 differ.
        first: Index of the first element.
    """
    bits, total = values.detach().view(-1).view(BITS[values.element_size()]), 0
    for start in range(0, bits.numel(), CHUNK_NUMEL):
        part = bits[start : start + CHUNK_NUMEL].to(torch.int64)
        mixed = torch.arange(first + start, first + start + part.numel(), device=part.device).add_(1).mul_(OF_INDEX)
        mixed = mixed.add_(part.mul_(OF_BITS))
        mixed ^= (mixed >> 31) & LOW_33
        mixed.mul_(LAST)
        mixed ^= (mixed >> 29) & LOW_35
        mixed.mul_(OF_BITS)
        mixed ^= (mixed >> 31) & LOW_33
        total += int(mixed.sum().item())
    return total % 2**64


def file_of(folder: str | Path, rank: int) -> Path:
    """Where a rank writes."""
    return Path(folder) / f"rank-{rank:05d}.ledger"


class BitLedger:
    """Writes this rank's file. Collective: a rank that cannot write makes all raise its OSError."""

    def __init__(self, folder: str, runtime: Runtime, pieces: list[MasterPiece]) -> None:
        self._runtime, self._pieces, self._num_updates = runtime, pieces, 0
        self._path = file_of(folder, runtime.topology.rank)
        buckets = [bucket for bucket in runtime.buckets if bucket.is_trainable]
        named = sorted((slot.name, slot.numel) for bucket in buckets for slot in bucket.layout.slots)
        self._number = {name: number for number, (name, _) in enumerate(named)}
        header = {
            "format": MAGIC,
            "rank": runtime.topology.rank,
            "world_size": runtime.topology.world_size,
            "stage": runtime.settings.stage,
            "is_whole": not runtime.stage.shards_states,
            "parameters": named,
        }
        line = json.dumps(header).encode() + b"\n"

        def begin() -> None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(line)

        on_every_rank(begin, runtime.topology)
        self._end = len(line)
        """Of the records of updates that have been applied."""

    def write_gradients(self) -> None:
        """Before an update; in place of what an attempt at it has left that failed."""
        self._of_attempt = self._write(GRADIENT, self._gradients(), self._end)

    def write_parameters(self) -> None:
        """After it."""
        self._end = self._write(PARAMETER, self._masters(), self._of_attempt)
        self._num_updates += 1

    def _write(self, kind: int, values: Iterator[tuple[int, int, Tensor]], at: int) -> int:
        """Write records from byte ``at`` on, the last of the file; returns its new end."""

        def write() -> int:
            update = self._num_updates + 1
            rows = [(update, kind, number, 0, hash_bits(part, first)) for number, first, part in values]
            with self._path.open("r+b") as file:
                file.truncate(at)
                file.seek(at)
                file.write(np.array(rows, dtype=RECORD).tobytes())
                return file.tell()

        return on_every_rank(write, self._runtime.topology)

    def _gradients(self) -> Iterator[tuple[int, int, Tensor]]:
        reducer, is_sharded = self._runtime.reducer, self._runtime.stage.shards_states
        row = self._runtime.topology.shard_index("local")
        for piece in self._pieces:
            grads, slot = reducer.by_bucket[piece.bucket.index], piece.bucket.layout.slots[piece.slot]
            result = None if grads.is_in_file or not grads.used[piece.slot] else reducer.results(grads)
            if result is not None:
                first = piece.start + (row * piece.bucket.layout.shard_numel if is_sharded else 0) - slot.offset
                part = result[piece.start : piece.start + piece.master.numel()]
                yield self._number[slot.name], first, part

    def _masters(self) -> Iterator[tuple[int, int, Tensor]]:
        of_pieces = values_of(self._pieces, self._runtime)
        for piece, (_, first, master) in zip(self._pieces, of_pieces, strict=True):
            yield self._number[piece.bucket.layout.slots[piece.slot].name], first, master
