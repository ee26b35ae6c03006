"""The update of a step: the optimizer updates the masters, and parameters get the new values.

    inner optimizer    gradient, master, moments                               new parameters
    torch              cast, unscaled, clipped first: a pass each              written by the write-back
    zero.CPU*          read as stored, times one factor, in one pass           written in the same pass
    both, in a list    read as stored; torch's: cast, times the factor         by zero.CPU* in its pass, then torch's

The factor of clipping stays on the GPU, so the host does not wait for it; only optimizers on the host read its value.

Order: files, then memory, then write-back. What is in files can be undone until every rank has written everything, so
it comes before updates in memory, which cannot. With ``delayed_update`` what is in host memory or files is updated
during the next step: see :mod:`zero._optim.delayed_update`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.optim import Optimizer

from zcomm import StateError, Work
from zero._optim.delayed_update import DelayedStep, DelayedUpdate
from zero._optim.file_update import FileUpdate
from zero._optim.masters import MasterPiece
from zero._optim.step_pieces import folds, step_pieces
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime
from zero._runtime.write_back import used_buckets, used_parameters
from zero._sharding.bucket import Bucket
from zero._step.bucketwise_update import BucketwiseUpdate, ended_on_error
from zero._step.final_gradients import FinalGradients
from zero._step.joint_update import JointUpdate


class Update:
    """Runs the updates of one optimizer."""

    def __init__(
        self, runtime: Runtime, inner: Optimizer, pieces: list[MasterPiece], gradients: FinalGradients
    ) -> None:
        self._runtime, self._inner, self._gradients = runtime, inner, gradients
        self._pieces = [piece for piece in pieces if not (piece.bucket.states.is_in_files or piece.is_joint)]
        self._joint = JointUpdate(runtime, inner, pieces)
        self._delayed_pieces = [piece for piece in pieces if piece.bucket.states.is_on_host]
        self._immediate_pieces = [piece for piece in pieces if not piece.bucket.states.is_on_host]
        # Whether a collective is called must depend on buckets, which are the same on every rank. A rank of a small
        # model may have no pieces: by pieces some ranks would skip the call, a deadlock for the others.
        trainable = [bucket for bucket in runtime.buckets if bucket.is_trainable]
        self._immediate_buckets = [bucket for bucket in trainable if not bucket.states.is_on_host]
        self._is_on_host = any(bucket.states.is_on_host and not bucket.states.is_in_files for bucket in trainable)
        self.folds = folds(inner)
        """Whether unscaling and clipping are a factor of the update, not passes before it."""
        self._files = FileUpdate(runtime.state_files, inner, pieces)
        self._failure: BaseException | None = None
        self._bucketwise = BucketwiseUpdate(runtime, inner, self._pieces)

    def check_usable(self) -> None:
        """Raise StateError if an earlier update failed half way."""
        if self._failure is not None:
            raise StateError(
                "an earlier step failed after some parameters were updated, so the optimizer is neither before nor "
                "after it: construct it again and load the last checkpoint. That step's error: "
                f"{str(self._failure) or type(self._failure).__name__}"
            )

    def run(self) -> bool:
        """Update with the gradients times their factor, and write back. Collective.

        A delayed update is only started; the parameters of the one before it are written back.

        Returns:
            Whether the update is delayed: it has taken the gradients, and none are left.

        Raises:
            Exception: What went wrong on a rank; on every rank if states are offloaded. If it was in files, and they
                keep the previous values, the optimizer is as before the step.
            StateError: An earlier update failed half way.
        """
        self.check_usable()
        self._gradients.is_applied = self.folds
        try:
            return self._run()
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: some masters may be updated and others not
                self.fail(error)
            raise
        finally:
            self._gradients.is_applied = False

    def _run(self) -> bool:
        if not self.folds:
            self._gradients.apply()
        delayed = self._runtime.delayed
        if not delayed.is_used:
            self._run_now()
            return False
        is_delayed = delayed.num_updates >= self._runtime.settings.tiers.states.delay_start
        if is_delayed:
            self._run_delayed(delayed)
        else:
            self._runtime.finish_update(writes_back=True)
            self._run_now()
        delayed.num_updates += 1
        return is_delayed

    def _run_delayed(self, delayed: DelayedUpdate) -> None:
        """Start the delayed update, update what is on the device at once, and write back."""
        # Update k starts before the parameters of update k - 1 are written back: it overlaps that exchange, too.
        delayed.finish()
        runtime, factor = self._runtime, self._gradients.factor.item()
        self._gradients.prepare_update(widens=False)
        gradients = runtime.reducer.detach_host_sums()
        delayed.start(DelayedStep(self._inner, self._delayed_pieces, factor, gradients, runtime.state_files, self.fail))
        if self._immediate_pieces:
            step_pieces(self._inner, self._immediate_pieces, factor)
        for bucket in self._immediate_buckets if not self.folds else []:
            bucket.update_shard()
        buckets = self._immediate_buckets + delayed.write_shards()
        if buckets:
            self._write_back(sorted(buckets, key=lambda bucket: bucket.index))

    def fail(self, error: BaseException) -> None:
        """Refuse all further updates: ``error`` has left masters updated in part."""
        self._failure = error

    @contextmanager
    def _final(self) -> Iterator[None]:
        """An error inside is final."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def _run_now(self) -> None:
        self._gradients.prepare_update(widens=not (self.folds or self._files.is_used))
        if self._files.is_used:
            self._update_files()
        with self._final():
            self._joint.run(self._gradients.factor.item() if self.folds else 1.0)
        buckets, sends_early = [b for b in self._runtime.buckets if b.is_trainable], self._bucketwise.are_sent_early
        sent = list[Work]() if sends_early else None
        update = self._update if sent is None else partial(self._update_and_send, sent)
        # A rank that fails has sent its old values to the others: without an agreement they would go on with them.
        if self._is_on_host or (sends_early and self._bucketwise.gathers):
            with self._final(), ended_on_error([] if sent is None else sent):
                on_every_rank(update, self._runtime.topology)
        else:
            update()
        if not (self.folds or sends_early):
            for bucket in dict.fromkeys(piece.bucket for piece in self._pieces):
                bucket.update_shard()
        self._write_back(buckets, sent=sent)

    def _write_back(self, buckets: list[Bucket], *, sent: list[Work] | None = None) -> None:
        """``sent``: what an early send has started. An error here is final: masters are updated."""
        all_grads = self._runtime.reducer.all
        changed, params = used_buckets(all_grads), None if self._runtime.delayed.is_used else used_parameters(all_grads)
        with self._final():
            self._runtime.write_back(buckets, are_written=True, changed=changed, params=params, sent=sent)
            self._runtime.reducer.reduction.commit()

    def _update_files(self) -> None:
        """Update masters, moments and parameters in files: on all ranks, or on none."""
        runtime, files = self._runtime, self._files

        def run() -> None:
            files.run(self._gradients.factor.item(), all_buckets=runtime.is_inexact)
            # Parameters must be in their files before the ranks agree that the step counts.
            runtime.parameter_storage.flush()

        try:
            on_every_rank(run, runtime.topology)
        except Exception as error:
            files.discard()
            if not files.keeps_previous:
                self.fail(error)
                raise
            try:  # the failed run has overwritten parameters: give them the old masters' values again
                runtime.write_back([b for b in runtime.buckets if b.states.is_in_files], changed=set(), params=())
            except Exception as other:
                self.fail(other)
            raise
        files.commit()

    def _update_and_send(self, sent: list[Work]) -> None:
        """Update what is in memory, and send it early. An error is final: a part has been sent."""
        with self._final():
            self._bucketwise.update(self._gradients.factor.item(), used_buckets(self._runtime.reducer.all), sent)

    def _update(self) -> None:
        """Update what is in memory."""
        if not (self.folds or self._files.is_used or self._joint.is_used):
            self._inner.step()
        else:
            step_pieces(self._inner, self._pieces, self._gradients.factor.item())
