"""Calls of every function that communicates, for 4 ranks: 2 nodes of 2 where there are two hops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zcomm
from zcomm import Topology

__all__ = ["WORLD_SIZE", "assert_same_bits", "collectives", "kept", "with_residual"]

WORLD_SIZE = 4


def values(rank: int, numel: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 7919 + numel)
    return (torch.randn(numel, generator=generator) * (rank + 1)).to(device, dtype)


def collectives(
    rank: int, name: str, group: Any, wire: Any, dtype: torch.dtype, numel: int, *, device: str = "cpu"
) -> list[Tensor]:
    """The result of each collective over backend ``name``."""
    shard, full = values(rank, numel, dtype, device), values(rank, numel * WORLD_SIZE, dtype, device)
    draws = "stochastic" in str(wire)
    options: dict[str, Any] = {"backend": name, "random": zcomm.RandomKey(1, 2, 3) if draws else None}
    back = wire[::-1] if isinstance(wire, tuple) else wire
    made = [torch.full_like(full, 7), torch.full_like(shard, 7), torch.full_like(full, 7), full.clone()]
    zcomm.all_gather_single(made[0], shard, group, format=back, **options)
    zcomm.reduce_scatter_single(made[1], full, "avg", group=group, format=wire, **options)
    zcomm.all_to_all_single(made[2], full, group, format=wire, **options)
    work = zcomm.all_reduce(made[3], group=group, format=wire, async_op=True, **options)
    assert work is not None
    work.wait()
    return made


def with_residual(rank: int, name: str, group: Any, numel: int, *, device: str = "cpu") -> list[Tensor]:
    """Three reductions with a residual; returns their results and the residual."""
    residual = zcomm.Residual(group, [("p", 0, numel * WORLD_SIZE)], numel * WORLD_SIZE, device=device)
    made = []
    for step in range(3):
        made.append(torch.empty(numel, device=device))
        full = values(rank + 10 * step, numel * WORLD_SIZE, torch.float32, device)
        zcomm.reduce_scatter_single(made[-1], full, group=group, format="int4", residual=residual, backend=name)
        residual.commit()
    return [*made, residual.values()]


def kept(rank: int, topology: Topology, numel: int, *, device: str = "cpu") -> list[Tensor]:
    """Results of classes that keep the backend of their topology."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    shard, made = values(rank, numel, torch.bfloat16, device), []
    for over, size in (("world", WORLD_SIZE), ("nodes", 2)):
        made.append(torch.zeros(size, numel, **options))
        delta = zcomm.DeltaGather(made[-1], topology, over=over)  # type: ignore[arg-type]
        delta.refresh(shard)
        for step in range(2):
            delta.update(shard + 0.01 * values(rank + step, numel, torch.bfloat16, device))
    made.append(torch.empty(WORLD_SIZE * numel, **options))
    zcomm.EncodedShard(shard, topology).gather(made[-1], numbering="local")
    part = zcomm.SecondaryPartition(topology, 2 * numel + 1, torch.bfloat16, device=device)
    part.fill(values(rank // 2, 2 * numel + 1, torch.bfloat16, device))
    made.append(torch.empty(2 * numel + 1, **options))
    part.gather(made[-1])
    residual = zcomm.Residual(
        topology, [("p", 0, numel * WORLD_SIZE)], numel * WORLD_SIZE, numbering="local", device=device
    )
    sums = zcomm.NodeSums(topology, numel, ("int8", "int4:asym"), device=device, residual=residual)
    for step in range(2):
        sums.add(values(rank + step, numel * WORLD_SIZE, torch.float32, device))
        made.append(torch.empty(numel, device=device))
        sums.reduce(made[-1], values(rank + 7, numel * WORLD_SIZE, torch.float32, device))
        residual.commit()
    return made


def assert_same_bits(case: str, got: list[Tensor], expected: list[Tensor]) -> None:
    """Compare tensor by tensor; none may contain NaN."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"{case}: result {index}"
