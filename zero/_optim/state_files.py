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

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import StateError, Topology
from zero._config.settings import ZeroSettings
from zero._optim.gradient_files import GradientFiles, GradientInMemory
from zero._optim.host_adam import describe_update
from zero._optim.masters import MasterPiece, pieces_by_bucket
from zero._optim.optimizer_clone import moments_of
from zero._optim.several import optimizers_of
from zero._optim.sub_groups import SubGroup, split
from zero._optim.updaters import updater_of
from zero._ranks.rank_errors import on_every_rank
from zero._sharding.bucket import Bucket, master_dtype
from zero._sharding.stages import get_stage
from zero._storage.file_store import PAGE, Transfer, pages, store_with
from zero._storage.gradient_store import GradientStore
from zero._storage.host_memory import HostMemory
from zero._storage.poison import is_placeholder, placeholder
from zero._storage.runtime_part import RuntimePart
from zero._storage.state_storage import HostStates
from zero._storage.tier_settings import StateTier, Tier


class LoadedSubGroup:
    """A sub-group in memory: its master and moments; a :class:`zero._storage.swap_pipeline.StagedUnit`."""

    def __init__(self, files: StateFiles, group: SubGroup, *, reads: bool, moments: bool = True) -> None:
        self._files, self._group = files, group
        self._buffers: list[Tensor] = []
        self._transfers: list[Transfer | GradientInMemory] = []
        self.gradient: GradientInMemory | None = None
        store, (masters_at, moments_at) = files.store, files.offsets(group)
        try:
            self._buffers.append(store.buffer(files.master_nbytes(group)))
            if moments and files.moments:
                self._buffers.append(store.buffer(files.moment_nbytes(group)))
            if reads:
                self._transfers.append(store.read(files.masters_file, masters_at, self._buffers[0]))
                if len(self._buffers) > 1 and group.has_moments:
                    self._transfers.append(store.read(files.moments_file, moments_at, self._buffers[1]))
        except BaseException:  # the buffers may be the last memory there is: a retry needs them
            with suppress(Exception):
                self.wait()
            self.free()
            raise

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

    def add_gradient(self, gradient: GradientInMemory) -> None:
        """Hold ``gradient``, too: it is waited for and freed with the rest, and not written."""
        self.gradient = gradient
        self._transfers.append(gradient)

    def start_write(self) -> None:
        """Start to write masters and moments to the extent that :meth:`StateFiles.commit` will make valid."""
        files, store = self._files, self._files.store
        files.drop_ahead([self._group])  # what was read is out of date
        masters_at, moments_at = files.offsets(self._group, new=True)
        self._transfers.append(store.write(files.masters_file, masters_at, self._buffers[0]))
        if len(self._buffers) > 1:
            self._transfers.append(store.write(files.moments_file, moments_at, self._buffers[1]))

    def free(self) -> None:
        """Return the buffers; no transfer may be in flight."""
        for buffer in self._buffers:
            self._files.store.give(buffer)
        self._buffers.clear()
        if self.gradient is not None:
            self.gradient.free()


class StateFiles(RuntimePart):
    """Masters and moments off the device, and in files, if there are any; constructed by all ranks together.

    :meth:`open_moments` comes before everything but masters. Without files there is no store, and nothing to do.

    Args:
        trainable: All buckets with states.
        off_device: Those whose states are offloaded: to files, if that is the tier.
        settings: Folder, sizes, how files are read and written, and the dtype of sums of gradients.
        topology: The ranks.

    With delayed updates gradients stay in host memory: an update reads them while the next step writes new ones.

    Raises:
        OSError: On every rank: the folder cannot be used, or has too little space for masters and gradients.
    """

    def __init__(
        self, trainable: Sequence[Bucket], off_device: Sequence[Bucket], settings: ZeroSettings, topology: Topology
    ) -> None:
        tiers = settings.tiers
        self.settings: StateTier = tiers.states
        self._total_numel = sum(bucket.layout.numel for bucket in trainable)
        self._num_offloaded = sum(bucket.layout.numel for bucket in off_device)
        buckets = off_device if tiers.states.tier is Tier.NVME else ()
        self.moments: dict[str, torch.dtype] = {}
        """The optimizer's moments by name, wider ones first."""
        self.num_generations = 2 if tiers.states.keeps_previous else 1
        self.groups_of = {bucket: list(split(bucket, tiers.states.sub_group_numel)) for bucket in buckets}
        self._topology = topology
        self.groups = [group for groups in self.groups_of.values() for group in groups]
        """Every sub-group, in order."""
        self._pieces = pieces_by_bucket(buckets, ())
        self._ahead: dict[SubGroup, LoadedSubGroup] = {}
        """What has been read, or is being read, for the next update."""
        at = 0
        for group in self.groups:
            group.masters_at = at
            at += self.num_generations * self.master_nbytes(group)
        if not buckets:
            self.gradients = GradientFiles({}, settings, topology)
            return
        self.store, created = store_with(tiers.states.path, {"masters": at}, tiers, name="states", topology=topology)
        self.masters_file = self.moments_file = created["masters"]
        stored = {} if tiers.states.delays_update else self.groups_of
        try:
            self.gradients = GradientFiles(stored, settings, topology)
        except BaseException:
            self.store.close()
            raise

    def open_moments(self, inner: Optimizer, pieces: Sequence[MasterPiece], whole_groups: Sequence[bool]) -> None:
        """Create the file of the moments of ``inner``, which updates ``pieces``. Collective if any are in files.

        ``whole_groups``: which of its parameter groups are updated as whole tensors.

        Raises:
            OSError: Too little space; on every rank.
            ConfigError: The optimizer's states cannot be stored in files.
        """
        self._inner = inner
        if not self.groups_of:
            return
        self._pieces = pieces_by_bucket(self.groups_of, pieces)
        dtype = next(iter(self.groups_of)).master.dtype
        moments = on_every_rank(lambda: moments_of(inner, dtype, whole_groups), self._topology)
        self.moments = dict(sorted(moments.items(), key=lambda item: -item[1].itemsize))
        at = 0
        for group in self.groups:
            group.moments_at = at
            at += self.num_generations * self.moment_nbytes(group)
        if self.moments:
            self.moments_file = self.store.create_all({"moments": at})["moments"]

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return 0 if not self.groups_of else self.masters_file.nbytes + (self.moments_file.nbytes if self.moments else 0)

    def master_nbytes(self, group: SubGroup) -> int:
        """Bytes of one extent of masters."""
        return pages(group.numel * master_dtype(group.bucket.dtype).itemsize)

    def moment_nbytes(self, group: SubGroup) -> int:
        """Bytes of one extent of moments."""
        return pages(sum(group.numel * dtype.itemsize for dtype in self.moments.values()))

    def offsets(self, group: SubGroup, *, new: bool = False) -> tuple[int, int]:
        """The offsets of the valid masters and moments; ``new``: of those written next."""
        if self.num_generations == 1 or group.is_second == new:
            return group.masters_at, group.moments_at
        return group.masters_at + self.master_nbytes(group), group.moments_at + self.moment_nbytes(group)

    def commit(self, groups: Sequence[SubGroup]) -> None:
        """Make what was last written of ``groups`` valid, masters and moments."""
        for group in groups:
            group.is_second = not group.is_second
            group.has_moments = group.has_moments or bool(self.moments)

    def read_ahead(self) -> None:
        """Start reading the sub-groups that the next update takes first, as many as it has buffers. Not collective.

        They stay in memory until an update takes them or their values change.
        """
        tier = self.settings
        # A delayed update runs during this backward, and replaces what would be read.
        if not tier.reads_ahead or tier.delays_update:
            return
        for group in self.groups[: tier.num_buffers]:
            if group not in self._ahead:
                try:
                    self._ahead[group] = LoadedSubGroup(self, group, reads=True)
                except Exception:  # must not raise on this rank alone; the update reads it again, and all ranks raise
                    return

    def take(self, group: SubGroup) -> LoadedSubGroup:
        """A sub-group that has been read or is being read; it no longer counts as read ahead."""
        return self._ahead.pop(group, None) or LoadedSubGroup(self, group, reads=True)

    def drop_ahead(self, groups: Iterable[SubGroup] | None = None) -> None:
        """Drop what is read ahead of ``groups``; None: of all."""
        for group in list(self._ahead) if groups is None else groups:
            unit = self._ahead.pop(group, None)
            if unit is not None:
                with suppress(Exception):  # nobody needs its values
                    unit.wait()
                with suppress(StateError):  # in a forked process transfers never complete
                    unit.free()

    @contextmanager
    def loaded(self, group: SubGroup, *, reads: bool, moments: bool = True) -> Iterator[LoadedSubGroup]:
        """A sub-group in memory, freed afterwards, once it is written if that was started inside."""
        unit = LoadedSubGroup(self, group, reads=reads, moments=moments)
        try:
            unit.wait()
            yield unit
        finally:
            unit.wait()  # a write uses the buffers until it is complete
            unit.free()

    def masters_of(self, bucket: Bucket) -> Iterator[tuple[int, int, Tensor]]:
        """The masters of ``bucket`` in parts, ``(start, stop, values)``; each is freed when the next is asked for."""
        for group in self.groups_of[bucket]:
            with self.loaded(group, reads=True, moments=False) as unit:
                yield group.start, group.stop, unit.master

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
        file, (at, moments_at) = self.masters_file, self.offsets(group)
        if moment:
            file, at = self.moments_file, moments_at
            for name, dtype in self.moments.items():
                if name == moment:
                    break
                at += group.numel * dtype.itemsize
        begin = at + nbytes_before
        end = begin + target.numel() * target.element_size()
        first = begin // PAGE * PAGE
        buffer = self.store.buffer(end - first)
        try:
            self.store.read(file, first, buffer[: pages(end - first)]).wait()
            target.copy_(buffer[begin - first : end - first].view(target.dtype))
        finally:
            self.store.give(buffer)

    @contextmanager
    def in_memory(self, bucket: Bucket, *, writes: bool) -> Iterator[None]:
        """Hold the master of ``bucket`` and its moments in memory: their placeholders have the values inside.

        Args:
            bucket: One of :attr:`groups_of`.
            writes: Write everything afterwards, with what was changed inside or had memory already.
        """
        dtypes = {"": master_dtype(bucket.dtype), **self.moments}
        full = {name: torch.zeros(bucket.shard_numel, dtype=dtype) for name, dtype in dtypes.items()}
        for group in self.groups_of[bucket]:
            with self.loaded(group, reads=True) as unit:
                full[""][group.start : group.stop] = unit.master
                for name, values in (unit.moments if group.has_moments else {}).items():
                    full[name][group.start : group.stop] = values
        tensors = self._tensors_of(bucket)
        for name, views in tensors.items():
            for start, stop, view in views:
                here = full[name][start:stop]
                if not is_placeholder(view):
                    here.copy_(view.reshape(-1))
                view.data = here.view(view.shape)
        try:
            yield
        finally:
            for views in tensors.values():
                for _, _, view in views:
                    view.data = placeholder(view.shape, view.dtype)
        if writes:
            self.write(bucket, full)

    def _tensors_of(self, bucket: Bucket) -> dict[str, list[tuple[int, int, Tensor]]]:
        """The tensors that stand for what is in files, with their ranges: by moment, and masters by ``""``."""
        tensors = defaultdict(list, {"": [(0, bucket.master.numel(), bucket.master)]})
        for piece in self._pieces[bucket]:
            stop = piece.start + piece.master.numel()
            for name, tensor in {"": piece.master, **self._moments_in_state(piece)}.items():
                tensors[name].append((piece.start, stop, tensor))
        return tensors

    def _moments_in_state(self, piece: MasterPiece) -> dict[str, Tensor]:
        state = self._inner.state.get(piece.master, {})
        return {name: value for name, value in state.items() if name in self.moments}

    def store_states(self) -> None:
        """Move the inner optimizer's moments from memory to the files, after they were loaded. Collective if any are.

        Raises:
            OSError: On every rank.
        """
        if self.groups_of:
            on_every_rank(self._store_states, self._topology)

    def _store_states(self) -> None:
        for bucket, pieces in self._pieces.items():
            if any(self._moments_in_state(piece) for piece in pieces):
                with self.in_memory(bucket, writes=True):
                    pass

    def write(self, bucket: Bucket, full: Mapping[str, Tensor]) -> None:
        """Replace the master, ``""``, and the moments of ``bucket``, if it has any yet."""
        for group in self.groups_of[bucket]:
            with self.loaded(group, reads=False) as unit:
                unit.master.copy_(full[""][group.start : group.stop])
                for name, values in unit.moments.items():
                    values.copy_(full[name][group.start : group.stop])
                unit.start_write()
        self.commit(self.groups_of[bucket])

    def described(self) -> tuple[str, ...]:
        """Where masters and moments are stored off the device, and what updates them; alike on all ranks."""
        tier, inner, offloaded = self.settings, self._inner, self._num_offloaded
        is_narrow = any(updater_of(one).moment_dtype == torch.bfloat16 for one in optimizers_of(inner))
        formats = ("moments are stored in bfloat16, rounded stochastically",) if is_narrow else ()
        if not offloaded:
            return formats
        place = f"files below {tier.path}" if tier.tier is Tier.NVME else "host memory"
        part = "" if offloaded == self._total_numel else f"{offloaded / self._total_numel:.0%} of the "
        delay = f", during the next step after the first {tier.delay_start}" if tier.delays_update else ""
        update = describe_update(inner)
        return (f"{part}masters and moments are stored in {place}, updated on the host by {update}{delay}", *formats)

    def held(self) -> dict[str, int]:
        gradients = self.gradients
        return {
            "states on their way": self.store.buffers.nbytes if self.groups_of else 0,
            "gradients on their way": gradients.store.buffers.nbytes if gradients.groups_of else 0,
        }

    def close(self) -> None:
        """Remove the files."""
        with ExitStack() as stack:  # each is called, also after an error of another
            if self.groups_of:
                stack.callback(self.store.close)
            stack.callback(self.gradients.close)
            self.drop_ahead()


class FileStates(HostStates):
    """The states of one bucket in ``files``; they are updated in host memory."""

    is_in_files = True

    def __init__(self, host: HostMemory, bucket: Bucket, files: StateFiles) -> None:
        super().__init__(host, bucket.device)
        self._bucket, self._files = bucket, files

    @property
    def moments(self) -> Mapping[str, torch.dtype]:
        return self._files.moments

    def new_master(self, initial: Tensor, dtype: torch.dtype) -> Tensor:
        self._files.write(self._bucket, {"": initial})
        return placeholder(initial.numel(), dtype)

    def masters(self, master: Tensor, ranges: object) -> Iterator[tuple[int, int, Tensor]]:  # noqa: ARG002
        return self._files.masters_of(self._bucket)

    def in_memory(self, *, writes: bool) -> AbstractContextManager[None]:
        return self._files.in_memory(self._bucket, writes=writes)

    def reader(self, moment: str, base: int) -> Callable[[int, int], Tensor]:
        return partial(self._files.read, self._bucket, moment, base)

    def new_gradient(self, numel: int, sent: torch.dtype, wide: torch.dtype, rows: Tensor | None) -> GradientStore:
        if self._bucket in self._files.gradients.groups_of:
            return self._files.gradients.new(self._bucket, self.host, sent, wide)
        return super().new_gradient(numel, sent, wide, rows)


def assign_states(buckets: list[Bucket], settings: ZeroSettings, topology: Topology) -> StateFiles:
    """Choose where the states of each bucket are stored, and create the files. Collective.

    ``ratio`` is met as closely as undivided buckets allow. The buckets used last in the forward are offloaded first:
    their gradients come first in the backward, so their copies overlap most of it.
    """
    tiers, chosen = settings.tiers, list[Bucket]()
    trainable = [bucket for bucket in buckets if bucket.is_trainable]
    if tiers.states.tier is not Tier.DEVICE and get_stage(settings.stage).shards_states:
        wanted, offloaded = tiers.states.ratio * sum(bucket.layout.numel for bucket in trainable), 0
        for bucket in reversed(trainable):
            if offloaded + bucket.layout.numel / 2 <= wanted:
                chosen.insert(0, bucket)
                offloaded += bucket.layout.numel
    files = StateFiles(trainable, chosen, settings, topology)
    host = HostMemory(buckets[0].device, pins=tiers.pins_memory)
    for bucket in chosen:
        is_in_files = bucket in files.groups_of
        bucket.states = FileStates(host, bucket, files) if is_in_files else HostStates(host, bucket.device)
    return files
