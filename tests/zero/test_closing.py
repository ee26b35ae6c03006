"""What an engine and an optimizer make on a rank, threads and process groups, is gone once they are closed."""

# covers zero/initialize.py

from __future__ import annotations

import gc
import threading
import time
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


def _num_threads() -> int:
    """Of this process, also those that are none of Python's.

    The thread that waits for exchanges that somebody asks about is one for the process, and is started by the first
    such question: on a slow machine that is in this test.
    """
    waiting = sum(thread.name == "zcomm-wait" for thread in threading.enumerate())
    assert waiting <= 1
    return len(list(Path("/proc/self/task").iterdir())) - waiting


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
    gc.collect()  # what tests before this one have left
    gc.disable()  # groups must not wait for it
    try:
        before, groups_before = _num_threads(), _groups()
        for index in range(5):
            _train_and_close(rank, config, ranks, uses_engine=index != 2)
        assert _groups() == groups_before
        deadline = time.monotonic() + 5
        while _num_threads() > before and time.monotonic() < deadline:
            time.sleep(0.02)  # threads end in their own time
        assert _num_threads() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("is_beside_others", [False, True], ids=["all ranks", "part of them"])
def test_no_thread_and_no_process_group_stays(*, is_beside_others: bool) -> None:
    run_ranks(4, _check_nothing_stays, is_beside_others)


def _check_groups_of_parts(rank: int) -> None:
    """Ranks in different numbers of groups, and groups that come and go, get groups that work."""
    logging = [dist.new_group([0]), dist.new_group([0, 1])]  # only in the first and the second rank
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    before = _groups()
    for _ in range(3):
        t = Topology(ranks_per_node=1, group=mine)
        rows = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(rows, torch.tensor([float(rank)]), group=t.world.group)
        assert [int(row) for row in rows] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert [str(r) for r in dist.get_process_group_ranks(t.world.group)] == [str(int(r)) for r in rows]
        t.close()
        with pytest.raises(StateError, match="Topology is closed"):
            zcomm.all_reduce(torch.zeros(1), group=t)
    assert _groups() == before
    for group in (*logging, *halves):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_groups_of_parts_come_and_go() -> None:
    run_ranks(4, _check_groups_of_parts)
