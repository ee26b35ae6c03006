"""Lists of tensors: one exchange with the bits of a call for each tensor, and named errors."""

# covers zcomm/_collectives/coalesced.py

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import device_mesh, run_ranks, topology
from tests.variables import variables
from tests.zcomm.data import same_values
from zcomm import DivergedError, FormatError, LayoutError, RandomKey, Topology

W = 4
SHAPES = [(5,), (0,), (10, 30), (1,), (256,), (7, 11), (1024,)]
ONE = Topology.single()
FORMATS: list[Any] = [
    *("none", "bf16", "int8", "int4", "nf4", "fp8_e4m3", "int8:asym", "int4/64:asym", "int8/96"),
    *(("int8", "int4"), ("int4:asym", "int8:asym"), ("none", "nf4"), ("int8/2048", "int4/32")),
]


def _shards(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Values that are not around 0, on which a padding with zeros would show."""
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(shape, generator=generator) * (index + 1) + 3 * (rank + 1)).to(dtype)
        for index, shape in enumerate(SHAPES)
    ]


def _wide(rank: int) -> list[Tensor]:
    return [torch.cat([x * (peer + 1) for peer in range(W)]) for x in _shards(rank)]


def _like(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return [x.new_full((int(x.shape[0] * factor), *x.shape[1:]), 9) for x in tensors]


def _results(rank: int, group: Any, wire: Any, numbering: Any, *, in_lists: bool, async_op: bool) -> list[Tensor]:
    """Of all three collectives, tensor by tensor or in lists."""
    shards, wide, sums = _shards(rank), _wide(rank), _shards(rank)
    gathered, reduced = _like(shards, W), _like(wide, 1 / W)
    options: dict[str, Any] = {"async_op": async_op}
    back = wire[::-1] if isinstance(wire, tuple) else wire

    def of(tensors: list[Tensor]) -> list[Any]:
        return [tensors] if in_lists else list(tensors)

    works = []
    for output, x in zip(of(gathered), of(shards), strict=True):
        works.append(zcomm.all_gather_single(output, x, group, format=back, numbering=numbering, **options))
    for output, x in zip(of(reduced), of(wide), strict=True):
        call = zcomm.reduce_scatter_single(output, x, "avg", group=group, format=wire, numbering=numbering, **options)
        works.append(call)
    works += [zcomm.all_reduce(x, "avg", group, format=wire, **options) for x in of(sums)]
    for work in works:
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
            work.wait()
            assert work.is_completed()
    return [*gathered, *reduced, *sums]


def _check_bits(rank: int, wire: Any) -> None:
    groups = [topology(1), topology(2), topology(4)]
    groups += [] if isinstance(wire, tuple) else [None, device_mesh((W,), ("data",))]
    for group in groups:
        for numbering in ("rank", "local") if isinstance(group, Topology) else ("rank",):
            one_by_one = _results(rank, group, wire, numbering, in_lists=False, async_op=False)
            for async_op in (False, True):
                together = _results(rank, group, wire, numbering, in_lists=True, async_op=async_op)
                for index, (a, b) in enumerate(zip(together, one_by_one, strict=True)):
                    assert same_values(a, b), (group, numbering, async_op, index)


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.usefixtures("both_backends")
def test_bits_are_those_of_a_call_for_each_tensor(wire: Any) -> None:
    run_ranks(W, _check_bits, wire)


def _check_against_torch(rank: int) -> None:
    for group in (None, topology(2)):
        outputs, shards = _like(_shards(rank), W), _shards(rank)
        zcomm.all_gather_single(tuple(outputs), tuple(shards), group)
        zcomm.all_reduce(shards, group=group)
        for output, shard, x in zip(outputs, shards, _shards(rank), strict=True):
            of_ranks = [torch.empty_like(x) for _ in range(W)]
            dist.all_gather(of_ranks, x)
            assert torch.equal(output, torch.cat(of_ranks))
            torch.testing.assert_close(shard, torch.stack(of_ranks).sum(0))


def test_results_are_those_of_torch() -> None:
    run_ranks(W, _check_against_torch)


def _check_dtypes_and_strides(rank: int) -> None:
    """Outputs of another dtype than inputs; rows with gaps."""
    for wire in ("none", "int8"):
        narrow = _shards(rank, torch.bfloat16)
        wide = [torch.full((W, x.numel() + 3), 9.0) for x in narrow]
        zcomm.all_gather_single([rows[:, :-3] for rows in wide], narrow, topology(2), format=wire)
        for rows, x in zip(wide, narrow, strict=True):
            expected = torch.empty(W * x.numel())
            zcomm.all_gather_single(expected, x, topology(2), format=wire)
            assert same_values(rows[:, :-3].reshape(-1), expected)
            assert bool((rows[:, -3:] == 9).all())
        sums, back = [torch.empty(x.numel()) for x in narrow], [rows[:, :-3].bfloat16() for rows in wide]
        zcomm.reduce_scatter_single(sums, back, group=topology(2), format=wire)
        for total, rows in zip(sums, back, strict=True):
            expected = torch.empty_like(total)
            zcomm.reduce_scatter_single(expected, rows, group=topology(2), format=wire)
            assert same_values(total, expected)


def test_dtypes_and_strides_of_a_list() -> None:
    run_ranks(W, _check_dtypes_and_strides)


def _check_traffic(rank: int) -> None:
    """As many messages as a call for one tensor."""
    shards, counts = _shards(rank), []
    for tensors in (shards, shards[:1]):
        with zcomm.traffic() as sent:
            zcomm.all_gather_single(_like(tensors, W), tensors, topology(2), format="int8")
            zcomm.reduce_scatter_single(_like(tensors, 1), _like(tensors, W), group=topology(2), format="int4")
            zcomm.all_reduce(tensors, group=topology(2))
        counts.append(sent.calls())
    assert counts[0] == counts[1] > 0
    with zcomm.traffic() as sent:
        zcomm.all_gather_single(_like(shards, W), shards, format="none")
    assert sent.bytes() == (W - 1) * 4 * sum(x.numel() for x in shards), "an exact format needs no padding"


def test_a_list_is_one_exchange() -> None:
    run_ranks(W, _check_traffic)


def _check_options(rank: int) -> None:
    shards, key = _shards(rank), RandomKey(1, 2, 3)
    exact = [torch.cat([_shards(peer)[index] for peer in range(W)]) for index in range(len(SHAPES))]
    found = []
    for _ in range(2):
        found.append(_like(shards, W))
        zcomm.all_gather_single(found[-1], shards, topology(2), format="int8:stochastic", random=key)
    for a, b, values in zip(*found, exact, strict=True):
        assert torch.equal(a, b)
        assert values.numel() == 0 or (a - values).abs().max() <= values.abs().max() / 127 * 1.01
    outputs = _like(shards, W)
    zcomm.all_gather_single(outputs, shards, topology(2), format="auto")  # not probed: none
    assert all(map(torch.equal, outputs, exact))
    with torch.no_grad():  # parameters, as in the calls of one tensor
        weights = [torch.nn.Parameter(x.clone()) for x in shards]
        zcomm.all_reduce(weights, "avg", topology(2))
    sums = [torch.stack([_shards(peer)[index] for peer in range(W)]).mean(0) for index in range(len(SHAPES))]
    for weight, total in zip(weights, sums, strict=True):
        torch.testing.assert_close(weight.detach(), total)


def test_options_hold_for_a_list() -> None:
    run_ranks(W, _check_options)


def test_inputs_may_change_and_the_output_is_written_in_wait() -> None:
    x, y = [torch.ones(3), torch.ones(2)], [torch.zeros(3), torch.zeros(2)]
    work = zcomm.all_gather_single(y, x, ONE, async_op=True)
    x[0].fill_(7)
    assert work is not None
    work.wait()
    assert y[0].tolist() == [1.0] * 3


F, HALF = torch.zeros(4), torch.zeros(4, dtype=torch.float16)
WRONG: dict[str, tuple[Any, Any, str]] = {
    "dtypes of inputs": ([F, F], [F, HALF], r"tensors of input must have one dtype.*input\[1\] is torch.float16"),
    "dtypes of outputs": ([F, F, HALF], [F, F, F], r"tensors of output must have one dtype.*output\[2\] is"),
    "lengths of lists": ([F], [F, F], r"lists of equally many tensors, at least one: lengths=\["),
    "empty lists": ([], [], r"at least one: lengths=\[0, 0\]"),
    "a tensor and a list": (F, [F], r"must be tensors, or lists .*None"),
    "a list and a tensor": ([F], F, r"must be tensors, or lists .*None"),
    "a number": ([F, F], [F, 3], r"input\[1\] must be a torch.Tensor, got int"),
    "lengths": ([F, F], [F, torch.zeros(5)], r"as many elements as (in|out)put\[1\]"),
    "a gradient": ([F, F], [F, torch.zeros(4, requires_grad=True)], r"input\[1\] must be without requires_grad"),
    "strides": ([F, torch.zeros(8)[::2]], [F, F], r"output\[1\] must be flat and contiguous"),
    "integers": ([F], [torch.zeros(4, dtype=torch.int64)], r"input\[0\] must be real floating point"),
    "meta": ([F, F], [F, torch.zeros(4, device="meta")], r"input\[1\] must be on a device with memory"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_in_a_list_is_named(kind: str) -> None:
    output, x, text = WRONG[kind]
    with pytest.raises(LayoutError, match=text):
        zcomm.all_gather_single(output, x, ONE)
    with pytest.raises(LayoutError, match=text):
        zcomm.reduce_scatter_single(output, x, group=ONE)


def test_what_all_reduce_and_options_refuse() -> None:
    for tensors, text in (
        ([F, HALF], r"tensor\[1\] is torch.float16"),
        ([], "at least one"),
        ([F, torch.zeros(8)[::2]], r"tensor\[1\] must be flat and contiguous"),
        ([F, None], r"tensor\[1\] must be a torch.Tensor"),
    ):
        with pytest.raises(LayoutError, match=text):
            zcomm.all_reduce(tensors, group=ONE)  # type: ignore[arg-type]
    residual: Any = zcomm.Residual(ONE, [("p", 0, 8)], 8)
    for call in (
        lambda: zcomm.all_reduce([F.clone(), F.clone()], group=ONE, format="int4", residual=residual),
        lambda: zcomm.reduce_scatter_single([F.clone()], [F], group=ONE, format="int4", residual=residual),
    ):
        with pytest.raises(LayoutError, match="residual needs one tensor"):
            call()
    for wrong, error in (("int9", "did you mean"), (("int8",), "must be one format, or a pair"), (7, "format=7")):
        with pytest.raises(FormatError, match=error):
            zcomm.all_gather_single([F.clone()], [F], ONE, format=wrong)  # type: ignore[arg-type]
        with pytest.raises(FormatError, match=error):
            zcomm.all_reduce([F.clone()], group=ONE, gather_format=wrong)  # type: ignore[arg-type]


def _check_other_lists(rank: int) -> None:
    """Lists with other lengths, whose buffers are equally long: never mixed up."""
    t = topology(2)
    numels = (5, 3) if rank == 2 else (3, 5)
    shards = [torch.ones(n) for n in numels]
    with pytest.raises(DivergedError):
        zcomm.all_gather_single(_like(shards, W), shards, t, format="int8")
    with variables(ZCOMM_DEBUG="1"), pytest.raises(LayoutError, match=r"calls must be equal(.|\n)*bucket=2 tensors"):
        zcomm.all_gather_single(_like(shards, W), shards, t, format="int8")
    zcomm.all_reduce([torch.ones(3), torch.ones(5)], group=t)


def test_other_lists_of_the_same_length_are_found() -> None:
    run_ranks(W, _check_other_lists)
