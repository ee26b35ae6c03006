"""Updates in a thread, while the next step goes on: ZeRO-Offload's delayed parameter update, one step late.

    main    backward k | finish k-1 | begin k | publish k-1 | forward and backward k+1 | finish k | begin k+1 | ...
    thread                                    | update k: masters, moments, staged parameters

Invariants:
    D1  Forward and backward k+1 read the parameters after update k-1: an update writes to staged parameters, which
        nobody reads before they are published.
    D2  What an update reads and writes nobody else touches: gradients are handed off, settings are copies, and whoever
        reads masters or states finishes the update first.
    D3  To finish is not to publish: looking at a run does not change it. Whoever changes something publishes first.

Source: "ZeRO-Offload: Democratizing Billion-Scale Model Training" (arXiv:2101.06840), delayed parameter update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from zcomm import Topology
from zero.agreement import on_every_rank
from zero.bucket import Bucket
from zero.late_step import LateStep

__all__ = ["DelayedUpdate"]


class DelayedUpdate:
    """At most one update under way.

    Args:
        buckets: Those that are updated late, all in host memory or files.
        topology: The ranks.

    Cost: two shards of host memory in the parameters' dtype, and another gradient.
    """

    def __init__(self, buckets: Sequence[Bucket], topology: Topology) -> None:
        self.buckets, self._topology = list(buckets), topology
        self.num_updates = 0
        """Updates so far, late or not."""
        self._memory: dict[Bucket, list[Tensor]] = {}
        for bucket in self.buckets:
            assert bucket.host is not None, "a late update of a bucket on the device"
            numel = bucket.layout.shard_numel
            # Zeros: a rank whose part of a bucket is all padding updates nothing there, and publishes it.
            self._memory[bucket] = [bucket.host.empty(numel, bucket.dtype).zero_() for _ in range(2)]
        self._finished: dict[Bucket, Tensor] = {}
        """Parameters that are not published yet."""
        self._job: LateStep | None = None
        self._future: Future[None] | None = None
        """None while there is a job: it has failed, and will run again."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-update")

    @property
    def is_behind(self) -> bool:
        """Whether parameters are one update behind their masters, or will be when that has run."""
        return self._job is not None or bool(self._finished)

    @property
    def nbytes(self) -> int:
        """Bytes of staged parameters."""
        return sum(t.numel() * t.element_size() for tensors in self._memory.values() for t in tensors)

    def begin(self, job: LateStep) -> None:
        """Run ``job`` in the thread; what was finished before may still be published."""
        assert self._job is None, "two updates at a time"
        for bucket in self.buckets:
            memory = self._memory[bucket]
            bucket.staged = memory[-1] if self._finished.get(bucket) is memory[0] else memory[0]
        self._job = job
        self._future = self._thread.submit(job.run)

    def finish(self) -> None:
        """Wait for the update, if there is one. Collective then.

        Raises:
            Exception: What went wrong in it on a rank, on every rank. If nothing of it has happened it is kept, and
                tried again the next time.
        """
        job = self._job
        if job is None:
            return
        future, self._future = self._future or self._thread.submit(job.run), None
        try:
            on_every_rank(future.result, self._topology)
        except Exception as error:
            if not job.undo(error):
                self.forget()
            raise
        job.commit()
        self._finished = {bucket: bucket.staged for bucket in self.buckets if bucket.staged is not None}
        self._end()

    def write_shards(self) -> list[Bucket]:
        """Bring the shards of finished parameters to where they rest: these buckets are to be published."""
        for bucket, values in self._finished.items():
            bucket.write_shard(values)
        buckets = list(self._finished)
        self._finished = {}
        return buckets

    def drop(self) -> None:
        """Masters will be replaced: nothing will be left of an update, even if it has failed. Collective."""
        with suppress(Exception):
            self.finish()
        self.forget()

    def forget(self) -> None:
        """Masters are, or will be, others than those of the last update: there is nothing to publish."""
        if self._future is not None:
            self._future.exception()
        if self._job is not None:
            self._job.drop()
        self._finished = {}
        self._end()

    def _end(self) -> None:
        for bucket in self.buckets:
            bucket.staged = None
        self._job = self._future = None

    def published(self) -> dict[Bucket, Tensor]:
        """What is behind the masters: copies of the shards as forward reads them. Collective if any is in a file."""
        return on_every_rank(self._read, self._topology) if self._finished else {}

    def _read(self) -> dict[Bucket, Tensor]:
        return {bucket: bucket.rest.read().to("cpu", copy=True) for bucket in self._finished}

    def restore(self, published: Mapping[Bucket, Tensor]) -> list[Bucket]:
        """Let shards, which are their masters rounded, be as :meth:`published` gave them. Collective.

        Returns:
            The buckets that are to be published for that.
        """

        def swap() -> None:
            for bucket, values in published.items():
                newer = self._memory[bucket][0].copy_(bucket.rest.read())
                bucket.write_shard(values)
                self._finished[bucket] = newer

        on_every_rank(swap, self._topology)
        return list(published)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)
