"""Exact changes in rooms of a known length, as on GPUs: the same bits, whatever fits."""

# covers zcomm/_stateful/capped_changes.py

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from tests.rotation import DAY
from tests.zcomm import test_exact_changes as exact
from zcomm import DeltaGather, MessageError, NodeReplica
from zcomm._kernels import ulps
from zcomm._stateful.capped_changes import CappedReplica
from zcomm._transport import backend
from zcomm.testing import Simulation


def _capped(rank: int, check: Callable[..., None], *args: Any) -> None:
    """Run ``check`` as if no receive took less than it has room for."""
    with patch.object(backend.Hop, "takes_shorter", False):
        check(rank, *args)


@pytest.mark.parametrize(("world_size", "per_node"), exact.PLACES)
def test_replicas_have_the_bits_of_the_shards(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _capped, exact._check_bits, per_node, DAY)


def test_float32_shards_and_values_that_are_written_meanwhile() -> None:
    run_ranks(4, _capped, exact._check_over_a_process_group)
    run_ranks(4, _capped, exact._check_next_values)


def test_damage_is_the_same_error_on_every_rank() -> None:
    run_ranks(4, _capped, exact._check_damage)


def test_after_an_error_of_one_rank_a_refresh_makes_replicas_equal() -> None:
    run_ranks(2, _capped, exact._check_one_rank_fails)


def _check_capacities(rank: int) -> None:
    """First the room, then a margin above the last two messages; and the rest of a message that is longer."""
    t, numel = topology(2), 50_000
    gather, room = NodeReplica(t, numel, torch.bfloat16, format="exact"), ulps.max_message_nbytes(numel)
    assert isinstance(gather._delta._uneven, CappedReplica)
    generator = torch.Generator().manual_seed(rank)
    message, lengths = torch.empty(room, dtype=torch.uint8), []
    values = torch.randn(numel, generator=generator).bfloat16()
    gather.refresh(values)
    for step, size in enumerate((1e-3, 1e-3, 1e-3, 1.0, 1e-3, 1e-3, 1e-3)):
        new = (values + size * torch.randn(numel, generator=generator)).bfloat16()
        lengths.append(ulps.encode(new, values, message))
        with zcomm.traffic() as sent:
            gather.update(new, async_op=True)
            at_first = sent.bytes(link="inter")
            assert torch.equal(gather.held, new)
        longest = max(lengths[:-1][-2:], default=room)
        capacity = room if step == 0 else -(-(longest + longest // 64 + 64) // 4) * 4
        assert at_first == capacity, (step, lengths)
        assert sent.bytes(link="inter") == max(capacity, lengths[-1]), (step, lengths)
        assert (lengths[-1] > capacity) == (step == 3), "only the large change did not fit"
        assert step in (0, 4, 5) or at_first <= 1.02 * max(lengths[-3:]) + 68, "the margin"
        values = new


def test_a_message_has_room_for_the_last_two_and_its_rest_follows() -> None:
    run_ranks(4, _capped, _check_capacities)


def _survives_damage(rank: int) -> tuple[bool, Tensor]:
    """Whether the second update failed, and the replica after a refresh and two more."""
    with patch.object(backend.Hop, "takes_shorter", False):
        t, steps = zcomm.Topology(ranks_per_node=2), exact._stream(rank, 500, 6)
        gather, has_failed = DeltaGather(torch.zeros(4 * 500, dtype=torch.bfloat16), t, format="exact"), False
        gather.refresh(steps[0])
        gather.update(steps[1])
        try:
            gather.update(steps[2])
        except MessageError:
            has_failed = True
        gather.refresh(steps[3])
        assert isinstance(gather._uneven, CappedReplica)
        assert gather._uneven._capacities == gather._uneven._room, "one rank has not seen a length"
        for values in steps[4:]:
            gather.update(values)
        t.close()
        return has_failed, gather.replica.view(4, -1)


@pytest.mark.parametrize("at", [DAY % ulps.HEAD_NBYTES, ulps.HEAD_NBYTES + DAY % 300])
def test_a_damaged_message_keeps_no_rank_waiting(at: int) -> None:
    """Its head, or its body: the receiver and its node raise, and capacities agree again after a refresh.

    Of the second update: a refresh sends 1,000 bytes of a row, and the first update all of its room.
    """
    expected = torch.stack([exact._stream(rank, 500, 6)[5] for rank in range(4)])
    seen: list[int] = []
    simulation, room = Simulation(4, seed=DAY), ulps.max_message_nbytes(500)

    def flip(received: Tensor) -> None:
        if 300 + ulps.HEAD_NBYTES < received.numel() < room and received.numel() != 1000 and not seen:
            received[at] ^= 4
            seen.append(received.numel())

    simulation.network.flip = flip
    outcomes = simulation.run(_survives_damage)
    assert [outcome.error for outcome in outcomes] == [None] * 4, f"ZERO_TEST_DAY={DAY}, {seen}"
    assert seen
    assert sorted(outcome.result[0] for outcome in outcomes) == [False, False, True, True], "one node"
    assert all(torch.equal(outcome.result[1], expected) for outcome in outcomes)
