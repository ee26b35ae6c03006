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
from zcomm import (
    BackendUnavailableError,
    ConfigError,
    DamagedError,
    DivergedError,
    FormatError,
    LayoutError,
    NodeSums,
    Residual,
)
from zcomm._kernels import grid
from zcomm._transport import backend

Floats = NDArray[np.float32]
PLACES = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]
"""Ranks, and how many of them are in a node."""
ERROR = 0.15


def _sizes(world_size: int) -> list[list[int]]:
    """Several blocks and a part of one, one element, rows without any; and equal rows."""
    return [[9000, 0, 1, 1024][:world_size], [513] * world_size]


def _input(rank: int, call: int, numel: int) -> Tensor:
    """Multiples of 2^-10 of many sizes, so that sums are exact in every order."""
    generator = torch.Generator().manual_seed(1000 * DAY + 100 * call + rank)
    values = torch.randn(numel, generator=generator) * torch.logspace(-3, 0, max(numel, 1), 10)[:numel]
    return (values * 1024).round() / 1024


def _on_grid(values: Floats, error: float) -> Floats:
    """``values`` rounded to the grid of their blocks, from its definition."""
    found = []
    for i in range(0, values.size, 128):
        block = values[i : i + 128]
        with np.errstate(over="ignore"):
            step = math.sqrt(12) * error * float(np.sqrt(np.mean(block.astype(np.float64) ** 2)))
        step = min(step, float(torch.finfo(torch.bfloat16).max)) if math.isfinite(step) else step
        rounded = torch.tensor(step, dtype=torch.float64).to(torch.bfloat16).float().numpy()
        if not np.isfinite(block).all():
            found.append(np.full_like(block, np.nan))
        elif step < 2.0**-126:
            found.append(np.zeros_like(block))
        else:
            largest = np.finfo(np.float32).max
            with np.errstate(over="ignore"):
                found.append(np.clip(np.rint(block * (np.float32(1) / rounded)) * rounded, -largest, largest))
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
                assert sent.bytes(link="inter") <= 0.45 * peers + 200 * len(pack), "below 4 bits an element"
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


def _coded(values: Tensor, error: float) -> tuple[int, Tensor]:
    """Bytes and decoded values of a message, which are those that the sender expects, whatever lies behind it."""
    message = torch.full((grid.max_message_nbytes(values.numel()),), 0xFF, dtype=torch.uint8)
    rounded = grid.round_to_grid(values, error)
    used, decoded = grid.encode(rounded, message), grid.decode(message, values.numel())
    assert np.array_equal(rounded.values().numpy(), decoded.numpy(), equal_nan=True)
    return used, decoded


@pytest.mark.parametrize("error", [grid.LEAST_ERROR, 0.05, 0.15, grid.LARGEST_ERROR])
def test_blocks_have_the_error_that_is_asked_for(error: float) -> None:
    """Also blocks of very different sizes side by side."""
    generator = torch.Generator().manual_seed(DAY)
    values = torch.randn(40 * 128, generator=generator) * 10.0 ** torch.arange(-30, 10, 1).repeat_interleave(128)
    _, decoded = _coded(values, error)
    assert np.array_equal(decoded.numpy(), _on_grid(values.numpy(), error))
    for given, found in zip(values.split(128), decoded.split(128), strict=True):
        relative = ((given - found).double().norm() / given.double().norm()).item()
        assert relative < 1.25 * error
    normal = torch.randn(2**20, generator=generator)
    used, decoded = _coded(normal, error)
    assert ((normal - decoded).norm() / normal.norm()).item() == pytest.approx(error, rel=0.02)
    assert 0.99 < used / grid.expected_nbytes(normal.numel(), error) < 1.02


@pytest.mark.parametrize("numel", [1, 3, 64, 129, 513, 2048])
def test_the_expected_length_of_short_messages(numel: int) -> None:
    """On average: the length of a single message depends on what few numbers are drawn."""
    generator = torch.Generator().manual_seed(DAY)
    used = [_coded(torch.randn(numel, generator=generator), ERROR)[0] for _ in range(64)]
    expected = grid.expected_nbytes(numel, ERROR)
    assert max(used) <= grid.max_message_nbytes(numel)
    assert abs(sum(used) / len(used) - expected) <= max(0.25 * expected, 24)


@pytest.mark.parametrize("error", [ERROR, grid.LARGEST_ERROR])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.3e38, 1e-38, 1e-40, 0.0])
def test_values_at_the_edges(value: float, error: float) -> None:
    """A block that is not finite is decoded as NaN, and no other; finite ones as finite ones."""
    values = torch.linspace(-1, 1, 9 * 128 - 7)
    values[300] = value
    if value in (3.3e38, 1e-38, 1e-40, 0.0):
        values[256:384] = value
    _, decoded = _coded(values, error)
    assert np.array_equal(decoded.numpy(), _on_grid(values.numpy(), error), equal_nan=True)
    assert decoded[:256].isfinite().all()
    assert decoded[384:].isfinite().all()
    assert decoded[256:384].isfinite().all() == math.isfinite(value)


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
    for error in (1e-4, 0.6, -0.1, math.nan, "0.15", None, [0.1], True):
        with pytest.raises(ConfigError, match=r"relative_error must be "):
            NodeSums(t, 8, ("int8", "none"), shard_sizes=equal, relative_error=error)  # type: ignore[arg-type]
    refused = pytest.raises(BackendUnavailableError, match=r"relative_error=0\.1 on cpu, backend 'gloo', darwin; use a")
    with patch.object(backend.sys, "platform", "darwin"), refused:
        NodeSums(t, 8, ("int8", "none"), shard_sizes=equal, relative_error=0.1)
    with pytest.raises(BackendUnavailableError, match=r"host memory"):
        NodeSums(t, 8, ("int8", "none"), shard_sizes=equal, relative_error=0.1, device="meta")


def _check_other_errors(rank: int) -> None:
    t, equal = topology(1), [600, 600]
    sums = NodeSums(t, 600, ("none", "none"), shard_sizes=equal, relative_error=0.1 + 0.1 * rank)
    with pytest.raises(DivergedError):
        sums.reduce(torch.empty(600), _input(rank, 0, 1200))


def test_ranks_with_different_errors_are_found() -> None:
    run_ranks(2, _check_other_errors)


def test_what_cannot_be_served_is_refused() -> None:
    run_ranks(2, _check_refused)
