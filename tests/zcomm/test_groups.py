"""Closing a topology frees its process groups and threads; group names are never reused."""

# covers zcomm/_transport/groups.py zcomm/_transport/tagged_group.py

from __future__ import annotations

import gc
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import device_mesh, run_ranks
from zcomm import StateError, Topology
from zcomm._transport import groups
from zcomm._transport import topology as topology_module


def _num_threads() -> int:
    """The kernel's count of threads; one that has ended may be counted for a moment longer."""
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
            kept.append(topology)  # closing is enough: references may remain
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
    cases = [(None, 2, 1, True), (part, 1, 1, True), (None, 2, 5, False), (part, 1, 1, False)]
    for number, (group, per_node, num_groups, shares) in enumerate(cases):
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
            patch.setattr(topology_module, "SHARES_GROUPS", shares)
            topology = Topology(ranks_per_node=per_node, group=group)
            # Another test may have left a topology open, whose shared group this one uses.
            assert len(made) <= num_groups if shares else len(made) == num_groups
            check(len(made))
            topology.background  # noqa: B018
            check(len(made))
        topology.close()


def test_groups_may_be_closed_as_soon_as_they_are_made() -> None:
    """A rank that closed its group while another still connected to it made the other one fail."""
    run_ranks(4, _check_nobody_is_early)


def _check_sharing(rank: int) -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    first, second = Topology(ranks_per_node=2), Topology(ranks_per_node=2)
    first.companion, second.companion.companion  # noqa: B018  (made at the first use)
    assert len(dist.distributed_c10d._world.pg_map) <= before + 2
    # In another order on each rank, with equal sizes: only the tags keep them apart.
    topologies = [first, second, first.companion, second.companion, second.companion.companion]
    works, outputs = [], {}
    for index in sorted(range(len(topologies)), key=lambda index: (index * 3 + rank * 2) % len(topologies)):
        outputs[index] = torch.empty(4 * 3000)
        mine = torch.full((3000,), 10.0 * index + rank)
        works.append(zcomm.all_gather_single(outputs[index], mine, topologies[index], async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    for index, output in outputs.items():
        assert output.view(4, -1).eq(torch.tensor([[10.0 * index + peer] for peer in range(4)])).all(), index
    # Ranks 0 and 1 have closed their last topology, ranks 2 and 3 have not: all make a new group.
    if rank < 2:
        second.close()
        first.close()
    third = Topology(ranks_per_node=2)
    second.close()
    first.close()
    full = torch.empty(4)
    zcomm.all_gather_single(full, torch.full((1,), float(rank)), third)
    assert full.tolist() == [0, 1, 2, 3]
    third.close()
    assert len(dist.distributed_c10d._world.pg_map) == before


def test_topologies_of_the_same_ranks_share_groups_and_nothing_else() -> None:
    run_ranks(4, _check_sharing)


def _check_collected(rank: int) -> None:
    parent = dist.new_group([0, 1], timeout=timedelta(seconds=120), backend="gloo")
    forgotten = Topology(ranks_per_node=2, group=parent)
    full = torch.empty(2)
    zcomm.all_gather_single(full, torch.ones(1), forgotten)
    del forgotten
    gc.collect()
    topology = Topology(ranks_per_node=2, group=parent)
    zcomm.all_gather_single(full, torch.ones(1), topology)
    groups = len(dist.distributed_c10d._world.pg_map)
    start = time.monotonic()
    if rank == 0:
        topology.close()
        assert len(dist.distributed_c10d._world.pg_map) < groups, "a topology that is gone keeps the group"
    else:
        with pytest.raises(zcomm.DivergedError, match="rank 0: has closed its Topology"):
            zcomm.all_gather_single(full, torch.ones(1), topology)
    assert time.monotonic() - start < 60
    dist.barrier()
    topology.close()
    dist.destroy_process_group(parent)


def test_a_topology_that_was_collected_keeps_no_group_open() -> None:
    """Else the others would wait for a rank that closes its last one until the timeout of the group."""
    run_ranks(2, _check_collected)


def _check_nothing_is_split_off(rank: int) -> None:
    """With a device bound to the default group torch would split a communicator, which all ranks must call."""
    default, seen = dist.group.WORLD, []
    make = dist.new_group
    assert default is not None

    def recorded(*args: Any, **options: Any) -> Any:
        seen.append((options["use_local_synchronization"], default.bound_device_id))
        return make(*args, **options)

    mesh = device_mesh((2, 2), ("dp", "tp"))
    bound = torch.device("cuda", 0)
    default.bound_device_id = bound
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", recorded)
            Topology(ranks_per_node=1, group=mesh.get_group("dp")).close()
            assert seen
            assert all(entry == (True, None) for entry in seen), seen
            assert default.bound_device_id == bound
    finally:
        default.bound_device_id = None


def test_groups_of_some_ranks_are_not_split_off_the_default_group() -> None:
    run_ranks(4, _check_nothing_is_split_off)
