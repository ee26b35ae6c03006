"""Masters and moments in files of this rank, sub-group by sub-group.

    bucket's master   | sub-group 0      | sub-group 1      | ...         runs of at most ``sub_group_numel`` elements,
                                                                          on multiples of 256
    file "masters"    | 0 now | 0 before | 1 now | 1 before | ...         an extent: float32 [numel], whole pages
    file "moments"    | 0 now | 0 before | 1 now | 1 before | ...         an extent: one run for each moment

A step writes the extents that hold what was before the step before; a sub-group's ``is_second`` says which one counts,
and changes once every rank has written everything. Without ``keeps_previous`` there is one extent, written in place.

At rest a master or moment keeps its object, shape and dtype but no memory: reading it gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zcomm import Topology
from zero._sharding.bucket import Bucket, master_dtype
from zero._storage.file_store import FileStore, StoredFile, Transfer
from zero._storage.poison import at_rest, is_at_rest
from zero._storage.tier_settings import StateTier, Tiers

PAGE = 4096
LARGEST_NUMEL = 2**22
"""Larger sub-groups need more memory and hide no more."""


@dataclass(slots=True, eq=False)
class SubGroup:
    """Elements ``[start, stop)`` of a bucket's master."""

    bucket: Bucket
    start: int
    stop: int
    masters_at: int
    """Where its extents begin, in the file of masters."""
    moments_at: int
    is_second: bool = False
    """Which of the two extents counts."""
    has_moments: bool = False
    """Whether its moments were ever written."""

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.stop - self.start


class InMemory:
    """A sub-group in memory: its master, and its moments if it has any; a :class:`zero._storage.pipeline.StagedUnit`."""

    def __init__(self, files: StateFiles, group: SubGroup, *, reads: bool, moments: bool = True) -> None:
        self._files, self._group = files, group
        self._buffers: list[Tensor] = []
        self._transfers: list[Transfer] = []
        try:
            self._open(reads=reads, moments=moments)
        except BaseException:  # what there is may be all that a recovery will get
            with suppress(Exception):
                self.wait()
            self.free()
            raise

    def _open(self, *, reads: bool, moments: bool) -> None:
        files, group, store = self._files, self._group, self._files.store
        self._buffers.append(store.buffer(files.master_nbytes(group)))
        if moments and files.moments:
            self._buffers.append(store.buffer(files.moment_nbytes(group)))
        if reads:
            self._transfers.append(store.read(files.masters_file, files.master_offset(group), self._buffers[0]))
            if len(self._buffers) > 1 and group.has_moments:
                self._transfers.append(store.read(files.moments_file, files.moment_offset(group), self._buffers[1]))

    @property
    def master(self) -> Tensor:
        """The master, flat."""
        dtype = master_dtype(self._group.bucket.dtype)
        return self._buffers[0].view(dtype)[: self._group.numel]

    @property
    def moments(self) -> dict[str, Tensor]:
        """The moments, flat, by name."""
        found, at, numel = {}, 0, self._group.numel
        for name, dtype in self._files.moments.items():
            nbytes = numel * dtype.itemsize
            found[name] = self._buffers[1][at : at + nbytes].view(dtype)
            at += nbytes
        return found

    def wait(self) -> None:
        """Wait for every transfer; the first error is raised after the last has ended."""
        error: Exception | None = None
        for transfer in self._transfers:
            try:
                transfer.wait()
            except Exception as caught:
                error = error or caught
        self._transfers.clear()
        if error is not None:
            raise error

    def begin_write(self) -> None:
        """Begin to write all that is in memory to the extent that :meth:`StateFiles.commit` makes the valid one."""
        files, group, store = self._files, self._group, self._files.store
        at = files.master_offset(group, new=True)
        self._transfers.append(store.write(files.masters_file, at, self._buffers[0]))
        if len(self._buffers) > 1:
            at = files.moment_offset(group, new=True)
            self._transfers.append(store.write(files.moments_file, at, self._buffers[1]))

    def free(self) -> None:
        """Give the memory back."""
        for buffer in self._buffers:
            self._files.store.give(buffer)
        self._buffers.clear()


class StateFiles:
    """The masters and moments of ``buckets``; constructed by all ranks together.

    Args:
        buckets: Those whose states rest in files.
        tiers: Folder, sizes and how files are read and written.
        topology: The ranks.

    Raises:
        OSError: On every rank: the folder cannot be used, or has too little space for the masters.
    """

    def __init__(self, buckets: Sequence[Bucket], tiers: Tiers, topology: Topology) -> None:
        self.settings: StateTier = tiers.states
        assert tiers.states.path is not None, "states in files without a folder"
        self.store = FileStore(
            tiers.states.path, files=tiers.files, name="states", topology=topology, pins_memory=tiers.pins_memory
        )
        self.moments: dict[str, torch.dtype] = {}
        """The optimizer's moments by name, wider ones first."""
        self.num_generations = 2 if tiers.states.keeps_previous else 1
        self.groups_of: dict[Bucket, list[SubGroup]] = {}
        at = 0
        for bucket in buckets:
            groups = self.groups_of[bucket] = []
            numel = bucket.layout.shard_numel
            step = _even_numel(numel, min(tiers.states.sub_group_numel, LARGEST_NUMEL))
            for start in range(0, numel, step):
                group = SubGroup(bucket, start, min(start + step, numel), at, 0)
                at += self.num_generations * self.master_nbytes(group)
                groups.append(group)
        try:
            self.masters_file: StoredFile = self.store.create_all({"masters": at})["masters"]
        except BaseException:
            self.store.close()
            raise
        self.moments_file = self.masters_file

    def reserve_moments(self, moments: Mapping[str, torch.dtype]) -> None:
        """Make room for the optimizer's moments. Collective.

        Raises:
            OSError: On every rank: too little space.
        """
        self.moments = dict(sorted(moments.items(), key=lambda item: -item[1].itemsize))
        if not self.moments:
            return
        at = 0
        for group in self.groups:
            group.moments_at = at
            at += self.num_generations * self.moment_nbytes(group)
        self.moments_file = self.store.create_all({"moments": at})["moments"]

    @property
    def groups(self) -> list[SubGroup]:
        """Every sub-group, in order."""
        return [group for groups in self.groups_of.values() for group in groups]

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return self.masters_file.nbytes + (self.moments_file.nbytes if self.moments else 0)

    def master_nbytes(self, group: SubGroup) -> int:
        """Bytes of one extent of masters."""
        return _pages(group.numel * master_dtype(group.bucket.dtype).itemsize)

    def moment_nbytes(self, group: SubGroup) -> int:
        """Bytes of one extent of moments."""
        return _pages(sum(group.numel * dtype.itemsize for dtype in self.moments.values()))

    def master_offset(self, group: SubGroup, *, new: bool = False) -> int:
        """Where the valid masters are; ``new``: where the next ones go."""
        is_second = (group.is_second != new) if self.num_generations == 2 else False
        return group.masters_at + is_second * self.master_nbytes(group)

    def moment_offset(self, group: SubGroup, *, new: bool = False) -> int:
        """Where the valid moments are; ``new``: where the next ones go."""
        is_second = (group.is_second != new) if self.num_generations == 2 else False
        return group.moments_at + is_second * self.moment_nbytes(group)

    def commit(self, groups: Sequence[SubGroup]) -> None:
        """What was written of ``groups``, masters and moments, is what counts from now on."""
        for group in groups:
            group.is_second = not group.is_second
            group.has_moments = group.has_moments or bool(self.moments)

    def load(self, group: SubGroup) -> InMemory:
        """Begin to read a sub-group."""
        return InMemory(self, group, reads=True)

    def settle(self, bucket: Bucket) -> None:
        """Write the first masters of ``bucket``, which are in memory, and let go of that memory."""
        for group in self.groups_of[bucket]:
            unit = InMemory(self, group, reads=False)
            try:
                unit.master.copy_(bucket.master[group.start : group.stop])
                unit.begin_write()
            finally:
                unit.wait()
                unit.free()
        self.commit(self.groups_of[bucket])
        bucket.master = at_rest(bucket.layout.shard_numel, bucket.master.dtype)

    def masters_of(self, bucket: Bucket) -> Iterator[tuple[SubGroup, Tensor]]:
        """The masters of ``bucket``, sub-group by sub-group; each is gone when the next comes."""
        for group in self.groups_of[bucket]:
            unit = InMemory(self, group, reads=True, moments=False)
            try:
                unit.wait()
                yield group, unit.master
            finally:
                unit.free()

    def read(self, bucket: Bucket, moment: str, base: int, start: int, stop: int) -> Tensor:
        """Elements ``[base + start, base + stop)`` of a moment of ``bucket``, or of its master, ``""``; a copy."""
        dtype = self.moments[moment] if moment else master_dtype(bucket.dtype)
        parts = []
        for group in self.groups_of[bucket]:
            low, high = max(base + start, group.start) - group.start, min(base + stop, group.stop) - group.start
            if low < high:
                parts.append(torch.empty(high - low, dtype=dtype))
                self._read_run(group, moment, low * dtype.itemsize, parts[-1])
        return torch.cat(parts)

    def _read_run(self, group: SubGroup, moment: str, nbytes_before: int, target: Tensor) -> None:
        """Fill ``target`` from byte ``nbytes_before`` of a run: whole pages are read."""
        file, at = self.masters_file, self.master_offset(group)
        if moment:
            file, at = self.moments_file, self.moment_offset(group)
            for name, dtype in self.moments.items():
                if name == moment:
                    break
                at += group.numel * dtype.itemsize
        begin = at + nbytes_before
        end = begin + target.numel() * target.element_size()
        first = begin // PAGE * PAGE
        buffer = self.store.buffer(end - first)
        try:
            self.store.read(file, first, buffer[: _pages(end - first)]).wait()
            target.copy_(buffer[begin - first : end - first].view(target.dtype))
        finally:
            self.store.give(buffer)

    @contextmanager
    def in_memory(
        self, bucket: Bucket, tensors: Mapping[str, Sequence[tuple[int, int, Tensor]]], *, writes: bool
    ) -> Iterator[None]:
        """Hold the master of ``bucket`` and its moments in memory.

        Args:
            bucket: One of :attr:`groups_of`.
            tensors: What is given memory: by moment, and masters by ``""``, the first element of each view of the
                bucket's master or moment, its end, and the view. Those with memory of their own keep their values.
            writes: What is changed inside, or had memory of its own, is written afterwards.
        """
        dtypes = {"": master_dtype(bucket.dtype), **self.moments}
        whole = {name: torch.zeros(bucket.layout.shard_numel, dtype=dtype) for name, dtype in dtypes.items()}
        for group in self.groups_of[bucket]:
            unit = InMemory(self, group, reads=True)
            try:
                unit.wait()
                whole[""][group.start : group.stop] = unit.master
                for name, values in (unit.moments if group.has_moments else {}).items():
                    whole[name][group.start : group.stop] = values
            finally:
                unit.free()
        for name, views in tensors.items():
            for start, stop, view in views:
                here = whole[name][start:stop]
                if not is_at_rest(view):
                    here.copy_(view)
                view.data = here
        try:
            yield
        finally:
            for views in tensors.values():
                for _, _, view in views:
                    view.data = at_rest(view.numel(), view.dtype)
        if writes:
            self.write(bucket, whole)

    def write(self, bucket: Bucket, whole: Mapping[str, Tensor]) -> None:
        """Replace the master, ``""``, and the moments of ``bucket``."""
        for group in self.groups_of[bucket]:
            unit = InMemory(self, group, reads=False)
            try:
                unit.master.copy_(whole[""][group.start : group.stop])
                for name, values in unit.moments.items() if self.moments else ():
                    values.copy_(whole[name][group.start : group.stop])
                unit.begin_write()
            finally:
                unit.wait()
                unit.free()
        self.commit(self.groups_of[bucket])

    def close(self) -> None:
        """Remove the files."""
        self.store.close()


def _even_numel(numel: int, largest: int) -> int:
    """The length of equal parts of at most ``largest`` elements: a multiple of 256, as ``numel`` is."""
    blocks = -(-numel // 256)
    parts = -(-blocks // max(largest // 256, 1)) or 1
    return max(-(-blocks // parts), 1) * 256


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
