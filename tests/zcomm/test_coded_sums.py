"""Node sums whose hop between nodes sends an entropy-coded grid: compared with a grid in NumPy."""

# covers zcomm/_stateful/coded_sums.py zcomm/_kernels/grid.py

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from tests.rotation import DAY
from tests.zcomm.test_checked import VICTIM, checking, flipped_bit
from zcomm import BackendUnavailableError, ConfigError, DamagedError, FormatError, LayoutError, NodeSums, Residual
from zcomm._kernels import grid
from zcomm._transport import backend

Floats = NDArray[np.float32]
PLACES = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]
"""Ranks, and how many of them are in a node."""
ERROR = 0.15


def _sizes(world_size: int) -> list[list[int]]:
    """Several blocks and a part of one, one element, rows without any; and equal rows."""
    return [[9000, 0, 1, 4096][:world_size], [513] * world_size]


def _input(rank: int, call: int, numel: int) -> Tensor:
    """Multiples of 2^-10 of many sizes, so that sums are exact in every order."""
    generator = torch.Generator().manual_seed(1000 * DAY + 100 * call + rank)
    values = torch.randn(numel, generator=generator) * torch.logspace(-3, 0, max(numel, 1), 10)[:numel]
    return (values * 1024).round() / 1024


def _on_grid(values: Floats, error: float) -> Floats:
    """``values`` rounded to the grid of their blocks, from its definition."""
    found = []
    for i in range(0, values.size, 4096):
        block = values[i : i + 4096]
        with np.errstate(over="ignore"):
            step = math.sqrt(12) * error * float(np.sqrt(np.mean(block.astype(np.float64) ** 2)))
        rounded = torch.tensor(step, dtype=torch.float64).to(torch.bfloat16).float().numpy()
        if not np.isfinite(block).all():
            found.append(np.full_like(block, np.nan))
        elif step < 2.0**-126:
            found.append(np.zeros_like(block))
        else:
            found.append(np.rint(block * (np.float32(1) / rounded)) * rounded)
    return np.concatenate(found) if found else values[:0]


def _from_all(mine: Any) -> list[Any]:
    """Every rank's object, by torch.distributed alone."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _made(t: zcomm.Topology, sizes: Sequence[int], *, beta: float = 1.0) -> tuple[NodeSums, Residual]:
    numel, own = sum(sizes), sizes[t.shard_index("local")]
    residual = Residual(t, [("w", 0, numel)], numel, numbering="local", beta=beta, shard_sizes=sizes)
    made = NodeSums(t, own, ("none", "none"), residual=residual, shard_sizes=sizes, relative_error=ERROR)
    return made, residual


def _check_against_numpy(rank: int, per_node: int) -> None:
    t = topology(per_node)
    for sizes in _sizes(t.world_size):
        numel, own = sum(sizes), t.shard_index("local")
        sums, residual = _made(t, sizes, beta=0.5)
        starts = np.cumsum([0, *sizes])
        pack = [t.local_rank * t.num_nodes + n for n in range(t.num_nodes)]
        for step, scale in enumerate((1.0, 8.0, 1.0)):
            inputs = [[_input(r, 10 * step + m, numel) * scale for m in range(2)] for r in range(t.world_size)]
            before, output = residual.values().numpy(), torch.empty(sizes[own])
            sums.add(inputs[rank][0])
            with zcomm.traffic() as sent:
                work = sums.reduce(output, inputs[rank][1], scale=scale, async_op=step == 1)
                if work is not None:
                    work.wait()
            node = [r for r in range(t.world_size) if r // per_node == t.node_rank]
            of_node = torch.stack([inputs[r][m].double() for r in node for m in range(2)]).sum(0) / scale
            rows = [of_node.float().numpy()[starts[row] : starts[row + 1]] for row in pack]
            if t.num_nodes == 1:
                assert torch.equal(output / scale, torch.from_numpy(rows[0]) / t.world_size)
                assert not sent.bytes(link="inter")
                assert not residual.values().any()
                residual.commit()
                continue
            olds = np.split(before, np.cumsum([row.size for row in rows])[:-1])
            given = [row + np.float32(0.5) * old for row, old in zip(rows, olds, strict=True)]
            coded = [_on_grid(row, ERROR) for row in given]
            mine = list(zip(pack, coded, strict=True))
            of_nodes = [dict(parts)[own] for parts in _from_all(mine) if own in dict(parts)]
            expected = of_nodes[0].copy()
            for part in of_nodes[1:]:
                expected += part
            assert np.array_equal(output.numpy(), expected / np.float32(t.world_size) * np.float32(scale)), step
            (residual.rollback if step == 1 else residual.commit)()
            if step != 1:
                lost = np.concatenate([u - c for u, c in zip(given, coded, strict=True)])
                kept = residual.values().numpy()
                assert np.abs(kept - lost).max(initial=0) <= np.abs(lost).max(initial=0) / 127 * 0.6
            if numel > 4096:
                relative = np.linalg.norm(np.concatenate(coded) - np.concatenate(given))
                assert relative <= 1.1 * ERROR * np.linalg.norm(np.concatenate(given)) + 1e-6
                peers = sum(sizes[row] for row in pack if row != own)
                assert sent.bytes(link="inter") <= 0.5 * peers + 128 * len(pack), "below 4 bits an element"
                assert sent.bytes(link="inter") or not peers


@pytest.mark.parametrize(("world_size", "per_node"), PLACES)
def test_sums_and_residuals_are_those_of_a_grid_in_numpy(world_size: int, per_node: int) -> None:
    """In steps with a loss scale, an accumulated input, and a residual that was rolled back."""
    run_ranks(world_size, _check_against_numpy, per_node)


def _check_mean_over_steps(rank: int) -> None:
    t, sizes = topology(1), [5000, 3000]
    sums, residual = _made(t, sizes)
    given, total = _input(rank, 0, 8000), torch.zeros(sizes[rank])
    mean = (torch.stack(_from_all(given)).sum(0) / 2).split(sizes)[rank]
    for _ in range(50):
        output = torch.empty(sizes[rank])
        sums.reduce(output, given)
        residual.commit()
        total += output
    once = ERROR * mean.norm()
    assert (total / 50 - mean).norm() < 0.1 * once, "what is rounded off comes in later steps"


def test_what_is_rounded_off_comes_in_later_steps() -> None:
    run_ranks(2, _check_mean_over_steps)


@pytest.mark.parametrize("error", [grid.LEAST_ERROR, 0.05, 0.15, grid.LARGEST_ERROR])
def test_blocks_have_the_error_that_is_asked_for(error: float) -> None:
    generator = torch.Generator().manual_seed(DAY)
    values = torch.randn(40_000, generator=generator) * 10.0 ** torch.arange(-30, 10, 1).repeat_interleave(1000)
    message = torch.empty(grid.max_message_nbytes(values.numel()), dtype=torch.uint8)
    used, decoded = grid.encode(values, error, message)
    message[used:] = 0xFF
    assert torch.equal(grid.decode(message, values.numel()), decoded)
    assert np.array_equal(decoded.numpy(), _on_grid(values.numpy(), error))
    for given, found in zip(values.split(4096), decoded.split(4096), strict=True):
        relative = ((given - found).double().norm() / given.double().norm()).item()
        assert relative < 1.1 * error
    normal = torch.randn(2**20, generator=generator)
    message = torch.empty(grid.max_message_nbytes(normal.numel()), dtype=torch.uint8)
    used, _ = grid.encode(normal, error, message)
    assert 0.99 < 8 * used / normal.numel() / grid.expected_bits(error) < 1.02


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-40, 0.0])
def test_values_at_the_edges(value: float) -> None:
    """A block that is not finite is decoded as NaN, and no other."""
    values = torch.linspace(-1, 1, 9000)
    values[5000] = value
    if value in (3e38, 1e-40, 0.0):
        values[4096:8192] = value
    message = torch.empty(grid.max_message_nbytes(values.numel()), dtype=torch.uint8)
    grid.encode(values, ERROR, message)
    decoded = grid.decode(message, values.numel())
    expected = _on_grid(values.numpy(), ERROR)
    assert np.array_equal(decoded.numpy(), expected, equal_nan=True)
    assert decoded[:4096].isfinite().all()
    assert decoded[8192:].isfinite().all()
    assert decoded[4096:8192].isfinite().all() == math.isfinite(value)


def _check_damage(rank: int) -> None:
    """One bit of a message flips on its way."""
    t, sizes = topology(2), [5000, 700, 2000, 900]
    given, output = _input(rank, 0, sum(sizes)), torch.empty(sizes[t.shard_index("local")])
    with checking():
        sums, residual = _made(t, sizes)
        with flipped_bit(2 if rank == VICTIM else 0, at=100), pytest.raises(DamagedError):
            sums.reduce(output, given)
        residual.rollback()
        sums.reduce(output, given)
        residual.commit()
    assert output.isfinite().all()


def test_damage_is_found_by_all_ranks() -> None:
    run_ranks(4, _check_damage)


def _check_refused(rank: int) -> None:
    t, equal = topology(1), [8, 8]
    with pytest.raises(FormatError, match=r"relative_error=0\.1.*second format must be 'none'.*'nf4'"):
        NodeSums(t, 8, ("int8", "nf4"), shard_sizes=equal, relative_error=0.1)
    with pytest.raises(LayoutError, match=r"relative_error=0\.1 needs shard_sizes"):
        NodeSums(t, 8, ("int8", "none"), relative_error=0.1)
    for error in (1e-4, 0.6, -0.1, math.nan):
        with pytest.raises(ConfigError, match=r"relative_error must be 0, or from 0\.001 to 0\.5"):
            NodeSums(t, 8, ("int8", "none"), shard_sizes=equal, relative_error=error)
    with patch.object(backend.sys, "platform", "darwin"), pytest.raises(BackendUnavailableError, match=r"use a format"):
        NodeSums(t, 8, ("int8", "none"), shard_sizes=equal, relative_error=0.1)
    with pytest.raises(BackendUnavailableError, match=r"host memory"):
        NodeSums(t, 8, ("int8", "none"), shard_sizes=equal, relative_error=0.1, device="meta")


def test_what_cannot_be_served_is_refused() -> None:
    run_ranks(2, _check_refused)
