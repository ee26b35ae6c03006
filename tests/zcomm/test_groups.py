"""What topologies make of process groups goes with them: threads, and names that are never used twice."""

# covers zcomm/_transport/groups.py

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import device_mesh, run_ranks
from zcomm import StateError, Topology
from zcomm._transport import groups


def _num_threads() -> int:
    """As the kernel counts them; one that has ended may be counted for a moment longer."""
    counts = []
    for _ in range(20):
        counts.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
        time.sleep(0.01)
    return min(counts)


def _check_threads_go(rank: int) -> None:
    part = device_mesh((2, 2), ("dp", "tp")).get_group("dp")
    kept = []
    for group, per_node in ((None, 2), (part, 1), (part, 2)):
        before = _num_threads()
        for turn in range(3):
            topology = Topology(ranks_per_node=per_node, group=group)
            topology.companion, topology.background, topology.watch  # noqa: B018  (made at the first use)
            total = torch.full((5,), float(rank + turn))
            zcomm.all_reduce(total, group=topology)
            ranks = dist.get_process_group_ranks(group) if group else range(4)
            assert total.tolist() == [float(sum(rank + turn for rank in ranks))] * 5
            assert _num_threads() > before
            topology.close()
            kept.append(topology)  # closing is enough: nobody has to let go of it
            assert _num_threads() == before
    for topology in kept:
        with pytest.raises(StateError, match="closed"):
            zcomm.all_reduce(torch.zeros(5), group=topology)


def test_a_closed_topology_keeps_no_thread_and_does_nothing() -> None:
    run_ranks(4, _check_threads_go)


def _check_nobody_is_early(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    part = device_mesh((2, 2), ("dp", "tp")).get_group("dp")
    new_group = groups.new_group
    last = dist.get_world_size() - 1
    for number, (group, per_node, num_groups) in enumerate([(None, 2, 5), (part, 1, 1)]):
        made = []

        def slowly(*args: Any, made: list[str] = made, number: int = number, **keywords: Any) -> Any:
            time.sleep(0.1 if rank == last else 0)
            made.append(f"{number}:{rank}:{len(made)}")
            result = new_group(*args, **keywords)
            store.set(made[-1], "made")
            return result

        def check(count: int, number: int = number, group: dist.ProcessGroup | None = group) -> None:
            for other in dist.get_process_group_ranks(group) if group else range(last + 1):
                assert all(store.check([f"{number}:{other}:{index}"]) for index in range(count)), (other, count)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(groups, "new_group", slowly)
            topology = Topology(ranks_per_node=per_node, group=group)
            check(num_groups)
            topology.background  # noqa: B018
            check(num_groups + 1)
        topology.close()


def test_groups_may_be_closed_as_soon_as_they_are_made() -> None:
    """A rank that was already gone when another still connected to it made that one fail."""
    run_ranks(4, _check_nobody_is_early)
