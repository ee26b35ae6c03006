"""``mode="delta"``, stages 1 and 2 on several nodes: deltas update the full parameters after a step.

They go between nodes and then inside them, as one message per shard and bucket. Gradients travel as without the mode.

    after a step     update: shard - own row of the full buffer --int4 or exact--> added to that row on every rank
    other writes     refresh: the shard itself, to every rank

The exact shard is kept beside the buffer. What the receivers hold, own row included, differs from it by the rounding
of the messages so far, and the next message includes that difference. So errors do not add up, and all ranks hold the
same bits. It costs a copy of this rank's shard. Shards of whole tensors (Muon) have lengths of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zcomm import DeltaGather, Work
from zero._gather.gather_sources import BucketSources, GatherOptions, Primary
from zero._modes.deltas import DeltaMode
from zero._modes.mode import MemoryShape
from zero._sharding.bucket import Bucket


class Delta(DeltaMode):
    """Deltas instead of the parameters that are gathered after a step."""

    name, stages, keeps_exact_shards, deltas_over = "delta", (1, 2), True, "world"
    needs = "stage 1 or 2, where every rank updates a shard of parameters that all hold"
    instead = "stage 3 has mode='delta_hpz'"

    def text(self, changes: str) -> str:
        return f"deltas of parameters as {changes}"

    def sources_of(self, buckets: Sequence[Bucket], options: GatherOptions, format: str) -> BucketSources:
        trained = [bucket for bucket in buckets if bucket.is_trainable and not bucket.is_persistent]
        replicas = {bucket.index: FullReplica(bucket, options, format) for bucket in trained}
        return BucketSources(options, [Primary(bucket, options) for bucket in buckets], replicas)

    def memory(self, shape: MemoryShape) -> dict[str, float]:
        return {"parameters": shape.param_nbytes * shape.trainable}


class FullReplica:
    """The full buffer of a partitioned, trainable bucket, to which deltas are added. It needs no other memory."""

    def __init__(self, bucket: Bucket, options: GatherOptions, format: str) -> None:
        self._bucket, self._options, self._format = bucket, options, format
        self._gather: DeltaGather | None = None
        self._work: Work | None = None

    @property
    def _delta(self) -> DeltaGather:
        if self._gather is None:
            topology, sizes = self._options.topology, self._bucket.layout.sizes
            self._gather = DeltaGather(
                self._bucket.buffer, topology, format=self._format, numbering="local", shard_sizes=sizes
            )
        return self._gather

    @property
    def held(self) -> Tensor:
        """What every rank holds of this rank's shard, [n]."""
        self.wait()
        return self._delta.held

    def send_change(self) -> None:
        """Send the change of the shard to all ranks after a step. Call :meth:`wait` before the full buffer is used."""
        self.wait()
        self._work = self._delta.update(self._bucket.shard, async_op=self._options.is_async)

    def refresh(self, values: Tensor | None = None) -> None:
        """Send the shard, or other values for it, to all ranks unquantized. Call :meth:`wait` before using it."""
        self.wait()
        shard = self._bucket.shard if values is None else values
        self._work = self._delta.refresh(shard, async_op=self._options.is_async)

    def wait(self) -> None:
        """Wait for the exchange in flight, and raise its error."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def close(self) -> None:
        """Wait until no exchange uses the buffer, and raise its error. Not collective."""
        work, self._work = self._work, None
        if work is not None:
            work.abandon()
