"""All-gather and reduce-scatter of shards of different lengths: bad arguments, other calls, and damage on the way."""

# covers zcomm/_collectives/uneven_shards.py

from __future__ import annotations

from typing import Any

import pytest
import torch

import zcomm
from tests.ranks import run_ranks, topology
from tests.rotation import DAY
from tests.variables import variables
from tests.zcomm.data import same_values
from tests.zcomm.test_checked import checking, flipped_bit
from tests.zcomm.test_uneven_shards import KEY, ROW, _day, _gather, _normal, _reduce, _whole  # noqa: F401  (a fixture)
from zcomm import BackendUnavailableError, DamagedError, DivergedError, FormatError, LayoutError, Residual, Topology

SIZES: dict[str, tuple[Any, str]] = {
    "sum": ([3, 2], "must add up to the rows of {0}: sum=5, rows=4"),
    "few": ([4], "{0}_split_sizes must be a list with the rows of each rank"),
    "many": ([1, 2, 1], "{0}_split_sizes must be a list with the rows of each rank"),
    "negative": ([5, -1], r"{0}_split_sizes\[1\] must be an integer of at least 0"),
    "float": ([2.0, 2], r"{0}_split_sizes\[0\] must be an integer"),
    "tensor": (torch.tensor([2, 2]), "{0}_split_sizes must be a list.*a Tensor of shape"),
    "word": ("ab", "{0}_split_sizes must be a list"),
    "shard": ([0, 4], "must be contiguous and have the elements of this rank's rows"),
}


def _check_wrong(rank: int) -> None:
    """Only rank 0 makes these calls: each raises before any communication."""
    full, shard, sizes = torch.ones(4, 3), torch.ones(3, 3), [3, 1]
    groups = [None, topology(2), topology(1)]  # made on both ranks

    def raises(kind: type[Exception], text: str, group: Any, **given: Any) -> None:
        for name, call, big, small in (
            ("output", zcomm.all_gather_single, "output", "input"),
            ("input", zcomm.reduce_scatter_single, "input", "output"),
        ):
            tensors = {big: given.get("full", full), small: given.get("shard", shard)}
            rest = {key: value for key, value in given.items() if key not in ("full", "shard", "sizes")}
            chosen = given.get("sizes", sizes)
            with pytest.raises(kind, match=text.format(name)):
                call(**tensors, group=group, **{f"{name}_split_sizes": chosen}, **rest)  # type: ignore[operator]

    for group in groups if rank == 0 else ():
        for wrong, text in SIZES.values():
            raises(LayoutError, text, group, sizes=wrong)
        raises(LayoutError, "must be left out with lists", group, full=[full], shard=[shard])
        raises(FormatError, "is measured on even shards: name a format", group, format="auto")
        raises(BackendUnavailableError, "backend='nccl' does not serve {0}_split_sizes", group, backend="nccl")
        raises(FormatError, "needs random=", group, format="int8:stochastic")
        raises(FormatError, "leave out random=", group, random=KEY)
        raises(LayoutError, "{0} must be contiguous and have rows", group, full=torch.ones(3, 4).t())
        raises(LayoutError, "{0} must be contiguous and have rows", group, full=torch.tensor(1.0))
        raises(LayoutError, "must be contiguous and have the elements", group, shard=torch.ones(3, 6)[:, ::2])
        raises(
            FormatError,
            r"dtype=torch\.float8",
            group,
            full=full.to(torch.float8_e4m3fn),
            shard=shard.to(torch.float8_e4m3fn),
        )
        raises(zcomm.ZcommError, "numbering", group, numbering="x")
        raises(zcomm.ZcommError, "async_op", group, async_op=1)
        with pytest.raises(LayoutError, match="op must be 'sum' or 'avg'"):
            zcomm.reduce_scatter_single(shard, full, "max", group=group, input_split_sizes=sizes)
        residual = Residual(Topology.single(), [("w", 0, 12)], 12)
        with pytest.raises(LayoutError, match="residual must be left out with input_split_sizes"):
            zcomm.reduce_scatter_single(shard, full, group=group, input_split_sizes=sizes, residual=residual)
    if rank == 0:
        raises(FormatError, "a pair of formats needs a Topology", None, format=("int8", "int4"))
    own = torch.ones(sizes[rank], 3)
    assert bool((_gather(own, sizes, topology(2)) == 1).all())
    assert bool((_reduce(full, sizes[rank], sizes, topology(2)) == 2).all())


def test_wrong_arguments_are_named_before_any_communication() -> None:
    run_ranks(2, _check_wrong)


def _both(rank: int, sizes: list[int], group: Any, **options: Any) -> None:
    x = _whole(rank, sum(sizes), 1)
    part, full = torch.empty(sizes[rank], *ROW), torch.empty(sum(sizes), *ROW)
    zcomm.reduce_scatter_single(part, x, group=group, input_split_sizes=sizes, **options)
    zcomm.all_gather_single(full, part, group, output_split_sizes=sizes, **options)
    assert same_values(full, sum(_whole(r, sum(sizes), 1) for r in range(4)))  # type: ignore[arg-type]


def _check_other_calls(rank: int) -> None:
    """One rank is in another call, or passes other sizes: the watch finds it, and the topology stays usable."""
    sizes = [3, 0, 5, 2]
    others = [2, 1, 5, 2]
    t, full = topology(2), torch.empty(sum(sizes), *ROW)
    with pytest.raises(DivergedError):
        zcomm.all_reduce(torch.ones(9), group=t) if rank == 1 else _both(rank, sizes, t)
    _both(rank, sizes, t)
    for per_node, check in ((4, "0"), (2, "1")):
        t, passed = topology(per_node), others if rank == 0 else sizes
        with variables(ZCOMM_CHECK=check):
            with pytest.raises(DivergedError):
                zcomm.all_gather_single(full, torch.ones(passed[rank], *ROW), t, output_split_sizes=passed)
            _both(rank, sizes, t)
    with variables(ZCOMM_DEBUG="1"):
        _both(rank, sizes, topology(2))
        with pytest.raises(LayoutError, match="the ranks' calls must be equal"):
            _both(rank, others if rank == 0 else sizes, topology(2))


def test_a_rank_in_another_call_is_found() -> None:
    run_ranks(4, _check_other_calls)


def _check_checked(rank: int) -> None:
    """With ZCOMM_CHECK=1: right results, and damage of one message is known on every rank."""
    sizes = [40, 0, 3, 21]
    for group in (topology(2), topology(4), None):
        with checking():
            _both(rank, sizes, group)
            x = _normal(rank, sizes[rank], DAY)
            full = _gather(x, sizes, group, format="int8")
            for nth in (1, 2) if group is topology(2) else (1,):
                got = torch.full((64, *ROW), 9.0)
                with flipped_bit(nth if rank == 1 else 0), pytest.raises(DamagedError, match="rank 1 received"):
                    zcomm.all_gather_single(got, x, group, output_split_sizes=sizes, format="int8")
                assert bool((got == 9).all())
            assert same_values(_gather(x, sizes, group, format="int8"), full)


def test_damaged_messages_are_named_on_every_rank() -> None:
    run_ranks(4, _check_checked)
