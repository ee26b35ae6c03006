"""ZCOMM_DEBUG=1: calls that differ between ranks are one error on every rank, before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import zcomm
from tests.ranks import run_ranks, topology
from zcomm import LayoutError, env


@contextmanager
def _debugging() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZCOMM_DEBUG", "1")
        env.value.cache_clear()
        try:
            yield
        finally:
            patch.undo()
            env.value.cache_clear()


def _gather(numel: int, **options: Any) -> None:
    zcomm.all_gather_single(torch.empty(4 * numel), torch.ones(numel), **options)


def _reduce(numel: int, op: str = "sum", dtype: torch.dtype = torch.float32) -> None:
    x = torch.ones(4 * numel, dtype=dtype)
    zcomm.reduce_scatter_single(torch.empty(numel), x, op, group=topology(2), format="int8")


def _check_mismatches(rank: int) -> None:
    t = topology(2)
    is_odd = rank == 2
    calls: list[tuple[Callable[[], object], tuple[str, ...]]] = [
        (lambda: _gather(100 + is_odd), ("numel=100", "numel=101")),
        (lambda: _gather(100, format="int4" if is_odd else "int8"), ("format=int4", "format=int8")),
        (lambda: _gather(8, group=t, format=("int8", "none" if is_odd else "int8")), ("int8 -> none", "int8 -> int8")),
        (lambda: _reduce(8, "avg" if is_odd else "sum"), ("op=avg", "op=sum")),
        (lambda: _reduce(8, dtype=torch.bfloat16 if is_odd else torch.float32), ("bfloat16", "float32")),
        (lambda: zcomm.all_reduce(torch.ones(8 + is_odd), group=t), ("all_reduce", "numel=9")),
        (lambda: _reduce(4) if is_odd else _gather(4, group=t), ("all_gather(", "reduce_scatter(")),
    ]
    with _debugging():
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


def _check_secondary(rank: int) -> None:
    partition = zcomm.SecondaryPartition(topology(2), 10 + rank, torch.float32)
    partition.fill(torch.ones(10 + rank))
    with _debugging(), pytest.raises(LayoutError, match="secondary_gather"):
        partition.gather(torch.empty(10 + rank))


def test_secondary_partitions_are_compared_inside_the_node() -> None:
    run_ranks(4, _check_secondary)
