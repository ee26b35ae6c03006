"""Collectives over NCCL have the bits of torch's groups: on a GPU shared by all ranks, otherwise emulated.

NCCL up to 2.29 takes ranks with different ``NCCL_HOSTID`` for ranks of different machines, which may share a GPU; from
2.30 on there is a switch.
"""

# covers zcomm/_transport/backend_choice.py

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import zcomm
from tests.ranks import ranks_over, run_ranks
from tests.zcomm.calls import WORLD_SIZE, assert_same_bits, collectives, kept, with_residual
from zcomm import Topology
from zcomm._collectives import nccl_steps
from zcomm._transport import chunks
from zcomm._transport.backend_choice import nccl_unavailable_reason
from zcomm._transport.nccl_communicators import close_communicators
from zcomm._transport.nccl_library import nccl_library

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")
pytestmark = pytest.mark.skipif(
    IS_GPU and bool(nccl_unavailable_reason()), reason=f"no NCCL backend: {nccl_unavailable_reason()[:80]}"
)
DTYPES = (torch.float32, torch.bfloat16)
FORMATS = ("none", "int8", "int4", "nf4", "fp8_e4m3")


def _run(world_size: int, check: Callable[..., None], *args: object) -> None:
    """Run on ranks over the emulated NCCL, or on a GPU over the real one."""
    with ranks_over("torch" if IS_GPU else "nccl"):
        run_ranks(world_size, check, *args)


@contextmanager
def _one_device(rank: int) -> Iterator[None]:
    """Let ranks share the GPU, with small chunks so that there are several."""
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": "4"}
    if tuple(int(part) for part in nccl_library().version.split(".")) >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"zcomm-test-{rank}"
    before, nccl_steps.MIN_CHUNK_NUMEL = nccl_steps.MIN_CHUNK_NUMEL, 1024
    try:
        yield
    finally:
        close_communicators()
        nccl_steps.MIN_CHUNK_NUMEL = before


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 7919 + numel)
    values = torch.randn(numel, generator=generator) * (rank + 1)
    values[:: max(1, numel // 3)] = float("nan") if rank == 1 else 0.0
    return values.to(DEVICE, dtype)


def _assert_same_bits(name: str, over_nccl: Tensor, over_torch: Tensor) -> None:
    same = (over_nccl == over_torch) | (over_nccl.isnan() & over_torch.isnan())
    assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} differ"


def _check_call(rank: int, world_size: int, group: Any, wire: Any, dtype: torch.dtype, numel: int) -> None:
    shard, full = _values(rank, numel, dtype), _values(rank, numel * world_size, dtype)
    gather_wire = wire[::-1] if isinstance(wire, tuple) else wire
    numberings = ("rank", "local") if isinstance(group, Topology) else ("rank",)
    results: dict[str, list[Tensor]] = {}
    for backend in ("torch", "nccl"):
        options: dict[str, Any] = {"group": group, "backend": backend}
        made = results[backend] = []
        for numbering in numberings:
            made.append(torch.full_like(full, 7))
            zcomm.all_gather_single(made[-1], shard, format=gather_wire, numbering=numbering, **options)
            for op in ("sum", "avg"):
                made.append(torch.full_like(shard, 7, dtype=torch.float32))
                zcomm.reduce_scatter_single(made[-1], full, op, format=wire, numbering=numbering, **options)
        made.append(torch.full_like(full, 7))
        zcomm.all_to_all_single(made[-1], full, format=wire, **options)
        made.append(full.clone())
        work = zcomm.all_reduce(made[-1], format=wire, async_op=True, **options)
        assert work is not None
        work.wait()
    for index, (over_nccl, over_torch) in enumerate(zip(results["nccl"], results["torch"], strict=True)):
        _assert_same_bits(f"result {index}, {wire}, {dtype}, {numel}", over_nccl, over_torch)


def _check_one_hop(rank: int, world_size: int) -> None:
    with _one_device(rank):
        for wire in FORMATS:
            for dtype in DTYPES:
                for numel in (1, 257, 20_000):
                    _check_call(rank, world_size, None, wire, dtype, numel)


def _check_two_hops(rank: int, world_size: int) -> None:
    topology = Topology(ranks_per_node=2)
    with _one_device(rank):
        for wire in ("int8", ("int8", "nf4"), ("none", "int4"), ("int8", "bf16")):
            for numel in (100, 10_000):
                _check_call(rank, world_size, topology, wire, torch.float32, numel)
    topology.close()


def _check_bytes(rank: int) -> None:
    """The path hop by hop in chunks, which Python drives instead of the pipeline in C++."""
    topology = Topology(ranks_per_node=2)
    with _one_device(rank), pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MIN_CHUNK_NUMEL", 1024)
        patch.setattr(chunks, "MIN_CHUNK_NUMEL_ON_GPU", 1024)
        patch.setattr(chunks, "HOST_S_PER_CHUNK", 0.0)
        for wire, dtype in (("int4:asym", torch.float32), ("none", torch.float64)):
            for group in (topology, None):
                case = rank, "torch", group, wire, dtype, 3000
                expected = collectives(*case, device=str(DEVICE))
                got = collectives(rank, "nccl", *case[2:], device=str(DEVICE))
                assert_same_bits(f"{wire}, {dtype}", got, expected)
        for group in (topology, None):
            expected = with_residual(rank, "torch", group, 3000, device=str(DEVICE))
            assert_same_bits("residual", with_residual(rank, "nccl", group, 3000, device=str(DEVICE)), expected)
        made = []
        for name in ("torch", "nccl"):
            over = Topology(ranks_per_node=2, backend=name)  # type: ignore[arg-type]
            made.append(kept(rank, over, 501, device=str(DEVICE)))
            over.close()
        assert_same_bits("kept", made[1], made[0])
    topology.close()


def _check_graph(rank: int, world_size: int) -> None:
    """A captured reduction, when replayed, reduces the current contents of its input."""
    with _one_device(rank):
        full, shard = _values(rank, 20_000 * world_size, torch.float32), torch.empty(20_000, device=DEVICE)
        options: dict[str, Any] = {"format": "int8", "backend": "nccl"}
        zcomm.reduce_scatter_single(shard, full, **options)  # connections are made before
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            zcomm.reduce_scatter_single(shard, full, **options)
        for factor in (2.0, 0.5):
            full.mul_(factor)
            graph.replay()
            expected = torch.empty_like(shard)
            zcomm.reduce_scatter_single(expected, full, format="int8", backend="torch")
            _assert_same_bits(f"replay, factor {factor}", shard, expected)
        del graph


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_hop_has_the_bits_of_torch(world_size: int) -> None:
    _run(world_size, _check_one_hop, world_size)


def test_two_hops_have_the_bits_of_torch() -> None:
    _run(4, _check_two_hops, 4)


def test_what_has_no_kernels_has_the_bits_of_torch() -> None:
    _run(WORLD_SIZE, _check_bytes)


@pytest.mark.gpu
def test_a_graph_replays() -> None:
    _run(2, _check_graph, 2)
