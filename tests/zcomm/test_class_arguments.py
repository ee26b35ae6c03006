"""Arguments of a wrong type for the classes: one error that names the argument, before any communication."""

# covers zcomm/__init__.py

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, distribute_tensor

import zcomm
from tests.ranks import device_mesh, run_ranks
from zcomm import LayoutError, Topology, ZcommError

ONE = Topology.single()


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(8)


WRONG: dict[str, Any] = {
    "none": None, "integer": 3, "negative": -1, "zero": 0, "true": True, "false": False, "float": 0.5, "two": 2.0,
    "nan": float("nan"), "infinity": float("inf"), "word": "x", "digits": "8", "empty": "", "bytes": b"8",
    "list": [1, 2], "list of tensors": [torch.zeros(8)], "tuple": (1, 2, 3), "pair": (1, 2), "dict": {},
    "formats": ("int8", "int4"), "object": object(), "function": print, "class": Tensor, "array": np.zeros(8),
    "numpy": np.int64(3), "tensor": torch.zeros(8), "integers": torch.zeros(8, dtype=torch.int64), "fake": _fake(),
    "number": torch.tensor(3), "0-dim": torch.zeros(()), "3-D": torch.zeros(2, 2, 2), "strided": torch.zeros(16)[::2],
    "meta": torch.zeros(8, device="meta"), "sparse": torch.zeros(8).to_sparse(), "short": torch.zeros(7),
    "parameter": torch.nn.Parameter(torch.zeros(8)), "complex": torch.zeros(8, dtype=torch.complex64),
    "dtype": torch.float32, "int dtype": torch.int32, "device": torch.device("cpu"),
    "meta device": torch.device("meta"),
    "another": "cuda:99", "reduction": dist.ReduceOp.MAX, "format": "int8", "stochastic": "int4:stochastic",
    "topology": ONE, "key": zcomm.RandomKey(1), "spans": [("a", 0, 4)], "negative span": [("a", -1, 4)],
    "span of floats": [("a", 0, 4.0)], "span of flags": [("a", False, True)], "no key": [([], 0, 4)],
    "long span": [("a", 0, 4, 0, 0)], "words": [("a", "0", "4")], "span": zcomm.Span("a", 0, 4),
    "unhashable": [((1, []), 0, 4)], "iterator": iter(()), "backend": "torch", "kernels": "reference",
    "numbering": "local", "over": "nodes",
}  # fmt: skip
RIGHT: dict[str, set[str]] = {
    "tensor": {"tensor"},
    "buffer": {"tensor", "short"},
    "tensor or none": {"tensor", "none"},
    "count": {"integer", "zero", "numpy"},
    "length": {"integer", "numpy"},
    "number": {"integer", "float", "two", "numpy"},
    "fraction": {"float"},
    "flag": {"true", "false"},
    "topology": {"topology"},
    "group": {"topology", "none"},
    "process group": {"none"},
    "mesh": set(),
    "format": {"format", "stochastic"},
    "formats": {"formats"},
    "numbering": {"numbering"},
    "over": {"over"},
    "device": {"device", "meta device"},
    "dtype": {"dtype"},
    "random": {"none"},
    "residual": {"none"},
    "spans": {"spans", "iterator"},
    "backend": {"backend"},
    "kernels": {"kernels"},
}
"""By type of argument: the values of WRONG that are valid for it."""


def _refreshed() -> zcomm.DeltaGather:
    gather = zcomm.DeltaGather(torch.zeros(8), ONE)
    gather.refresh(torch.zeros(8))
    return gather


def _added() -> zcomm.NodeSums:
    sums = zcomm.NodeSums(ONE, 8, ("none", "none"))
    sums.add(torch.zeros(8))
    return sums


def _filled() -> zcomm.SecondaryPartition:
    part = zcomm.SecondaryPartition(ONE, 8, torch.float32)
    part.fill(torch.zeros(8))
    return part


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


Taker = tuple[Callable[..., object], dict[str, tuple[str, Any]]]
TAKERS: dict[str, Taker] = {
    "DeltaGather": (
        zcomm.DeltaGather,
        {
            "replica": ("buffer", torch.zeros(8)), "group": ("group", ONE), "format": ("format", "int4"),
            "numbering": ("numbering", "rank"), "over": ("over", "world"),
        },
    ),
    "DeltaGather.refresh": (
        lambda **given: _refreshed().refresh(**given),
        {"shard": ("tensor", torch.zeros(8)), "async_op": ("flag", False)},
    ),
    "DeltaGather.update": (
        lambda **given: _refreshed().update(**given),
        {"shard": ("tensor", torch.zeros(8)), "random": ("random", None), "async_op": ("flag", False)},
    ),
    "NodeSums": (
        zcomm.NodeSums,
        {
            "topology": ("topology", ONE), "shard_numel": ("count", 8), "formats": ("formats", ("none", "none")),
            "device": ("device", "cpu"), "residual": ("residual", None),
        },
    ),
    "NodeSums.add": (
        lambda **given: _added().add(**given), {"input": ("tensor", torch.zeros(8)), "async_op": ("flag", False)},
    ),
    "NodeSums.reduce": (
        lambda **given: _added().reduce(**given),
        {
            "output": ("tensor", torch.zeros(8)), "input": ("tensor or none", torch.zeros(8)), "scale": ("number", 2.0),
            "async_op": ("flag", False),
        },
    ),
    "NodeSums.forget": (lambda **given: _added().forget(**given), {"start": ("count", 0), "stop": ("count", 8)}),
    "Topology": (
        Topology,
        {
            "ranks_per_node": ("length", 1), "group": ("process group", None), "backend": ("backend", "auto"),
            "kernels": ("kernels", "auto"),
        },
    ),
    "Topology.from_env": (
        Topology.from_env,
        {"group": ("process group", None), "backend": ("backend", "auto"), "kernels": ("kernels", "auto")},
    ),
    "Topology.single": (Topology.single, {"backend": ("backend", "auto"), "kernels": ("kernels", "auto")}),
    "Topology.from_mesh": (Topology.from_mesh, {"mesh": ("mesh", None)}),
    "Residual": (
        zcomm.Residual,
        {
            "group": ("group", ONE), "spans": ("spans", [zcomm.Span("a", 0, 8)]), "numel": ("length", 8),
            "numbering": ("numbering", "rank"), "beta": ("fraction", 1.0), "reset_interval": ("count", 0),
            "device": ("device", "cpu"),
        },
    ),
    "SecondaryPartition": (
        zcomm.SecondaryPartition,
        {
            "topology": ("topology", ONE), "numel": ("count", 8), "dtype": ("dtype", torch.float32),
            "device": ("device", "cpu"), "is_on_host": ("flag", False),
        },
    ),
    "SecondaryPartition.fill": (lambda **given: _filled().fill(**given), {"full": ("tensor", torch.zeros(8))}),
    "SecondaryPartition.gather": (
        lambda **given: _filled().gather(**given), {"output": ("tensor", torch.zeros(8)), "async_op": ("flag", False)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("taker", TAKERS)
def test_an_argument_of_a_wrong_kind_is_named(taker: str) -> None:
    call, arguments = TAKERS[taker]
    right = {name: value for name, (_, value) in arguments.items()}
    if taker != "Topology.from_mesh":
        call(**right)
    for name, (kind, _) in arguments.items():
        for wrong, value in WRONG.items():
            what, error = f"{taker}({name}={wrong})", _error_of(lambda v=value, n=name: call(**{**right, n: v}))
            if error is None:
                assert wrong in RIGHT[kind], f"{what} is accepted"
                continue
            assert isinstance(error, ZcommError), f"{what} is no named error: {error!r}"
            assert wrong not in RIGHT[kind] or kind in ("count", "length"), f"{what} is right: {error}"
            assert name.rstrip("s") in str(error), f"{what}: {error}"
            assert len(str(error)) < 600, what


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([("a", 0, 4), ("b", 3, 2)], "spans must not overlap in the buffer"),
        ([("a", 6, 4)], "a span must lie in the buffer"),
        ([("a", 0, 4), ("b", 4, -2)], r"spans\[1\]\.numel must be an integer of at least 0: spans\[1\]\.numel=-2"),
        ([("a", 0, 4, True)], r"spans\[0\]\.offset must be an integer .*offset=True"),
        ([("a", 0)], r"spans must be zcomm\.Span, or \(key, first element, numel\): spans\[0\]=\('a', 0\)"),
    ],
)
def test_a_span_that_cannot_be_is_named_by_its_place(spans: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        zcomm.Residual(ONE, spans, 8)


@pytest.mark.parametrize("scale", [10**400, -(10**400), np.float32("inf")], ids=["huge", "low", "infinity"])
def test_a_scale_is_a_number_that_a_float_holds(scale: Any) -> None:
    with pytest.raises(zcomm.ConfigError, match=r"scale must be a number above 0: scale=.{3,110}$"):
        _added().reduce(torch.zeros(8), scale=scale)


def _check_tensors_of_others(rank: int) -> None:
    replicated = distribute_tensor(torch.zeros(8), device_mesh((2,), ("data",)), [Replicate()])
    for call, arguments in TAKERS.values():
        right = {name: value for name, (_, value) in arguments.items()}
        for name, (kind, _) in arguments.items():
            if kind.startswith(("tensor", "buffer")):
                with pytest.raises(
                    LayoutError, match=rf"{name} must be a plain tensor, got DTensor: pass tensor\.to_local"
                ):
                    call(**{**right, name: replicated})
            elif kind in ("group", "process group", "topology"):
                with pytest.raises(zcomm.TopologyError, match="got DeviceMesh"):
                    call(**{**right, name: device_mesh((2,), ("data",))})
            else:
                with pytest.raises(ZcommError, match=name.rstrip("s")):
                    call(**{**right, name: replicated})


def test_dtensors_and_meshes_are_refused_with_the_remedy() -> None:
    run_ranks(2, _check_tensors_of_others)


def test_parameters_are_taken_under_no_grad() -> None:
    weight = torch.nn.Parameter(torch.full((8,), 2.0))
    with pytest.raises(LayoutError, match=r"replica must be without requires_grad.*or use no_grad\(\)"):
        zcomm.DeltaGather(weight, ONE)
    with torch.no_grad():
        gather = zcomm.DeltaGather(weight, ONE)
        gather.refresh(torch.nn.Parameter(torch.ones(8)))
        sums = zcomm.NodeSums(ONE, 8, ("none", "none"))
        sums.reduce(torch.zeros(8), weight)
    assert weight.tolist() == [1.0] * 8
    assert weight.is_leaf
