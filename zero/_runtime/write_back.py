"""After masters have changed: shards get their values, and what the forward reads gets the shards'.

full buffers, below stage 3 and of residents     gathered from the shards, but for those of ``mode="delta"``
these, and replicas, ``mode="delta_hpz"``        after a step the changes of the buckets it used, else exactly
everything gathered or kept for later            forgotten
what autograd has saved, and views               out of date: their use is an error
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn

from zcomm import Topology
from zero._gather.gather_sources import start_gather
from zero._gather.gatherer import Gatherer
from zero._gradients.bucket_gradients import BucketGrads
from zero._optim.state_files import StateFiles
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.untracked_edits import Published
from zero._sharding.bucket import Bucket
from zero._sharding.stages import Stage
from zero._storage.parameter_storage import ParameterRests


class Publisher:
    """Publishes the parameters of one model."""

    def __init__(
        self,
        topology: Topology,
        stage: Stage,
        gatherer: Gatherer,
        rests: ParameterRests,
        state_files: StateFiles | None,
    ) -> None:
        self._topology, self._stage, self._gatherer = topology, stage, gatherer
        self._rests, self._state_files = rests, state_files
        self.published = Published(topology, is_always_full=not stage.shards_parameters)

    def publish(
        self,
        buckets: Sequence[Bucket],
        *,
        are_written: bool,
        changed: set[int] | None,
        params: Collection[nn.Parameter] | None,
    ) -> None:
        """Bring what the forward reads in line with the masters. Collective.

        Args:
            buckets: Whose masters may be new.
            are_written: The shards are in line already.
            changed: Numbers of the buckets that a step has changed, and whose changes are yet to be sent; None: it was
                no step.
            params: Whose values are new; None: those of all ``buckets``.
        """
        if not are_written:
            self._update_shards(buckets)
        self._send_to_replicas(buckets, changed)
        works, replicas = [], self._gatherer.replicas
        for bucket in buckets if self._stage.shards_states else []:
            if bucket.is_resident or not (self._stage.shards_parameters or bucket.index in replicas):
                assert bucket.full is not None, "residents, and below stage 3 all parameters, are always full"
                works += start_gather(bucket, bucket.full, bucket.shard, self._gatherer.options)
        for work in works:
            work.wait()
        self._rests.agree(even_unread=True)
        self._are_published(buckets, params)

    def hold(self, shards: Mapping[Bucket, Tensor]) -> None:
        """Let replicas, or full buffers with changes, hold these values of shards instead of the masters'. Collective.

        Args:
            shards: On this rank; the same buckets on every rank.
        """
        for bucket, values in shards.items():
            self._gatherer.replicas[bucket.index].refresh(values.to(bucket.device, bucket.dtype))
        self._are_published(shards)

    def _are_published(self, buckets: Iterable[Bucket], params: Collection[nn.Parameter] | None = None) -> None:
        """Replicas wait by themselves; full buffers are read by anybody, at any time."""
        for bucket in buckets if not self._stage.shards_parameters else ():
            if (copy := self._gatherer.replicas.get(bucket.index)) is not None:
                copy.wait()
        self.published.remember(buckets)
        self._gatherer.parameters_changed(buckets, params)

    def _send_to_replicas(self, buckets: Sequence[Bucket], changed: set[int] | None) -> None:
        """Asynchronously."""
        for bucket in buckets:
            replica = self._gatherer.replicas.get(bucket.index)
            if replica is not None and changed is None:
                replica.refresh()
            elif replica is not None and bucket.index in (changed or ()):
                replica.send_change()

    def _update_shards(self, buckets: Sequence[Bucket]) -> None:
        """Bring shards in line with their masters."""
        files = self._state_files

        def update() -> None:
            for bucket in buckets:
                if files is None or bucket not in files.groups_of:
                    bucket.update_shard()
                    continue
                for group, master in files.masters_of(bucket):
                    bucket.begin_update(group.start, group.stop).copy_(master)
                    bucket.end_update(group.start, group.stop)

        if files is None:
            update()
        else:
            on_every_rank(update, self._topology)

    def close(self) -> None:
        """Wait for what is under way to replicas."""
        for replica in self._gatherer.replicas.values():
            replica.wait()


def used_buckets(all_grads: Sequence[BucketGrads]) -> set[int]:
    """The buckets that have a gradient, by number: what a step changes."""
    return {grads.bucket.index for grads in all_grads if grads.agreed}


def used_parameters(all_grads: Sequence[BucketGrads]) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    return [param for grads in all_grads for param, used in zip(grads.bucket.params, grads.used, strict=True) if used]
