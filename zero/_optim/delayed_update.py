"""Delayed parameter update (ZeRO-Offload): a thread updates masters while the main thread computes the next step.

    main    backward k | finish k-1 | start k | write back k-1 | forward and backward k+1 | finish k | start k+1 | ...
    thread                                    | update k: masters, moments, staged parameters

Invariants:
    U1  Forward and backward k+1 read the parameters after update k-1: an update writes to staged parameters, which
        nobody reads before they are written back.
    U2  Nobody else touches what an update reads and writes: gradients are handed off, settings are copies, and whoever
        reads masters or states finishes the update first.
    U3  Finishing is not writing back, so looking at a run does not change it. Whoever changes something writes back
        first.

Each update runs with its own step's gradients, factor and settings. The inner optimizer is therefore copied, except for
its memory: the copy steps views of the same masters with the same moments, while schedulers change the learning rates
of the original, and a backward its gradients.

Source: "ZeRO-Offload: Democratizing Billion-Scale Model Training" (arXiv:2101.06840), delayed parameter update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import Topology
from zcomm._base.rank_context import bound, threads
from zero._optim.file_update import FileUpdate
from zero._optim.masters import MasterPiece
from zero._optim.optimizer_clone import over_groups
from zero._optim.state_files import StateFiles
from zero._optim.step_pieces import folds, step_pieces
from zero._ranks.rank_errors import on_every_rank
from zero._sharding.bucket import Bucket
from zero._storage.gradient_store import GradientStore
from zero._storage.runtime_part import RuntimePart


class DelayedStep:
    """The update of one step, which :class:`DelayedUpdate` runs in its thread.

    Args:
        inner: The optimizer.
        pieces: The pieces to step: all in memory, or all in ``files``. Their masters have their gradients.
        factor: Multiplies the gradients, if the optimizer is, or has, one of zero's own.
        gradients: Cleared once the update has run.
        files: Where masters and moments are stored, if they are in files.
        fail: Called with an error that leaves some masters updated and others not.
    """

    def __init__(
        self,
        inner: Optimizer,
        pieces: Sequence[MasterPiece],
        factor: float,
        gradients: Sequence[GradientStore],
        files: StateFiles,
        fail: Callable[[Exception], None],
    ) -> None:
        self._inner, self._factor, self._gradients, self._fail = inner, factor, gradients, fail
        # The same memory with a .grad of its own (U2); parameters without a gradient keep their positions.
        self._leaves = {param: param.detach() for group in inner.param_groups for param in group["params"]}
        self._pieces = [replace(piece, master=self._leaves[piece.master]) for piece in pieces]
        for piece, copied in zip(pieces, self._pieces, strict=True):
            copied.master.grad_dtype = None
            copied.master.grad = piece.master.grad
        self._settings = [_settings(group) for group in inner.param_groups]
        params = ([self._leaves[param] for param in group["params"]] for group in inner.param_groups)
        groups = [{**settings, "params": own} for settings, own in zip(self._settings, params, strict=True)]
        self._copy = over_groups(inner, groups)
        for param, leaf in self._leaves.items():
            if param in inner.state:
                self._copy.state[leaf] = inner.state[param]
        self._files = FileUpdate(files, self._copy, self._pieces)

    @torch.no_grad()
    def run(self) -> None:
        """Update masters and moments, and write the new parameters to ``bucket.staged``; in the thread."""
        for group, settings in zip(self._copy.param_groups, self._settings, strict=True):
            group.update(settings)  # an earlier attempt that failed may have changed them
        if self._files.is_used:
            self._files.run(self._factor, all_buckets=True)
            return
        step_pieces(self._copy, self._pieces, self._factor)
        if not folds(self._copy):
            for bucket in dict.fromkeys(piece.bucket for piece in self._pieces):
                bucket.update_shard()

    def commit(self) -> None:
        """After it has run on every rank: give the original the states, and settings that the step changed."""
        self._files.commit()
        for param, leaf in self._leaves.items():
            if leaf in self._copy.state:
                self._inner.state[param] = self._copy.state[leaf]
        everything = zip(self._inner.param_groups, self._copy.param_groups, self._settings, strict=True)
        for group, after, before in everything:
            group.update({name: after[name] for name in before if _differ(after[name], before[name])})
        self.drop()

    def undo(self, error: Exception) -> bool:
        """After a failure on some rank. True if the files have the previous values, so that it can run again."""
        self._files.discard()
        if self._files.is_used and self._files.keeps_previous:
            return True
        self._fail(error)
        return False

    def drop(self) -> None:
        """Clear the gradients: it will not run again."""
        for gradient in self._gradients:
            gradient.clear()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of everything but the parameters: schedulers change learning rates in tensors in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not b
    return bool(a != b)


class DelayedUpdate(RuntimePart):
    """Runs at most one update at a time, in a thread.

    Args:
        buckets: The buckets with delayed updates, all in host memory or files. None if updates are not delayed: then
            there is never anything to finish.
        topology: The ranks.

    Cost: two shards of host memory in the parameters' dtype, and another gradient.
    """

    state_key = "delayed"

    def __init__(self, buckets: Sequence[Bucket], topology: Topology) -> None:
        self.buckets, self._topology = list(buckets), topology
        self.is_used = bool(buckets)
        """Whether any updates are delayed."""
        self.num_updates = 0
        """Updates so far, delayed or not."""
        # Two buffers: update k writes to one while the parameters of update k - 1, in the other, are written back
        # (U1; tests/zero/test_delayed_update.py). Zeros: a shard that is all padding is never written, but sent.
        self._memory = {b: [b.states.empty(b.shard_numel, b.dtype).zero_() for _ in range(2)] for b in self.buckets}
        self._finished: dict[Bucket, Tensor] = {}
        """Parameters that are not written back yet."""
        self._job: DelayedStep | None = None
        self._future: Future[None] | None = None
        """None while there is a job: it has failed, and :meth:`finish` runs it again."""
        # One thread: updates must run in order.
        self._thread = threads().Executor(1, thread_name_prefix="zero-update")

    @property
    def has_pending_update(self) -> bool:
        """Whether parameters are one update behind their masters, or will be when it has run."""
        return self._job is not None or bool(self._finished)

    def held(self) -> dict[str, int]:
        staged = (t for tensors in self._memory.values() for t in tensors)
        return {"parameters of a delayed update": sum(t.numel() * t.element_size() for t in staged)}

    def start(self, job: DelayedStep) -> None:
        """Run ``job`` in the thread; the parameters of the one before may still be written back."""
        assert self._job is None, "two updates at a time"
        for bucket in self.buckets:
            memory = self._memory[bucket]
            bucket.staged = memory[-1] if self._finished.get(bucket) is memory[0] else memory[0]
        self._job = job
        self._future = self._thread.submit(bound(job.run))

    def finish(self) -> None:
        """Wait for the update, if there is one. Collective then.

        Raises:
            Exception: What went wrong on a rank; on every rank. If it left nothing changed it is kept, and the next
                call tries it again.
        """
        job = self._job
        if job is None:
            return
        future, self._future = self._future or self._thread.submit(bound(job.run)), None
        try:
            # The ranks agree before any of them commits: otherwise an error on one would leave masters of two steps.
            on_every_rank(future.result, self._topology)
        except Exception as error:
            if not job.undo(error):
                self.discard()
            raise
        job.commit()
        self._finished = {bucket: bucket.staged for bucket in self.buckets if bucket.staged is not None}
        self._end()

    def write_shards(self) -> list[Bucket]:
        """Store the shards of finished parameters; returns their buckets, which the caller writes back."""
        for bucket, values in self._finished.items():
            bucket.write_shard(values)
        buckets = list(self._finished)
        self._finished = {}
        return buckets

    def drop(self) -> None:
        """Finish and discard an update, also a failed one: masters will be replaced. Collective."""
        with suppress(Exception):
            self.finish()
        self.discard()

    def discard(self) -> None:
        """Drop the update and its parameters: masters are, or will be, replaced."""
        if self._future is not None:
            self._future.exception()  # waits: the thread must not write to masters that are replaced
        if self._job is not None:
            self._job.drop()
        self._finished = {}
        self._end()

    def _end(self) -> None:
        for bucket in self.buckets:
            bucket.staged = None
        self._job = self._future = None

    def stale_shards(self) -> dict[Bucket, Tensor]:
        """Copies of the shards that lack the last update, as the forward reads them. Collective if any is in a file."""
        if not self._finished:
            return {}
        return on_every_rank(lambda: {b: b.storage.read().to("cpu", copy=True) for b in self._finished}, self._topology)

    def state_dict(self) -> dict[str, Any] | None:
        """The number of updates, and the shards of parameters that lack the last one."""
        if not self.is_used:
            return None
        stale = {bucket.index: shard for bucket, shard in self.stale_shards().items()}
        return {"num_updates": self.num_updates, "published": stale}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> list[Bucket]:
        """Give parameters that lacked the last update their saved values, not the masters'."""
        if state is None or not self.is_used:
            return []
        self.num_updates = state["num_updates"]
        stale = {bucket: state["published"][bucket.index] for bucket in self.buckets if state["published"]}
        return self.restore(stale) if stale else []

    def restore(self, stale: Mapping[Bucket, Tensor]) -> list[Bucket]:
        """Set the shards to what :meth:`stale_shards` gave; the masters' rounding waits to be written. Collective.

        Returns:
            The buckets that the caller must write back.
        """

        def swap() -> None:
            for bucket, values in stale.items():
                newer = self._memory[bucket][0].copy_(bucket.storage.read())
                bucket.write_shard(values)
                self._finished[bucket] = newer

        on_every_rank(swap, self._topology)
        return list(stale)

    def close(self) -> None:
        """End the thread, after its update: it writes to masters that others will free."""
        self._thread.shutdown(wait=True)
