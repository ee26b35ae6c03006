"""Arguments of a wrong type: one named error, before any communication, the same for operators and their fakes."""

# covers zcomm/_base/arguments.py

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import zcomm
from tests.ranks import device_mesh, run_ranks, topology
from zcomm import LayoutError, Topology, TopologyError, ZcommError, functional

ONE = Topology.single()
SIZES = {"output_split_sizes": [8], "input_split_sizes": [8]}
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "all_gather": (zcomm.all_gather_single, {"output": torch.zeros(8), "input": torch.zeros(8)}),
    "reduce_scatter": (zcomm.reduce_scatter_single, {"output": torch.zeros(8), "input": torch.zeros(8), "op": "sum"}),
    "all_reduce": (zcomm.all_reduce, {"tensor": torch.zeros(8), "op": "avg", "gather_format": "int8"}),
    "all_to_all": (zcomm.all_to_all_single, {"output": torch.zeros(8), "input": torch.zeros(8)}),
    "functional all_gather": (functional.all_gather_single, {"input": torch.zeros(8)}),
    "functional reduce_scatter": (functional.reduce_scatter_single, {"input": torch.zeros(8), "op": "sum"}),
    "functional all_reduce": (functional.all_reduce, {"input": torch.zeros(8), "op": "sum"}),
    "functional all_to_all": (functional.all_to_all_single, {"input": torch.zeros(8)}),
    "lists": (zcomm.all_gather_single, {"output": [torch.zeros(8)], "input": [torch.zeros(8)]}),
    "split sizes": (zcomm.all_to_all_single, {"output": torch.zeros(8), "input": torch.zeros(8), **SIZES}),
    "functional split sizes": (functional.all_to_all_single, {"input": torch.zeros(8), **SIZES}),
}
COMMON = {
    "group": ONE, "format": "int8", "random": None, "async_op": False, "numbering": "rank", "residual": None,
    "grad_format": None,
}  # fmt: skip
WRONG = {
    "none": None, "integer": 3, "float": 0.5, "word": "x", "list": [1, 2], "list of tensors": [torch.zeros(8)],
    "tuple": (1, 2, 3), "dict": {}, "object": object(), "function": print, "class": Tensor, "array": np.zeros(8),
    "integers": torch.zeros(8, dtype=torch.int64), "bool": torch.zeros(8, dtype=torch.bool), "0-dim": torch.zeros(()),
    "3-D": torch.zeros(2, 2, 2), "meta": torch.zeros(8, device="meta"), "sparse": torch.zeros(8).to_sparse(),
    "parameter": torch.nn.Parameter(torch.zeros(8)), "complex": torch.zeros(8, dtype=torch.complex64),
    "dtype": torch.float32, "number of a reduction": dist.ReduceOp.MAX, "bytes": b"abc", "nan": float("nan"),
}  # fmt: skip


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except (ZcommError, TypeError) as error:
        return error
    return None


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_a_wrong_kind_is_named(call: str, wrong: str) -> None:
    function, right = CALLS[call]
    known = function.__annotations__
    right = {name: value for name, value in {**COMMON, **right}.items() if name in known}
    function(**right)
    for name in right:
        error = _error_of(lambda n=name: function(**{**right, n: WRONG[wrong]}))
        is_format = name in ("gather_format", "grad_format") and "format" in str(error)
        assert error is None or name in str(error) or is_format, error


def _check_dtensor_and_mesh(rank: int) -> None:
    mesh = device_mesh((2,), ("data",))
    replicated = distribute_tensor(torch.ones(8), mesh, [Replicate()])
    sharded = distribute_tensor(torch.arange(16.0), mesh, [Shard(0)])
    for format in ("none", "int8"):
        for call in (
            lambda f=format: zcomm.all_reduce(replicated, format=f),
            lambda f=format: zcomm.all_gather_single(torch.empty(16), sharded, format=f),
            lambda f=format: zcomm.reduce_scatter_single(torch.empty(4), replicated, format=f),
            lambda f=format: zcomm.all_to_all_single(torch.empty(8), replicated, format=f),
            lambda f=format: functional.all_gather_single(sharded, format=f),
            lambda f=format: functional.all_reduce(replicated, format=f),
        ):
            with pytest.raises(LayoutError, match=r"must be a plain tensor, got DTensor: pass tensor\.to_local\(\)"):
                call()
    full = torch.empty(16)
    zcomm.all_gather_single(full, sharded.to_local())
    assert full.tolist() == list(range(16))
    for function in (zcomm.all_reduce, functional.all_reduce):
        with pytest.raises(TopologyError, match=r"ndim=2; pass mesh\[name\] for one hop"):
            function(torch.ones(8), group=device_mesh((2, 1), ("data", "model")))
    for group in (mesh.get_group(), mesh):
        tensor = torch.ones(8)
        zcomm.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0] * 8


def test_dtensors_and_meshes_of_two_dimensions_are_refused_with_the_remedy() -> None:
    run_ranks(2, _check_dtensor_and_mesh)


def _check_no_grad(rank: int) -> None:
    for group in (None, topology(1)):
        weight = torch.nn.Parameter(torch.full((8,), float(rank)))
        with pytest.raises(LayoutError, match=r"tensor must be without requires_grad.*or use no_grad\(\)"):
            zcomm.all_reduce(weight, group=group)
        with torch.no_grad():
            work = zcomm.all_reduce(weight, group=group, async_op=True)
            work.wait()
            assert weight.tolist() == [1.0] * 8
            full = torch.nn.Parameter(torch.zeros(16))
            zcomm.all_gather_single(full, weight * (rank + 1), group, format="int8")
            assert (full[8:] - 2).abs().max() < 0.02
            shard = torch.nn.Parameter(torch.zeros(4))
            zcomm.reduce_scatter_single(shard, weight, group=group)
            assert shard.tolist() == [2.0] * 4
            assert functional.all_reduce(weight, group=group).tolist() == [2.0] * 8
        assert weight.is_leaf
        assert full.is_leaf
        assert weight.grad_fn is None
        (full.sum() * 2).backward()  # nothing was recorded
        assert full.grad.tolist() == [2.0] * 16


def test_parameters_are_taken_under_no_grad() -> None:
    run_ranks(2, _check_no_grad)


REFUSED: dict[str, Callable[[], object]] = {
    "7 of 2": lambda: functional.reduce_scatter_single(torch.ones(7)),
    "exchange of 7": lambda: functional.all_to_all_single(torch.ones(7)),
    "3 rows of 2": lambda: functional.reduce_scatter_single(torch.ones(3, 2)),
    "exchange of 3 rows": lambda: functional.all_to_all_single(torch.ones(3, 2)),
    "integers": lambda: functional.all_reduce(torch.ones(4, dtype=torch.int64)),
    "to integers": lambda: functional.reduce_scatter_single(torch.ones(4), dtype=torch.int64),
    "float8": lambda: functional.all_gather_single(torch.ones(4).to(torch.float8_e4m3fn)),
    "format": lambda: functional.all_gather_single(torch.ones(4), format="int9"),
    "pair": lambda: functional.all_gather_single(torch.ones(4), format=("int8", "int4")),
    "stochastic": lambda: functional.all_gather_single(torch.ones(4), format="int4:stochastic"),
    "key": lambda: functional.all_gather_single(torch.ones(4), random=zcomm.RandomKey(1, 2, 3)),
    "op": lambda: functional.all_reduce(torch.ones(4), "max"),
    "numbering": lambda: functional.all_gather_single(torch.ones(4), numbering="x"),  # type: ignore[arg-type]
    "grad_format": lambda: functional.all_gather_single(torch.ones(4), grad_format="int8:stochastic"),
    "grad pair": lambda: functional.all_reduce(torch.ones(4), grad_format=("int8", "int4")),
    "rows": lambda: functional.all_to_all_single(torch.ones(4, 2), output_split_sizes=[2, 2], input_split_sizes=[1, 2]),
    "one of the splits": lambda: functional.all_to_all_single(torch.ones(4, 2), input_split_sizes=[2, 2]),
    "splits": lambda: functional.all_to_all_single(torch.ones(4), output_split_sizes=[2], input_split_sizes=[2, 2]),
}
TAKEN: dict[str, Callable[[], Tensor]] = {
    "8 of 2": lambda: functional.reduce_scatter_single(torch.ones(8), dtype=torch.float64),
    "exchange": lambda: functional.all_to_all_single(torch.ones(8), format="int8"),
    "strided": lambda: functional.all_gather_single(torch.ones(16)[::2], format="nf4"),
    "bf16": lambda: functional.all_reduce(torch.ones(7, dtype=torch.bfloat16)),
    "auto": lambda: functional.all_reduce(torch.ones(7), format="auto"),
    "empty": lambda: functional.all_gather_single(torch.ones(0)),
    "2-D": lambda: functional.all_gather_single(torch.ones(2, 3)),
    "2-D sum": lambda: functional.all_reduce(torch.ones(3, 2).t()),
    "2-D shard": lambda: functional.reduce_scatter_single(torch.ones(4, 3).t().contiguous().t()),
    "2-D exchange": lambda: functional.all_to_all_single(torch.ones(2, 3, 2), format="int8"),
    "0-dim": lambda: functional.all_reduce(torch.ones(())),
    "splits": lambda: functional.all_to_all_single(
        torch.ones(3, 4, 2).transpose(0, 1), output_split_sizes=[2, 2], input_split_sizes=[2, 2]
    ),
    "grad_format": lambda: functional.all_gather_single(torch.ones(4), grad_format="int8"),
}


def _check_fakes(rank: int) -> None:
    for name, call in REFUSED.items():
        real = _error_of(call)
        with FakeTensorMode():
            fake = _error_of(call)
        errors = [real, fake]
        assert isinstance(real, ZcommError), name
        assert type(errors[0]) is type(errors[1]), name
        assert str(errors[0]) == str(errors[1]), name
    for call in TAKEN.values():
        real = call()
        with FakeTensorMode():
            fake = call()
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_fakes_refuse_what_operators_refuse() -> None:
    run_ranks(2, _check_fakes)
