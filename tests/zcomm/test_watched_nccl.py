"""Ranks make different calls over the emulated NCCL: a DivergedError on each, and a new communicator."""

# covers zcomm/control.py

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import zcomm
from tests.nccl_job import nccl_alone
from tests.ranks import ranks_over, run_ranks
from zcomm import DivergedError, Topology, control

NUMEL = 8
NAMED = r"rank 0: (all_gather|the making of a communicator over NCCL|a collective) .*test_watched_nccl\.py:\d+"


def _gather(rank: int, topology: Topology, wire: str, numel: int = NUMEL) -> None:
    shard = torch.full((numel,), float(rank))
    full = torch.full((numel * topology.world_size,), -1.0)
    zcomm.all_gather_single(full, shard, topology, format=wire)
    expected = torch.arange(float(topology.world_size))
    assert torch.allclose(full.view(-1, numel)[:, 0], expected, atol=0.1), full


def _gather_later(rank: int, topology: Topology, wire: str) -> None:
    """Two calls are in flight, and the second is waited for."""
    shards, fulls = torch.ones(2, NUMEL), torch.empty(2, NUMEL * topology.world_size)
    works = [
        zcomm.all_gather_single(f, s, topology, format=wire, async_op=True) for f, s in zip(fulls, shards, strict=True)
    ]
    works[1].wait()


def _agree(topology: Topology) -> None:
    assert control.are_equal("the same", topology)


def _topology(world_size: int) -> Topology:
    topology = Topology(ranks_per_node=2, backend="nccl")
    topology.watch.period_s = 0.1
    _agree(topology)
    assert topology.has_two_hops == (world_size == 4)
    return topology


def _check_different_calls(rank: int, world_size: int, wire: str) -> None:
    ways: tuple[tuple[Callable[[Topology], None], Callable[[Topology], None]], ...] = (
        (lambda t: _gather(rank, t, wire), _agree),
        (lambda t: _gather_later(rank, t, wire), _agree),
        (lambda t: _gather(rank, t, wire), lambda t: _gather(rank, t, wire, 2 * NUMEL)),
    )
    with nccl_alone():
        for is_made in (True, False):
            for one, others in ways:
                topology = _topology(world_size)
                if is_made:
                    _gather(rank, topology, wire)
                with pytest.raises(DivergedError, match=NAMED):
                    (one if rank == 0 else others)(topology)
                _gather(rank, topology, wire)
                _agree(topology)
                topology.close()


@pytest.mark.parametrize("wire", ["int8", "int8:asym"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_call_of_one_rank_alone_is_named_on_all(world_size: int, wire: str) -> None:
    """In the pipeline and hop by hop; also while the communicator connects."""
    with ranks_over("nccl"):
        run_ranks(world_size, _check_different_calls, world_size, wire)


def _check_slow_ranks(rank: int) -> None:
    with nccl_alone():
        topology = _topology(2)
        before = topology.watch.num_deadlocks
        for late in (0, 1):
            for call in (lambda: _gather(rank, topology, "int8"), lambda: _agree(topology)):
                if rank == late:
                    time.sleep(1.5)
                call()
        assert topology.watch.num_deadlocks == before
        topology.close()


def test_a_slow_rank_is_waited_for() -> None:
    with ranks_over("nccl"):
        run_ranks(2, _check_slow_ranks)


def _check_closing(rank: int) -> None:
    with nccl_alone():
        topology = _topology(2)
        _gather(rank, topology, "int8")
        if rank == 1:
            topology.close()
            return
        with pytest.raises(DivergedError, match=r"rank 1: has closed its Topology at .*test_watched_nccl\.py:\d+"):
            _gather(rank, topology, "int8")
        topology.close()


def test_a_rank_that_has_closed_its_topology_is_named() -> None:
    with ranks_over("nccl"):
        run_ranks(2, _check_closing)
