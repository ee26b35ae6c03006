"""With ZCOMM_CHECK=1 one flipped bit in any message is the same named error on every rank, and nothing is used."""

# covers zcomm/_base/env.py zcomm/_transport/checked.py

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from zcomm import DamagedError, DivergedError, MessageError, control
from zcomm._base import env
from zcomm._formats.message import layout_of
from zcomm._kernels import kernels
from zcomm._transport import checked

NUMEL = 1200
VICTIM = 1


@contextmanager
def checking() -> Iterator[None]:
    """Act as a process started with ZCOMM_CHECK=1."""
    usual = env.is_set
    env.is_set = lambda name: name == "ZCOMM_CHECK" or usual(name)  # type: ignore[assignment]
    try:
        yield
    finally:
        env.is_set = usual


@contextmanager
def flipped_bit(nth: int, *, at: int = -1, bit: int = 4) -> Iterator[list[int]]:
    """Flip a bit of one rank's bytes in the ``nth`` exchange from now on. Yields the senders."""
    usual, left, senders = checked.wait_received, [nth], []

    def wait_received(pending: Any, received: Mapping[int, Tensor]) -> None:
        usual(pending, received)
        left[0] -= 1
        if left[0] == 0:
            sender = min(received)
            flat = received[sender].view(-1).view(torch.uint8)
            flat[at] ^= bit
            senders.append(sender)

    checked.wait_received = wait_received
    try:
        yield senders
    finally:
        checked.wait_received = usual


def _calls(rank: int, world_size: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """The calls by name, each with its number of exchanges."""
    two_hops, hops = topology(2), min(2, world_size // 2)
    shard = torch.linspace(-1, 1 + rank, NUMEL)
    rows, out = shard.repeat(world_size), torch.empty(NUMEL)

    def gather(wire: Any, group: Any = None, *, async_op: bool = False) -> None:
        full = torch.full((world_size * NUMEL,), float("nan"))
        try:
            work = zcomm.all_gather_single(full, shard, group, format=wire, async_op=async_op)
            if work is not None:
                work.wait()
        except DamagedError:
            assert wire == "none" or full.isnan().all(), "decoded before it was known to be whole"
            raise

    return {
        "gather": (1, lambda: gather("none")),
        "gather int8": (1, lambda: gather("int8")),
        "gather later": (1, lambda: gather("int4", async_op=True)),
        "gather two hops": (hops, lambda: gather("none", two_hops)),
        "gather two hops, recoded": (hops, lambda: gather(("int8", "bf16"), two_hops)),
        "gather two hops later": (hops, lambda: gather("int8", two_hops, async_op=True)),
        "scatter": (1, lambda: zcomm.reduce_scatter_single(out, rows, format="bf16")),
        "scatter two hops": (
            hops,
            lambda: zcomm.reduce_scatter_single(out, rows, group=two_hops, format=("int8", "int4")),
        ),
        "all reduce": (2, lambda: zcomm.all_reduce(rows.clone(), format="int8")),
        "all to all": (1, lambda: zcomm.all_to_all_single(torch.empty_like(rows), rows, format="int8")),
        "maximum": (1, lambda: control.agree_max(torch.ones(3, dtype=torch.int64), two_hops)),
        "broadcast": (1, lambda: control.broadcast_(torch.ones(5), 0, two_hops)),
    }


def _check(rank: int, world_size: int) -> None:
    of_ranks: list[Any] = [None] * world_size
    with checking():
        for name, (num_exchanges, call) in _calls(rank, world_size).items():
            call()
            for nth in range(1, num_exchanges + 1):
                with flipped_bit(nth if rank == VICTIM else 0), pytest.raises(DamagedError) as error:
                    call()
                dist.all_gather_object(of_ranks, str(error.value))
                assert len(set(of_ranks)) == 1, (name, nth, of_ranks)
                assert f"rank {VICTIM} received other bytes than rank " in of_ranks[0], (name, nth, of_ranks)
            call()  # the groups are as before
        _check_order(rank, world_size)
        if world_size == 4:
            _check_node_sums(rank)
            _check_gathers_of_a_node(rank)


def _check_node_sums(rank: int) -> None:
    """The hop between nodes is one over all ranks; damage inside a node is reported to the other nodes."""
    sums, out, texts = zcomm.NodeSums(topology(2), NUMEL, ("int8", "int4")), torch.empty(NUMEL), [""] * 4
    full = torch.linspace(-1, rank, 4 * NUMEL)
    sums.add(full)
    calls: list[tuple[int, int, Callable[[], object]]] = [
        (1, 3, lambda: sums.reduce(out)),
        (1, 0, lambda: sums.add(full)),
        (1, 0, lambda: sums.reduce(out, full)),
        (2, 3, lambda: sums.reduce(out, full)),
    ]
    for nth, sender, call in calls:
        with flipped_bit(nth if rank == VICTIM else 0), pytest.raises(DamagedError) as error:
            call()
        dist.all_gather_object(texts, str(error.value))
        assert len(set(texts)) == 1, texts
        assert f"rank {VICTIM} received other bytes than rank {sender} sent" in texts[0]
        sums.clear()


def _check_gathers_of_a_node(rank: int) -> None:
    """The other node raises the same error, though its messages are intact: else it would wait for dead ranks."""
    two_hops, out, texts = topology(2), torch.empty(4 * NUMEL), [""] * 4
    secondary = zcomm.SecondaryPartition(two_hops, 4 * NUMEL, torch.float32)
    secondary.fill(torch.arange(4.0 * NUMEL))
    replica = zcomm.NodeReplica(two_hops, NUMEL, torch.float32)
    for call in (lambda: secondary.gather(out), lambda: replica.gather(out, 0, NUMEL)):
        with flipped_bit(1 if rank == VICTIM else 0), pytest.raises(DamagedError) as error:
            call()
        dist.all_gather_object(texts, str(error.value))
        assert len(set(texts)) == 1, texts
        assert f"rank {VICTIM} received other bytes than rank 0 sent" in texts[0]
        call()
    secondary.gather(out)
    assert torch.equal(out, torch.arange(4.0 * NUMEL))


def _check_order(rank: int, world_size: int) -> None:
    """Ranks wait for the calls in different orders, and one of them for none."""
    fulls = [torch.empty(world_size * NUMEL) for _ in range(4)]
    works: Any = [
        zcomm.all_gather_single(full, torch.full((NUMEL,), float(rank + i)), async_op=True)
        for i, full in enumerate(fulls)
    ]
    for i in range(3 if rank else 4):
        works[(i * (1 if rank % 2 else 3)) % 4].wait()
    expected = torch.arange(float(world_size)).repeat_interleave(NUMEL)
    works[3].wait()
    assert torch.equal(fulls[3], expected + 3)


def test_a_damaged_message_is_not_decoded() -> None:
    layout = layout_of("test", zcomm.get_format("int8"), torch.float32, 1, 100)
    message, values = layout.new(1, torch.device("cpu")), torch.full((100,), 7.0)
    with checking():
        kernels.quantize(torch.ones(100), layout, message, 0, 0)
        message[0, 40] ^= 1
        with pytest.raises(MessageError, match="a message was damaged"):
            kernels.decode(message, layout, values, 0, 0)
    assert bool((values == 7).all())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_wrong_bit_is_the_same_error_on_every_rank(world_size: int) -> None:
    run_ranks(world_size, _check, world_size)


def _check_diverging(rank: int) -> None:
    """Ranks make different calls of two hops: some wait only for verdicts, in exchanges that all have started."""
    with checking():
        t = zcomm.Topology(ranks_per_node=2)
        t.companion  # noqa: B018  (made at the first use)
        t.watch.period_s = 0.1
        shard, full = torch.full((NUMEL,), float(rank)), torch.empty(4 * NUMEL)
        expected = torch.arange(4.0).repeat_interleave(NUMEL)

        def gather(over: zcomm.Topology) -> None:
            zcomm.all_gather_single(full, shard, over, format="int8")

        def scatter() -> None:
            zcomm.reduce_scatter_single(torch.empty(NUMEL), expected, group=t, format="bf16")

        for leaving in ([3], [1, 2, 3], [0, 2]):
            start, leaves = time.perf_counter(), rank in leaving
            for call in (partial(gather, t.companion if leaves else t), scatter if leaves else partial(gather, t)):
                with pytest.raises(DivergedError, match="deadlock: the ranks make different calls"):
                    call()
            assert time.perf_counter() - start < 20
            for _ in range(2):
                zcomm.all_gather_single(full, shard, t, format="none")
                assert torch.equal(full, expected)
        t.close()
    gc.collect()  # the errors hold frames, and those the groups, whose threads end with them


def test_ranks_that_wait_for_one_anothers_verdicts_are_found() -> None:
    run_ranks(4, _check_diverging)


def _check_bytes(rank: int) -> None:
    full, shard = torch.empty(2 * NUMEL), torch.ones(NUMEL)
    with zcomm.traffic() as plain:
        zcomm.all_gather_single(full, shard, format="int8")
    with checking(), zcomm.traffic() as checked_:
        zcomm.all_gather_single(full, shard, format="int8")
    assert checked_.bytes() - plain.bytes() == checked_.bytes(operation="check") == 16, checked_.as_dict()
    assert {t.name for t in threading.enumerate()} >= {"zcomm-check"}


def test_what_checksums_cost_is_counted() -> None:
    run_ranks(2, _check_bytes)
