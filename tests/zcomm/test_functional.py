"""The functional collectives: bits of the eager ones, and no graph break under torch.compile."""

# covers zcomm/_collectives/all_gather.py zcomm/_collectives/all_reduce.py zcomm/_collectives/all_to_all.py

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import zcomm
from tests.ranks import run_ranks, topology
from zcomm import FormatError, RandomKey, StateError, Topology, functional

OUTSIDE = RandomKey(3, 4, 5)
FORMATS: list[Any] = ["none", "int8", ("int8", "int4")]


def _eager(x: torch.Tensor, t: Topology, format: Any) -> list[torch.Tensor]:
    full, shard = x.new_empty(4 * x.numel()), x.new_empty(x.numel() // 4)
    zcomm.all_gather_single(full, x, t, format=format)
    zcomm.reduce_scatter_single(shard, x, "avg", group=t, format=format)
    total, parts = x.clone(), torch.empty_like(x)
    zcomm.all_reduce(total, "sum", t, format=format)
    zcomm.all_to_all_single(parts, x, t, format=format)
    return [full, shard, total, parts]


def _functional(x: torch.Tensor, t: Topology, format: Any) -> list[torch.Tensor]:
    return [
        functional.all_gather_single(x, t, format=format) + 0,
        functional.reduce_scatter_single(x, "avg", t, format=format),
        functional.all_reduce(x, "sum", t, format=format),
        functional.all_to_all_single(x, t, format=format) * 1,
    ]


def _random_functional(x: torch.Tensor, t: Topology, format: Any, step: int) -> list[torch.Tensor]:
    """One key is created outside the compiled function, the others inside."""
    return [
        functional.all_gather_single(x, t, format=format, random=RandomKey(7, 0, step)) + 0,
        functional.reduce_scatter_single(x, "avg", t, format=format, random=RandomKey(7, 1, step)),
        functional.all_reduce(x, "sum", t, format=format, random=RandomKey(7, 2, step)),
        functional.all_to_all_single(x, t, format=format, random=OUTSIDE) * 1,
    ]


def _random_eager(x: torch.Tensor, t: Topology, format: Any, step: int) -> list[torch.Tensor]:
    full, shard, total, parts = x.new_empty(4 * x.numel()), x.new_empty(x.numel() // 4), x.clone(), torch.empty_like(x)
    zcomm.all_gather_single(full, x, t, format=format, random=RandomKey(7, 0, step))
    zcomm.reduce_scatter_single(shard, x, "avg", group=t, format=format, random=RandomKey(7, 1, step))
    zcomm.all_reduce(total, "sum", t, format=format, random=RandomKey(7, 2, step))
    zcomm.all_to_all_single(parts, x, t, format=format, random=OUTSIDE)
    return [full, shard, total, parts]


def _check_random(x: torch.Tensor, t: Topology, *, is_compiled: bool) -> None:
    """The bits are those of the eager calls; one compilation serves all steps after the first."""
    fn, format = _random_functional, ("int8", "int4:asym:stochastic")
    counter = CompileCounterWithBackend("aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn = torch.compile(fn, fullgraph=True, backend=counter) if is_compiled else fn
        results = [fn(x, t, format, step) for step in range(5)]
    for step, found in enumerate(results):
        for got, expected in zip(found, _random_eager(x, t, format, step), strict=True):
            assert torch.equal(got, expected)
    assert not torch.equal(results[1][0], results[2][0])
    assert counter.frame_count <= 2
    with pytest.raises(FormatError, match="needs random="):
        functional.all_reduce(x, "sum", t, format="int8:stochastic")
    with pytest.raises(FormatError, match=r"must be a zcomm.RandomKey\(seed, tensor, step\): random=7"):
        functional.all_reduce(x, "sum", t, format="int8:stochastic", random=7)  # type: ignore[arg-type]


def _check(rank: int, is_compiled: bool) -> None:  # noqa: FBT001
    x, t = torch.randn(4 * 700), topology(2)
    for format in FORMATS:
        fn = _functional
        if is_compiled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's own compiler
                fn = torch.compile(_functional, fullgraph=True, backend="aot_eager")
                fn(x, t, format)
        for got, expected in zip(fn(x, t, format), _eager(x, t, format), strict=True):
            assert torch.equal(got, expected)
    _check_random(x, t, is_compiled=is_compiled)
    assert functional.reduce_scatter_single(x, "sum", dtype=torch.float64).dtype == torch.float64
    assert rank >= 0


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_functional_equals_eager(is_compiled: bool) -> None:  # noqa: FBT001
    run_ranks(4, _check, is_compiled)


def _check_group(rank: int) -> None:
    group = torch.distributed.group.WORLD
    x = torch.arange(8.0) + rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(lambda x: functional.all_reduce(x, "sum", group), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), 2 * torch.arange(8.0) + 1)
    assert torch.equal(functional.all_reduce(x), 2 * torch.arange(8.0) + 1)


def test_process_groups_are_traced_by_name() -> None:
    run_ranks(2, _check_group)


def test_fake_implementations_agree_with_the_real_ones() -> None:
    t = Topology.single()
    x = torch.randn(300)
    for op, arguments in (
        (torch.ops.zcomm.all_gather_single, (x, t.key, 1, "int8", "rank")),
        (torch.ops.zcomm.reduce_scatter_single, (x, "sum", t.key, 1, "int4", "rank", torch.float32)),
        (torch.ops.zcomm.all_reduce, (x, "avg", t.key, "bf16")),
        (torch.ops.zcomm.all_to_all_single, (x, t.key, "none")),
        (torch.ops.zcomm.all_gather_single, (x, t.key, 1, "int8:stochastic", "rank", [1, 2, 3])),
        (torch.ops.zcomm.reduce_scatter_single,
         (x, "sum", t.key, 1, "int4:stochastic", "rank", torch.float32, [1, 2, 3])),
        (torch.ops.zcomm.all_reduce, (x, "avg", t.key, "int4:asym:stochastic", [1, 2, 3])),
        (torch.ops.zcomm.all_to_all_single, (x, t.key, "int8:stochastic", [1, 2, 3])),
    ):  # fmt: skip
        torch.library.opcheck(op, arguments)


def test_a_topology_that_is_gone() -> None:
    key = Topology.single().key
    with pytest.raises(StateError, match="is gone"):
        Topology.of_key(key)
