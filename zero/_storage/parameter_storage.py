"""``offload_param``: chooses the storage of each shard of a model, and owns the files and buffers that shards share.

Persistent parameters, and all parameters below stage 3, keep their shards on the device. With files, the first shards
of the model stay in host memory, up to ``max_in_cpu`` elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm import Topology
from zero._ranks.rank_errors import on_every_rank
from zero._storage.file_shard import FileShard, file_nbytes
from zero._storage.file_store import FileStore, StoredFile, store_with
from zero._storage.host_memory import CopyStream
from zero._storage.poison import placeholder
from zero._storage.runtime_part import RuntimePart
from zero._storage.shard_storage import KIND, HostShard, InMemoryShard, QuantizedShard, ShardStorage
from zero._storage.staging_buffers import StagingBuffers
from zero._storage.tier_settings import FileSettings, ParameterTier, Tier, Tiers
from zero._storage.transfer_buffers import HostBuffers

LEAST_AHEAD_NBYTES = 2**24
"""At least so much is read ahead, even if every shard is smaller: a disk is slow at small requests."""


class ShardPlan(NamedTuple):
    """What is known of a shard before it has values."""

    name: str
    """The unique name of its file."""
    numel: int
    dtype: torch.dtype
    cuts: Sequence[tuple[int, int]]
    """Its parts, one for each exchange of a gather."""
    gaps: Sequence[tuple[int, int]]
    """Its ranges of padding."""
    is_encoded: bool = False
    """Whether it is stored as INT8, in memory."""
    mean_numel: int = 0
    """Elements of a shard on average over the ranks: what is decided by it is the same on all of them."""


class ParameterStorage(RuntimePart):
    """The storage of a model's shards on this rank.

    Args:
        tiers: The settings.
        device: Where the parameters are used.
        topology: The ranks.
        plans: The offloaded shards, by bucket.
        total_numel: Elements of all shards.

    Raises:
        OSError: On every rank: the folder is missing or read-only, or there is not enough space; with path, errno,
            bytes needed and free.
    """

    def __init__(
        self,
        tiers: Tiers,
        device: torch.device,
        topology: Topology,
        plans: Mapping[int, ShardPlan],
        *,
        total_numel: int = 0,
    ) -> None:
        self._tiers, self._device, self._topology, self._total_numel = tiers, device, topology, total_numel
        self._copies = CopyStream(device)
        self._host = HostBuffers(pins_memory=tiers.pins_memory)
        self._plans = {index: plan for index, plan in plans.items() if plan.mean_numel}
        self._in_files = _choose_files(tiers.parameters, self._plans)
        self._files: dict[str, StoredFile] = {}
        self._staging: StagingBuffers | None = None
        if self._in_files:
            self._staging = self._open()

    def _open(self) -> StagingBuffers:
        chosen = [self._plans[index] for index in self._in_files]
        tier, itemsize = self._tiers.parameters, max(plan.dtype.itemsize for plan in chosen)
        sizes = {plan.name: file_nbytes(plan.cuts, plan.dtype.itemsize) for plan in chosen}
        store, self._files = store_with(tier.path, sizes, self._tiers, name=KIND, topology=self._topology)
        largest = max(plan.numel * plan.dtype.itemsize for plan in chosen)
        return StagingBuffers(
            store, min(tier.num_buffers * tier.buffer_numel * itemsize, max(largest, LEAST_AHEAD_NBYTES))
        )

    def place(self, index: int, values: Tensor, *, updates_on_host: bool) -> ShardStorage:
        """Create the storage of bucket ``index``'s shard and copy ``values`` into it; the tensor itself is not kept.

        Raises:
            OSError: The values cannot be written.
            MemoryError: There is not enough memory.
        """
        plan = self._plans.get(index)
        if plan is None:
            return InMemoryShard(values.clone(), updates_on_host=updates_on_host)
        if plan.is_encoded:
            keeps_on = self._device if self._tiers.parameters.tier is Tier.DEVICE else torch.device("cpu")
            return QuantizedShard(values, plan.cuts, self._topology, keeps_on=keeps_on)
        if index in self._in_files:
            assert self._staging is not None, "a file without a store"
            shard_storage = FileShard(
                placeholder(plan.numel, plan.dtype),
                self._files[plan.name],
                plan.cuts,
                self._staging,
                self._copies,
                gaps=plan.gaps,
                updates_on_host=updates_on_host,
            )
            shard_storage.store(values)
            shard_storage.flush()
            return shard_storage
        nbytes = plan.numel * plan.dtype.itemsize
        shard = self._host.take(nbytes)[:nbytes].view(plan.dtype)
        return HostShard(shard.copy_(values), self._copies, updates_on_host=updates_on_host)

    def read_ahead(self, upcoming: Iterable[tuple[ShardStorage, int]]) -> None:
        """Read ahead what is gathered next: shards, each from the given exchange on."""
        if self._staging is not None:
            self._staging.read_ahead(part for shard, first in upcoming for part in shard.parts(first))

    def described(self) -> tuple[str, ...]:
        """The tiers of all shards; empty if they are on the device."""
        tier, total_numel = self._tiers.parameters, self._total_numel
        if tier.tier is Tier.DEVICE:
            return ()
        in_files = sum(self._plans[index].numel for index in self._in_files)
        off_device = sum(plan.numel for plan in self._plans.values())
        numels = {
            f"in files below {tier.path}": in_files,
            "in host memory": off_device - in_files,
            "on the device, as they stay full": total_numel - off_device,
        }
        found = [
            place if numel == total_numel else f"{place} ({numel / total_numel:.1%})"
            for place, numel in numels.items()
            if numel
        ]
        return (f"parameters are stored {', '.join(found)}",)

    @property
    def reads_files(self) -> bool:
        """Whether any shard is in a file."""
        return self._staging is not None

    def agree(self, *, waits_for_writes: bool = False) -> None:
        """Raise, on every rank, the first file error of any. Collective if shards were fetched from files since.

        Args:
            waits_for_writes: Wait for writes in flight, and agree even if nothing was fetched.
        """
        staging = self._staging
        if staging is None or not (staging.has_fetched or waits_for_writes):
            return
        staging.has_fetched = False
        on_every_rank(self.flush if waits_for_writes else staging.raise_error, self._topology)

    def flush(self) -> None:
        """Wait for writes in flight, and raise the first file error of this rank. Not collective."""
        if self._staging is not None:
            self._staging.flush()
            self._staging.raise_error()

    def held(self) -> dict[str, int]:
        return {"parameters on their way": 0 if self._staging is None else self._staging.nbytes}

    def close(self) -> None:
        """Remove the files, and the shards in them."""
        if self._staging is not None:
            self._staging.forget()
            self._staging.store.close()


def _choose_files(tier: ParameterTier, plans: Mapping[int, ShardPlan]) -> set[int]:
    """The shards to keep in files: all but the first that fit into host memory together."""
    if tier.tier is not Tier.NVME:
        return set()
    left, chosen = tier.max_numel_in_memory, set()
    for index, plan in plans.items():
        if plan.is_encoded:
            continue
        if plan.mean_numel <= left:
            left -= plan.mean_numel
        else:
            chosen.add(index)
    return chosen


STAGED_NBYTES = 2**26
"""Bytes of writes in flight at most, but at least the largest shard; construction continues meanwhile."""


class InitFiles:
    """The files of one model construction. Creating it is collective.

    Args:
        folder: A folder on a fast disk.
        files: How files are read and written.
        topology: The ranks.

    Raises:
        OSError: On every rank: the folder is missing or read-only.
    """

    def __init__(self, folder: str, files: FileSettings, topology: Topology) -> None:
        self._store = FileStore(folder, files=files, name=KIND, topology=topology)
        self._staging = StagingBuffers(self._store, STAGED_NBYTES)
        self._copies = CopyStream(torch.device("cpu"))
        self._numbers = count()
        self._shards: dict[ShardStorage, FileShard] = {}
        """Those that are stored here."""

    def store(self, values: Tensor, old: ShardStorage) -> FileShard:
        """Write flat ``values`` of this rank to a file, which replaces that of ``old``; the tensor itself is not kept.

        Raises:
            OSError: There is not enough space, or a write failed, also an earlier one.
        """
        known = self._shards.get(old)
        shard = self._new(values) if known is None or known.shard.dtype != values.dtype else known
        shard.store(values)
        self._staging.raise_error()
        if shard is not known:
            self.remove(old)
        return shard

    def _new(self, values: Tensor) -> FileShard:
        cuts = [(0, values.numel())]
        file = self._store.create(f"built{next(self._numbers)}", file_nbytes(cuts, values.element_size()))
        shard = FileShard(placeholder(values.numel(), values.dtype), file, cuts, self._staging, self._copies)
        self._shards[shard] = shard
        return shard

    def remove(self, old: ShardStorage) -> None:
        """Delete the file of a shard that is no longer needed, if it has one here."""
        if (shard := self._shards.pop(old, None)) is not None:
            self._staging.flush()  # a file with a transfer in flight must not be closed
            self._store.remove(shard.file)
            self._staging.raise_error()

    def close(self) -> None:
        """Remove the remaining files."""
        self._staging.forget()
        self._store.close()
