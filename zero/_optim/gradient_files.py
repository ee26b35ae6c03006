"""Reduced gradients offloaded to files of this rank, beside the masters and moments that they update.

    mean of a bucket   --sub-group by sub-group, during the backward-->   file "gradients"        the first of a step
    mean of a bucket + what the file has   --read, added, written-->      file "gradients"        the others
    file "gradients"   --with master and moments of a sub-group-->        update

A sub-group's extent has whole pages and room for the dtype of sums; the first mean of a step is stored in the dtype it
has. Memory holds ``num_buffers`` sub-groups that are being written.

A file error does not stop the backward: the other ranks are in its reductions, and would wait for this rank (a
deadlock). It is kept until the gradient is cleared, and the ranks agree on it before the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from zcomm import Topology
from zero._config.settings import ZeroSettings
from zero._optim.loss_scale import is_nonfinite
from zero._optim.sub_groups import SubGroup, new_pipeline
from zero._ranks.rank_errors import on_every_rank
from zero._sharding.bucket import Bucket, master_dtype
from zero._storage.file_store import Transfer, pages, store_with
from zero._storage.gradient_store import GradientStore
from zero._storage.host_memory import HostMemory, PendingCopy
from zero._storage.tier_settings import StateTier

Result = TypeVar("Result")
KIND = "gradients"
MAX_ARRIVING = 2
"""Copies from a GPU in flight before the host waits for one."""


class GradientInMemory:
    """The gradient of a sub-group in memory; a :class:`zero._storage.swap_pipeline.StagedUnit`.

    Args:
        files: Where it is stored.
        group: The sub-group.
        dtype: Its dtype in the file.
        room: The widest dtype that it will have.
    """

    def __init__(self, files: GradientFiles, group: SubGroup, dtype: torch.dtype, room: torch.dtype) -> None:
        self._files, self._group, self._dtype = files, group, dtype
        self._place = files.file, files.offset_of[group]
        self._buffer = files.store.buffer(group.numel * room.itemsize)
        self._transfer: Transfer | None = None

    @property
    def values(self) -> Tensor:
        return self._buffer.view(self._dtype)[: self._group.numel]

    def widen(self, dtype: torch.dtype) -> Tensor:
        """The same in ``dtype``, in which it will be written."""
        if dtype != self._dtype:
            narrow, self._dtype = self.values.clone(), dtype
            self.values.copy_(narrow)
        return self.values

    @property
    def _pages(self) -> Tensor:
        nbytes = self._group.numel * self._dtype.itemsize
        return self._buffer[: pages(nbytes)]

    def start_read(self) -> None:
        self._transfer = self._files.store.read(*self._place, self._pages)

    def start_write(self) -> None:
        self._transfer = self._files.store.write(*self._place, self._pages)

    def wait(self) -> None:
        """Wait for the transfer."""
        if self._transfer is not None:
            self._transfer.wait()

    def free(self) -> None:
        """Return the buffer; no transfer may be in flight."""
        self._files.store.give(self._buffer)


class _GradientInFlight(NamedTuple):
    """In flight: from the device to host memory, then to the file."""

    gradient: FileGradient
    unit: GradientInMemory
    arrival: PendingCopy


class GradientFiles:
    """The gradients of the buckets whose states are in files; constructed by all ranks together.

    Args:
        groups_of: The sub-groups of each bucket; without any, there is no file and nothing to do.
        settings: Folder, number of buffers, how files are read and written, and the dtype of sums.
        topology: The ranks.

    Raises:
        OSError: The folder cannot be used, or has too little space; on every rank.
    """

    def __init__(
        self, groups_of: Mapping[Bucket, Sequence[SubGroup]], settings: ZeroSettings, topology: Topology
    ) -> None:
        tiers, dtype = settings.tiers, settings.gradient_dtype
        self.settings: StateTier = tiers.states
        self.groups_of, self._topology = groups_of, topology
        self.gradient_of: dict[Bucket, FileGradient] = {}
        self.offset_of: dict[SubGroup, int] = {}
        self._arriving: deque[_GradientInFlight] = deque()
        self._writing: deque[_GradientInFlight] = deque()
        at = 0
        for bucket, groups in groups_of.items():
            for group in groups:
                self.offset_of[group] = at
                at += pages(group.numel * (dtype or master_dtype(bucket.dtype)).itemsize)
        if not groups_of:
            return
        self.store, created = store_with(tiers.states.path, {KIND: at}, tiers, name=KIND, topology=topology)
        self.file = created[KIND]

    def new(self, bucket: Bucket, host: HostMemory, sent: torch.dtype, wide: torch.dtype) -> FileGradient:
        """The gradient of ``bucket``: means go through ``host`` in dtype ``sent``, and are summed in ``wide``."""
        gradient = self.gradient_of[bucket] = FileGradient(self, bucket, host, sent, wide)
        return gradient

    def allocate(self, group: SubGroup, dtype: torch.dtype) -> GradientInMemory:
        """A buffer for a gradient to be written; waits until one is free."""
        while len(self._arriving) + len(self._writing) >= max(self.settings.num_buffers, 1):
            self._finish_first_write()
        return GradientInMemory(self, group, dtype, dtype)

    def write_behind(self, gradient: FileGradient, unit: GradientInMemory, arrival: PendingCopy) -> None:
        """Write a sub-group's part of ``gradient`` once it has arrived in host memory, then free its buffer."""
        self._arriving.append(_GradientInFlight(gradient, unit, arrival))
        while len(self._arriving) > (MAX_ARRIVING if torch.cuda.is_available() else 0):
            self._start_first_write()

    def _start_first_write(self) -> None:
        sent = self._arriving.popleft()
        sent.arrival.wait()
        sent.gradient.note_overflow(sent.unit.values)
        sent.gradient.keep_error(sent.unit.start_write)
        self._writing.append(sent)

    def _finish_first_write(self) -> None:
        if not self._writing:
            self._start_first_write()
        sent = self._writing.popleft()
        sent.gradient.keep_error(sent.unit.wait)
        sent.unit.free()

    def drain(self) -> None:
        """Wait until everything is in the file."""
        while self._arriving or self._writing:
            self._finish_first_write()

    def raise_error(self) -> None:
        """Drain, and raise the first error of a gradient that was not cleared since."""
        self.drain()
        for gradient in self.gradient_of.values():
            gradient.raise_error()

    def agree(self) -> None:
        """Raise, on every rank, the first error of any. Collective if there are gradients in files."""
        self.reading(self.raise_error)

    def reading(self, call: Callable[[], Result]) -> Result:
        """Call what may read gradients, and return its result; an error of any rank is raised on every rank.

        Collective if there are gradients in files.
        """
        return on_every_rank(call, self._topology) if self.groups_of else call()

    def is_nonfinite(self) -> bool:
        """Whether any stored gradient has a NaN or an infinity."""
        self.drain()
        return any(gradient.is_nonfinite for gradient in self.gradient_of.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.file.nbytes if self.groups_of else 0

    def close(self) -> None:
        """Remove the file."""
        self.drain()
        if self.groups_of:
            self.store.close()


class FileGradient(GradientStore):
    """The reduced gradient of one bucket, summed over micro-batches: a HostGradient in a file."""

    is_on_device, is_in_file = False, True
    tensors: tuple[Tensor, ...] = ()
    """None: the gradient holds no memory."""

    def __init__(
        self, files: GradientFiles, bucket: Bucket, host: HostMemory, sent: torch.dtype, wide: torch.dtype
    ) -> None:
        self._files, self._host, self._groups = files, host, files.groups_of[bucket]
        self._numel, self._sent, self._wide = bucket.shard_numel, sent, wide
        self._num_means = 0
        self._error: Exception | None = None
        self._dtype = sent
        """Its dtype in the file."""
        self.is_nonfinite = False
        """Whether it has a NaN or an infinity, as far as it was written."""

    def add(self, mean: Tensor) -> None:
        """Add a mean, on the device, [numel]; the caller may overwrite it afterwards."""
        self._num_means += 1
        if self._error is None:
            self.keep_error(lambda: self._store(mean, self._host) if self._num_means == 1 else self._accumulate(mean))

    def _store(self, values: Tensor, host: HostMemory | None) -> None:
        """Start to write all of it; ``host``: from the device."""
        self._dtype, self.is_nonfinite = values.dtype if host is None else self._sent, False
        for group in self._groups:
            part, unit = values[group.start : group.stop], self._files.allocate(group, self._dtype)
            arrival = PendingCopy()
            if host is not None:
                arrival = host.fetch_gradient(part, unit.values)
            else:
                unit.values.copy_(part)
            self._files.write_behind(self, unit, arrival)

    def _accumulate(self, mean: Tensor) -> None:
        self._files.drain()
        self.raise_error()

        def add(group: SubGroup, unit: GradientInMemory) -> None:
            part = self._host.empty(group.numel, self._sent)
            self._host.fetch_gradient(mean[group.start : group.stop], part).wait()
            self.note_overflow(unit.widen(self._wide).add_(part))

        new_pipeline(lambda group: self.load(group, room=self._wide), self._files.settings).run(self._groups, add)
        self._dtype = self._wide

    def load(self, group: SubGroup, *, room: torch.dtype | None = None) -> GradientInMemory:
        """Start to read a sub-group; nothing is being written."""
        unit = GradientInMemory(self._files, group, self._dtype, room or self._dtype)
        try:
            unit.start_read()
        except BaseException:
            unit.free()
            raise
        return unit

    def values(self, *, wide: bool = False) -> Tensor:
        """A copy of all of it as it is stored; ``wide``: in the dtype of sums.

        Raises:
            OSError: It cannot be read, or could not be written.
        """
        self._files.drain()
        self.raise_error()
        full = torch.empty(self._numel, dtype=self._wide if wide else self._dtype)
        for group in self._groups:
            unit = self.load(group)
            try:
                unit.wait()
                full[group.start : group.stop] = unit.values
            finally:
                unit.free()
        return full

    def change(self, edit: Callable[[Tensor], object]) -> None:
        """Apply ``edit`` to all of it, in the dtype of sums. An error is kept."""

        def read_and_write() -> None:
            full = self.values(wide=True)
            edit(full)
            self._store(full, None)

        self.keep_error(read_and_write)

    def note_overflow(self, values: Tensor) -> None:
        """Update :attr:`is_nonfinite` with values that are written: the file need not be read for it again."""
        self.is_nonfinite = self.is_nonfinite or is_nonfinite([values])

    def keep_error(self, call: Callable[[], None]) -> None:
        """Call ``call``; keep the first error."""
        try:
            call()
        except (OSError, MemoryError) as error:
            self._error = self._error or error

    def raise_error(self) -> None:
        """Raise the error kept since the gradient was cleared."""
        if self._error is not None:
            raise self._error

    def clear(self) -> None:
        self._files.drain()
        self._num_means, self._dtype = 0, self._sent
        self._error, self.is_nonfinite = None, False
