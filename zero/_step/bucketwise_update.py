"""Updates bucket by bucket, and sends a bucket as soon as its update ends, while the next one is updated.

    modes "delta" and "delta_hpz"    its change
    stages 1 and 2 with Muon         its new parameters; other updates are too short to hide an exchange

Small buckets are updated together, in runs of at most RUN_NUMEL elements, and sent after their run.

    update bucket 0 | update bucket 1 | update bucket 2 |
                    |---- bucket 0 ---|---- bucket 1 ---|---- bucket 2 ...

A change is waited for where the bucket is read, new parameters at the end of the step.

It needs an optimizer that gives the same bits when it is stepped a few parameters at a time: zero's own, and those of
torch.optim in BY_PARAMETER and OF_TENSORS, also several of them. With others all updates come first. So they do in
files, where a step counts only after every rank has written everything, and on a rank where hooks run in a step. The
order of exchanges is the same on all ranks, also if hooks are on some alone: a deadlock would follow otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zcomm import Work
from zero._optim.elementwise_check import BY_PARAMETER, OF_TENSORS
from zero._optim.masters import MasterPiece, pieces_by_bucket
from zero._optim.muon import is_muon
from zero._optim.several import name_of, optimizers_of
from zero._optim.step_pieces import folds, numbers_of_groups, step_pieces
from zero._optim.updaters import updater_of
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket
from zero._sharding.layout import group_consecutive

RUN_NUMEL = 2**18
"""Elements of a rank's shards up to which buckets are updated together.

On one core of a server a call of an optimizer took 13 us (SGD) and 43 us (AdamW), and 2^18 elements took 69 and 600 us:
a change waits at most that long for the updates of other buckets. Two neighbouring runs have more than 2^18 elements
together, so there are at most two calls for each 2^18 elements: a fraction of the updates' time.
"""


@contextmanager
def ended_on_error(sent: list[Work]) -> Iterator[None]:
    """After an error inside, on any rank, wait for ``sent``: the buffers must not change any more."""
    try:
        yield
    except Exception:
        for work in sent:
            with suppress(Exception):  # the error inside counts
                work.wait()
        raise


class BucketwiseUpdate:
    """Steps one optimizer bucket by bucket, and sends each bucket's change, or its new parameters.

    Args:
        runtime: Its ``effective`` gets a line that says what is done.
        inner: The optimizer.
        pieces: What it updates in memory.
    """

    def __init__(self, runtime: Runtime, inner: Optimizer, pieces: list[MasterPiece]) -> None:
        self._runtime, self._inner = runtime, inner
        self._pieces = pieces_by_bucket((b for b in runtime.buckets if b.is_trainable), pieces)
        self._runs = _runs_of(list(self._pieces))
        self._in_files = [bucket for bucket in self._pieces if bucket.states.is_in_files]
        self._sends_changes = bool(runtime.gatherer.replicas)
        is_gathered = runtime.stage.shards_states and not (runtime.stage.shards_parameters or self._sends_changes)
        is_alone = runtime.topology.world_size == 1
        self.gathers = is_gathered and not is_alone and any(map(is_muon, optimizers_of(inner)))
        """Whether a step gathers new parameters, and its update is long enough to hide that."""
        if self._sends_changes or self.gathers:
            runtime.effective = runtime.effective.with_notes(details=(self._described(),))

    def _described(self) -> str:
        what = "changes are" if self._sends_changes else "new parameters are"
        one = "the change of a bucket is" if self._sends_changes else "the new parameters of a bucket are"
        if len(self._in_files) == len(self._pieces):
            return f"{what} sent after all updates, which are in files"
        if all(_updates_by_parameter(each) for each in optimizers_of(self._inner)):
            return f"{one} sent while the next is updated"
        name = name_of(self._inner)
        return f"{what} sent after all updates ({name} is not known to update each parameter by itself)"

    @property
    def are_sent_early(self) -> bool:
        """Whether :meth:`update` sends what has changed; False: the write-back sends it after all updates.

        The same on every rank: it must not depend on hooks, which may be on one rank alone.
        """
        if not (self._sends_changes or self.gathers) or len(self._in_files) == len(self._pieces):
            return False
        return all(_updates_by_parameter(one) for one in optimizers_of(self._inner))

    @property
    def _is_watched(self) -> bool:
        """Whether hooks run in each step of the optimizer, or of one of several, and would see many."""
        if updater_of(self._inner).is_fused:
            return False
        return any(_is_watched(one) for one in [self._inner, *optimizers_of(self._inner)])

    @torch.no_grad()
    def update(self, factor: float, changed: Collection[int], sent: list[Work]) -> None:
        """Step every bucket in memory, write its shard, and send it. Collective.

        If hooks run in a step there is one, before the first exchange.

        Args:
            factor: Multiplies gradients; 1 unless the optimizer is, or has, one of zero's own.
            changed: Indices of the buckets that the step changes; the changes of others are not sent.
            sent: Gets the gathers in flight, which the write-back waits for.

        Raises:
            Exception: What went wrong here, raised after all exchanges have started.
        """
        failure: Exception | None = None
        groups, updates = numbers_of_groups(self._inner), self._runs
        if self._is_watched:
            updates = [list(self._pieces), *([] for _ in self._runs[1:])]
        for buckets, sends in zip(updates, self._runs, strict=True):
            if failure is None:
                try:
                    self._step(buckets, factor, groups)
                except Exception as error:
                    failure = error
            # Also after a failure: the other ranks are in these exchanges, and would wait for this one (a deadlock).
            sent += self._runtime.send_updated(sends, changed)
        if failure is not None:
            raise failure

    def _step(self, buckets: Sequence[Bucket], factor: float, groups: Mapping[int, int]) -> None:
        pieces = [piece for bucket in buckets for piece in self._pieces[bucket]]
        if pieces or len(buckets) == len(self._pieces):  # hooks run on a rank without pieces, too
            step_pieces(self._inner, pieces, factor, groups)
        for bucket in buckets:
            if self._pieces[bucket] and not folds(self._inner):
                bucket.update_shard()


def _runs_of(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """``buckets`` in order, in runs that are updated together: of at most RUN_NUMEL elements, or one bucket."""
    numels = [bucket.layout.shard_numel for bucket in buckets]
    return [[buckets[index] for index in run] for run in group_consecutive(numels, RUN_NUMEL)]


def _updates_by_parameter(inner: Optimizer) -> bool:
    """Whether what a step of ``inner`` does to a parameter depends on that parameter alone."""
    return updater_of(inner).is_fused or type(inner) in BY_PARAMETER | OF_TENSORS


def _is_watched(inner: Optimizer) -> bool:
    """Whether hooks run in each step of ``inner``. A scheduler's wrapper only notes the call."""
    of_all = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    own = inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks
    is_replaced = "step" in vars(inner) and not getattr(inner.step, "_wrapped_by_lr_sched", False)
    return is_replaced or any((*of_all, *own))
