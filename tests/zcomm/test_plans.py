"""Calls that were checked before: equal ones are not checked again, and whatever differs is found all the same."""

# covers zcomm/_collectives/plans.py

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import run_ranks
from zcomm import ConfigError, FormatError, LayoutError, StateError, Topology


def _check_equal_calls(rank: int) -> None:
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = half[rank // 2]
    topology = Topology(ranks_per_node=2)
    for _ in range(2):
        for group, world_size in ((mine, 2), (None, 4), (topology, 4)):
            full, shard = torch.empty(8), torch.full((8 // world_size,), float(rank))
            zcomm.all_gather_single(full, shard, group)
            first = 2 * (rank // 2) if group is mine else 0
            assert full.view(world_size, -1)[:, 0].tolist() == [float(first + peer) for peer in range(world_size)]
            # as many rows as the other group has ranks
            rows, part = torch.full((2, 8), 1.0), torch.empty(16 // world_size)
            zcomm.reduce_scatter_single(part, rows, group=group)
            assert part.eq(world_size).all()
            total = torch.ones(2, 8)
            zcomm.all_reduce(total, group=group, format="int8")
            assert torch.allclose(total, torch.tensor(float(world_size)), rtol=0.01)
            received = torch.empty(8)
            zcomm.all_to_all_single(received, torch.full((8,), float(rank)), group)
            assert received.view(world_size, -1)[:, 0].tolist() == [float(first + peer) for peer in range(world_size)]
    out, shard = torch.empty(32), torch.ones(8)
    zcomm.all_gather_single(out, shard)
    with pytest.raises(LayoutError, match="must not overlap"):
        zcomm.all_gather_single(out, out[4:12])
    with pytest.raises(LayoutError, match="requires_grad"):
        zcomm.all_gather_single(out, torch.ones(8, requires_grad=True))
    with pytest.raises(FormatError, match="random"):
        zcomm.all_gather_single(out, shard, random=zcomm.RandomKey(0, 0, 0))
    with pytest.raises(ConfigError, match="async_op must be True or False"):
        zcomm.all_gather_single(out, shard, async_op=0)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="world_size times"):
        zcomm.all_gather_single(out, shard, mine)
    summed = torch.ones(8)
    zcomm.all_reduce(summed, "sum")
    zcomm.all_reduce(summed, "avg")
    assert summed.eq(4).all()
    topology.close()
    with pytest.raises(StateError, match="closed"):
        zcomm.all_gather_single(out, shard, topology)
    for group in half:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)


def test_equal_calls_over_other_groups_and_with_other_arguments() -> None:
    run_ranks(4, _check_equal_calls)
