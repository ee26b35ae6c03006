"""Filling full parameters from shards, and letting them go: every bucket of stage 3, by the schedule.

    acquire: SHARDED -> pool buffer -> all-gather (primary, or inside the node from the secondary partition) -> FULL
    release: FULL -> placeholders, buffer back to the pool, unless the schedule keeps it for its next use; what
             somebody views still is set aside (:mod:`zero._gather.stale_views`)

Each use is told to a :class:`zero._sharding.prefetch_plan.Schedule`, which says what to start for later ones. Where it has no plan, in
the first iteration and after a change of order, the ranks compare what they are about to gather.

Do all ranks gather the same parameters? Asked before an exchange, so that the answer is an error and not a hang.

Exchanges of different parameters would meet each other: of equal size they give wrong numbers, else they never end. The
question travels over process groups of its own, by which nothing else is disturbed. A rank that follows its plan does
not ask: where it meets one that does, both wait, and :class:`zcomm._transport.deadlock_watch.DeadlockWatch` finds them out.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial

import torch
from torch import nn

from zcomm import DivergedError, Topology, Work, control
from zcomm._base import env
from zcomm._transport import call_context
from zcomm._transport.call_context import in_bucket
from zero._config.settings import Effective, ZeroSettings
from zero._gather.full_replica import FullCopy
from zero._gather.gather_sources import GatherOptions, Primary, Replica, Secondary
from zero._gather.stale_views import outdate_views
from zero._sharding.bucket import Bucket, BucketState, ShardInfo, bump_versions
from zero._sharding.buffer_pool import BufferPool, num_uses, storage_of
from zero._sharding.prefetch_plan import END_OF_BACKWARD, GatherStart, Limits, Schedule
from zero._storage.parameter_storage import ParameterRests
from zero._storage.shard_storage import ShardRest


class OrderCheck:
    """Compares what the ranks are about to do.

    Args:
        topology: The ranks. Its companion's companion is made here, which is collective.
    """

    def __init__(self, topology: Topology) -> None:
        self._watch = None if topology.world_size == 1 else topology.watch
        self._ranks = topology if topology.world_size == 1 else topology.companion.companion
        self._num_unequal = 0
        self._doing: Callable[[], str] = lambda: "waits"
        self.is_always_on = env.is_set("ZERO_DEBUG")

    def note(self, doing: Callable[[], str]) -> None:
        """What this rank is about to do, in words that are asked for if the ranks wait for one another."""
        self._doing = doing
        call_context.note(partial(_answer, weakref.ref(self)))
        if self._watch is not None:
            self._watch.compose = _compose

    @property
    def num_divergences(self) -> int:
        """How often the ranks have been found to do different things; the same on all of them."""
        return self._num_unequal + (0 if self._watch is None else self._watch.num_found)

    def compare(self, call: str, detail: str = "") -> None:
        """Raise DivergedError, on every rank and with every rank's ``detail`` or ``call``, unless calls are equal.

        Collective; all comparisons travel over the same groups, whatever is compared.

        Cost for each rank: 8 bytes to every other rank, and one wait for the slowest.
        """
        if self._watch is None:
            return
        mine = torch.tensor([float(zlib.crc32(call.encode()))], dtype=torch.float64)
        if bool((control.gather_float64(mine, self._ranks) != mine).any()):
            self._num_unequal += 1
            raise DivergedError(_compose(control.gather_texts(detail or call, self._ranks)))

    def agree_ends(self, ends: list[int]) -> list[int]:
        """The latest end of each use on any rank; as many on every rank."""
        return [int(v) for v in control.agree_max(torch.tensor(ends, dtype=torch.int64), self._ranks).tolist()]


def _answer(reference: weakref.ref[OrderCheck]) -> str:
    check = reference()
    return "waits" if check is None else check._doing()


def _compose(texts: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    return (
        "every rank must run the same modules in the same order at stage 3, and now they differ: "
        + "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())
        + ". For layers that only some ranks use, take stage 1 or 2"
    )


logger = logging.getLogger("zero")


class Mode(Enum):
    """What an iteration is: each has an order of its own."""

    TRAINING = "training"  # from one optimizer step to the next
    INFERENCE = "inference"  # one forward without gradients


class Gatherer:
    """Gathers and releases the buckets of stage 3. Below stage 3 every call is a no-op: buckets are always full."""

    def __init__(
        self,
        buckets: list[Bucket],
        options: GatherOptions,
        settings: ZeroSettings,
        effective: Effective,
        pool: BufferPool,
        rests: ParameterRests,
        *,
        speaks: bool = True,
    ) -> None:
        topology, self.speaks = options.topology, speaks
        self._buckets, self._topology, self._pool, self._rests = buckets, topology, pool, rests
        self._effective, self._logs_every_change = effective, settings.log_trace_cache_warnings
        self._is_active = effective.stage.shards_parameters
        self.options = options
        self._primary = [Primary(bucket, self.options) for bucket in buckets]
        exchanges = [source.exchanges for source in self._primary]
        self._secondary: dict[int, Secondary | Replica] = {}
        self.replicas: dict[int, Replica | FullCopy] = {}
        """What changes are sent to, by bucket: in ``mode="delta_hpz"`` and ``mode="delta"``."""
        changes = effective.change_format
        for b in (b for b in buckets if not b.is_resident):
            if changes is not None and self._is_active:
                replica = Replica(b, self.options, changes, exchanges[b.index])
                self.replicas[b.index] = self._secondary[b.index] = replica
            elif changes is not None and b.is_trainable:
                self.replicas[b.index] = FullCopy(b, self.options, changes)
            elif effective.has_secondary:
                self._secondary[b.index] = Secondary(b, self.options, exchanges[b.index])
        limits = _within_layers(effective.limits, [sum(e) for e in exchanges])
        self._schedules = {mode: Schedule(exchanges, limits) for mode in Mode}
        self._check = OrderCheck(topology) if self._is_active else None
        self._works: dict[int, list[Work | None]] = {}
        """The exchanges that have started of each bucket that is being gathered."""
        self._starting: int | None = None
        """The bucket one of whose exchanges starts now, and is not among those yet."""
        self._in_use: dict[int, Schedule | None] = {}
        """Buckets that somebody needs, each with the schedule that was told of it."""
        self._kept: set[int] = set()
        """Full buckets that nobody needs now."""
        self._has_said: set[str] = set()
        self._last_mode = Mode.TRAINING
        self.checksum = 0
        """Of all gathers issued so far, in order: they match those of other ranks only if it is the same there."""
        self._num_divergences = 0 if self._check is None else self._check.num_divergences
        self.by_storage: dict[int, Bucket] = {}

    def acquire(self, bucket: Bucket, mode: Mode | None = None) -> None:
        """Make ``bucket`` FULL. ``mode``: the use is part of an iteration, so its place in the order is recorded."""
        if not self._is_active or bucket.is_resident:
            return
        starts = () if bucket.index in self._in_use else self._begin_use(bucket, mode)
        if bucket.state is not BucketState.FULL:
            self._issue(bucket)
        for start in starts:
            self._issue(self._buckets[start.bucket], start.stop)
        if mode is not None:
            self._read_ahead(mode)
        if bucket.state is BucketState.GATHERING:
            self._finish(bucket)

    def acquire_all(self, buckets: list[Bucket]) -> None:
        """Make all of ``buckets`` FULL, outside of forward and backward; their exchanges overlap."""
        if not self._is_active:
            return
        self._start_over_if_diverged()
        if self._compares_always:
            for bucket in buckets:
                self.acquire(bucket)
        for bucket in buckets:
            self._issue(bucket)
        for bucket in buckets:
            self.acquire(bucket)

    def _begin_use(self, bucket: Bucket, mode: Mode | None) -> tuple[GatherStart, ...]:
        assert self._check is not None, "stage 3 without an order check"
        self._start_over_if_diverged()
        self._in_use[bucket.index] = None
        self._kept.discard(bucket.index)
        if mode is None:
            text = f"gathers {_describe(bucket)} outside of forward and backward"
            self._check.note(lambda: text)
            if self._check.is_always_on:
                self._check.compare(text)
            return ()
        schedule = self._in_use[bucket.index] = self._schedules[mode]
        return self._begin(schedule, bucket.index, mode)

    def _begin(self, schedule: Schedule, bucket: int, mode: Mode) -> tuple[GatherStart, ...]:
        assert self._check is not None, "stage 3 without an order check"
        position, instead = schedule.position, ""
        if not schedule.expects(bucket):
            planned = schedule.planned
            instead = ", where the recorded order " + ("ends" if planned is None else f"has {self._name(planned)}")
            self._leave_plan(schedule, mode)
        is_backward = torch._C._current_graph_task_id() != -1

        def doing() -> str:
            verb = "has come to" if bucket == END_OF_BACKWARD else "gathers"
            phase = "" if bucket == END_OF_BACKWARD else f" in {'backward' if is_backward else 'forward'}"
            return f"{verb} {self._name(bucket)}{phase}, use {position} of {mode.value}{instead}"

        self._check.note(doing)
        is_new_mode = mode is not self._last_mode  # a rank in another mode may follow a plan, too
        self._last_mode = mode
        if not schedule.is_following or is_new_mode or self._check.is_always_on:
            self._check.compare(doing())
        return schedule.begin(bucket)

    def _name(self, bucket: int) -> str:
        return "the end of backward" if bucket == END_OF_BACKWARD else _describe(self._buckets[bucket])

    @property
    def _compares_always(self) -> bool:
        return self._check is not None and self._check.is_always_on

    def _leave_plan(self, schedule: Schedule, mode: Mode) -> None:
        schedule.leave_plan()
        if mode is Mode.TRAINING:
            self._say(
                f"the order in which layers are used has changed at use {schedule.position} of a step: it is recorded "
                "anew, and this step gathers each layer when it is used",
                "order" if not self._logs_every_change else "",
            )
        self._drop_idle(self._buckets)

    def _say(self, text: str, once: str) -> None:
        """Log on one rank; what has the same ``once`` only once, unless that is empty."""
        if once in self._has_said:
            return
        if once:
            self._has_said.add(once)
        if self.speaks:
            logger.warning("%s", text)

    def _issue(self, bucket: Bucket, stop: int | None = None) -> None:
        """Start the exchanges of ``bucket`` up to number ``stop`` that have not started yet."""
        if bucket.state is BucketState.SHARDED:
            full = self._pool.take(bucket.layout.numel, bucket.dtype)
            works: list[Work | None] = []
            self._pool.lend(works, full)
            bucket.begin_gather(full)
            self._works[bucket.index] = works
        if bucket.state is not BucketState.GATHERING:
            return
        assert bucket.full is not None, f"bucket {bucket.name!r} is being gathered without a buffer"
        started, source = self._works[bucket.index], self._source(bucket)
        for index in range(len(started), len(self._primary[bucket.index].exchanges) if stop is None else stop):
            self.checksum = zlib.crc32(f"{bucket.index}.{index}".encode(), self.checksum)
            self._starting = bucket.index
            with in_bucket(bucket.name):
                started.append(source.start(index, bucket.full))
            self._starting = None

    def _start_over_if_diverged(self) -> bool:
        """Whether the ranks have diverged: what came before is not the same everywhere, and is forgotten."""
        if self._check is None or self._check.num_divergences == self._num_divergences:
            return False
        self._num_divergences, self.checksum, self._last_mode = self._check.num_divergences, 0, Mode.TRAINING
        self._drop_idle(self._buckets)
        for schedule in self._schedules.values():
            schedule.restart()
        return True

    def compare(self, call: str, detail: str = "") -> None:
        """At stage 3, raise DivergedError unless all ranks make the same ``call``; ``detail`` is shown instead."""
        if self._check is not None:
            self._check.note(lambda: detail or call)
            self._check.compare(call, detail)

    def _source(self, bucket: Bucket) -> Primary | Secondary | Replica:
        secondary = self._secondary.get(bucket.index)
        return secondary if secondary is not None and secondary.is_valid else self._primary[bucket.index]

    def _wait(self, bucket: Bucket) -> None:
        assert bucket.full is not None, f"bucket {bucket.name!r} is being gathered without a buffer"
        try:
            self._pool.reclaim(self._works.pop(bucket.index), bucket.full)
        except DivergedError:
            bucket.rest.fetched()
            bucket.abandon()
            raise
        bucket.rest.fetched()

    def _finish(self, bucket: Bucket) -> None:
        self._issue(bucket)
        self._wait(bucket)
        assert bucket.full is not None, f"bucket {bucket.name!r} is being gathered without a buffer"
        secondary = self._secondary.get(bucket.index)
        if isinstance(secondary, Secondary) and not secondary.is_valid:
            secondary.fill(bucket.full)
        bucket.expose()
        self.by_storage[storage_of(bucket.full)] = bucket

    def _read_ahead(self, mode: Mode) -> None:
        if self._rests.reads_files:
            self._rests.expect(self._upcoming(mode))

    def _upcoming(self, mode: Mode) -> Iterator[tuple[ShardRest, int]]:
        """What will be fetched next, each from that exchange on, into the next iteration if values stay the same."""
        schedule = self._schedules[mode]
        num_started = {index: len(works) for index, works in self._works.items()}
        filled = {index for index, secondary in self._secondary.items() if secondary.is_valid}
        for index in schedule.upcoming():
            if index not in filled:
                yield self._buckets[index].rest, num_started.pop(index, 0)
                filled.update(self._secondary.keys() & {index})
        for index in schedule.next_iteration():
            if index not in filled and not (mode is Mode.TRAINING and self._buckets[index].is_trainable):
                yield self._buckets[index].rest, 0

    def agree(self) -> None:
        """Raise, on every rank, what went wrong with a rank's files. Collective if shards were read from files."""
        self._rests.agree()

    def release_if_unneeded(self, bucket: Bucket, *, may_keep: bool = True) -> None:
        """Give the buffer back unless somebody needs it, or will soon by the plan, as far as that still holds."""
        if not self._is_active or bucket.is_resident or bucket.is_needed:
            return
        if bucket.index in self._in_use:
            schedule = self._in_use.pop(bucket.index)
            if schedule is not None and schedule.end(bucket.index) and may_keep:
                self._kept.add(bucket.index)
        if bucket.index not in self._kept:
            self._release(bucket)

    def _release(self, bucket: Bucket) -> None:
        if bucket.state is BucketState.FULL:
            full = bucket.release()
            self.by_storage.pop(storage_of(full), None)
            if num_uses(full) > 2:  # it is a part of the pool's
                self._pool.set_aside(full, bucket)
            else:
                self._pool.give(full)
            casts = bucket.device.type != "meta" and torch.is_autocast_enabled(bucket.device.type)
            if casts and torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()  # which would keep casts of what is released, and use them again

    def _drop_idle(self, buckets: Iterable[Bucket]) -> None:
        """Give back what is kept or prefetched for later."""
        for bucket in buckets:
            if bucket.index in self._in_use or bucket.is_resident:
                continue
            self._kept.discard(bucket.index)
            if bucket.state is BucketState.GATHERING:
                if bucket.index not in self._works or self._starting == bucket.index:
                    self._forget_gather(bucket)
                    continue
                with suppress(DivergedError):
                    self._wait(bucket)
                    full = bucket.abandon()
                    assert full is not None, f"bucket {bucket.name!r} was being gathered without a buffer"
                    self._pool.give(full)
            self._release(bucket)

    def _forget_gather(self, bucket: Bucket) -> None:
        """An interrupt came while exchanges started or were waited for: some may fill the buffer yet, for nobody."""
        self._works.pop(bucket.index, None)
        self._starting = None
        bucket.abandon()

    def release_all(self) -> None:
        """No forward or backward runs any more: give every buffer back, prefetched ones too."""
        if not self._is_active:
            return
        for bucket in self._buckets:
            bucket.forward_depth, bucket.is_held_by_backward, bucket.is_pinned = 0, False, False
            self.release_if_unneeded(bucket)
        self._drop_idle(self._buckets)

    def end_backward(self) -> None:
        """A backward has used its last bucket."""
        if self._is_active:
            self._begin(self._schedules[Mode.TRAINING], END_OF_BACKWARD, Mode.TRAINING)

    def abandon_iteration(self, mode: Mode) -> None:
        """An exception has ended it: what it has recorded is worth nothing."""
        if self._schedules[mode].position:
            self._schedules[mode].restart()

    def end_iteration(self, mode: Mode) -> None:
        """The next iteration begins. Collective if this one was not as planned."""
        schedule = self._schedules[mode]
        if not self._is_active or not schedule.position or schedule.is_as_planned or self._start_over_if_diverged():
            schedule.restart()
            return
        assert self._check is not None, "stage 3 without an order check"
        if schedule.is_following:
            self._leave_plan(schedule, mode)
        uses = schedule.recorded()
        self.compare(f"ends an iteration of {mode.value} after {len(uses)} uses")
        ends = self._check.agree_ends([use.end for use in uses])
        schedule.restart([use._replace(end=end) for use, end in zip(uses, ends, strict=True)])
        assert schedule.plan is not None, "an order without a plan"
        if schedule.plan.needed_numel > schedule.limits.live_numel:
            self._say(
                f"stage3_max_live_parameters={schedule.limits.live_numel} is exceeded by what modules need at a time: "
                f"{schedule.plan.needed_numel} elements",
                "live",
            )

    def parameters_changed(self, buckets: Iterable[Bucket], params: Iterable[nn.Parameter] | None = None) -> None:
        """The shards of ``buckets`` have new values: replicas of the old ones are worthless.

        ``params``: whose values are new, which autograd and views find out; None: all of them.
        """
        buckets = list(buckets)
        changed = [param for bucket in buckets for param in bucket.params] if params is None else list(params)
        bump_versions(changed)
        outdate_views(self._pool, buckets if params is None else {_bucket_of(param) for param in changed})
        if self._is_active:
            self._drop_idle(buckets)
        for bucket in buckets:
            secondary = self._secondary.get(bucket.index)
            if isinstance(secondary, Secondary):
                secondary.invalidate()
        self._read_ahead(Mode.TRAINING)

    @property
    def secondary_nbytes(self) -> int:
        """Bytes of the secondary partitions."""
        return sum(secondary.nbytes for secondary in self._secondary.values())


def _bucket_of(param: nn.Parameter) -> Bucket:
    info: ShardInfo = param.zero_shard  # type: ignore[attr-defined]
    return info.bucket


def _within_layers(limits: Limits, numels: list[int]) -> Limits:
    """More than the largest layer ahead would cost memory and hide nothing more."""
    return Limits(
        prefetch_numel=min(limits.prefetch_numel, max(numels, default=0)),
        live_numel=limits.live_numel,
        reuse_numel=limits.reuse_numel,
    )


def _describe(bucket: Bucket) -> str:
    first, more = bucket.layout.slots[0], len(bucket.layout.slots) - 1
    rest = f" and {more} more" if more else ""
    return f"parameter {first.name!r} {first.shape}{rest} of module {bucket.name!r}"
