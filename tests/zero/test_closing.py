"""Closing an engine and an optimizer removes the threads and process groups that they made."""

# covers zero/initialize.py

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import device_mesh, run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from zcomm import StateError, Topology
from zero import ZeroOptimizer, initialize

SHARED_THREADS = ("zcomm-send", "zcomm-wait", "zcomm-drop")


def _num_threads() -> int:
    """Threads of this process, including those that Python does not know.

    Those of tagged exchanges are shared by the process, and started when the first one needs them: on a slow machine
    that happens in this test.
    """
    shared = [thread.name for thread in threading.enumerate() if thread.name in SHARED_THREADS]
    assert len(shared) == len(set(shared))
    return len(list(Path("/proc/self/task").iterdir())) - len(shared)


def _groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _train_and_close(rank: int, config: dict[str, Any], ranks: Any, *, uses_engine: bool) -> None:
    model = new_model()
    inner = torch.optim.AdamW(groups_of(model), lr=1e-2)
    if uses_engine:
        engine = initialize(model=model, optimizer=inner, config=config, mpu=ranks).engine
        engine.backward(loss_of(engine, *batch(0, 0, rank)))
        engine.step()
        engine.destroy()
    else:
        optimizer = ZeroOptimizer(model, inner, config=config, group=ranks)
        loss_of(model, *batch(0, 0, rank)).backward()
        optimizer.step()
        optimizer.close()


def _check_nothing_stays(rank: int, is_beside_others: bool) -> None:  # noqa: FBT001
    ranks = None
    if is_beside_others:
        ranks = device_mesh((2, 2), ("dp", "tp"))
    config = {"zero_optimization": {"stage": 3}, "zcomm": {"ranks_per_node": 1 if is_beside_others else 2}}
    gc.collect()  # left by earlier tests
    gc.disable()  # groups must not wait for it
    try:
        before, groups_before = _num_threads(), _groups()
        for index in range(5):
            _train_and_close(rank, config, ranks, uses_engine=index != 2)
        assert _groups() == groups_before
        deadline = time.monotonic() + 5
        while _num_threads() > before and time.monotonic() < deadline:
            time.sleep(0.02)  # threads end asynchronously
        assert _num_threads() <= before, [thread.name for thread in threading.enumerate()]
    finally:
        gc.enable()


@pytest.mark.parametrize("is_beside_others", [False, True], ids=["all ranks", "part of them"])
def test_no_thread_and_no_process_group_stays(*, is_beside_others: bool) -> None:
    run_ranks(4, _check_nothing_stays, is_beside_others)


def _check_number(rank: int) -> None:
    """Stage 3 on 2 x 2 ranks: two groups besides the job's own, also for two optimizers whose backwards interleave."""
    config = {"zero_optimization": {"stage": 3}, "zcomm": {"ranks_per_node": 2}}
    before, threads = _groups(), _num_threads()
    models = [new_model(), new_model(), new_model()]
    first, second, alone = (
        ZeroOptimizer(model, torch.optim.AdamW(groups_of(model), lr=1e-2), config=config) for model in models
    )
    made = _groups() - before  # fewer than 2 if another test has left a topology of these ranks open
    assert made <= 2
    for step in range(3):
        # Reductions of one model while the other's parameters are gathered.
        (loss_of(models[0], *batch(step, 0, rank)) + loss_of(models[1], *batch(step, 0, rank))).backward()
        loss_of(models[2], *batch(step, 0, rank)).backward()
        for optimizer in (second, alone, first):
            optimizer.step()
            optimizer.zero_grad()
    assert _groups() == before + made
    assert _num_threads() < threads + 2 * 3 + 12  # three for each group, and those of queues and the watch
    found = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    for values in found[:2]:
        assert all(torch.equal(values[name], expected) for name, expected in found[2].items())
    for optimizer in (first, second, alone):
        optimizer.close()
    assert _groups() == before


def test_optimizers_share_two_process_groups() -> None:
    run_ranks(4, _check_number)


def _check_groups_of_parts(rank: int) -> None:
    """Ranks in different numbers of groups, and groups that are made and closed in turn, get groups that work."""
    logging = [dist.new_group([0]), dist.new_group([0, 1])]  # on the first and the second rank only
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    before = _groups()
    for _ in range(3):
        t = Topology(ranks_per_node=1, group=mine)
        rows = torch.zeros(2)
        zcomm.all_gather_single(rows, torch.tensor([float(rank)]), t)
        assert rows.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert t.global_ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
        t.close()
        with pytest.raises(StateError, match="Topology is closed"):
            zcomm.all_reduce(torch.zeros(1), group=t)
    assert _groups() == before
    for group in (*logging, *halves):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_groups_of_parts_come_and_go() -> None:
    run_ranks(4, _check_groups_of_parts)


NOT_CLOSED: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "delta": {"stage": 2},
    "delta_hpz": {"stage": 3},
    "host memory": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
"""Sections zero_optimization, by the mode or what else is special."""


def _check_freed(rank: int, name: str, *, uses_engine: bool) -> None:
    model = new_model()
    inner: Any = torch.optim.AdamW(groups_of(model), lr=1e-2)
    mode = {"mode": name} if "delta" in name else {}
    config = {"zero_optimization": NOT_CLOSED[name], "zcomm": {"ranks_per_node": 1, **mode}}
    if uses_engine:
        inner = initialize(model=model, optimizer=inner, config=config).engine
        inner.backward(loss_of(inner, *batch(0, 0, rank)))
    else:
        inner = ZeroOptimizer(model, inner, config=config)
        loss_of(model, *batch(0, 0, rank)).backward()
    inner.step()
    loss = loss_of(model, *batch(1, 0, rank))
    loss.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):  # and within a backward that ended early
        loss.backward()
    del loss
    last = weakref.ref(model), weakref.ref(inner)
    del model, inner
    gc.collect()
    gc.collect()  # of a thread that the first has ended
    assert [thing() for thing in last] == [None, None]


@pytest.mark.parametrize("name", NOT_CLOSED)
def test_what_is_dropped_without_close_is_freed(name: str) -> None:
    for uses_engine in (False, True):
        run_ranks(2, partial(_check_freed, name=name, uses_engine=uses_engine))
