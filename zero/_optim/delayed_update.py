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

The update of one step, to be run later than it was decided: with that step's gradients, factor and settings.

The inner optimizer is copied, but for its memory: the copy steps views of the same masters with the same moments, while
schedulers change the learning rates, and a backward the gradients, of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import Topology
from zero._optim.cpu_optimizer import CPUOptimizer
from zero._optim.file_update import FileUpdate
from zero._optim.masters import MasterPiece
from zero._optim.optimizer_clone import over_groups
from zero._optim.state_files import StateFiles
from zero._optim.step_pieces import step_pieces
from zero._ranks.rank_errors import on_every_rank
from zero._sharding.bucket import Bucket
from zero._storage.host_gradient import HostGradient


class LateStep:
    """What :class:`zero._optim.delayed_update.DelayedUpdate` runs.

    Args:
        inner: The optimizer.
        pieces: What is stepped: all in memory, or all in ``files``. Their masters have their gradients.
        factor: What the gradients are multiplied by, if the optimizer is one of zero's own.
        gradients: What is cleared once the gradients are not needed any more.
        files: Where masters and moments rest; None: in memory.
        fail: Called with an error that leaves some masters updated and others not.
    """

    def __init__(
        self,
        inner: Optimizer,
        pieces: Sequence[MasterPiece],
        factor: float,
        gradients: Sequence[HostGradient],
        files: StateFiles | None,
        fail: Callable[[Exception], None],
    ) -> None:
        self._inner, self._factor, self._gradients, self._fail = inner, factor, gradients, fail
        self._leaves = [
            [(param, param.detach()) for param in group["params"]] for group in inner.param_groups
        ]  # the same memory, and gradients of their own; parameters without a gradient keep their places
        leaf_of = {id(param): leaf for pairs in self._leaves for param, leaf in pairs}
        self._pieces = [replace(piece, master=leaf_of[id(piece.master)]) for piece in pieces]
        for piece, copied in zip(pieces, self._pieces, strict=True):
            copied.master.grad_dtype = None
            copied.master.grad = piece.master.grad
        self._settings = [_settings(group) for group in inner.param_groups]
        self._copy = self._copied()
        self._files = None if files is None else FileUpdate(files, None, self._copy, self._pieces)

    def _copied(self) -> Optimizer:
        inner, each = self._inner, zip(self._settings, self._leaves, strict=True)
        copied = over_groups(inner, [{**settings, "params": [leaf for _, leaf in pairs]} for settings, pairs in each])
        for pairs in self._leaves:
            for param, leaf in pairs:
                if param in inner.state:
                    copied.state[leaf] = inner.state[param]
        return copied

    @torch.no_grad()
    def run(self) -> None:
        """Update masters and moments, and write the new parameters to ``bucket.staged``; in the thread."""
        for group, settings in zip(self._copy.param_groups, self._settings, strict=True):
            group.update(settings)  # it may run again
        if self._files is not None:
            self._files.run(self._factor, all_buckets=True)
            return
        step_pieces(self._copy, self._pieces, self._factor)
        if not isinstance(self._copy, CPUOptimizer):
            for bucket in dict.fromkeys(piece.bucket for piece in self._pieces):
                bucket.update_shard()

    def commit(self) -> None:
        """It has run on every rank: the original gets the states, and the settings that the optimizer has changed."""
        if self._files is not None:
            self._files.commit()
        for pairs in self._leaves:
            for param, leaf in pairs:
                if leaf in self._copy.state:
                    self._inner.state[param] = self._copy.state[leaf]
        everything = zip(self._inner.param_groups, self._copy.param_groups, self._settings, strict=True)
        for group, after, before in everything:
            group.update({name: after[name] for name in before if _differ(after[name], before[name])})
        self.drop()

    def undo(self, error: Exception) -> bool:
        """It has failed on some rank. True if the files hold what was before, so that it can run again."""
        if self._files is not None:
            self._files.forget()
            if self._files.keeps_previous:
                return True
        self._fail(error)
        return False

    def drop(self) -> None:
        """It will not run again: let go of the gradients."""
        for gradient in self._gradients:
            gradient.clear()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Everything but the parameters; learning rates in tensors are copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not b
    return bool(a != b)


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
