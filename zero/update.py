"""The update of a step: every master moves, and the new parameters go to where they rest.

    inner optimizer    gradient, master, moments                               new parameters
    torch              cast, unscaled, clipped first: a pass each              written by publishing
    zero.CPU*          read as they rest, times one factor, in one pass        written in the same pass

What rests in files is updated first: nothing of it counts until every rank has written everything.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor
from torch.optim import Optimizer

from zcomm import StateError
from zero.agreement import on_every_rank
from zero.bucket import Bucket
from zero.cpu_optimizers import CPUOptimizer
from zero.final_gradients import FinalGradients
from zero.masters import MasterPiece
from zero.runtime import Runtime
from zero.tiers.file_update import FileUpdate, only

__all__ = ["Update"]


class Update:
    """The updates of one optimizer."""

    def __init__(
        self, runtime: Runtime, inner: Optimizer, pieces: list[MasterPiece], gradients: FinalGradients
    ) -> None:
        self._runtime, self._inner, self._gradients = runtime, inner, gradients
        self._pieces = [piece for piece in pieces if not runtime.is_in_files(piece.bucket)]
        self.folds = isinstance(inner, CPUOptimizer)
        """Whether unscaling and clipping are a factor of the update, not passes before it."""
        self._failure: Exception | None = None
        runtime.reducer.rounds_means = self.folds

    def check_usable(self) -> None:
        """Raise StateError if an update has failed half way."""
        if self._failure is not None:
            raise StateError(
                "an earlier step failed after some parameters were updated, so the optimizer is neither before nor "
                f"after it: construct it anew and load the last checkpoint. That step's error: {self._failure}"
            )

    def run(self) -> None:
        """Update with the gradients times their factor, and publish. Collective.

        Raises:
            Exception: What went wrong on a rank, on every rank if states are offloaded. If only files were concerned
                and they keep what was before, the optimizer is before the step.
            StateError: An earlier one, after which that could not be said.
        """
        self.check_usable()
        if not self.folds:
            self._gradients.apply()
        files = self._runtime.file_update
        self._gradients.hand_over(widens=not self.folds and files is None)
        if files is not None:
            self._update_files(files)
        if any(piece.bucket.host is not None for piece in self._pieces):
            try:
                on_every_rank(self._update, self._runtime.topology)
            except Exception as error:
                self._failure = error
                raise
        else:
            self._update()
        buckets = [bucket for bucket in self._runtime.buckets if bucket.is_trainable]
        if not self.folds:
            for bucket in dict.fromkeys(piece.bucket for piece in self._pieces):
                bucket.update_shard()
        self._runtime.publish(buckets, are_written=True)

    def _update_files(self, files: FileUpdate) -> None:
        """All of it on every rank, or nothing."""
        runtime = self._runtime
        try:
            on_every_rank(lambda: files.run(self._gradients.factor, all_buckets=runtime.is_inexact), runtime.topology)
        except Exception as error:
            files.forget()
            if not files.keeps_previous:
                self._failure = error
                raise
            try:
                runtime.publish([bucket for bucket in runtime.buckets if runtime.is_in_files(bucket)])
            except Exception as other:
                self._failure = other
            raise
        files.commit()

    def _update(self) -> None:
        """What is in memory."""
        if isinstance(self._inner, CPUOptimizer):
            _step_in_one_pass(self._inner, self._pieces, self._gradients.factor)
        elif self._runtime.file_update is None:
            self._inner.step()
        else:
            index_of = {id(p): i for i, group in enumerate(self._inner.param_groups) for p in group["params"]}
            leaves: dict[int, list[Tensor]] = defaultdict(list)
            for piece in self._pieces:
                leaves[index_of[id(piece.master)]].append(piece.master)
                if piece.master.grad is not None:
                    piece.master.grad = piece.master.grad.to(piece.master.dtype)
            with only(self._inner, leaves):
                self._inner.step()


def _step_in_one_pass(inner: CPUOptimizer, pieces: list[MasterPiece], factor: float) -> None:
    """Step every piece that has a gradient, times ``factor``, and write all parameters."""
    group_of = {id(param): group for group in inner.param_groups for param in group["params"]}
    by_bucket: dict[Bucket, list[MasterPiece]] = {}
    for piece in pieces:
        by_bucket.setdefault(piece.bucket, []).append(piece)
    for bucket, of_bucket in by_bucket.items():
        shard: Tensor | None = None
        if bucket.master is not bucket.shard:
            shard = bucket.begin_update(0, bucket.master.numel())
            for start, stop in bucket.gaps:
                shard[start:stop].zero_()
        for piece in of_bucket:
            master, grad = piece.master, piece.master.grad
            out = None if shard is None else shard[piece.start : piece.start + master.numel()]
            if grad is not None:
                inner.step_tensor_(master, grad, group_of[id(master)], grad_factor=factor, out=out)
            elif out is not None:
                out.copy_(master)
        if shard is not None:
            bucket.end_update(0, bucket.master.numel())
