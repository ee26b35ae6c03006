"""``offload_param``: which shard of a model rests where, and what the shards of one rank share.

Small parameters that stay whole, and every model below stage 3, keep their shards on the device. With files, shards
stay in host memory as long as ``max_in_cpu`` elements suffice, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm import Topology
from zero._ranks.rank_errors import on_every_rank
from zero._storage.copy_stream import CopyStream
from zero._storage.file_shard_storage import FileShard, file_nbytes
from zero._storage.file_store import FileStore, StoredFile
from zero._storage.shard_storage import KIND, Encoded, HostShard, InPlace, ShardRest
from zero._storage.staging_buffers import PageRange, StagingBuffers
from zero._storage.tier_settings import ParameterTier, Tier, Tiers
from zero._storage.transfer_buffers import HostBuffers

LEAST_AHEAD_NBYTES = 2**24
"""So much is read ahead even if the largest shard is smaller: a disk is slow at small requests."""


class ShardPlan(NamedTuple):
    """What has to be known of a shard before it has values."""

    name: str
    """Of its file; unique."""
    numel: int
    dtype: torch.dtype
    cuts: Sequence[tuple[int, int]]
    """How the exchanges of a gather cut it."""
    gaps: Sequence[tuple[int, int]]
    """Its padding."""
    is_encoded: bool = False
    """Whether it rests as INT8, in memory."""


class ParameterRests:
    """The resting places of a model's shards on this rank.

    Args:
        tiers: What was asked for.
        device: Where the parameters are used.
        topology: The ranks.
        plans: The shards that are to rest off the device, by bucket.

    Raises:
        OSError: On every rank: the folder is missing or read-only, or the space does not suffice; with path, errno,
            bytes needed and free.
    """

    def __init__(self, tiers: Tiers, device: torch.device, topology: Topology, plans: Mapping[int, ShardPlan]) -> None:
        self._tiers, self._device, self._topology = tiers, device, topology
        self._copies = CopyStream(device)
        self._host = HostBuffers(pins_memory=tiers.pins_memory)
        self._plans = {index: plan for index, plan in plans.items() if plan.numel}
        self._in_files = _choose_files(tiers.parameters, self._plans)
        self._files: dict[str, StoredFile] = {}
        self._staging: StagingBuffers | None = None
        if self._in_files:
            self._staging = self._open()

    def _open(self) -> StagingBuffers:
        chosen = [self._plans[index] for index in self._in_files]
        tier, itemsize = self._tiers.parameters, max(plan.dtype.itemsize for plan in chosen)
        assert tier.path is not None, "files without a folder"
        store = FileStore(
            tier.path,
            files=self._tiers.files,
            name=KIND,
            topology=self._topology,
            pins_memory=self._tiers.pins_memory,
        )
        try:
            self._files = store.create_all({p.name: file_nbytes(p.cuts, p.dtype.itemsize) for p in chosen})
        except BaseException:
            store.close()
            raise
        largest = max(plan.numel * plan.dtype.itemsize for plan in chosen)
        return StagingBuffers(
            store, min(tier.num_buffers * tier.buffer_numel * itemsize, max(largest, LEAST_AHEAD_NBYTES))
        )

    def place(self, index: int, values: Tensor, *, updates_on_host: bool) -> ShardRest:
        """Where the shard of bucket ``index`` rests, with these values, which are not kept themselves.

        Raises:
            OSError: They cannot be written.
            MemoryError: There is no memory for them.
        """
        plan = self._plans.get(index)
        if plan is None:
            return self.leave(values.clone(), updates_on_host=updates_on_host)
        if plan.is_encoded:
            keeps_on = self._device if self._tiers.parameters.tier is Tier.DEVICE else torch.device("cpu")
            return Encoded(values, plan.cuts, self._topology, keeps_on=keeps_on)
        if index in self._in_files:
            rest = self._in_file(plan, updates_on_host=updates_on_host)
            for start, stop in plan.cuts:
                rest.target(start, stop, torch.device("cpu")).copy_(values[start:stop])
                rest.written(start, stop)
            rest.flush()
            return rest
        nbytes = plan.numel * plan.dtype.itemsize
        shard = self._host.take(nbytes)[:nbytes].view(plan.dtype)
        return HostShard(shard.copy_(values), self._copies, updates_on_host=updates_on_host)

    def leave(self, shard: Tensor, *, updates_on_host: bool) -> ShardRest:
        """``shard`` stays where it is."""
        return InPlace(shard, updates_on_host=updates_on_host)

    def _in_file(self, plan: ShardPlan, *, updates_on_host: bool) -> FileShard:
        assert self._staging is not None, "a file without a store"
        nothing = torch.full((), float("nan"), dtype=plan.dtype).expand(plan.numel)
        return FileShard(
            nothing,
            self._files[plan.name],
            plan.cuts,
            self._staging,
            self._copies,
            gaps=plan.gaps,
            updates_on_host=updates_on_host,
        )

    def expect(self, upcoming: Iterable[tuple[ShardRest, int]]) -> None:
        """These are gathered next, each from that exchange on: read them ahead."""
        if self._staging is not None:
            self._staging.expect(_parts(upcoming))

    def described(self, total_numel: int) -> tuple[str, ...]:
        """Where ``total_numel`` elements of shards rest, for ``optimizer.effective``; empty: nothing to say."""
        tier = self._tiers.parameters
        if tier.tier is Tier.DEVICE:
            return ()
        in_files = sum(self._plans[index].numel for index in self._in_files)
        off_device = sum(plan.numel for plan in self._plans.values())
        numels = {
            f"in files below {tier.path}": in_files,
            "in host memory": off_device - in_files,
            "on the device, as they stay whole": total_numel - off_device,
        }
        found = [
            place if numel == total_numel else f"{place} ({numel / total_numel:.1%})"
            for place, numel in numels.items()
            if numel
        ]
        return (f"parameters rest {', '.join(found)}",)

    @property
    def reads_files(self) -> bool:
        """Whether any shard is in a file."""
        return self._staging is not None

    def agree(self, *, even_unread: bool = False) -> None:
        """Raise, on every rank, what went wrong with files on any. Collective if shards were fetched from files since.

        Args:
            even_unread: In any case; waits for what is being written, too.
        """
        staging = self._staging
        if staging is None or not (staging.has_fetched or even_unread):
            return
        staging.has_fetched = False
        on_every_rank(self.settle if even_unread else staging.raise_error, self._topology)

    def settle(self) -> None:
        """Wait for what is being written, and raise what went wrong with files of this rank; not collective."""
        if self._staging is not None:
            self._staging.flush()
            self._staging.raise_error()

    @property
    def staging_nbytes(self) -> int:
        """Bytes of host buffers between files and memory."""
        return 0 if self._staging is None else self._staging.nbytes

    def close(self) -> None:
        """Remove the files. Shards that were in them are gone."""
        if self._staging is not None:
            self._staging.forget()
            self._staging.store.close()


def _parts(upcoming: Iterable[tuple[ShardRest, int]]) -> Iterable[PageRange]:
    for rest, first in upcoming:
        if isinstance(rest, FileShard):
            yield from rest.parts(first)


def _choose_files(tier: ParameterTier, plans: Mapping[int, ShardPlan]) -> set[int]:
    """Shards that are in files: all but those that fit into host memory together."""
    if tier.tier is not Tier.NVME:
        return set()
    left, chosen = tier.max_numel_in_memory, set()
    for index, plan in plans.items():
        if plan.is_encoded:
            continue
        if plan.numel <= left:
            left -= plan.numel
        else:
            chosen.add(index)
    return chosen
