"""``mode="delta"``, stages 1 and 2 on several nodes: full parameters, as all ranks hold them, get changes.

    after a step     update: shard - own row of the full buffer --4 bits--> added to that row on every rank
    other writes     refresh: the shard itself, to every rank

A step sends one message a shard and bucket, between nodes and inside them as it is. The shard rests beside the buffer,
exactly: what receivers hold, own row included, differs from it by what the messages so far have lost, and that is part
of the next one. So errors do not add up, and all ranks hold the same bits.
"""

from __future__ import annotations

from torch import Tensor

from zcomm import DeltaGather, Work
from zero._gather.gather_sources import GatherOptions
from zero._sharding.bucket import Bucket


class FullCopy:
    """The full buffer of a trainable bucket, once it is settled. Memory: the buffer is the bucket's own."""

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
        """Bring all ranks closer to the shard, which a step has changed. The full buffer is to be waited for."""
        self.wait()
        self._work = self._delta.update(self._bucket.shard, async_op=self._options.is_async)

    def refresh(self, values: Tensor | None = None) -> None:
        """Give all ranks the shard, or other values of it, as they are. The full buffer is to be waited for."""
        self.wait()
        shard = self._bucket.shard if values is None else values
        self._work = self._delta.refresh(shard, async_op=self._options.is_async)

    def wait(self) -> None:
        """Wait for what is under way, and raise its error."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
