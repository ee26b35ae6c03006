"""The update of a step: every master moves, and the new parameters go to where they rest.

    inner optimizer    gradient, master, moments                               new parameters
    torch              cast, unscaled, clipped first: a pass each              written by publishing
    zero.CPU*          read as they rest, times one factor, in one pass        written in the same pass

A GPU keeps the factor of clipping to itself, and the host does not wait; but the host's optimizers need to know it.

With ``delayed_update`` what rests in host memory or files is updated during the next step: see :mod:`zero._optim.delayed_update`.
What rests in files is updated first: nothing of it counts until every rank has written everything.
"""

from __future__ import annotations

from torch.optim import Optimizer

from zcomm import StateError
from zero._optim.cpu_optimizer import CPUOptimizer
from zero._optim.delayed_update import DelayedUpdate, LateStep
from zero._optim.file_update import FileUpdate
from zero._optim.masters import MasterPiece
from zero._optim.step_pieces import step_pieces
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime
from zero._runtime.write_back import used_buckets, used_parameters
from zero._sharding.bucket import Bucket
from zero._step.delta_publish import Changes
from zero._step.final_gradients import FinalGradients


class Update:
    """The updates of one optimizer."""

    def __init__(
        self, runtime: Runtime, inner: Optimizer, pieces: list[MasterPiece], gradients: FinalGradients
    ) -> None:
        self._runtime, self._inner, self._gradients = runtime, inner, gradients
        self._pieces = [piece for piece in pieces if not runtime.is_in_files(piece.bucket)]
        self._late = [piece for piece in pieces if piece.bucket.host is not None]
        self._at_once = [piece for piece in pieces if piece.bucket.host is None]
        # What is collective goes by buckets, which are the same on every rank: a small model leaves ranks no pieces.
        trainable = [bucket for bucket in runtime.buckets if bucket.is_trainable]
        self._buckets_at_once = [bucket for bucket in trainable if bucket.host is None]
        self._is_on_host = any(bucket.host is not None and not runtime.is_in_files(bucket) for bucket in trainable)
        self.folds = isinstance(inner, CPUOptimizer)
        """Whether unscaling and clipping are a factor of the update, not passes before it."""
        self._failure: BaseException | None = None
        self._changes = Changes(runtime, inner, self._pieces)
        runtime.reducer.rounds_means = self.folds

    def check_usable(self) -> None:
        """Raise StateError if an update has failed half way."""
        if self._failure is not None:
            raise StateError(
                "an earlier step failed after some parameters were updated, so the optimizer is neither before nor "
                "after it: construct it anew and load the last checkpoint. That step's error: "
                f"{str(self._failure) or type(self._failure).__name__}"
            )

    def run(self) -> bool:
        """Update with the gradients times their factor, and publish. Collective.

        A late update is begun instead, and what the one before has made of the parameters is published.

        Returns:
            Whether the update is delayed: it has taken the gradients, and none are left.

        Raises:
            Exception: What went wrong on a rank, on every rank if states are offloaded. If only files were concerned
                and they keep what was before, the optimizer is before the step.
            StateError: An earlier one, after which that could not be said.
        """
        self.check_usable()
        try:
            return self._run()
        except Exception:
            raise
        except BaseException as error:  # an interrupt: nobody knows how far the update has come
            self.fail(error)
            raise

    def _run(self) -> bool:
        if not self.folds:
            self._gradients.apply()
        delayed = self._runtime.delayed
        if delayed is None:
            self._run_now()
            return False
        is_late = delayed.num_updates >= self._runtime.settings.tiers.states.delay_start
        if is_late:
            self._run_late(delayed)
        else:
            self._runtime.finish_update(publishes=True)
            self._run_now()
        delayed.num_updates += 1
        return is_late

    def _run_late(self, delayed: DelayedUpdate) -> None:
        delayed.finish()
        self._begin(delayed)
        buckets = self._buckets_at_once + delayed.write_shards()
        if buckets:
            self._publish(sorted(buckets, key=lambda bucket: bucket.index))

    def _begin(self, delayed: DelayedUpdate) -> None:
        """What rests on the device, if anything, is updated at once."""
        runtime, factor = self._runtime, self._gradients.factor.item()
        self._gradients.hand_over(widens=False)
        files = None if runtime.file_update is None else runtime.state_files
        gradients = runtime.reducer.hand_off()
        delayed.begin(LateStep(self._inner, self._late, factor, gradients, files, self.fail))
        if self._at_once:
            step_pieces(self._inner, self._at_once, factor)
        for bucket in self._buckets_at_once if not self.folds else []:
            bucket.update_shard()

    def broken_off(self, error: BaseException) -> None:
        """``error`` has ended the step: after an interrupt no gradient may be applied a second time, or in part."""
        if not isinstance(error, Exception):
            self._runtime.hooks.drop_step()

    def fail(self, error: BaseException) -> None:
        """Something is half done: no update will run any more."""
        self._failure = error

    def _run_now(self) -> None:
        files = self._runtime.file_update
        self._gradients.hand_over(widens=not self.folds and files is None)
        if files is not None:
            self._update_files(files)
        buckets, sends_early = [b for b in self._runtime.buckets if b.is_trainable], self._changes.are_sent_early
        update = self._update_and_send if sends_early else self._update
        if self._is_on_host:
            try:
                on_every_rank(update, self._runtime.topology)
            except Exception as error:
                self.fail(error)
                raise
        else:
            update()
        if not (self.folds or sends_early):
            for bucket in dict.fromkeys(piece.bucket for piece in self._pieces):
                bucket.update_shard()
        self._publish(buckets, are_sent=sends_early)

    def _publish(self, buckets: list[Bucket], *, are_sent: bool = False) -> None:
        """What was updated is not taken back if that fails. ``are_sent``: changes are on their way to replicas."""
        all_grads = self._runtime.reducer.all
        changed = set() if are_sent else used_buckets(all_grads)
        params = None if self._runtime.delayed is not None else used_parameters(all_grads)
        try:
            self._runtime.publish(buckets, are_written=True, changed=changed, params=params)
            self._runtime.reducer.commit()
        except Exception as error:
            self.fail(error)
            raise

    def _update_files(self, files: FileUpdate) -> None:
        """All of it on every rank, parameters that go to files too, or nothing."""
        runtime = self._runtime

        def run() -> None:
            files.run(self._gradients.factor.item(), all_buckets=runtime.is_inexact)
            runtime.rests.settle()

        try:
            on_every_rank(run, runtime.topology)
        except Exception as error:
            files.forget()
            if not files.keeps_previous:
                self.fail(error)
                raise
            try:
                runtime.publish([b for b in runtime.buckets if runtime.is_in_files(b)], changed=set(), params=())
            except Exception as other:
                self.fail(other)
            raise
        files.commit()

    def _update_and_send(self) -> None:
        """What is in memory; nothing of it is taken back if that fails, for a part has been sent."""
        try:
            self._changes.update(self._gradients.factor.item(), used_buckets(self._runtime.reducer.all))
        except Exception as error:
            self.fail(error)
            raise

    def _update(self) -> None:
        """What is in memory."""
        if self._runtime.file_update is None and not self.folds:
            self._inner.step()
        else:
            step_pieces(self._inner, self._pieces, self._gradients.factor.item())
