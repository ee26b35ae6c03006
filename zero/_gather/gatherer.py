"""Gathers and releases the buckets of stage 3, with prefetching by the recorded order of uses.

    acquire: SHARDED -> pool buffer -> all-gather (primary, or inside the node from the secondary partition) -> FULL
    release: FULL -> released parameters, buffer back to the pool, unless the schedule keeps it for its next use; a
             buffer that is still viewed is set aside (ViewedBuffer)

Each use is recorded by a Schedule (_sharding/prefetch_plan.py), which says what to prefetch for later uses. Without a
plan, in the first iteration and after a change of order, the ranks compare what they are about to gather before the
exchange, so that ranks that diverged get an error and no deadlock: exchanges of different parameters would be matched
with each other, and give wrong numbers if their sizes are equal, or else never end.

The comparison has process groups of its own, so that it cannot be matched with an exchange in flight. A rank that
follows its plan does not compare. If another rank does, the two wait in different calls, and DeadlockWatch
(zcomm/_transport/deadlock_watch.py) reports them.

A view can outlive the gather, such as a transposed weight that a layer keeps:

    released while viewed     the pool sets the buffer aside: the views keep the right values
    the parameter changes     the views become NaN, and any use of them raises an error that names the parameter
    no view is left           the buffer goes back to the pool

How long a view lives differs from rank to rank, and gloo's threads may keep one for a moment. So it affects memory
only, never what is exchanged: else ranks would make different exchanges, and deadlock.
"""

from __future__ import annotations

import gc
import logging
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zcomm import DivergedError, Topology, control
from zcomm._base import env
from zcomm._transport import call_context
from zcomm._transport.call_context import in_bucket
from zero._config.settings import Effective, ZeroSettings
from zero._gather.gather_sources import BucketSources
from zero._gather.lost_writes import LostWrites
from zero._sharding.bucket import Bucket, BucketState, bump_versions
from zero._sharding.buffer_pool import BufferPool, num_uses, storage_of
from zero._sharding.phases import Phases, in_phase
from zero._sharding.prefetch_plan import END_OF_BACKWARD, Prefetch, Schedule
from zero._sharding.released import mark_stale
from zero._storage.parameter_storage import ParameterStorage
from zero._storage.runtime_part import RuntimePart
from zero._storage.shard_storage import ShardStorage


def mark_views_stale(pool: BufferPool, buckets: Collection[Bucket]) -> None:
    """The parameters of ``buckets`` have new values: make any use of a view of the old ones an error.

    Cost: if there are such views, a pass over all Python objects of the process; else none.
    """
    found = {storage_of(each.buffer): each for each in pool.viewed() if each.of in buckets}
    if not found:
        return
    for tensor in _tensors():
        with torch._C.DisableTorchFunctionSubclass():
            aside, offset = found.get(storage_of(tensor)), int(tensor.storage_offset())
        if aside is not None and tensor is not aside.buffer and tensor.numel():  # an empty view shows no old values
            assert isinstance(aside.of, Bucket), "buffers are set aside for buckets"
            mark_stale(tensor, aside.of.layout.slots[aside.of.layout.slot_at(offset)].name)
    for aside in found.values():
        aside.of = None
        if aside.buffer.is_floating_point():
            aside.buffer.fill_(float("nan"))  # for NumPy arrays and C++ code, which no class stops


def _tensors() -> Iterator[Tensor]:
    """Every tensor with memory of its own; not wrapper subclasses."""
    plain = Tensor.__torch_dispatch__
    for each in gc.get_objects():
        cls = type(each)
        if issubclass(cls, Tensor) and cls.__torch_dispatch__ is plain:
            with torch._C.DisableTorchFunctionSubclass():  # released parameters refuse the call otherwise
                has_memory = torch._C._has_storage(each)
            if has_memory:
                yield each


class OrderCheck:
    """Compares what the ranks are about to gather.

    Args:
        topology: The ranks of the gathers. Creates more process groups over them, which is collective.
        is_needed: Whether they gather; else all calls are equal.
    """

    def __init__(self, topology: Topology, *, is_needed: bool) -> None:
        compares = is_needed and topology.world_size > 1
        self._watch = topology.watch if compares else None
        # Comparisons must match neither gathers, over ``topology``, nor reductions, over the companion. Over NCCL they
        # go through host memory, where the companion has nothing else.
        self._ranks = topology
        if compares:
            of_reductions = topology.companion
            self._ranks = of_reductions if of_reductions.is_on_nccl else of_reductions.companion
        self._num_unequal = 0
        self._doing: Callable[[], str] = lambda: "waits"
        self.is_always_on = env.is_set("ZERO_DEBUG")

    def note(self, doing: Callable[[], str]) -> None:
        """Register what this rank is about to do; the deadlock watch calls ``doing`` for its report."""
        self._doing = doing
        call_context.note_activity(partial(_answer, weakref.ref(self)))
        if self._watch is not None:
            self._watch.compose = _compose

    @property
    def num_divergences(self) -> int:
        """How often the ranks were found to have diverged; the same on every rank."""
        return self._num_unequal + (0 if self._watch is None else self._watch.num_deadlocks)

    def compare(self, call: str, detail: str = "") -> None:
        """Raise DivergedError on every rank, with every rank's ``detail`` or ``call``, unless all calls are equal.

        Collective. All comparisons use the same process groups, so that two different ones are matched and compared.

        Cost for each rank: 8 bytes to every other rank, and one wait for the slowest.
        """
        if self._watch is None:
            return
        mine = torch.tensor([float(zlib.crc32(call.encode()))], dtype=torch.float64)
        if bool((control.gather_float64(mine, self._ranks) != mine).any()):
            self._num_unequal += 1
            raise DivergedError(_compose(control.gather_texts(detail or call, self._ranks)))

    def agree_ends(self, ends: list[int]) -> list[int]:
        """The latest end of each use on any rank. Every rank has the same number of uses."""
        return [int(v) for v in control.agree_max(torch.tensor(ends, dtype=torch.int64), self._ranks).tolist()]


def _answer(reference: weakref.ref[OrderCheck]) -> str:
    check = reference()
    return "waits" if check is None else check._doing()


def _compose(texts: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    return (
        "every rank must run the same modules in the same order at stage 3, but they differ: "
        + "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())
        + ". For layers that only some ranks use, choose stage 1 or 2"
    )


logger = logging.getLogger("zero")


BEING_STARTED: Any = object()
"""The place of an exchange among those of a bucket until it has been started: an interrupt may come in between."""


class IterationKind(Enum):
    """The kind of an iteration; each has a schedule of its own."""

    TRAINING = "training"  # from one optimizer step to the next
    INFERENCE = "inference"  # one forward without gradients


class Gatherer(RuntimePart):
    """Gathers and releases the buckets of stage 3. Below stage 3 every call is a no-op: buckets are always full."""

    def __init__(
        self,
        buckets: list[Bucket],
        sources: BucketSources,
        settings: ZeroSettings,
        effective: Effective,
        pool: BufferPool,
        storage: ParameterStorage,
        *,
        phases: Phases | None = None,
        is_log_rank: bool = True,
    ) -> None:
        self.options = sources.options
        topology, self.is_log_rank, self.phases = self.options.topology, is_log_rank, phases or Phases()
        self._buckets, self._topology, self._pool, self._storage = buckets, topology, pool, storage
        self._effective, self._logs_every_change = effective, settings.log_trace_cache_warnings
        self._is_active = effective.stage.shards_parameters
        self._sources = list(sources.sources)
        exchanges = [list(source.exchanges) for source in self._sources]
        self.replicas = sources.receivers
        # At most the largest bucket is prefetched: more costs memory and overlaps nothing more.
        ahead = min(effective.limits.prefetch_numel, max(map(sum, exchanges), default=0))
        limits = replace(effective.limits, prefetch_numel=ahead)
        self._schedules = {mode: Schedule(exchanges, limits) for mode in IterationKind}
        self._check = OrderCheck(topology, is_needed=self._is_active)
        self._in_use: dict[int, Schedule | None] = {}
        """Buckets in use, each with the schedule that recorded it."""
        self._warned: set[str] = set()
        self._last_mode = IterationKind.TRAINING
        self.checksum = 0
        """Checksum of all gathers issued so far, in order; the end of each backward compares it between ranks."""
        self._num_divergences = self._check.num_divergences
        self.by_storage: dict[int, Bucket] = {}
        self.lost_writes = LostWrites()
        for bucket in buckets if self._is_active else ():
            if bucket.is_persistent:  # never gathered
                self.lost_writes.note(bucket)

    @in_phase("gather")
    def acquire(self, bucket: Bucket, mode: IterationKind | None = None) -> None:
        """Make ``bucket`` FULL. With ``mode``, the use is part of an iteration, and is recorded in its order."""
        if not self._is_active or bucket.is_persistent:
            return
        starts = () if bucket.index in self._in_use else self._start_use(bucket, mode)
        if bucket.state is BucketState.RESTING:
            bucket.move(BucketState.FULL)
        elif bucket.state is not BucketState.FULL:
            self._issue(bucket)
        for start in starts:
            self._issue(self._buckets[start.bucket], start.stop)
        if mode is not None:
            self._read_ahead(mode)
        if bucket.state is BucketState.GATHERING:
            self._finish(bucket)

    def acquire_all(self, buckets: list[Bucket]) -> None:
        """Make all ``buckets`` FULL, outside of forward and backward; their exchanges overlap."""
        if not self._is_active:
            return
        self._start_over_if_diverged()
        if self._check.is_always_on:  # one at a time, each compared before its exchange
            for bucket in buckets:
                self.acquire(bucket)
        for bucket in buckets:
            self._issue(bucket)
        for bucket in buckets:
            self.acquire(bucket)

    def _start_use(self, bucket: Bucket, mode: IterationKind | None) -> tuple[Prefetch, ...]:
        self._start_over_if_diverged()
        self._in_use[bucket.index] = None
        if mode is None:
            text = f"gathers {_describe(bucket)} outside of forward and backward"
            self._check.note(lambda: text)
            if self._check.is_always_on:
                self._check.compare(text)
            return ()
        schedule = self._in_use[bucket.index] = self._schedules[mode]
        return self._record_use(schedule, bucket.index, mode)

    def _record_use(self, schedule: Schedule, bucket: int, mode: IterationKind) -> tuple[Prefetch, ...]:
        position, instead = schedule.position, ""
        if not schedule.expects(bucket):
            planned = schedule.planned
            instead = ", where the recorded order " + ("ends" if planned is None else f"has {self._name(planned)}")
            self._leave_plan(schedule, mode)
        is_backward = torch._C._current_graph_task_id() != -1

        def doing() -> str:
            verb = "has reached" if bucket == END_OF_BACKWARD else "gathers"
            phase = "" if bucket == END_OF_BACKWARD else f" in {'backward' if is_backward else 'forward'}"
            return f"{verb} {self._name(bucket)}{phase}, use {position} of {mode.value}{instead}"

        self._check.note(doing)
        # After a change of mode, compare even with a plan: a rank in the other mode may follow its own plan.
        is_new_mode = mode is not self._last_mode
        self._last_mode = mode
        if not schedule.is_following or is_new_mode or self._check.is_always_on:
            self._check.compare(doing())
        return schedule.start_use(bucket)

    def _name(self, bucket: int) -> str:
        return "the end of backward" if bucket == END_OF_BACKWARD else _describe(self._buckets[bucket])

    def _leave_plan(self, schedule: Schedule, mode: IterationKind) -> None:
        schedule.leave_plan()
        if mode is IterationKind.TRAINING:
            self._warn(
                f"the order in which layers are used has changed at use {schedule.position} of a step: it is recorded "
                "again, and this step does not prefetch",
                "order" if not self._logs_every_change else "",
            )
        self._drop_idle(self._buckets)

    def _warn(self, text: str, once: str) -> None:
        """Log a warning on one rank; texts with the same non-empty ``once`` only once."""
        if once in self._warned:
            return
        if once:
            self._warned.add(once)
        if self.is_log_rank:
            logger.warning("%s", text)

    def _issue(self, bucket: Bucket, stop: int | None = None) -> None:
        """Start those exchanges of ``bucket`` before number ``stop`` that have not started yet."""
        if bucket.state is BucketState.SHARDED:
            full = self._pool.take(bucket.layout.numel, bucket.dtype)
            bucket.start_gathering(full)
            self._pool.lend(bucket.exchanges, full)
        if bucket.state is not BucketState.GATHERING:
            return
        assert bucket.full is not None, f"bucket {bucket.name!r} is being gathered without a buffer"
        started, source = bucket.exchanges, self._sources[bucket.index]
        if started and started[-1] is BEING_STARTED:  # it failed, and is tried again
            started.pop()
        for index in range(len(started), len(source.exchanges) if stop is None else stop):
            self.checksum = zlib.crc32(f"{bucket.index}.{index}".encode(), self.checksum)
            started.append(BEING_STARTED)
            with in_bucket(bucket.name):
                started[index] = source.start(index, bucket.full)

    def _start_over_if_diverged(self) -> bool:
        """Whether the ranks have diverged since the last call; if so, drop plans and records: they may differ."""
        if self._check.num_divergences == self._num_divergences:
            return False
        self._num_divergences, self.checksum, self._last_mode = self._check.num_divergences, 0, IterationKind.TRAINING
        self._drop_idle(self._buckets)
        for schedule in self._schedules.values():
            schedule.restart()
        return True

    def compare(self, call: str, detail: str = "") -> None:
        """At stage 3, raise DivergedError unless all ranks make the same ``call``; the error shows ``detail``."""
        if self._is_active:
            self._check.note(lambda: detail or call)
            self._check.compare(call, detail)

    def _wait(self, bucket: Bucket) -> None:
        assert bucket.full is not None, f"bucket {bucket.name!r} is being gathered without a buffer"
        try:
            self._pool.reclaim(bucket.exchanges, bucket.full)
        except DivergedError:
            bucket.storage.fetched()
            bucket.abandon()
            raise
        bucket.storage.fetched()

    def _finish(self, bucket: Bucket) -> None:
        self._issue(bucket)
        self._wait(bucket)
        assert bucket.full is not None, f"bucket {bucket.name!r} is being gathered without a buffer"
        self._sources[bucket.index].gathered(bucket.full)
        bucket.expose()
        self.lost_writes.note(bucket)
        self.by_storage[storage_of(bucket.full)] = bucket

    def _read_ahead(self, mode: IterationKind) -> None:
        if self._storage.reads_files:
            self._storage.read_ahead(self._upcoming(mode))

    def _upcoming(self, mode: IterationKind) -> Iterator[tuple[ShardStorage, int]]:
        """Shards to fetch next, each from an exchange on; into the next iteration, if their values do not change."""
        schedule = self._schedules[mode]
        gathering = (bucket for bucket in self._buckets if bucket.state is BucketState.GATHERING)
        num_started = {bucket.index: len(bucket.exchanges) for bucket in gathering}
        filled = {index for index, source in enumerate(self._sources) if not source.reads_shard}
        for index in schedule.upcoming():
            if index not in filled:
                yield self._buckets[index].storage, num_started.pop(index, 0)
                filled |= {index} if self._sources[index].keeps_values else set()
        if mode is IterationKind.TRAINING:  # the step changes these
            filled |= {bucket.index for bucket in self._buckets if bucket.is_trainable}
        for index in schedule.next_iteration() if len(filled) < len(self._buckets) else ():
            if index not in filled:
                yield self._buckets[index].storage, 0

    def agree(self) -> None:
        """Raise, on every rank, the file errors of any. Collective if shards were read from files."""
        self._storage.agree()

    def release_if_unneeded(self, bucket: Bucket, *, may_keep: bool = True) -> None:
        """Release ``bucket`` unless it is needed; ``may_keep``: or the plan keeps it for its next use."""
        if not self._is_active or bucket.is_persistent or bucket.is_held():
            return
        if bucket.index in self._in_use:
            schedule = self._in_use.pop(bucket.index)
            if schedule is not None and schedule.end_use(bucket.index) and may_keep and bucket.is_full:
                bucket.move(BucketState.RESTING)
        if bucket.state is not BucketState.RESTING:
            self._release(bucket)

    def _release(self, bucket: Bucket) -> None:
        if bucket.is_full:
            self.lost_writes.find(bucket)
            full = bucket.release()
            self.by_storage.pop(storage_of(full), None)
            # Two uses are this tensor and the pool's; any other is a view, which must not see the next gather's values.
            if num_uses(full) > 2:
                self._pool.set_aside(full, bucket)
            else:
                self._pool.give(full)
            casts = bucket.device.type != "meta" and torch.is_autocast_enabled(bucket.device.type)
            if casts and torch.is_autocast_cache_enabled():
                # Else autocast would keep low-precision copies of released parameters, and use them after a step.
                torch.clear_autocast_cache()

    def _drop_idle(self, buckets: Iterable[Bucket]) -> None:
        """Release the buckets that rest or are prefetched."""
        for bucket in buckets:
            if bucket.index in self._in_use or bucket.is_persistent:
                continue
            if bucket.state is BucketState.GATHERING:
                if BEING_STARTED in bucket.exchanges:
                    # An interrupt broke it off. Its buffer is never reused: an exchange may still fill it.
                    bucket.abandon()
                    continue
                with suppress(DivergedError):
                    self._wait(bucket)
                    full = bucket.abandon()
                    assert full is not None, f"bucket {bucket.name!r} was being gathered without a buffer"
                    self._pool.give(full)
            self._release(bucket)

    def release_all(self, *, but_access: bool = False) -> None:
        """Release every bucket, prefetched ones too: no forward or backward is running.

        ``but_access``: except those of blocks that read or write them, for which values must not have changed.
        """
        if not self._is_active:
            return
        for bucket in self._buckets:
            bucket.drop_all(but_access=but_access)
            self.release_if_unneeded(bucket)
        self._drop_idle(self._buckets)

    def end_backward(self) -> None:
        """Record the end of a backward."""
        if self._is_active:
            self._record_use(self._schedules[IterationKind.TRAINING], END_OF_BACKWARD, IterationKind.TRAINING)

    def abandon_iteration(self, mode: IterationKind) -> None:
        """Drop the record of an iteration that an exception ended."""
        if self._schedules[mode].position:
            self._schedules[mode].restart()

    def end_iteration(self, mode: IterationKind) -> None:
        """End an iteration, and plan the next. Collective if this one did not follow the plan."""
        schedule = self._schedules[mode]
        if not self._is_active or not schedule.position or schedule.is_as_planned or self._start_over_if_diverged():
            schedule.restart()
            return
        if schedule.is_following:
            self._leave_plan(schedule, mode)
        uses = schedule.recorded()
        self.compare(f"ends an iteration of {mode.value} after {len(uses)} uses")
        ends = self._check.agree_ends([use.end for use in uses])
        schedule.restart([use._replace(end=end) for use, end in zip(uses, ends, strict=True)])
        assert schedule.plan is not None, "an order without a plan"
        if schedule.plan.needed_numel > schedule.limits.live_numel:
            self._warn(
                f"stage3_max_live_parameters={schedule.limits.live_numel} is exceeded: modules need "
                f"{schedule.plan.needed_numel} elements at a time",
                "live",
            )

    def parameters_changed(self, buckets: Iterable[Bucket], params: Iterable[nn.Parameter] | None = None) -> None:
        """The shards of ``buckets`` have new values: drop gathered, prefetched and secondary copies of the old ones.

        Args:
            buckets: The buckets.
            params: The parameters with new values, whose saved tensors and views become invalid; None: all of them.
        """
        buckets = list(buckets)
        changed = [param for bucket in buckets for param in bucket.params] if params is None else list(params)
        bump_versions(changed)
        if self._pool.viewed():
            stale = buckets if params is None else {p.zero_shard.bucket for p in changed}  # type: ignore[attr-defined]
            mark_views_stale(self._pool, stale)
        if self._is_active:
            for bucket in buckets:
                self.lost_writes.forget(bucket, None if params is None else changed)
            self._drop_idle(buckets)
        for bucket in buckets:
            self._sources[bucket.index].values_changed()
        self._read_ahead(IterationKind.TRAINING)

    def planned_gathers(self) -> Counter[int] | None:
        """How often the next step gathers each bucket, by its index; None before the order of uses is known."""
        plan = self._schedules[IterationKind.TRAINING].plan
        return None if plan is None else Counter(plan.uses[position].bucket for position in plan.gathers)

    def held(self) -> dict[str, int]:
        return {"secondary partition": sum(source.nbytes for source in self._sources)}

    def step_ended(self) -> None:
        self.release_all()
        self.end_iteration(IterationKind.TRAINING)


def _describe(bucket: Bucket) -> str:
    first, more = bucket.layout.slots[0], len(bucket.layout.slots) - 1
    others = f" and {more} more" if more else ""
    return f"parameter {first.name!r} {first.shape}{others} of module {bucket.name!r}"
