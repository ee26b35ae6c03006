"""The stage-3 schedule without processes: plans keep their limits, and the gatherer works at any network speed."""

# covers zero/_config/settings.py zero/_gather/gatherer.py zero/_sharding/bucket.py

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from zcomm import StateError, Topology
from zero._config.settings import ZeroSettings, resolve
from zero._gather.gather_sources import gather_options
from zero._gather.gatherer import Gatherer, IterationKind
from zero._modes.mode import Mode
from zero._sharding.bucket import Bucket, BucketState, Hold
from zero._sharding.buffer_pool import BufferPool
from zero._sharding.layout import BucketLayout
from zero._sharding.prefetch_plan import Limits, PrefetchPlan, Schedule, Use, make_plan
from zero._storage.parameter_storage import ParameterStorage
from zero._storage.tier_settings import ON_DEVICE

SIZES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=6)
LIMITS = st.builds(
    Limits, prefetch_numel=st.integers(0, 100), live_numel=st.integers(0, 150), reuse_numel=st.integers(0, 200)
)


@st.composite
def orders(draw: Any) -> tuple[list[list[int]], list[Use]]:
    """Sizes, and an order of uses that start and end at random; a bucket has one use at a time."""
    sizes = draw(SIZES)
    started: list[list[int]] = []
    in_use: dict[int, int] = {}
    for bucket in draw(st.lists(st.integers(0, len(sizes) - 1), max_size=25)):
        if bucket in in_use:
            started[in_use.pop(bucket)][1] = len(started)
        else:
            in_use[bucket] = len(started)
            started.append([bucket, 0])
    return sizes, [Use(bucket, end or len(started)) for bucket, end in started]


def _replay(plan: PrefetchPlan, sizes: list[list[int]]) -> list[tuple[int, int, int]]:
    """Follow ``plan`` step by step. Returns live, prefetched and needed elements after each use has started."""
    progress: dict[int, int] = {}  # bucket -> exchanges started since it was last released
    in_use: set[int] = set()
    kept: set[int] = set()
    seen = []
    for position, use in enumerate(plan.uses):
        in_use.add(use.bucket)
        kept.discard(use.bucket)
        progress[use.bucket] = len(sizes[use.bucket])
        for bucket, stop in plan.prefetches[position]:
            assert bucket not in in_use, "started while in use"
            assert bucket not in kept, "started although it is full"
            assert progress.get(bucket, 0) == stop - 1, "exchanges out of order"
            progress[bucket] = stop
        ahead = sum(sum(sizes[b][:n]) for b, n in progress.items() if b not in in_use and b not in kept)
        seen.append((sum(sum(sizes[b]) for b in progress), ahead, sum(sum(sizes[b]) for b in in_use)))
        for earlier in range(position + 1):
            ended = plan.uses[earlier]
            if ended.end == position + 1:
                in_use.discard(ended.bucket)
                if plan.keeps[earlier]:
                    kept.add(ended.bucket)
                else:
                    del progress[ended.bucket]
    assert not set(progress) - in_use, "prefetched or kept for nobody"
    return seen


@settings(max_examples=200, deadline=None)
@given(orders(), LIMITS)
def test_a_plan_stays_within_its_limits(order: tuple[list[list[int]], list[Use]], limits: Limits) -> None:
    sizes, uses = order
    plan = make_plan(uses, sizes, limits)
    seen = _replay(plan, sizes)
    for live, ahead, needed in seen:
        assert ahead <= limits.prefetch_numel
        assert live <= max(limits.live_numel, needed)
    assert plan.needed_numel == max((needed for _, _, needed in seen), default=0)
    if not limits.reuse_numel:
        assert not any(plan.keeps)


@settings(max_examples=100, deadline=None)
@given(orders())
def test_gathers_start_in_the_order_of_their_uses(order: tuple[list[list[int]], list[Use]]) -> None:
    sizes, uses = order
    plan = make_plan(uses, sizes, Limits(prefetch_numel=60, live_numel=10**6, reuse_numel=0))
    issued: list[tuple[int, int]] = []
    progress: dict[int, int] = {}
    for position, use in enumerate(plan.uses):
        for index in range(progress.pop(use.bucket, 0), len(sizes[use.bucket])):
            issued.append((use.bucket, index))
        for bucket, stop in plan.prefetches[position]:
            issued.append((bucket, stop - 1))
            progress[bucket] = stop
    assert issued == [(use.bucket, index) for use in uses for index in range(len(sizes[use.bucket]))]


def test_what_a_plan_looks_like() -> None:
    """Three layers of 10, forward and backward: the next layer is prefetched, the last one is kept."""
    uses = [Use(b, at + 1) for at, b in enumerate((0, 1, 2, 2, 1, 0))]
    plan = make_plan(uses, [[10], [10], [10]], Limits(prefetch_numel=10, live_numel=20, reuse_numel=1))
    assert plan.prefetches == (((1, 1),), ((2, 1),), ((1, 1),), (), ((0, 1),), ())
    assert plan.keeps == (False, False, True, False, False, False)
    assert make_plan(uses, [[10]] * 3, Limits(prefetch_numel=9, live_numel=99, reuse_numel=0)).prefetches == ((),) * 6
    assert make_plan(uses, [[10]] * 3, Limits(prefetch_numel=99, live_numel=19, reuse_numel=0)).prefetches == ((),) * 6
    in_part = make_plan(uses[:2], [[10], [4, 6]], Limits(prefetch_numel=4, live_numel=20, reuse_numel=0))
    assert in_part.prefetches == (((1, 1),), ())
    both = make_plan(uses, [[10]] * 3, Limits(prefetch_numel=0, live_numel=99, reuse_numel=41))
    assert both.keeps == (True, True, True, False, False, False)
    assert make_plan(uses, [[10]] * 3, Limits(prefetch_numel=0, live_numel=99, reuse_numel=40)).keeps[0] is False


def test_a_schedule_learns_a_new_order() -> None:
    schedule = Schedule([[10]] * 3, Limits(prefetch_numel=10, live_numel=99, reuse_numel=0))

    def run(*buckets: int) -> list[Any]:
        started = []
        for bucket in buckets:
            if not schedule.expects(bucket):
                schedule.leave_plan()
            started.append(schedule.start_use(bucket))
            schedule.end_use(bucket)
        schedule.restart(None if schedule.is_as_planned else schedule.recorded())
        return started

    assert run(0, 1, 2) == [(), (), ()]
    assert run(0, 1, 2) == [((1, 1),), ((2, 1),), ()]
    assert run(0, 2, 1) == [((1, 1),), (), ()], "from the change on nothing is prefetched"
    assert run(0, 2, 1) == [((2, 1),), ((1, 1),), ()]
    assert run(0, 2) == [((2, 1),), ((1, 1),)], "a shorter order is found out at its end"
    assert run(0, 2) == [((2, 1),), ()]


class FakeExchange:
    """Completes at any time, at the latest when it is waited for; its values appear only then."""

    def __init__(self, bucket: Bucket, columns: slice, full: torch.Tensor) -> None:
        self.full: torch.Tensor | None = full
        self.has_ended = False
        self.values = bucket.shard[columns].clone()
        full.fill_(float("nan"))

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            assert self.full is not None
            self.full.copy_(self.values)
            self.full = None  # complete exchanges must not hold what they have filled

    wait = end


class FakeNetwork:
    def __init__(self) -> None:
        self.exchanges: list[FakeExchange] = []

    def source_of(self, bucket: Bucket, pieces: int) -> Any:
        edges = [bucket.layout.numel * i // pieces for i in range(pieces + 1)]
        columns = [slice(a, b) for a, b in pairwise(edges)]

        def start(index: int, full: torch.Tensor) -> FakeExchange:
            exchange = FakeExchange(bucket, columns[index], full[columns[index]])
            self.exchanges.append(exchange)
            return exchange

        numels = [c.stop - c.start for c in columns]
        source = SimpleNamespace(start=start, exchanges=numels, reads_shard=True, keeps_values=False, nbytes=0)
        source.gathered, source.values_changed = lambda _full: None, lambda: None
        return source


class PoisonedPool(BufferPool):
    def give(self, buffer: torch.Tensor) -> None:
        buffer.fill_(float("nan"))
        super().give(buffer)


class BucketsUnderAnyNetwork(RuleBasedStateMachine):
    """The gatherer of one rank whose exchanges complete in any order, under uses that start and end in any order."""

    @initialize(seed=st.integers(0, 999), prefetch=st.booleans(), reuse=st.sampled_from((0, 900, 10**6)))
    def build(self, *, seed: int, prefetch: bool, reuse: int) -> None:
        self.random = random.Random(seed)
        self.network = FakeNetwork()
        topology = Topology.single()
        options = ZeroSettings(stage=3, stage3_prefetch_bucket_size=10**6 * prefetch, stage3_max_reuse_distance=reuse)
        effective = resolve(options, topology)
        self.pool = PoisonedPool(torch.device("cpu"))
        self.parameter_storage = ParameterStorage(ON_DEVICE, torch.device("cpu"), topology, {})
        self.buckets = [self._bucket(i, effective) for i in range(4)]
        self.gatherer = Gatherer(
            self.buckets,
            Mode().sources(self.buckets, gather_options(options, effective, topology), effective),
            options,
            effective,
            self.pool,
            self.parameter_storage,
        )
        self.gatherer._sources = [self.network.source_of(b, self.random.randint(1, 3)) for b in self.buckets]
        exchanges = [source.exchanges for source in self.gatherer._sources]
        limits = Limits(prefetch_numel=1200 * prefetch, live_numel=self.random.choice((1500, 10**6)), reuse_numel=reuse)
        self.gatherer._schedules = {mode: Schedule(exchanges, limits) for mode in IterationKind}
        self.order = [self.random.randrange(4) for _ in range(12)]
        self.position = 0
        self.num_held = Counter[int]()
        self.go_on(len(self.order))
        self.a_step_ends()

    def _bucket(self, index: int, effective: Any) -> Bucket:
        param = nn.Parameter(torch.full((256 * (index + 1),), index + 1.0))
        layout = BucketLayout.of([f"p{index}"], [tuple(param.shape)], 1)
        bucket = Bucket(index, f"layer{index}", layout, [param])
        bucket.partition(
            bucket.flatten(), effective.stage, self.parameter_storage, keeps_exact_master=False, keeps_exact_shard=False
        )
        return bucket

    def _use(self, index: int) -> None:
        self.num_held[index] += 1
        self.buckets[index].hold(Hold.FORWARD)
        self.gatherer.acquire(self.buckets[index], IterationKind.TRAINING)

    def _end(self, index: int) -> None:
        self.num_held[index] -= 1
        self.buckets[index].drop(Hold.FORWARD)
        self.gatherer.release_if_unneeded(self.buckets[index])

    @rule()
    def use_the_next(self) -> None:
        index = self.order[self.position % len(self.order)]
        self.position += 1
        self._use(index)

    @rule(num_uses=st.integers(1, 12))
    def go_on(self, num_uses: int) -> None:
        """Run the next uses in the expected order."""
        for _ in range(num_uses):
            index = self.order[self.position % len(self.order)]
            self.use_the_next()
            self.what_is_in_use_is_full_and_right()
            self._end(index)

    @rule(index=st.integers(0, 3))
    def use_another(self, index: int) -> None:
        self._use(index)

    @precondition(lambda self: self.num_held.total())
    @rule(choice=st.integers(0, 99))
    def end_a_use(self, choice: int) -> None:
        held = sorted(self.num_held.elements())
        self._end(held[choice % len(held)])

    @rule()
    def end_all_uses(self) -> None:
        for index in list(self.num_held.elements()):
            self._end(index)

    @rule()
    def some_exchange_ends(self) -> None:
        running = [e for e in self.network.exchanges if not e.has_ended]
        if running:
            self.random.choice(running).end()

    @rule()
    def a_step_ends(self) -> None:
        self.num_held.clear()
        self.position = 0
        self.gatherer.release_all()
        self.gatherer.end_iteration(IterationKind.TRAINING)
        for bucket in self.buckets:
            bucket.shard.add_(4)
            assert bucket.state is BucketState.SHARDED
        self.gatherer.parameters_changed(self.buckets)
        assert all(e.has_ended for e in self.network.exchanges), "a buffer went back while it was being filled"
        self.network.exchanges.clear()

    @rule(num_uses=st.integers(0, 12))
    def values_change(self, num_uses: int) -> None:
        """Change the values of all buckets that are not in use."""
        idle = [bucket for bucket in self.buckets if not self.num_held[bucket.index]]
        for bucket in idle:
            bucket.shard.add_(4)
        self.gatherer.parameters_changed(idle)
        self.go_on(num_uses)

    @invariant()
    def what_is_in_use_is_full_and_right(self) -> None:
        if not hasattr(self, "buckets"):
            return
        for index, bucket in enumerate(self.buckets):
            if self.num_held[index]:
                assert bucket.state is BucketState.FULL
                assert torch.equal(bucket.params[0].detach(), bucket.shard)
        owned = [b.full.data_ptr() for b in self.buckets if b.full is not None]
        assert len(set(owned)) == len(owned), "two buckets share a buffer"
        free = {t.data_ptr() for buffers in self.pool._free.values() for t in buffers}
        assert not free & set(owned), "a buffer in use is free"


TestBuckets = BucketsUnderAnyNetwork.TestCase
TestBuckets.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_impossible_transitions_are_named() -> None:
    bucket = Bucket(0, "layer", BucketLayout.of(["p"], [(3,)], 1), [nn.Parameter(torch.ones(3))])
    with pytest.raises(StateError, match="'layer' cannot go from sharded to full"):
        bucket.expose()
