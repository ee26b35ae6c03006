"""Latency of every collective in every format, over one hop and two, on 2 nodes of 2 ranks on this machine.

    pytest bench/bench_collectives_micro.py     times; --benchmark-disable: each once, in seconds

This process is rank 0 and times itself. It sends each call to the three other ranks before the clock starts. ``torch``
is torch.distributed's own call. Each result is compared with the exact one in float64 (``zcomm._bench.checking``): no
error may exceed the format's bound, and replicated results must be equal on all ranks. ``zcomm bench`` covers more
sizes, real machines and emulated networks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import zcomm
from zcomm import DeltaGather, RandomKey, Residual, Topology
from zcomm._bench.checking import check
from zcomm._bench.data import Tiles
from zcomm._bench.workloads import Workload, WorkloadFormats, wire_of
from zcomm._stateful.node_sums import NodeSums

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
FORMATS = (
    *zcomm.FORMATS, "int8+int4",
    "int8:asym", "int4:asym", "int8:hadamard", "int4:hadamard", "int8:stochastic", "int4:stochastic",
)  # fmt: skip
WIRES = [("torch", 1), *((name, hops) for name in FORMATS for hops in (1, 2) if hops == 2 or "+" not in name)]
DELTAS = [wire for wire in WIRES if wire[0] in FORMATS and "+" not in wire[0]]
NUM_RANKS, RANKS_PER_NODE = 4, 2
NBYTES = 2**16
ROUNDS = {"rounds": 30, "warmup_rounds": 3}
TIMEOUT = timedelta(seconds=240)

Call = tuple[str, str, int]
"""Collective, format (``torch``: torch's own), hops."""


@cache
def _topology() -> Topology:
    return Topology(ranks_per_node=RANKS_PER_NODE)


@cache
def _tiles() -> Tiles:
    return Tiles(torch.float32)


class Plain:
    """A collective of ``zcomm bench``."""

    def __init__(self, collective: str, format: str, num_hops: int) -> None:
        self.work = Workload(collective, NBYTES, _tiles(), _topology(), "avg")
        self.wire: WorkloadFormats | None = None if format == "torch" else wire_of(format, num_hops)

    def prepare(self) -> None:
        """Restore the input: an all-reduce overwrites it."""
        self.work.reset()

    def run(self) -> None:
        """Make the call."""
        if self.wire is None:
            self.work.call_torch()
        else:
            self.work.call_zcomm(self.wire)

    def num_wrong(self) -> int:
        """Make one more call and count its wrong elements."""
        self.work.poison()
        self.run()
        return check(self.work, self.wire).num_wrong


class Difference:
    """A gather of deltas, with new random numbers at each call."""

    def __init__(self, _: str, format: str, num_hops: int) -> None:
        wire, numel = zcomm.get_format(format), NBYTES // 4 // NUM_RANKS
        self.replica = torch.zeros(NUM_RANKS * numel)
        self.gather = DeltaGather(self.replica, _topology() if num_hops == 2 else None, format=wire)
        self.shard = _tiles().of_rank(dist.get_rank(), 0, numel).clone()
        self.step, self.is_random = 0, wire.is_random
        self.gather.refresh(self.shard)

    def prepare(self) -> None:
        """Change the shard, so that there is a delta to send."""
        self.shard.add_(1e-3)

    def run(self) -> None:
        """Send the delta."""
        self.step += 1
        self.gather.update(self.shard, random=RandomKey(0, 0, self.step) if self.is_random else None)

    def num_wrong(self) -> int:
        """Elements of this rank's row with an error above 1 % after six calls, each of which sends what is missing."""
        self.shard.neg_()
        for _ in range(6):
            self.run()
        return int(((self.gather.held - self.shard).abs() > 1e-2 * self.shard.abs().max()).sum())


class WithResidual:
    """An all-reduce with a residual: its rounding error is added to the next call."""

    def __init__(self, _: str, format: str, __: int) -> None:
        self.work = Workload("all_reduce", NBYTES, _tiles(), _topology(), "avg")
        self.wire = wire_of(format, 2)
        self.residual = Residual(_topology(), [("all", 0, self.work.numel)], self.work.numel)

    def prepare(self) -> None:
        """Restore the input: an all-reduce overwrites it."""
        self.work.reset()

    def run(self) -> None:
        """Reduce, and keep the residual."""
        assert self.wire is not None
        formats = self.wire.of_reduction()
        zcomm.all_reduce(self.work.output, "avg", _topology(), format=formats, residual=self.residual)
        self.residual.commit()

    def num_wrong(self) -> int:
        """Wrong elements of a first call, whose residual is zero."""
        self.residual = Residual(_topology(), [("all", 0, self.work.numel)], self.work.numel)
        self.work.poison()
        self.run()
        return check(self.work, self.wire).num_wrong


class OfNodes:
    """Node sums: two micro-batches are summed inside the node, then reduced between nodes once."""

    def __init__(self, _: str, format: str, __: int) -> None:
        self.work = Workload("reduce_scatter", NBYTES, _tiles(), _topology(), "avg")
        self.wire = wire_of(format, 2)
        assert self.wire is not None
        self.sums = NodeSums(_topology(), self.work.shard_numel, (self.wire.inside, self.wire.between))
        rows = self.work.input.view(NUM_RANKS // RANKS_PER_NODE, RANKS_PER_NODE, -1)  # by node and rank in it
        self.input = rows.transpose(0, 1).flatten()  # by rank in the node and node, as it numbers them

    def prepare(self) -> None:
        """Do nothing: the input is not overwritten."""

    def run(self) -> None:
        """Sum the same input twice and reduce: the result is twice the mean."""
        self.sums.add(self.input)
        self.sums.reduce(self.work.output, self.input)

    def num_wrong(self) -> int:
        """Wrong elements of half the result."""
        self.run()
        self.work.output.mul_(0.5)
        return check(self.work, self.wire).num_wrong


CALLS: dict[str, Callable[[str, str, int], Any]] = {
    "delta_gather": Difference, "all_reduce_with_residual": WithResidual, "node_sums": OfNodes,
}  # fmt: skip


def _follow(rank: int, store: str, pipe: Connection) -> None:
    """Run a rank other than the first: construct the call received, ``run`` it or ``check`` it; None ends the rank."""
    torch.set_num_threads(1)
    _join(rank, store)
    call: Any = None
    while (request := pipe.recv()) is not None:
        if request == "run":
            call.prepare()
            call.run()
        elif request == "check":
            call.num_wrong()
        else:
            call = CALLS.get(request[0], Plain)(*request)
    dist.destroy_process_group()


def _join(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)


class Ranks:
    """The ranks; this process is the first."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        context = mp.get_context("forkserver")
        self._pipes: list[Any] = []
        for rank in range(1, NUM_RANKS):
            here, there = context.Pipe()
            context.Process(target=_follow, args=(rank, store, there), daemon=True).start()
            self._pipes.append(here)
        self._num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        _join(0, store)

    def send(self, request: str | Call | None) -> None:
        """Send ``request`` to all other ranks."""
        for pipe in self._pipes:
            pipe.send(request)

    def close(self) -> None:
        """End the other ranks and leave the group."""
        self.send(None)
        dist.destroy_process_group()
        torch.set_num_threads(self._num_threads)
        self._folder.cleanup()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Start the ranks once for all tests."""
    all_ranks = Ranks()
    yield all_ranks
    all_ranks.close()
    for cached in (_topology, _tiles):
        cached.cache_clear()


def _time(benchmark: Any, ranks: Ranks, request: Call) -> None:
    ranks.send(request)
    call = CALLS.get(request[0], Plain)(*request)

    def start_others() -> None:
        ranks.send("run")
        call.prepare()

    benchmark.pedantic(call.run, setup=start_others, **ROUNDS)
    ranks.send("check")
    assert call.num_wrong() == 0


@pytest.mark.parametrize(("format", "num_hops"), WIRES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective(benchmark: Any, ranks: Ranks, collective: str, format: str, num_hops: int) -> None:
    """Each collective of zcomm, on a tensor of 64 KiB."""
    _time(benchmark, ranks, (collective, format, num_hops))


def test_secondary_gather(benchmark: Any, ranks: Ranks) -> None:
    """hpZ: gather the shards of this node's ranks, uncompressed."""
    _time(benchmark, ranks, ("secondary_gather", "none", 1))


@pytest.mark.parametrize(("format", "num_hops"), DELTAS)
def test_delta_gather(benchmark: Any, ranks: Ranks, format: str, num_hops: int) -> None:
    """delta-hpZ: gather the deltas since the last call."""
    _time(benchmark, ranks, ("delta_gather", format, num_hops))


@pytest.mark.parametrize("format", ["int8", "int4", "nf4", "fp8_e4m3", "int8+int4"])
@pytest.mark.parametrize("kind", ["all_reduce_with_residual", "node_sums"])
def test_reductions_that_keep_something(benchmark: Any, ranks: Ranks, kind: str, format: str) -> None:
    """Residuals are kept between steps, node sums between micro-batches."""
    _time(benchmark, ranks, (kind, format, 2))
