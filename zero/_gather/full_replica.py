"""``mode="delta"``, stages 1 and 2 on several nodes: sends changes of parameters instead of parameters.

    after a step     update: shard - own row of the full buffer --4 bits--> added to that row on every rank
    other writes     refresh: the shard itself, to every rank

A step sends one message per shard and bucket, the same one between nodes and inside them. The exact shard is kept
beside the buffer. What the receivers hold, own row included, differs from it by the rounding of the messages so far,
and the next message includes that difference. So errors do not add up, and all ranks hold the same bits.
"""

from __future__ import annotations

from torch import Tensor

from zcomm import DeltaGather, Work
from zero._gather.gather_sources import GatherOptions
from zero._sharding.bucket import Bucket


class FullReplica:
    """The full buffer of a partitioned, trainable bucket, to which deltas are added. It needs no other memory."""

    def __init__(self, bucket: Bucket, options: GatherOptions, format: str) -> None:
        self._bucket, self._options, self._format = bucket, options, format
        self._gather: DeltaGather | None = None
        self._work: Work | None = None

    @property
    def _delta(self) -> DeltaGather:
        if self._gather is None:
            assert self._bucket.full is not None, "below stage 3 parameters are always full"
            topology, format = self._options.topology, self._format
            self._gather = DeltaGather(self._bucket.full, topology, format=format, numbering="local")
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
