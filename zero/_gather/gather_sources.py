"""Where a bucket's parameters come from (:class:`ParameterSource`): chosen once, by the mode.

    Primary     the shards of all ranks               columns of the shards:  | first | ..., each of at most max_numel
    Secondary   the node's own copy (hpZ)             as many, contiguous:    |   0   |   1   |   2   | ...

A mode has sources of its own (zero/_modes). The first exchange carries at most as much as may be prefetched: of a
larger bucket only that part is prefetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zcomm import SecondaryPartition, Topology, Work, all_gather_single
from zcomm._transport.call_context import in_bucket
from zero._config.settings import Effective, ZeroSettings
from zero._sharding.bucket import Bucket
from zero._sharding.layout import BucketLayout
from zero._storage.shard_storage import KIND
from zero._storage.tier_settings import Tier
from zero._storage.transfer_counters import record


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """Settings of the exchanges of gathers."""

    topology: Topology
    format: str
    """The wire format of weights."""
    is_async: bool
    first_numel: int
    """At most so many elements are in the first exchange of a gather."""
    max_numel: int
    """At most so many elements are in any exchange."""
    secondary_on_host: bool
    """Whether secondary partitions are stored in host memory."""

    def columns(self, layout: BucketLayout) -> list[tuple[int, int]]:
        """The parts of every shard, one for each exchange of a gather."""
        return layout.chunks(self.max_numel, first_numel=self.first_numel)

    def columns_of(self, bucket: Bucket) -> list[tuple[int, int]]:
        """The same parts of this rank's shard."""
        numel = bucket.shard_numel
        return [(start, min(stop, numel)) for start, stop in self.columns(bucket.layout)]


def gather_options(settings: ZeroSettings, effective: Effective, topology: Topology) -> GatherOptions:
    """The options of gathers that follow from ``settings``."""
    tier, max_numel = settings.tiers.parameters, settings.allgather_bucket_size
    if tier.tier is Tier.NVME:  # an exchange sends what one staging buffer holds
        max_numel = min(max_numel, tier.buffer_numel * topology.world_size)
    first_numel = min(effective.limits.prefetch_numel or max_numel, max_numel)
    wire, is_async, on_host = effective.weight_format, settings.overlap_comm, settings.hpz_secondary_device == "cpu"
    return GatherOptions(topology, wire, is_async, first_numel, max_numel, on_host)


def gather_shards(full: Tensor, own: Tensor, layout: BucketLayout, topology: Topology, **options: Any) -> Work | None:
    """Gather every rank's shard of a bucket into ``full``; options as for :func:`zcomm.all_gather_single`."""
    return all_gather_single(full, own, topology, numbering="local", output_split_sizes=layout.sizes, **options)


def start_gather(bucket: Bucket, full: Tensor, shard: Tensor, options: GatherOptions) -> list[Work]:
    """Start a gather of ``bucket`` from every rank's ``shard`` into ``full``, outside of the schedule."""
    wire, columns = options.format, bucket.layout.chunks(options.max_numel)
    if not bucket.dtype.is_floating_point:  # frozen: integers and complex numbers travel as they are
        ratio, wire = full.element_size() / 4, "none"
        full, shard = full.view(torch.float32), shard.view(torch.float32)
        columns = [(int(start * ratio), int(stop * ratio)) for start, stop in columns]
    with in_bucket(bucket.name):
        works = [_gather_columns(full, shard[a:b], (a, b), bucket.layout, options, wire) for a, b in columns]
    return [work for work in works if work is not None]


def _gather_columns(
    full: Tensor, own: Tensor, columns: tuple[int, int], layout: BucketLayout, options: GatherOptions, wire: str
) -> Work | None:
    """Gather columns ``[start, stop)`` of the shards into ``full``; ``own`` is this rank's part."""
    start, stop = columns
    is_all = layout.sizes is not None or (stop - start) * layout.world_size == full.numel()
    output = full if is_all else full.view(layout.world_size, -1)[:, start:stop]
    return gather_shards(output, own, layout, options.topology, format=wire, async_op=options.is_async)


class ParameterSource(Protocol):
    """Fills the buffer of full parameters, in one or several exchanges."""

    exchanges: Sequence[int]
    """Elements that each exchange carries."""

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank besides the shard."""

    @property
    def reads_shard(self) -> bool:
        """Whether the next gather reads this rank's shard."""

    @property
    def keeps_values(self) -> bool:
        """Whether gathers after that do not, until the values change."""

    def start(self, index: int, full: Tensor) -> Work | None:
        """Start exchange number ``index`` of a gather into ``full``."""

    def gathered(self, full: Tensor) -> None:
        """All exchanges of a gather are complete."""

    def values_changed(self) -> None:
        """The shards have new values."""


class DeltaReceiver(Protocol):
    """What the deltas of a bucket's parameters are added to, on other ranks too: in modes that send deltas."""

    @property
    def held(self) -> Tensor:
        """What the ranks hold of this rank's shard, [n]."""

    def send_change(self) -> None:
        """Start to send the change of the shard after a step."""

    def refresh(self, values: Tensor | None = None) -> None:
        """Start to send the shard itself, or other values for it."""

    def wait(self) -> None:
        """Wait for the exchange in flight, and raise its error."""

    def close(self) -> None:
        """Wait until no exchange is in flight, and raise its error. Not collective."""


class BucketSources(NamedTuple):
    """Where the parameters of all buckets come from."""

    options: GatherOptions
    sources: Sequence[ParameterSource]
    """One for each bucket."""
    receivers: Mapping[int, DeltaReceiver]
    """By bucket, what deltas are sent to."""


class Primary:
    """The shards of all ranks."""

    nbytes, reads_shard, keeps_values = 0, True, False

    def __init__(self, bucket: Bucket, options: GatherOptions) -> None:
        self._bucket, self._options = bucket, options
        self._columns, layout = options.columns(bucket.layout), bucket.layout
        numels = [(stop - start) * layout.world_size for start, stop in self._columns]
        self.exchanges: Sequence[int] = numels if layout.sizes is None else [layout.numel]

    def gathered(self, full: Tensor) -> None: ...

    def values_changed(self) -> None: ...

    def start(self, index: int, full: Tensor) -> Work | None:
        """Start exchange number ``index``."""
        start, stop = self._columns[index]
        storage, row = self._bucket.storage, self._bucket.shard_of(full)[start:stop]
        if storage.format != "none":
            rows = full.view(self._bucket.layout.world_size, -1)[:, start:stop]
            return storage.gather((start, stop), rows, async_op=self._options.is_async)
        with storage.on_stream():  # else the exchange would send the buffer before the copy has filled it
            own, layout = storage.fetch(start, start + row.numel(), row), self._bucket.layout
            work = _gather_columns(full, own, (start, stop), layout, self._options, self._options.format)
        if work is None:  # a synchronous exchange ran on the copy stream, and leaves no work that orders the reader
            storage.join()
        return work


class Secondary:
    """The secondary partition inside the node (hpZ), divided like the exchanges of the primary partition.

    The first gather after a change is that of ``primary``, and fills it.
    """

    keeps_values = True

    def __init__(self, primary: Primary, bucket: Bucket, options: GatherOptions) -> None:
        self._primary, self._is_async, self.exchanges = primary, options.is_async, primary.exchanges
        self._ends = list(accumulate(self.exchanges))
        on_host = options.secondary_on_host
        self._parts = [
            SecondaryPartition(options.topology, numel, bucket.dtype, device=bucket.device, is_on_host=on_host)
            for numel in self.exchanges
        ]

    @property
    def reads_shard(self) -> bool:
        return not all(part.is_valid for part in self._parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def gathered(self, full: Tensor) -> None:
        """Keep this rank's part of ``full``, unless it has it."""
        if not self.reads_shard:
            return
        for part, end in zip(self._parts, self._ends, strict=True):
            part.fill(full[end - part.numel : end])
            if part.is_on_host:
                record(KIND, "to_host", part.nbytes)

    def values_changed(self) -> None:
        for part in self._parts:
            part.invalidate()

    def start(self, index: int, full: Tensor) -> Work | None:
        if self.reads_shard:
            return self._primary.start(index, full)
        part, end = self._parts[index], self._ends[index]
        if part.is_on_host:
            record(KIND, "to_device", part.nbytes)
        return part.gather(full[end - part.numel : end], async_op=self._is_async)
