"""Write-back: after masters have changed, shards and everything that the forward reads get the new values.

masters -> shards                                    this rank alone, rounded once
shards  -> full buffers                              below stage 3 and of persistent parameters: all-gathered
masters -> replicas, full buffers of mode "delta"    a step sends the changes of the buckets it used;
                                                     anything else (a load, an edit) sends exact values
gathered buffers, secondary partitions               released: they hold the old values
what autograd has saved, and views                   out of date: their use is an error
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor, nn

from zcomm import Topology, Work
from zcomm._transport.call_context import waiting_next
from zero._gather.gather_sources import start_gather
from zero._gather.gatherer import Gatherer
from zero._gradients.bucket_gradients import BucketGrads
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.untracked_edits import DebugCopies
from zero._sharding.bucket import Bucket
from zero._sharding.phases import in_phase
from zero._sharding.stages import Stage
from zero._storage.parameter_storage import ParameterStorage
from zero._storage.runtime_part import RuntimePart


class WriteBack(RuntimePart):
    """Writes back the parameters of one model."""

    def __init__(
        self, topology: Topology, stage: Stage, gatherer: Gatherer, parameter_storage: ParameterStorage
    ) -> None:
        self.topology, self.stage, self._gatherer, self.phases = topology, stage, gatherer, gatherer.phases
        self._parameter_storage = parameter_storage
        self.debug_copies = DebugCopies(topology, is_always_full=not stage.shards_parameters)

    @in_phase("gather")
    def run(
        self,
        buckets: Sequence[Bucket],
        *,
        are_written: bool = False,
        changed: set[int] | None = None,
        params: Collection[nn.Parameter] | None = None,
        sent: Sequence[Work] | None = None,
    ) -> None:
        """Give shards, full buffers and replicas the masters' values. Collective.

        Args:
            buckets: Their masters may have changed.
            are_written: The shards have the new values already.
            changed: Indices of the buckets that a step has changed and whose changes are not sent yet; None: it was
                not a step, so replicas get exact values.
            params: The parameters whose values are new; None: all of ``buckets``.
            sent: What :meth:`send` has returned for all of ``buckets``; None: it is called here.
        """
        if not are_written:
            self._update_shards(buckets)
        if sent is None:
            sent = self.send(buckets, changed, overlaps=False)
        for work in sent:
            work.wait()
        self._parameter_storage.agree(waits_for_writes=True)
        self._finish(buckets, params)

    def send(self, buckets: Sequence[Bucket], changed: Collection[int] | None, *, overlaps: bool = True) -> list[Work]:
        """Start to send the shards of ``buckets`` to replicas and full buffers. Collective.

        Args:
            buckets: Their shards have the new values.
            changed: As in :meth:`run`.
            overlaps: Whether the caller computes before it waits for what is returned.

        Returns:
            The gathers into full buffers.
        """
        self._send_to_replicas(buckets, changed)
        works, replicas = list[Work](), self._gatherer.replicas
        with nullcontext() if overlaps else waiting_next():
            for bucket in buckets if self.stage.shards_states else []:
                if bucket.is_persistent or not (self.stage.shards_parameters or bucket.index in replicas):
                    assert bucket.full is not None, "residents, and below stage 3 all parameters, are always full"
                    works += start_gather(bucket, bucket.full, bucket.shard, self._gatherer.options)
        return works

    def set_replicas(self, shards: Mapping[Bucket, Tensor]) -> None:
        """Give replicas, or the full buffers of ``mode="delta"``, these values instead of the masters'. Collective.

        Args:
            shards: This rank's shards; the same buckets on every rank.
        """
        for bucket, values in shards.items():
            self._gatherer.replicas[bucket.index].refresh(values.to(bucket.device, bucket.dtype))
        self._finish(shards)

    def _finish(self, buckets: Iterable[Bucket], params: Collection[nn.Parameter] | None = None) -> None:
        # A replica is waited for where it is read. Full buffers below stage 3 are ordinary parameters, which the user
        # may read at any time, so their changes must have arrived before this returns.
        for bucket in buckets if not self.stage.shards_parameters else ():
            if (copy := self._gatherer.replicas.get(bucket.index)) is not None:
                copy.wait()
        self.debug_copies.remember(buckets)
        self._gatherer.parameters_changed(buckets, params)

    def _send_to_replicas(self, buckets: Sequence[Bucket], changed: Collection[int] | None) -> None:
        # Asynchronous: replicas are waited for where a bucket is next read, so the exchanges overlap what follows.
        for bucket in buckets:
            replica = self._gatherer.replicas.get(bucket.index)
            if replica is not None and changed is None:
                replica.refresh()
            elif replica is not None and bucket.index in (changed or ()):
                replica.send_change()

    def _update_shards(self, buckets: Sequence[Bucket]) -> None:
        def update() -> None:
            for bucket in buckets:
                bucket.update_shard()

        if any(bucket.states.is_in_files for bucket in buckets):
            on_every_rank(update, self.topology)
        else:
            update()

    def close(self) -> None:
        """Wait for exchanges of replicas that are in flight: their buffers must not be freed before."""
        for replica in self._gatherer.replicas.values():
            replica.close()


def used_buckets(all_grads: Sequence[BucketGrads]) -> set[int]:
    """Indices of the buckets that have a gradient: those that a step changes."""
    return {grads.bucket.index for grads in all_grads if grads.agreed}


def used_parameters(all_grads: Sequence[BucketGrads]) -> list[nn.Parameter]:
    return [param for grads in all_grads for param, used in zip(grads.bucket.params, grads.used, strict=True) if used]
