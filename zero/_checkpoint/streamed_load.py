"""Load masters and moments into files (NVMe offload), a sub-group at a time: a shard may be larger than host memory.

    checkpoint --chunks--> master and moments of a sub-group --> the unused extent of its file --commit--> current

With ``keep_previous_states`` each sub-group has two extents in its file; an error before the commit leaves the old one.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from zero._checkpoint.dcp import read_chunk
from zero._checkpoint.flat_parts import LocalPart, local_masters
from zero._checkpoint.index import Index, StoredChunk
from zero._optim.state_files import LoadedSubGroup
from zero._optim.sub_groups import SubGroup
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.optimizer_parts import OptimizerParts
from zero._storage.poison import placeholder


class StreamedStates:
    """The masters and moments of a checkpoint that go to files; without such files every method does nothing.

    Args:
        internals: The parts of the optimizer.
        index: The checkpoint, which fits the model.
        moments: Load moments, too; False: those in the files stay.

    Cost: one sub-group of memory, and for the master and each moment one chunk of the checkpoint, 64 MiB at most.
    """

    def __init__(self, internals: OptimizerParts, index: Index, *, moments: bool) -> None:
        self._internals, self._index, self._has_moments = internals, index, moments
        self._files = internals.runtime.state_files
        self._chunks: dict[str, tuple[str, StoredChunk, Tensor]] = {}
        """The chunk that was read last, for the master and each moment: the next sub-group often begins in it."""

    def write(self) -> None:
        """Write everything; with ``keep_previous_states`` nothing changes before :meth:`commit`. Collective.

        Raises:
            CheckpointError: The checkpoint cannot be read. On every rank.
            OSError: The files cannot be written. On every rank.
        """
        files, runtime = self._files, self._internals.runtime
        if not files.groups_of:
            return
        # A delayed update in flight writes to the same extents: its late write would replace what is loaded here. Its
        # error does not matter, as its result is discarded.
        with suppress(Exception):
            runtime.delayed.finish()
        try:
            on_every_rank(self._write_all, runtime.topology)
        except Exception as error:
            if files.num_generations == 1:  # the old values are overwritten, partly
                self._internals.fail(error)
            raise
        finally:
            self._chunks.clear()

    def _write_all(self) -> None:
        files, masters = self._files, list(local_masters(self._internals))
        for group in files.groups:
            own = [local for local in masters if local.bucket is group.bucket]
            is_complete = self._has_moments and all(f"weight/{local.name}" in self._index.tensors for local in own)
            with files.loaded(group, reads=not is_complete) as unit:
                if is_complete:
                    for buffer in (unit.master, *unit.moments.values()):
                        buffer.zero_()
                for local in own:
                    self._fill(group, unit, local)
                unit.start_write()

    def _fill(self, group: SubGroup, unit: LoadedSubGroup, local: LocalPart) -> None:
        """Read the elements of ``local`` that are in ``group``."""
        start, stop = max(local.start, group.start), min(local.start + local.values.numel(), group.stop)
        if start >= stop:
            return
        first, base = local.first + start - local.start, group.start
        master = self._read("weight", f"weight/{local.name}", first, stop - start)
        if master is not None:
            unit.master[start - base : stop - base].copy_(master)
        for name in self._files.moments if self._has_moments else ():
            values = self._read(name, f"state/{name}/{local.name}", first, stop - start)
            if values is not None:
                unit.moments[name][start - base : stop - base].copy_(values)

    def _read(self, kind: str, key: str, first: int, numel: int) -> Tensor | None:
        """Return elements ``[first, first + numel)`` of a tensor, or None if it was not saved."""
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
            known = None  # frees its memory before the next chunk is read
            known = (key, chunk, read_chunk(self._index.folder, key, chunk, dtype))
        self._chunks[kind] = known
        return known[2]

    def commit(self) -> None:
        """Make what was written the current state, on this rank."""
        self._files.commit(self._files.groups)

    def stand_ins(self) -> None:
        """Put placeholders for the moments in files into the inner optimizer's state."""
        for local in local_masters(self._internals) if self._has_moments else ():
            if local.bucket.states.is_in_files:
                for name, dtype in self._files.moments.items():
                    if f"state/{name}/{local.name}" in self._index.tensors:
                        self._internals.inner.state[local.values][name] = placeholder(local.values.shape, dtype)
