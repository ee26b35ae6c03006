"""Masters and moments offloaded to files of this rank, sub-group by sub-group.

    bucket's master   | sub-group 0      | sub-group 1      | ...         runs of at most ``sub_group_numel`` elements,
                                                                          on multiples of 256
    file "masters"    | 0 now | 0 prev | 1 now | 1 prev | ...             an extent: float32 [numel], whole pages
    file "moments"    | 0 now | 0 prev | 1 now | 1 prev | ...             an extent: one run for each moment

A step writes to the extent that is not valid. A sub-group's ``is_second`` says which one is; it changes once every rank
has written everything, so a failed write leaves the previous values on all ranks. Without ``keeps_previous`` there is
one extent, written in place, and a failed step is final.

While it is in a file, a master or moment is a placeholder: it keeps its object, shape and dtype but no memory, and
reading it gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import Topology
from zero._config.settings import ZeroSettings
from zero._optim.cpu_optimizer_base import CPUOptimizer
from zero._optim.host_adam import describe_update
from zero._sharding.bucket import Bucket, master_dtype
from zero._sharding.stages import get_stage
from zero._storage.file_store import FileStore, StoredFile, Transfer
from zero._storage.host_memory import HostMemory
from zero._storage.poison import is_placeholder, placeholder
from zero._storage.tier_settings import StateTier, Tier, Tiers

PAGE = 4096
LARGEST_NUMEL = 2**22
"""Larger sub-groups need more memory and overlap no better."""


@dataclass(slots=True, eq=False)
class SubGroup:
    """Elements ``[start, stop)`` of a bucket's master."""

    bucket: Bucket
    start: int
    stop: int
    masters_at: int
    """The offset of its extents in the file of masters."""
    moments_at: int
    is_second: bool = False
    """Whether the second of its two extents is valid."""
    has_moments: bool = False
    """Whether its moments were ever written."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


class LoadedSubGroup:
    """A sub-group in memory: its master and moments; a :class:`zero._storage.swap_pipeline.StagedUnit`."""

    def __init__(self, files: StateFiles, group: SubGroup, *, reads: bool, moments: bool = True) -> None:
        self._files, self._group = files, group
        self._buffers: list[Tensor] = []
        self._transfers: list[Transfer] = []
        try:
            self._open(reads=reads, moments=moments)
        except BaseException:  # the buffers may be the last memory there is: a retry needs them
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

    def start_write(self) -> None:
        """Start to write everything to the extent that :meth:`StateFiles.commit` will make valid."""
        files, group, store = self._files, self._group, self._files.store
        at = files.master_offset(group, new=True)
        self._transfers.append(store.write(files.masters_file, at, self._buffers[0]))
        if len(self._buffers) > 1:
            at = files.moment_offset(group, new=True)
            self._transfers.append(store.write(files.moments_file, at, self._buffers[1]))

    def free(self) -> None:
        """Return the buffers; no transfer may be in flight."""
        for buffer in self._buffers:
            self._files.store.give(buffer)
        self._buffers.clear()


class StateFiles:
    """The masters and moments of ``buckets`` in files; constructed by all ranks together.

    Args:
        buckets: The buckets whose states are offloaded to files.
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
        """Create the file of the optimizer's moments. Collective.

        Raises:
            OSError: Too little space; on every rank.
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
        """The offset of the valid masters; ``new``: of those written next."""
        is_second = (group.is_second != new) if self.num_generations == 2 else False
        return group.masters_at + is_second * self.master_nbytes(group)

    def moment_offset(self, group: SubGroup, *, new: bool = False) -> int:
        """The offset of the valid moments; ``new``: of those written next."""
        is_second = (group.is_second != new) if self.num_generations == 2 else False
        return group.moments_at + is_second * self.moment_nbytes(group)

    def commit(self, groups: Sequence[SubGroup]) -> None:
        """Make what was last written of ``groups`` valid, masters and moments."""
        for group in groups:
            group.is_second = not group.is_second
            group.has_moments = group.has_moments or bool(self.moments)

    def load(self, group: SubGroup) -> LoadedSubGroup:
        """Start to read a sub-group."""
        return LoadedSubGroup(self, group, reads=True)

    def write_first_masters(self, bucket: Bucket) -> None:
        """Write the initial masters of ``bucket``, which are in memory, and free that memory."""
        for group in self.groups_of[bucket]:
            unit = LoadedSubGroup(self, group, reads=False)
            try:
                unit.master.copy_(bucket.master[group.start : group.stop])
                unit.start_write()
            finally:
                unit.wait()
                unit.free()
        self.commit(self.groups_of[bucket])
        bucket.master = placeholder(bucket.layout.shard_numel, bucket.master.dtype)

    def masters_of(self, bucket: Bucket) -> Iterator[tuple[SubGroup, Tensor]]:
        """The masters of ``bucket``, sub-group by sub-group; each is freed when the next is asked for."""
        for group in self.groups_of[bucket]:
            unit = LoadedSubGroup(self, group, reads=True, moments=False)
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
        """Fill ``target`` from byte ``nbytes_before`` of a run; reads whole pages, as direct I/O must."""
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
            tensors: The views that get memory, by moment, and masters by ``""``: each with its first element in the
                bucket's master or moment, its end, and the view. One that has memory already keeps its values.
            writes: Write everything afterwards, with what was changed inside or had memory already.
        """
        dtypes = {"": master_dtype(bucket.dtype), **self.moments}
        full = {name: torch.zeros(bucket.layout.shard_numel, dtype=dtype) for name, dtype in dtypes.items()}
        for group in self.groups_of[bucket]:
            unit = LoadedSubGroup(self, group, reads=True)
            try:
                unit.wait()
                full[""][group.start : group.stop] = unit.master
                for name, values in (unit.moments if group.has_moments else {}).items():
                    full[name][group.start : group.stop] = values
            finally:
                unit.free()
        for name, views in tensors.items():
            for start, stop, view in views:
                here = full[name][start:stop]
                if not is_placeholder(view):
                    here.copy_(view)
                view.data = here
        try:
            yield
        finally:
            for views in tensors.values():
                for _, _, view in views:
                    view.data = placeholder(view.numel(), view.dtype)
        if writes:
            self.write(bucket, full)

    def write(self, bucket: Bucket, full: Mapping[str, Tensor]) -> None:
        """Replace the master, ``""``, and the moments of ``bucket``."""
        for group in self.groups_of[bucket]:
            unit = LoadedSubGroup(self, group, reads=False)
            try:
                unit.master.copy_(full[""][group.start : group.stop])
                for name, values in unit.moments.items() if self.moments else ():
                    values.copy_(full[name][group.start : group.stop])
                unit.start_write()
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


def assign_states(buckets: list[Bucket], settings: ZeroSettings, topology: Topology) -> StateFiles | None:
    """Assign host memory to the buckets whose states are offloaded, and create their files. Collective.

    ``ratio`` is met as closely as undivided buckets allow. The buckets used last in the forward are offloaded first:
    their gradients come first in the backward, so their copies overlap most of it.
    """
    tiers = settings.tiers
    if tiers.states.tier is Tier.DEVICE or not get_stage(settings.stage).shards_states:
        return None
    trainable = [bucket for bucket in buckets if bucket.is_trainable]
    wanted = tiers.states.ratio * sum(bucket.layout.numel for bucket in trainable)
    host, offloaded = HostMemory(buckets[0].device, pins=tiers.pins_memory), 0
    for bucket in reversed(trainable):
        if offloaded + bucket.layout.numel / 2 <= wanted:
            bucket.host = host
            offloaded += bucket.layout.numel
    chosen = [bucket for bucket in trainable if bucket.host is not None]
    return StateFiles(chosen, tiers, topology) if chosen and tiers.states.tier is Tier.NVME else None


def describe_states(buckets: list[Bucket], tier: StateTier, inner: Optimizer) -> tuple[str, ...]:
    """Where masters and moments are stored, and what updates them, for ``optimizer.effective``; alike on all ranks."""
    trainable = [bucket for bucket in buckets if bucket.is_trainable]
    offloaded = sum(bucket.layout.numel for bucket in trainable if bucket.host is not None)
    is_narrow = isinstance(inner, CPUOptimizer) and inner.moment_dtype == torch.bfloat16
    formats = ("moments are stored in bfloat16, rounded stochastically",) if is_narrow else ()
    if not offloaded:
        return formats
    share = offloaded / sum(bucket.layout.numel for bucket in trainable)
    place = f"files below {tier.path}" if tier.tier is Tier.NVME else "host memory"
    update = describe_update(inner)
    part = "" if share == 1 else f"{share:.0%} of the "
    delay = f", during the next step after the first {tier.delay_start}" if tier.delays_update else ""
    return (f"{part}masters and moments are stored in {place}, updated on the host by {update}{delay}", *formats)
