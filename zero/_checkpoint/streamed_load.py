"""Loading masters and moments that rest in files: a sub-group at a time, so that a shard may be larger than memory.

checkpoint --chunks--> master and moments of a sub-group --> the extent that does not count yet --commit--> counts
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from zero._checkpoint.dcp import read_chunk
from zero._checkpoint.flat_parts import Held, held_pieces
from zero._checkpoint.index import Index, StoredChunk
from zero._optim.masters import MasterPiece
from zero._optim.state_files import InMemory, StateFiles, SubGroup
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.optimizer_parts import OptimizerParts
from zero._storage.poison import at_rest


class StreamedStates:
    """What of a checkpoint goes to the files of states; nothing where there are none.

    Args:
        inside: Of the optimizer.
        index: The checkpoint, which fits the model.
        moments: Take moments over, too; else those of the files stay.

    Cost: one sub-group of memory, and for the master and each moment one chunk of the checkpoint, 64 MiB at most.
    """

    def __init__(self, inside: OptimizerParts, index: Index, *, moments: bool) -> None:
        self._inside, self._index, self._has_moments = inside, index, moments
        self._files = inside.runtime.state_files
        self._chunks: dict[str, tuple[str, StoredChunk, Tensor]] = {}
        """By kind, the last that was read."""

    def write(self) -> None:
        """Write everything; with ``keep_previous_states`` nothing is changed before :meth:`commit`. Collective.

        Raises:
            CheckpointError: The checkpoint cannot be read. On every rank, as the others.
            OSError: The files cannot be written.
        """
        files, runtime = self._files, self._inside.runtime
        if files is None:
            return
        if runtime.delayed is not None:  # it writes to the same places
            with suppress(Exception):
                runtime.delayed.finish()
        try:
            on_every_rank(lambda: self._write_all(files), runtime.topology)
        except Exception as error:
            if files.num_generations == 1:
                self._inside.fail(error)
            raise
        finally:
            self._chunks.clear()

    def _write_all(self, files: StateFiles) -> None:
        pieces = list(held_pieces(self._inside))
        for group in files.groups:
            own = [(held, piece) for held, piece in pieces if piece.bucket is group.bucket]
            is_whole = self._has_moments and all(f"weight/{held.name}" in self._index.tensors for held, _ in own)
            unit = InMemory(files, group, reads=not is_whole)
            try:
                unit.wait()
                if is_whole:
                    for buffer in (unit.master, *(unit.moments.values() if files.moments else ())):
                        buffer.zero_()
                for held, piece in own:
                    self._fill(files, group, unit, held, piece)
                unit.begin_write()
            finally:
                unit.wait()
                unit.free()

    def _fill(self, files: StateFiles, group: SubGroup, unit: InMemory, held: Held, piece: MasterPiece) -> None:
        """The part of ``piece`` that is in ``group``."""
        start, stop = max(piece.start, group.start), min(piece.start + piece.master.numel(), group.stop)
        if start >= stop:
            return
        first, base = held.first + start - piece.start, group.start
        master = self._read("weight", f"weight/{held.name}", first, stop - start)
        if master is not None:
            unit.master[start - base : stop - base].copy_(master)
        for name in files.moments if self._has_moments else ():
            values = self._read(name, f"state/{name}/{held.name}", first, stop - start)
            if values is not None:
                unit.moments[name][start - base : stop - base].copy_(values)

    def _read(self, kind: str, key: str, first: int, numel: int) -> Tensor | None:
        """Elements ``[first, first + numel)`` of a tensor; None: it was not saved."""
        stored = self._index.tensors.get(key)
        if stored is None:
            return None
        values = torch.empty(numel, dtype=stored.dtype)
        for chunk in stored.chunks:
            low, high = max(first, chunk.offset), min(first + numel, chunk.offset + chunk.numel)
            if low < high:
                read = self._chunk(kind, key, chunk, stored.dtype)
                values[low - first : high - first] = read[low - chunk.offset : high - chunk.offset]
        return values

    def _chunk(self, kind: str, key: str, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        known = self._chunks.pop(kind, None)
        if known is None or known[:2] != (key, chunk):
            known = None  # its memory goes before the next is read
            known = (key, chunk, read_chunk(self._index.folder, key, chunk, dtype))
        self._chunks[kind] = known
        return known[2]

    def commit(self) -> None:
        """What was written counts, on this rank."""
        if self._files is not None:
            self._files.commit(self._files.groups)

    def stand_ins(self) -> None:
        """Give the inner optimizer, which has its new numbers, what stands for the moments in the files."""
        files = self._files
        if files is None or not self._has_moments:
            return
        for held, piece in held_pieces(self._inside):
            if self._inside.runtime.is_in_files(piece.bucket):
                for name, dtype in files.moments.items():
                    if f"state/{name}/{held.name}" in self._index.tensors:
                        self._inside.inner.state[piece.master][name] = at_rest(piece.master.numel(), dtype)
