"""The functional collectives are differentiated: gradients of the exact collective, of the sum of all ranks' losses."""

# covers zcomm/functional.py

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiated
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import zcomm
from tests.ranks import run_ranks, topology
from zcomm import ConfigError, DivergedError, FormatError, LayoutError, RandomKey, functional

W = 4
F64 = torch.float64
SPLITS = [[2, 0, 3, 1], [1, 1, 0, 4], [0, 0, 0, 2], [5, 1, 2, 0]]
"""The rows that rank i sends to rank j."""


def _values(rank: int, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=F64)


Call = Callable[..., Tensor]
SIZES = [{"output_split_sizes": [row[rank] for row in SPLITS], "input_split_sizes": SPLITS[rank]} for rank in range(W)]


class Case(NamedTuple):
    """A call, what it gives each rank, of all ranks' inputs, and the shape of rank 0's input."""

    function: Call
    options: dict[str, Any]
    formula: Callable[[list[Tensor]], list[Tensor]]
    shape: tuple[int, ...]

    def call(self, x: Tensor, group: Any, rank: int, **more: Any) -> Tensor:
        sizes = SIZES[rank] if self.shape[:1] == (sum(SPLITS[0]),) else {}
        return self.function(x, group=group, **self.options, **sizes, **more)

    def input(self, rank: int) -> Tensor:
        is_uneven = self.shape[:1] == (sum(SPLITS[0]),)
        return _values(rank, (sum(SPLITS[rank]), *self.shape[1:]) if is_uneven else self.shape, seed=1)


def _exchanged(xs: list[Tensor]) -> list[Tensor]:
    return [torch.cat([x.chunk(W)[rank] for x in xs]) for rank in range(W)]


def _exchanged_unevenly(xs: list[Tensor]) -> list[Tensor]:
    return [torch.cat([x.split(SPLITS[peer])[rank] for peer, x in enumerate(xs)]) for rank in range(W)]


def _of_nodes(xs: list[Tensor]) -> list[Tensor]:
    """Shards numbered local, on 2 nodes of 2."""
    return [torch.cat([xs[0], xs[2], xs[1], xs[3]])] * W


AVG = dist.ReduceOp.AVG
CASES = {
    "all_gather": Case(functional.all_gather_single, {}, lambda xs: [torch.cat(xs)] * W, (3, 5)),
    "all_gather, local": Case(functional.all_gather_single, {"numbering": "local"}, _of_nodes, (3, 5)),
    "reduce_scatter": Case(
        functional.reduce_scatter_single, {}, lambda xs: list(torch.stack(xs).sum(0).chunk(W)), (2 * W, 5)
    ),
    "reduce_scatter, mean": Case(
        functional.reduce_scatter_single, {"op": "avg"}, lambda xs: list(torch.stack(xs).mean(0).chunk(W)), (2 * W, 5)
    ),
    "all_reduce": Case(functional.all_reduce, {}, lambda xs: [torch.stack(xs).sum(0)] * W, (7,)),
    "all_reduce, mean": Case(functional.all_reduce, {"op": AVG}, lambda xs: [torch.stack(xs).mean(0)] * W, ()),
    "all_to_all": Case(functional.all_to_all_single, {}, _exchanged, (2 * W, 5)),
    "all_to_all, uneven": Case(functional.all_to_all_single, {}, _exchanged_unevenly, (sum(SPLITS[0]), 5)),
}


def _loss(y: Tensor, rank: int) -> Tensor:
    return (y.sin() * _values(rank, y.shape, seed=2).to(y.dtype)).sum()


def _expected(name: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of all ranks, in one process: results, gradients, and gradients of the sum of squares of those."""
    xs = [CASES[name].input(rank).requires_grad_() for rank in range(W)]
    ys = CASES[name].formula(xs)
    loss = torch.stack([_loss(y, rank) for rank, y in enumerate(ys)]).sum()
    grads = torch.autograd.grad(loss, xs, create_graph=True)
    second = torch.autograd.grad(torch.stack([(grad**2).sum() for grad in grads]).sum(), xs)
    return [y.detach() for y in ys], [grad.detach() for grad in grads], list(second)


def _check_gradients(rank: int, name: str) -> None:
    case = CASES[name]
    ys, grads, second = _expected(name)
    groups = [topology(2)] if "local" in name else [None, topology(2), topology(4)]
    for group in groups:
        x = case.input(rank).requires_grad_()
        y = case.call(x, group, rank)
        assert y.grad_fn is not None
        torch.testing.assert_close(y.detach(), ys[rank])
        (grad,) = torch.autograd.grad(_loss(y, rank), x, create_graph=True)
        torch.testing.assert_close(grad.detach(), grads[rank])
        (of_grad,) = torch.autograd.grad((grad**2).sum(), x)
        torch.testing.assert_close(of_grad, second[rank])
        _loss(case.call(x, group, rank) * 2, rank).backward()
        _loss(case.call(x, group, rank), rank).backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formula_in_one_process(name: str) -> None:
    run_ranks(W, _check_gradients, name)


def _check_convention(rank: int) -> None:
    """torch.distributed.nn.functional, which torch 2.13 deprecates, has the same convention."""
    x, z = _values(rank, (6,), seed=1).requires_grad_(), CASES["all_to_all, uneven"].input(rank).requires_grad_()
    output = torch.empty(sum(SIZES[rank]["output_split_sizes"]), 5, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        y, parts = differentiated.all_reduce(x), differentiated.all_to_all_single(output, z, **SIZES[rank])
        of_torch = *torch.autograd.grad(_loss(y, rank), x), *torch.autograd.grad(_loss(parts, rank), z)
    (of_sum,) = torch.autograd.grad(_loss(functional.all_reduce(x), rank), x)
    (of_parts,) = torch.autograd.grad(_loss(functional.all_to_all_single(z, **SIZES[rank]), rank), z)
    torch.testing.assert_close(of_sum, of_torch[0])
    assert torch.equal(of_parts, of_torch[1])


def test_gradients_are_those_of_torch() -> None:
    run_ranks(W, _check_convention)


def _check_straight_through(rank: int, name: str) -> None:
    """Rounding in forward changes the result, and no gradient of a loss that is linear in it."""
    case = CASES[name]
    grads = []
    for wire, random in (("none", None), ("int4", None), ("int8:stochastic", RandomKey(1, 2, 3))):
        x = case.input(rank).float().requires_grad_()
        y = case.call(x, topology(2), rank, format=wire, random=random)
        grads.append(torch.autograd.grad((y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum(), x)[0])
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter, mean", "all_reduce", "all_to_all, uneven"])
def test_rounding_counts_as_the_identity(name: str) -> None:
    run_ranks(W, _check_straight_through, name)


def _check_grad_format(rank: int) -> None:
    """Backward is the transposed collective in ``grad_format``: the same bits, and so many bytes."""
    t, wire = topology(2), ("int8", "int4")
    g = _values(rank, (W * 600,), seed=3).float()
    shard, full, total, parts = torch.empty(600), torch.empty(W * 600), g.clone(), torch.empty(W * 600)
    zcomm.reduce_scatter_single(shard, g, group=t, format=wire)
    zcomm.all_gather_single(full, g[:600] / W, t, format=wire[::-1])
    zcomm.all_reduce(total, group=t, format=wire)
    zcomm.all_to_all_single(parts, g, t, format=wire)
    calls: list[tuple[Call, Tensor, Any, Tensor, int]] = [
        (lambda x, **f: functional.all_gather_single(x, t, **f), g, wire, shard, 600),
        (lambda x, **f: functional.reduce_scatter_single(x, "avg", t, **f), g[:600], wire[::-1], full, 2400),
        (lambda x, **f: functional.all_reduce(x, "sum", t, **f), g, wire, total, 2400),
        (lambda x, **f: functional.all_to_all_single(x, t, **f), g, wire, parts, 2400),
    ]
    for call, grad, grad_format, expected, numel in calls:
        x = torch.zeros(numel, requires_grad=True)
        y = call(x, grad_format=grad_format)
        with zcomm.traffic() as sent:
            y.backward(grad)
        assert torch.equal(x.grad, expected)
        assert {key.format for key, _ in sent} == {"int8", "int4"}
        y = call(x)
        with zcomm.traffic() as sent:
            y.backward(grad)
        assert {key.format for key, _ in sent} == {"none"}


def test_backward_exchanges_in_grad_format() -> None:
    run_ranks(W, _check_grad_format)


def _check_dtypes(rank: int) -> None:
    t = topology(2)

    def mean(x: Tensor) -> Tensor:
        return functional.reduce_scatter_single(x, "avg", t, dtype=torch.float32)

    for fn in (mean, torch.compile(mean, fullgraph=True, backend="aot_eager")):
        x = torch.ones(2 * W, dtype=torch.bfloat16, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = fn(x)
        y.backward(torch.full((2,), 1 + rank, dtype=torch.float32))
        assert x.grad is not None
        assert x.grad.dtype == torch.bfloat16
        assert x.grad.tolist() == [(1 + peer) / W for peer in range(W) for _ in range(2)]
    alone = torch.tensor(2.0, requires_grad=True)
    functional.all_gather_single(alone, t).sum().backward()
    assert alone.grad is not None
    assert alone.grad.shape == ()
    z = torch.ones(3, 2, requires_grad=True)  # a gradient that is an expanded scalar
    functional.all_gather_single(z.t(), topology(2)).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [[float(W)] * 2] * 3


def test_gradients_have_the_dtype_and_shape_of_the_input() -> None:
    run_ranks(W, _check_dtypes)


def _check_compiled(rank: int, name: str) -> None:
    case = CASES[name]

    def step(x: Tensor, group: Any) -> Tensor:
        return _weighted(case.call(x * 2, group, rank, format="int8", grad_format="int4"))

    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own compiler
        for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            for _ in range(2):
                x = case.input(rank).float().requires_grad_()
                y = fn(x, topology(2))
                y.backward()
                results.append((y.detach(), x.grad))
    for y, grad in results:
        assert torch.equal(y, results[0][0])
        assert torch.equal(grad, results[0][1])


def _weighted(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum()


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter, mean", "all_reduce", "all_to_all, uneven"])
def test_compiled_gradients_have_the_same_bits(name: str) -> None:
    run_ranks(W, _check_compiled, name)


def _check_split_sizes_as_arguments(rank: int) -> None:
    """Other sizes of a compiled function: torch makes them symbols, so that it compiles twice and not each time."""
    t = topology(2)
    compiled = torch.compile(
        lambda x, outputs, inputs: functional.all_to_all_single(
            x, t, output_split_sizes=outputs, input_split_sizes=inputs, grad_format="bf16"
        ),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for n in range(2, 6):
        inputs = [n + (rank + peer) % 3 for peer in range(W)]
        x = torch.randn(sum(inputs), 5, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = compiled(x, inputs, inputs)  # the sizes are symmetric in both ranks
        expected = torch.empty_like(x)
        dist.all_to_all_single(expected, x.detach(), inputs, inputs)
        assert torch.equal(y, expected)
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad, torch.ones_like(x))


def test_split_sizes_of_a_compiled_function_may_change() -> None:
    run_ranks(W, _check_split_sizes_as_arguments)


def _check_without_gradients(rank: int) -> None:
    t = topology(2)
    x = torch.ones(2 * W, requires_grad=True)
    calls: list[Call] = [
        lambda **f: functional.all_gather_single(x, t, **f),
        lambda **f: functional.reduce_scatter_single(x, "sum", t, **f),
        lambda **f: functional.all_reduce(x, "sum", t, **f),
        lambda **f: functional.all_to_all_single(x, t, **f),
    ]
    for call in calls:
        for off in (torch.no_grad(), torch.inference_mode()):
            with off:
                y = call()
                assert not y.requires_grad
                with pytest.raises(ConfigError, match=r"input requires a gradient.*no_grad\(\): grad_format='int8'"):
                    call(grad_format="int8")
                assert torch.equal(functional.all_reduce(x.detach(), "sum", t, grad_format="int8"), calls[2]())
        with torch.no_grad():
            y = call()
        with pytest.raises(RuntimeError, match="does not require grad"):
            y.sum().backward()
        assert call(grad_format="int8").requires_grad
        with pytest.raises(FormatError, match="grad_format must not round stochastically"):
            call(grad_format="int8:stochastic")
        for text in ("int8|int4", "int8>int4"):  # what the operators write between formats
            with pytest.raises(FormatError, match="one format or a pair"):
                call(format=text)
        with pytest.raises(FormatError, match="int9"):
            call(grad_format="int9")
        with pytest.raises(FormatError, match="format=7"):
            call(grad_format=7)
    with pytest.raises(FormatError, match="a pair of formats needs a Topology"):
        functional.all_reduce(x, grad_format=("int8", "int4"))
    assert not functional.all_reduce(x.detach(), "sum", t, grad_format="int8").requires_grad


def test_without_gradients_nothing_is_recorded_and_grad_format_refused() -> None:
    run_ranks(W, _check_without_gradients)


def _check_bad_splits(rank: int) -> None:
    """One rank passes other sizes: an error on all, also of what the operator itself cannot take."""
    x, two = torch.ones(2 * W, 3, requires_grad=True), [2] * W
    for group in (None, topology(2)):
        for outputs, inputs, text in (
            (two, [2, 2, 2, 3], "must add up to the rows of input"),
            (two, [1, 2, 2, 2.0], r"input_split_sizes\[3\] must be an integer"),
            ([2, 2], two, "output_split_sizes must be a list with the rows"),
            ([3, 2, 2, 2], two, "rank 0 sends 6 elements to rank 3, whose output_split_sizes expect 9"),
        ):
            mine = (outputs, inputs) if rank == 3 else (two, two)
            with pytest.raises(LayoutError, match=text if rank == 3 or "sends" in text else r"ranks \[3\] refuse"):
                functional.all_to_all_single(x, group, output_split_sizes=mine[0], input_split_sizes=mine[1])
    for alone in ({"output_split_sizes": two}, {"input_split_sizes": two}):
        with pytest.raises(LayoutError, match="both output_split_sizes and input_split_sizes"):
            functional.all_to_all_single(x, **alone)
    wrong = {"output_split_sizes": two, "input_split_sizes": [2, 2, 2, 3]}
    with FakeTensorMode(), pytest.raises(LayoutError, match="must add up to the rows of input: sum=9, rows=8"):
        functional.all_to_all_single(torch.ones(2 * W, 3), **wrong)
    with FakeTensorMode():
        y = functional.all_to_all_single(torch.ones(8, 3), output_split_sizes=[1, 2, 3, 4], input_split_sizes=two)
    assert y.shape == (10, 3)


def test_split_sizes_that_do_not_fit_are_an_error_on_every_rank() -> None:
    run_ranks(W, _check_bad_splits)


def _check_backward_of_some(rank: int) -> None:
    """The watch finds a rank whose loss does not use the result."""
    t = topology(2)
    x = torch.ones(8, requires_grad=True)
    y = functional.all_reduce(x, "sum", t)
    with pytest.raises(DivergedError):
        zcomm.all_gather_single(torch.empty(8), torch.ones(2), t) if rank == 1 else y.sum().backward()
    functional.all_reduce(x, "sum", t).sum().backward()
    assert x.grad is not None


def test_a_rank_without_this_backward_is_found() -> None:
    run_ranks(W, _check_backward_of_some)


def test_operators_are_registered_for_gradients() -> None:
    t = zcomm.Topology.single()
    x = torch.randn(6, 2, requires_grad=True)
    for op, arguments in (
        (torch.ops.zcomm.all_gather_single, (x, t.key, 1, "int8>int4", "rank")),
        (torch.ops.zcomm.reduce_scatter_single, (x, "avg", t.key, 1, "int4|int8>int8|int4", "rank", torch.float32)),
        (torch.ops.zcomm.all_reduce, (x, "sum", t.key, "none")),
        (torch.ops.zcomm.all_to_all_single, (x, t.key, "int8", None, [6], [6])),
    ):
        torch.library.opcheck(op, arguments)
