"""Exact changes in buffers of a size that both sides know, as on GPUs: the same bits, whatever fits."""

# covers zcomm/_stateful/capped_changes.py

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from tests.rotation import DAY
from tests.zcomm import test_exact_changes as exact
from tests.zcomm.test_checked import checking
from zcomm import DeltaGather, NodeReplica
from zcomm._kernels import ulps
from zcomm._stateful.capped_changes import CappedReplica
from zcomm._stateful.exact_changes import ExactReplica
from zcomm._transport import backend
from zcomm.testing import Simulation


@contextmanager
def capped() -> Iterator[None]:
    """Act as if no receive took less than it has room for."""
    sends = patch.object(ExactReplica, "_send", side_effect=AssertionError("messages of unknown length"))
    with patch.object(backend.Hop, "takes_shorter", False), sends:
        yield


def _capped(rank: int, check: Callable[..., None], *args: Any) -> None:
    with capped():
        check(rank, *args)


def _checked(rank: int, check: Callable[..., None], *args: Any) -> None:
    with checking():
        _capped(rank, check, *args)


@pytest.mark.parametrize(("world_size", "per_node"), exact.PLACES)
def test_replicas_have_the_bits_of_the_shards(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _capped, exact._check_bits, per_node, DAY)


def test_with_checksums_too() -> None:
    """Rows that are empty, in a pack or altogether, and messages that would not have fit."""
    run_ranks(4, _checked, exact._check_bits, 2, DAY)
    run_ranks(4, _checked, _check_one_row, 2)


def test_float32_shards_and_values_that_are_written_meanwhile() -> None:
    run_ranks(4, _capped, exact._check_over_a_process_group)
    run_ranks(4, _capped, exact._check_next_values)


def test_damage_is_the_same_error_on_every_rank() -> None:
    run_ranks(4, _capped, exact._check_damage)


def test_after_an_error_of_one_rank_a_refresh_makes_replicas_equal() -> None:
    run_ranks(2, _capped, exact._check_one_rank_fails)


def _check_one_row(rank: int, per_node: int) -> None:
    """Only one rank's message outgrows its room: ranks of other local ranks have no part in its rest."""
    t, numel = topology(per_node), 20_000
    for over in ("world", "nodes"):
        replica = torch.zeros((4 if over == "world" else t.num_nodes) * numel, dtype=torch.bfloat16)
        gather = DeltaGather(replica, t, format="exact", numbering="local", over=over)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(DAY + rank)
        values = torch.randn(numel, generator=generator).bfloat16()
        gather.refresh(values)
        for step in range(4):
            size = 1.0 if step == 2 and rank == DAY % 4 else 1e-3
            values = (values + size * torch.randn(numel, generator=generator)).bfloat16()
            work = gather.update(values, async_op=True)
            assert work is not None
            work.wait()
            owners = exact._owners(4, per_node, "local")
            held = [owner for owner in owners if over == "world" or owner % per_node == t.local_rank]
            of_ranks = exact._gathered(values, 4)
            assert torch.equal(replica.view(torch.int16), torch.cat([of_ranks[owner] for owner in held]))


def test_the_rest_of_one_row() -> None:
    run_ranks(4, _capped, _check_one_row, 2)
    run_ranks(4, _capped, _check_one_row, 1)


def _check_abandoned(rank: int) -> None:
    """One rank alone gives up its replica, whose message had no room: it waits for no other."""
    t, numel = topology(1), 20_000
    gather = NodeReplica(t, numel, torch.bfloat16, format="exact")
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator).bfloat16()
    gather.refresh(values)
    for size in (1e-3, 1e-3, 1.0):
        gather.update(values + size * torch.randn(numel, generator=generator), async_op=True)
        if size < 1:
            gather.wait()
    if rank == 0:
        gather.abandon()
    dist.barrier()
    if rank:
        gather.abandon()


def test_a_replica_that_is_given_up_starts_no_rest() -> None:
    run_ranks(2, _capped, _check_abandoned)


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


def _check_agreed(gather: DeltaGather) -> None:
    assert isinstance(gather._uneven, CappedReplica)
    assert gather._uneven._capacities == gather._uneven._room, "one rank has not seen a length"


@pytest.mark.parametrize("at", [DAY % ulps.HEAD_NBYTES, ulps.HEAD_NBYTES + DAY % 200])
def test_a_damaged_message_keeps_no_rank_waiting(at: int) -> None:
    """Its head, or its body: the receiver and its node raise, and capacities agree again after a refresh.

    Of the second update: a refresh sends 1,000 bytes of a row, and the first update all of its room.
    """
    expected = torch.stack([exact._stream(rank, 500, 6)[5] for rank in range(4)])
    seen: list[int] = []
    simulation, room = Simulation(4, seed=DAY), ulps.max_message_nbytes(500)

    def flip(received: Tensor) -> None:
        if 200 + ulps.HEAD_NBYTES < received.numel() < room and received.numel() != 1000 and not seen:
            received[at] ^= 4
            seen.append(received.numel())

    simulation.network.flip = flip
    with capped():  # around all ranks: they are threads of one process
        outcomes = simulation.run(partial(exact.survives_damage, num_before=1, num_after=2, check=_check_agreed))
    assert [outcome.error for outcome in outcomes] == [None] * 4, f"ZERO_TEST_DAY={DAY}, {seen}"
    assert seen
    assert sorted(outcome.result[0] for outcome in outcomes) == [False, False, True, True], "one node"
    assert all(torch.equal(outcome.result[1], expected) for outcome in outcomes)
