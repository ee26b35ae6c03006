"""The choice of backend="nccl": its refusals, on every rank with the reason, and its calls of C++."""

# covers zcomm/_collectives/nccl_steps.py

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import run_ranks
from zcomm import Topology
from zcomm._collectives import nccl_steps
from zcomm._collectives.encoder import Encoder
from zcomm._formats.formats import get_format
from zcomm._formats.message import layout_of
from zcomm._transport import backend_choice, nccl_communicators
from zcomm._transport.backend import Hop
from zcomm._transport.route import Route
from zcomm._transport.topology import hop_of_group
from zcomm._transport.work import Link
from zcomm.errors import BackendUnavailableError, CommunicationError, ConfigError

F32 = torch.float32


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="'auto' or 'torch' or 'nccl': backend='mpi'"):
        Topology(ranks_per_node=1, backend="mpi")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kernels must be 'auto' or 'native' .*: kernels='fast'"):
        Topology.single(kernels="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="backend='gloo'"):
        zcomm.all_gather_single(torch.zeros(2), torch.zeros(2), Topology.single(), backend="gloo")  # type: ignore[arg-type]


def test_a_build_without_cuda_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice.kernels, "native", lambda: SimpleNamespace(build_info=lambda: {"cuda": None}))
    with pytest.raises(BackendUnavailableError, match="without CUDA: build it where nvcc is found"):
        Topology.single(backend="nccl")
    assert Topology.single().backend == "torch"


def _check_refused_on_every_rank(rank: int) -> None:
    world_size = dist.get_world_size()
    shard, full = torch.ones(8), torch.ones(8 * world_size)
    topology = Topology(ranks_per_node=world_size)
    calls: list[Any] = [
        lambda: zcomm.all_gather_single(full, shard, format="int8", backend="nccl"),
        lambda: zcomm.reduce_scatter_single(shard, full, group=topology, backend="nccl"),
        lambda: zcomm.all_reduce(full, group=topology, backend="nccl"),
        lambda: zcomm.all_to_all_single(full, full.clone(), backend="nccl"),
    ]
    for call in calls:
        with pytest.raises(BackendUnavailableError, match=r"takes CUDA tensors, got device=cpu; use backend='torch'"):
            call()
    topology.backend = "nccl"  # a build without CUDA cannot make one
    with pytest.raises(BackendUnavailableError, match="does not serve this all_reduce"):
        zcomm.all_reduce(full, group=topology)
    encoded = zcomm.EncodedShard(shard, topology)
    kept: list[Any] = [
        lambda: encoded.gather(full),
        lambda: zcomm.SecondaryPartition(topology, 8, F32),
        lambda: zcomm.DeltaGather(full, topology),
        lambda: zcomm.NodeSums(topology, 8, ("int8", "int4")),
    ]
    for call in kept:
        with pytest.raises(BackendUnavailableError, match="takes CUDA tensors, got device=cpu"):
            call()
    zcomm.all_reduce(full, group=topology, backend="torch")
    topology.close()


def _check_ranks_without_nccl_are_told_to_all(rank: int) -> None:
    hop = hop_of_group(None)
    reason = "there is no NCCL here" if rank == 1 else ""
    original, nccl_communicators.nccl_unavailable_reason = nccl_communicators.nccl_unavailable_reason, lambda: reason
    try:
        with pytest.raises(BackendUnavailableError, match=r"(?s)cannot be used:\n  rank 1: there is no NCCL here$"):
            nccl_communicators.agree_on_nccl(hop)
        nccl_communicators.nccl_unavailable_reason = lambda: ""
        nccl_communicators.agree_on_nccl(hop)
    finally:
        nccl_communicators.nccl_unavailable_reason = original


def _check_one_rank_of_two_hops_is_told_to_all(rank: int) -> None:
    topology = Topology(ranks_per_node=2)
    original = nccl_communicators.nccl_unavailable_reason
    nccl_communicators.nccl_unavailable_reason = lambda: "no NCCL\nsecond line" if rank == 3 else ""
    try:
        with pytest.raises(BackendUnavailableError, match=r"(?s)cannot be used:\n  rank 3: no NCCL\nsecond line$"):
            nccl_communicators.agree_on_nccl(topology.intra, topology.inter)
        nccl_communicators.nccl_unavailable_reason = lambda: ""
        nccl_communicators.agree_on_nccl(topology.intra, topology.inter)
    finally:
        nccl_communicators.nccl_unavailable_reason = original
    topology.close()


def test_a_rank_without_nccl_is_an_error_on_every_rank_of_two_hops() -> None:
    run_ranks(4, _check_one_rank_of_two_hops_is_told_to_all)


def _check_an_id_that_cannot_be_made(rank: int) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("no socket")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_communicators, "nccl_library", fail)
        with pytest.raises(CommunicationError, match="failed on its first rank: no socket"):
            nccl_communicators._unique_id(hop_of_group(None))


def test_an_id_that_cannot_be_made_is_an_error_on_every_rank() -> None:
    run_ranks(2, _check_an_id_that_cannot_be_made)


def _check_both(rank: int) -> None:
    _check_refused_on_every_rank(rank)
    _check_ranks_without_nccl_are_told_to_all(rank)


def test_what_cannot_be_served_is_refused_on_every_rank() -> None:
    run_ranks(2, _check_both)


def _route(operation: str, wires: tuple[str, ...], shape: tuple[int, int], *, is_gather: bool = False) -> Route:
    nodes, locals_ = shape
    hops = [Hop(None, nodes * locals_, 1, locals_ - 1, (nodes - 1) * locals_)]
    if len(wires) == 2:
        hops = [Hop(None, locals_, 1, locals_ - 1, 0), Hop(None, nodes, 0, 0, nodes - 1)]
    if is_gather:
        hops.reverse()
    pairs = tuple((hop, get_format(wire)) for hop, wire in zip(hops, wires, strict=True))
    return Route(operation, pairs, nodes, locals_, 1, None, hops[0], 0, "nccl")


@pytest.mark.parametrize(
    ("wire", "dtype", "is_native"),
    [("int8:stochastic", F32, False), ("int8:asym", F32, False), ("int4/96", F32, False), ("int8/2048", F32, False),
     ("nf4:hadamard", F32, False), ("int8", F32, True), ("none", torch.bfloat16, True), ("none", torch.float64, False)],
)  # fmt: skip
def test_what_has_no_kernels_is_left_to_python(
    monkeypatch: pytest.MonkeyPatch, wire: str, dtype: torch.dtype, *, is_native: bool
) -> None:
    route = _route("all_gather", (wire,), (1, 2))
    monkeypatch.setattr(nccl_steps, "check_device", lambda *_: None)
    encoder, values = Encoder(route, 8), torch.empty(8, dtype=dtype)
    assert nccl_steps.is_native(encoder, values) == is_native
    with_residual = replace(encoder, residual=object())  # type: ignore[arg-type]
    assert not nccl_steps.is_native(with_residual, values)
    assert not nccl_steps.is_native(replace(encoder, route=replace(route, backend="torch")), values)


@pytest.mark.parametrize("numel", [1, 1000, 2**20, 2**26 + 77])
@pytest.mark.parametrize("num_ranks", [1, 3, 64])
def test_chunks_are_whole_blocks_and_few(numel: int, num_ranks: int) -> None:
    step = nccl_steps.chunk_numel(numel, num_ranks, get_format("int4/512"), get_format("nf4"))
    assert step % 512 == 0
    assert math.ceil(numel / step) <= nccl_steps.MAX_CHUNKS
    assert step * num_ranks >= nccl_steps.MIN_CHUNK_NUMEL


def test_chunks_take_several_times_what_they_cost_the_host() -> None:
    for num_ranks, links, rate, latency_s in ((8, (), 450e9, 0), (64, (Link(1e-5, 9e11),), 9e11, 1e-5)):
        step = nccl_steps.chunk_numel(2**22, num_ranks, get_format("int8"), links=links)
        assert step * num_ranks / rate == pytest.approx(4 * (60e-6 + latency_s), rel=1e-3)
    slow = nccl_steps.chunk_numel(2**26, 8, get_format("int8"), links=(Link(1e-5, 1e9),))
    assert slow == 2**26 // nccl_steps.MAX_CHUNKS
    assert nccl_steps.chunk_numel(2**20, 8, get_format("int8"), links=(Link(1e-5, 1e9),)) == 2**24 // 8


def test_sizes_hold_the_layouts_of_a_chunk_and_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_steps, "MIN_CHUNK_NUMEL", 1)
    route = _route("reduce_scatter", ("int8", "nf4"), (3, 2))
    numel = 16 * 256 + 5
    sizes = nccl_steps._sizes(route, F32, numel, (3, 1))
    step = 512  # 4101 / 16, in blocks of 256
    last = numel - 8 * step
    inside = [layout_of("reduce_scatter", get_format("int8"), F32, 3, n).hash for n in (step, last)]
    between = [layout_of("reduce_scatter", get_format("nf4"), F32, 1, n).hash for n in (step, last)]
    assert sizes == (numel, step, [(3, 256, *inside), (6, 64, *between)])
    assert len({*inside, *between}) == 4


def test_every_chunk_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_steps, "MIN_CHUNK_NUMEL", 1)
    route = _route("all_gather", ("int8", "int8"), (3, 2), is_gather=True)
    sizes = nccl_steps._sizes(route, F32, 600, (1, 1))
    with zcomm.traffic() as traffic:
        nccl_steps._count(route, F32, sizes, (1, 1), [1, 3])
    messages = [layout_of("all_gather", get_format("int8"), F32, 1, n).nbytes for n in (256, 256, 88)]
    assert traffic.bytes(link="inter") == 2 * sum(messages)  # to two nodes
    assert traffic.bytes(link="intra") == 3 * sum(messages)  # three nodes' messages to one rank
    assert traffic.elements(link="intra") == 1800


def test_rows_of_two_hops_have_both_strides() -> None:
    rows = torch.empty(6, 10)
    route = _route("reduce_scatter", ("int8", "nf4"), (3, 2))
    assert nccl_steps._rows(rows, route, "rank")[2:] == (10, 20)
    assert nccl_steps._rows(rows, route, "local")[2:] == (30, 10)
    assert nccl_steps._rows(rows, _route("reduce_scatter", ("int8",), (3, 2)), "rank") == (0, rows.data_ptr(), 10, 0)
