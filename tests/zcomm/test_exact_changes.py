"""Exact changes: replicas have the bits of the shards, whatever changes; messages are as long as the change is rich."""

# covers zcomm/_stateful/exact_changes.py

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import ranks_over, run_ranks, topology
from tests.rotation import DAY
from tests.zcomm.test_checked import VICTIM, checking, flipped_bit
from tests.zcomm.test_delta import _owners
from zcomm import (
    BackendUnavailableError,
    DamagedError,
    DeltaGather,
    DivergedError,
    FormatError,
    LayoutError,
    MessageError,
    NodeReplica,
    StateError,
)
from zcomm._kernels import ulps
from zcomm._transport import backend
from zcomm.testing import Simulation

PLACES = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 4)]
"""Ranks, and how many of them are in a node."""
KINDS = ("small", "none", "large", "any bits", "one", "small")
"""What happens to a shard in each step: messages are short and long in turn."""


def _changed(shard: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    if kind == "none":
        return shard.clone()
    if kind == "any bits":  # not-a-numbers and infinities with their payloads, both zeros, subnormals
        return torch.randint(-(2**15), 2**15, shard.shape, generator=generator).to(torch.int16).view(shard.dtype)
    if kind == "one":
        changed = shard.clone()
        changed[:1] = 7.0
        return changed
    size = {"small": 1e-3, "large": 10.0}[kind]
    finite = shard.float().nan_to_num(0, 1, -1).clamp(-1, 1)
    return (finite + size * torch.randn(shard.shape, generator=generator)).to(shard.dtype)


def _gathered(shard: Tensor, world_size: int) -> list[Tensor]:
    """The bits of every rank's shard, by torch.distributed alone."""
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, shard.view(torch.int16).numpy())
    return [torch.from_numpy(bits) for bits in found]


def _sizes(world_size: int) -> list[Sequence[int] | None]:
    return [None, [300, 0, 1, 3333][:world_size], [0, 0, 40, 300][-world_size:]]


def _check_bits(rank: int, per_node: int, seed: int) -> None:
    t = topology(per_node)
    generator = torch.Generator().manual_seed(seed + rank)
    for over, numbering, dtype in (("world", "rank", torch.bfloat16), ("nodes", "local", torch.float16)):
        owners = _owners(t.world_size, per_node, numbering)
        for sizes in _sizes(t.world_size):
            row = owners.index(rank)
            numel = 1000 if sizes is None else sizes[row]
            held = [row for row, owner in enumerate(owners) if over == "world" or owner % per_node == t.local_rank]
            replica = torch.zeros(sum(1000 if sizes is None else sizes[i] for i in held), dtype=dtype)
            gather = DeltaGather(
                replica,
                t,
                format="exact",
                numbering=numbering,
                over=over,
                shard_sizes=sizes,  # type: ignore[arg-type]
            )
            shard = torch.randn(numel, generator=generator).to(dtype)
            gather.refresh(shard)
            for step, kind in enumerate(KINDS):
                shard = _changed(shard, kind, generator)
                work = gather.update(shard, async_op=step % 2 == 1)
                if work is not None:
                    work.wait()
                of_ranks = _gathered(shard, t.world_size)
                expected = torch.cat([of_ranks[owners[i]] for i in held])
                assert torch.equal(replica.view(torch.int16), expected), (over, sizes, kind, f"ZERO_TEST_DAY={seed}")
                assert torch.equal(gather.held.view(torch.int16), of_ranks[rank])


@pytest.mark.parametrize(("world_size", "per_node"), PLACES)
def test_replicas_have_the_bits_of_the_shards(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_bits, per_node, DAY)


def _check_over_a_process_group(rank: int) -> None:
    replica = torch.zeros(4, 500, dtype=torch.bfloat16)
    gather = DeltaGather(replica, None, format="exact")
    values = torch.linspace(-1, 1 + rank, 500)
    gather.refresh(values)
    for factor in (1.01, 100.0, 1.5):
        values = values * factor  # float32: rounded to the replica's dtype
        work = gather.update(values, async_op=True)
        assert work is not None
        work.wait()
    of_ranks = _gathered(values.bfloat16(), 4)
    assert torch.equal(replica.view(torch.int16), torch.stack(of_ranks))


def test_float32_shards_are_rounded_once() -> None:
    run_ranks(4, _check_over_a_process_group)


# Messages.


def _stream(rank: int, numel: int, num_steps: int) -> list[Tensor]:
    """Weights under changes of one size."""
    generator = torch.Generator().manual_seed(rank)
    values, found = torch.randn(numel, generator=generator), []
    for _ in range(num_steps):
        values = values + 1e-3 * torch.randn(numel, generator=generator)
        found.append(values.bfloat16())
    return found


def _check_lengths(rank: int) -> None:
    """What is counted, and what gloo sends, is the message."""
    t, numel = topology(2), 20_000
    gather = NodeReplica(t, numel, torch.bfloat16, format="exact")
    values, message = _stream(rank, numel, 5), torch.empty(ulps.max_message_nbytes(numel), dtype=torch.uint8)
    gather.refresh(values[0])
    for old, new in pairwise(values):
        exchanging = patch.object(backend, "exchange", side_effect=backend.exchange)
        with zcomm.traffic() as sent, exchanging as exchange:
            gather.update(new)
        nbytes = ulps.encode(new, old, message)
        assert nbytes < numel
        assert torch.equal(gather.held.view(torch.int16), new.view(torch.int16))
        assert sent.bytes(link="inter") == sent.bytes(format="exact") == nbytes
        _, _, _, sends, _ = exchange.call_args.args
        assert [part.nbytes for _, part in sends] == [nbytes]


def test_messages_are_sent_as_long_as_they_are() -> None:
    run_ranks(4, _check_lengths)


def _check_orders(rank: int) -> None:
    """Two changes in flight, which ranks wait for in different orders, and not at all before a barrier."""
    t, numel = topology(1), 5_000
    gathers = [DeltaGather(torch.zeros(2 * numel, dtype=torch.bfloat16), t, format="exact") for _ in range(2)]
    streams = [_stream(2 * rank + i, numel, 3) for i in range(2)]
    for gather, (first, *_) in zip(gathers, streams, strict=True):
        gather.refresh(first)
    for step in (1, 2):
        works = [gather.update(stream[step], async_op=True) for gather, stream in zip(gathers, streams, strict=True)]
        if rank == step % 2:
            dist.barrier()
        for work in works if rank else reversed(works):
            assert work is not None
            work.wait()
        if rank != step % 2:
            dist.barrier()
        for gather, stream in zip(gathers, streams, strict=True):
            expected = torch.stack(_gathered(stream[step], 2))
            assert torch.equal(gather.replica.view(torch.int16), expected.view(2, -1))


def test_ranks_may_wait_in_any_order() -> None:
    run_ranks(2, _check_orders)


def _check_next_values(rank: int) -> None:
    """What is sent are the values at the call, also where a thread drives both hops, and another gather before."""
    t, numel = topology(2), 50_000
    busy, gather = (DeltaGather(torch.zeros(4 * numel, dtype=torch.bfloat16), t, format="exact") for _ in range(2))
    first, second = _stream(rank, numel, 2)
    for one in (busy, gather):
        one.refresh(first)
    sent = second.clone()
    works = busy.update(second, async_op=True), gather.update(sent, async_op=True)
    sent.fill_(rank)
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(gather.replica.view(torch.int16), torch.stack(_gathered(second, 4)))


def test_the_next_values_may_be_written_while_a_message_is_in_flight() -> None:
    run_ranks(4, _check_next_values)


# What goes wrong.


def _check_damage(rank: int) -> None:
    """The same error on every rank, and the next call must be a refresh."""
    t = topology(2)
    first, second, third = _stream(rank, 800, 3)
    with checking():
        gather = DeltaGather(torch.zeros(4 * 800, dtype=torch.bfloat16), t, format="exact")
        gather.refresh(first)
        for nth in (1, 2):  # one exchange on each hop
            with flipped_bit(nth if rank == VICTIM else 0, at=20), pytest.raises(DamagedError) as error:
                gather.update(second if nth % 2 else third)
            texts: list[Any] = [None] * 4
            dist.all_gather_object(texts, str(error.value))
            assert len(set(texts)) == 1, texts
            with pytest.raises(StateError, match="refresh"):
                gather.update(third)
            gather.refresh(first)
        gather.update(second)
    expected = torch.stack(_gathered(second, 4))
    assert torch.equal(gather.replica.view(4, -1).view(torch.int16), expected)


def test_damage_is_the_same_error_on_every_rank() -> None:
    run_ranks(4, _check_damage)


def _check_one_rank_fails(rank: int) -> None:
    """A rank that alone cannot read a message holds other values than the others, until all refresh."""
    gather = DeltaGather(torch.zeros(2 * 20_000, dtype=torch.bfloat16), None, format="exact")
    generator = torch.Generator().manual_seed(rank)
    shard = torch.randn(20_000, generator=generator).bfloat16()
    gather.refresh(shard)
    for kind in ("small", "large"):
        shard = _changed(shard, kind, generator)
        fails = rank == VICTIM % 2 and kind == "large"
        damaged = patch.object(ulps, "decode", side_effect=MessageError("damaged")) if fails else nullcontext()
        with damaged, pytest.raises(MessageError) if fails else nullcontext():
            gather.update(shard)
    gather.refresh(shard)
    for kind in ("small", "small"):
        shard = _changed(shard, kind, generator)
        gather.update(shard)
    assert torch.equal(gather.replica.view(2, -1).view(torch.int16), torch.stack(_gathered(shard, 2)))


def test_after_an_error_of_one_rank_a_refresh_makes_replicas_equal() -> None:
    run_ranks(2, _check_one_rank_fails)


def survives_damage(
    rank: int, num_before: int = 0, num_after: int = 1, check: Callable[[DeltaGather], None] = lambda _: None
) -> tuple[bool, Tensor]:
    """Whether an update failed, after others and a refresh, and the replica after ``check``, a refresh and others."""
    t, (first, *steps) = zcomm.Topology(ranks_per_node=2), _stream(rank, 500, 3 + num_before + num_after)
    gather, has_failed = DeltaGather(torch.zeros(4 * 500, dtype=torch.bfloat16), t, format="exact"), False
    gather.refresh(first)
    for values in steps[:num_before]:
        gather.update(values)
    try:
        gather.update(steps[num_before])
    except MessageError:
        has_failed = True
    gather.refresh(steps[num_before + 1])
    check(gather)
    for values in steps[num_before + 2 :]:
        gather.update(values)
    t.close()
    return has_failed, gather.replica.view(4, -1)


def test_a_damaged_head_on_the_first_hop_keeps_no_rank_waiting() -> None:
    """The receiver has nothing whole to forward, but its node waits for it."""
    expected, room = torch.stack([_stream(rank, 500, 4)[3] for rank in range(4)]), ulps.max_message_nbytes(500)
    flipped, simulation = [], Simulation(4, seed=DAY)

    def flip(received: Tensor) -> None:
        if received.numel() == room and not flipped:
            received[DAY % ulps.HEAD_NBYTES] ^= 4
            flipped.append(True)

    simulation.network.flip = flip
    outcomes = simulation.run(survives_damage)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert sorted(outcome.result[0] for outcome in outcomes) == [False, False, True, True], "one node"
    assert all(torch.equal(outcome.result[1], expected) for outcome in outcomes)


def _cancelled(rank: int) -> Tensor:
    """An update that stands in the queue behind a deadlock is never sent, but this rank's row has its values."""
    t, steps = zcomm.Topology(ranks_per_node=2), _stream(rank, 500, 4)
    gather = DeltaGather(torch.zeros(4 * 500, dtype=torch.bfloat16), t, format="exact")
    gather.refresh(steps[0])
    numel = 64 if rank else 128
    diverged = zcomm.all_gather_single(torch.zeros(4 * numel), torch.zeros(numel), t, async_op=True)
    for work in (diverged, gather.update(steps[1], async_op=True)):
        assert work is not None
        with pytest.raises(DivergedError):
            work.wait()
    with pytest.raises(StateError, match="refresh"):
        gather.update(steps[2])
    gather.refresh(steps[2])
    gather.update(steps[3])
    t.close()
    return gather.replica.view(4, -1)


def test_after_a_cancelled_update_a_refresh_makes_replicas_equal() -> None:
    expected = torch.stack([_stream(rank, 500, 4)[3] for rank in range(4)])
    for outcome in Simulation(4, seed=DAY).run(_cancelled):
        assert outcome.error is None, outcome.error
        assert torch.equal(outcome.result, expected)


def test_what_is_refused() -> None:
    one = zcomm.Topology.single()
    with pytest.raises(FormatError, match="16-bit"):
        DeltaGather(torch.zeros(8), one, format="exact")
    with pytest.raises(LayoutError):
        DeltaGather(torch.zeros(1, 8, dtype=torch.bfloat16)[:, :4].expand(1, 4).t(), one, format="exact")
    with pytest.raises(FormatError, match="exact"):
        zcomm.all_gather_single(torch.zeros(8), torch.zeros(8), format="exact")


def _check_refused_over_nccl(rank: int) -> None:
    with pytest.raises(BackendUnavailableError):
        DeltaGather(torch.zeros(16, dtype=torch.bfloat16), topology(1), format="exact")


def test_it_is_refused_over_nccl() -> None:
    with ranks_over("nccl"):
        run_ranks(2, _check_refused_over_nccl)
