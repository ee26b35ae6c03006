"""ZCOMM_DEBUG=1: calls that differ between ranks are one error on every rank, before anything is exchanged."""

# covers zcomm/_bench/torch_calls.py zcomm/_transport/debug.py

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import run_ranks, topology
from tests.variables import variables
from zcomm import CommunicationError, LayoutError
from zcomm._transport import backend
from zcomm._transport.call_context import public_call


def _gather(numel: int, **options: Any) -> None:
    zcomm.all_gather_single(torch.empty(4 * numel), torch.ones(numel), **options)


def _reduce(numel: int, op: str = "sum", dtype: torch.dtype = torch.float32) -> None:
    x = torch.ones(4 * numel, dtype=dtype)
    zcomm.reduce_scatter_single(torch.empty(numel), x, op, group=topology(2), format="int8")


def _check_mismatches(rank: int) -> None:
    t, flat = topology(2), topology(4)
    is_odd = rank == 2
    calls: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (lambda: _gather(100 + is_odd), ("numel=100", "numel=101")),
        (lambda: _gather(100, format="int4" if is_odd else "int8"), ("format=int4", "format=int8")),
        (lambda: _gather(8, group=t, format=("int8", "none" if is_odd else "int8")), ("int8 -> none", "int8 -> int8")),
        (lambda: _reduce(8, "avg" if is_odd else "sum"), ("op=avg", "op=sum")),
        (lambda: _reduce(8, dtype=torch.bfloat16 if is_odd else torch.float32), ("bfloat16", "float32")),
        (lambda: zcomm.all_reduce(torch.ones(8 + is_odd), group=t), ("all_reduce", "numel=9")),
        (lambda: _reduce(4) if is_odd else _gather(4, group=t), ("all_gather(", "reduce_scatter(")),
        (lambda: _gather(8, group=None if is_odd else t, format="int8"), ("hops=1", "hops=2")),
        (lambda: _gather(8, group=None if is_odd else flat), ("group='0'", "group='")),
    ]
    with variables(ZCOMM_DEBUG="1"):
        for call, texts in calls:
            with pytest.raises(LayoutError) as caught:
                call()
            message = str(caught.value)
            for text in (*texts, "rank 0", "rank 3", "test_debug.py:"):
                assert text in message, message
        _gather(100, group=t, format="int8")  # equal calls go through, and nothing is left of the others
        total = torch.ones(5)
        zcomm.all_reduce(total, group=t)
        assert total.tolist() == [4.0] * 5


def test_mismatches_are_named_on_every_rank() -> None:
    run_ranks(4, _check_mismatches)


def _check_control(rank: int) -> None:
    """One rank skips an exchange of values, and one of texts; its next call is another."""
    t = topology(2)
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: zcomm.control.agree_max(torch.zeros(3, dtype=torch.int64), t),
            r"control all_gather\(nbytes=24, call=",
        ),
        (lambda: zcomm.control.gather_texts("text", t), r"control all_gather\(nbytes=512"),
        (lambda: zcomm.control.broadcast_(torch.ones(2), 1, t), r"control broadcast\(nbytes=8"),
    ]
    with variables(ZCOMM_DEBUG="1"):
        for call, text in calls:
            with pytest.raises(LayoutError, match=text), public_call("save_checkpoint()"):
                _gather(5, group=t) if rank == 1 else call()
            call()


def test_control_exchanges_are_compared() -> None:
    run_ranks(4, _check_control)


def _check_secondary(rank: int) -> None:
    partition = zcomm.SecondaryPartition(topology(2), 10 + rank, torch.float32)
    partition.fill(torch.ones(10 + rank))
    with variables(ZCOMM_DEBUG="1"), pytest.raises(LayoutError, match="secondary_gather"):
        partition.gather(torch.empty(10 + rank))


def test_secondary_partitions_are_compared_inside_the_node() -> None:
    run_ranks(4, _check_secondary)


def _check_missing(rank: int) -> None:
    """Ranks 0 and 1 call over all ranks, rank 2 inside its node, rank 3 only after the others have timed out."""
    t = topology(2)
    partition = zcomm.SecondaryPartition(t, 10, torch.float32)
    partition.fill(torch.ones(10))
    with variables(ZCOMM_DEBUG="1"), pytest.MonkeyPatch.context() as patch:
        seconds = 6 if rank == 2 else 2  # the third rank gives up when the others have
        patch.setattr(backend, "timeout_of", lambda _group: timedelta(seconds=seconds))
        _gather(7)  # what rank 3 will have done last
        if rank == 3:
            patch.setattr(backend, "timeout_of", lambda _group: timedelta(seconds=30))
            dist.barrier()  # the others have their error
        calls: list[Callable[[], object]] = [lambda: _gather(9, group=t), lambda: partition.gather(torch.empty(10))]
        for index in {0: [0], 1: [0], 2: [1, 0], 3: [0, 1]}[rank]:
            with pytest.raises(CommunicationError) as caught:
                calls[index]()
            message = str(caught.value)
            if index == 0:
                assert "of ranks 0, 1, 2, 3 not all came within 2 s: 2, 3\n  rank 0: all_gather(numel=9" in message
                assert "  rank 2: waits for ranks 3 in another call, of ranks 2, 3: secondary_gather(" in message
            assert "  rank 3: has made no call since all_gather(numel=7" in message
            assert "test_debug.py:" in message
        if rank != 3:
            dist.barrier()
        patch.undo()
        _gather(7, group=t)  # all are in step again


def test_ranks_that_make_no_call_are_named() -> None:
    run_ranks(4, _check_missing)


def _check_threads(rank: int) -> None:
    """A thread's calls over its own group match those of other ranks, independently of the main thread's calls."""
    t, other = topology(2), topology(4)
    is_first = threading.Event()

    def in_thread() -> None:
        is_first.set()
        for _ in range(3):
            _gather(5, group=other)

    with variables(ZCOMM_DEBUG="1"):
        thread = threading.Thread(target=in_thread)
        if rank % 2:
            thread.start()
            is_first.wait()
            time.sleep(0.05)  # until it is in its call
        _gather(6, group=t)
        if rank % 2 == 0:
            thread.start()
        thread.join()


def test_threads_are_compared_by_group() -> None:
    run_ranks(4, _check_threads)
