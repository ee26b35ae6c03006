"""Invalid input raises before any communication: this process has no process group."""

# covers zcomm/functional.py

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from tests.forks import run_on_forks
from tests.ranks import device_mesh, run_ranks
from tests.variables import variables
from zcomm import FormatError, LayoutError, MessageError, Topology, TopologyError, functional
from zcomm._base import env

ONE = Topology.single()


@pytest.mark.parametrize(
    ("output", "shard", "error", "message"),
    [
        (torch.zeros(8), torch.zeros(4), LayoutError, "output 8, input 4, world_size=1"),
        (torch.zeros(8), torch.zeros(4, 2).t(), LayoutError, r"input must be flat.*shape=\(2, 4\)"),
        (torch.zeros(8), torch.zeros(16)[::2], LayoutError, r"stride=\(2,\)"),
        (torch.zeros(8), torch.zeros(8, dtype=torch.int32), LayoutError, "dtype=torch.int32"),
        (torch.zeros(8), torch.zeros(8, dtype=torch.complex64), LayoutError, "complex64"),
        (torch.zeros(8), torch.zeros(8, requires_grad=True), LayoutError, "requires_grad"),
        (torch.zeros(8), torch.zeros(8).to_sparse(), LayoutError, "sparse"),
        (torch.zeros(8), torch.zeros(8, device="meta"), LayoutError, "meta"),
        (torch.zeros(8), torch.zeros(8, dtype=torch.float8_e4m3fn), FormatError, "float8"),
    ],
)
def test_bad_tensors(output: torch.Tensor, shard: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zcomm.all_gather_single(output, shard, ONE)


BAD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "strided": (lambda: torch.zeros(16)[::2], "contiguous"),
    "requires grad": (lambda: torch.zeros(8, requires_grad=True), "requires_grad"),
    "sparse": (lambda: torch.zeros(8).to_sparse(), "dense"),
    "complex": (lambda: torch.zeros(8, dtype=torch.complex64), "complex64"),
    "meta": (lambda: torch.zeros(8, device="meta"), "meta"),
}
TAKERS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_gather output": lambda x: zcomm.all_gather_single(x, torch.zeros(8), ONE),
    "reduce_scatter input": lambda x: zcomm.reduce_scatter_single(torch.zeros(8), x, group=ONE),
    "reduce_scatter output": lambda x: zcomm.reduce_scatter_single(x, torch.zeros(8), group=ONE),
    "all_reduce": lambda x: zcomm.all_reduce(x, group=ONE),
    "all_to_all input": lambda x: zcomm.all_to_all_single(torch.zeros(8), x, ONE),
    "all_to_all output": lambda x: zcomm.all_to_all_single(x, torch.zeros(8), ONE),
    "DeltaGather": lambda x: zcomm.DeltaGather(x, ONE),
    "SecondaryPartition": lambda x: zcomm.SecondaryPartition(ONE, 8, torch.float32).fill(x),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("taker", TAKERS)
def test_every_taker_refuses_bad_tensors(taker: str, bad: str) -> None:
    make, message = BAD[bad]
    with pytest.raises(LayoutError, match=message):
        TAKERS[taker](make())


@pytest.mark.parametrize("taker", [functional.all_gather_single, functional.all_reduce, functional.all_to_all_single])
def test_functional_forms_copy_what_is_strided_and_refuse_the_rest(taker: Callable[..., torch.Tensor]) -> None:
    strided = torch.arange(16.0)[::2]
    assert torch.equal(taker(strided, group=ONE), strided)
    for make, message in (BAD[kind] for kind in ("sparse", "complex")):
        with pytest.raises(LayoutError, match=message):
            taker(make(), group=ONE)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"format": "int9"}, FormatError, "did you mean 'int8'"),
        ({"format": ("int8", "int8", "int8")}, FormatError, "a pair"),
        ({"format": 8}, FormatError, "format=8"),
        ({"op": "max"}, LayoutError, "op='max'"),
        ({"numbering": "column"}, TopologyError, "numbering='column'"),
    ],
)
def test_bad_arguments(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zcomm.reduce_scatter_single(torch.zeros(4), torch.zeros(4), group=ONE, **keywords)


def test_a_pair_needs_a_topology() -> None:
    with pytest.raises(FormatError, match="needs a Topology"):
        zcomm.all_gather_single(torch.zeros(4), torch.zeros(4), format=("int8", "none"))


@pytest.mark.parametrize("block", [0, 1, 3, 65538])
def test_bad_blocks(block: int) -> None:
    with pytest.raises(FormatError, match=f"block={block}"):
        zcomm.get_format("int8", block=block)


def _check_bad_topologies(rank: int) -> None:
    for bad in (0, 3, 2.0):
        with pytest.raises(TopologyError, match=f"ranks_per_node={bad}"):
            Topology(ranks_per_node=bad)  # type: ignore[arg-type]
    os.environ["GROUP_RANK"] = "0" if rank < 3 else "1"
    try:
        with pytest.raises(TopologyError, match=r"nodes of the ranks=\[0, 0, 0, 1\]"):
            Topology.from_env()
        for variable in ("GROUP_RANK", "LOCAL_WORLD_SIZE"):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 2:
                    patch.setenv(variable, "two")
                with pytest.raises(zcomm.ConfigError, match=r"wrong on ranks \[2\]") as error:
                    Topology.from_env()
            assert (rank == 2) == (f"{variable}=two" in str(error.value.__cause__))
        os.environ["GROUP_RANK"] = str(rank // 2)
        t = Topology.from_env()
        assert (t.num_nodes, t.ranks_per_node, t.node_rank, t.local_rank) == (2, 2, rank // 2, rank % 2)
        t.close()
    finally:
        del os.environ["GROUP_RANK"]
    mesh = device_mesh((2, 2), ("node", "local"))
    t = Topology.from_mesh(mesh)
    assert (t.num_nodes, t.ranks_per_node) == (2, 2)
    t.close()
    with pytest.raises(TopologyError, match="2-D"):
        Topology.from_mesh(device_mesh((4,), ("rank",)))


def test_topologies() -> None:
    run_ranks(4, _check_bad_topologies)


def test_world_size_without_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (
        Topology.from_env,
        lambda: Topology(ranks_per_node=1),
        lambda: zcomm.all_gather_single(torch.empty(3), torch.ones(3)),
        lambda: zcomm.all_reduce(torch.ones(3)),
    ):
        with pytest.raises(TopologyError, match="init_process_group"):
            call()
    assert Topology.single().world_size == 1


CORRUPT = """
import torch, zcomm
from zcomm._kernels import kernels
from zcomm._formats.message import layout_of
layout = layout_of("test", zcomm.get_format("int8"), torch.float32, 1, 100)
message = layout.new(1, torch.device("cpu"))
kernels.quantize(torch.ones(100), layout, message, 0, 0)
kernels.decode(message, layout, torch.empty(100), 0, 0)
message[0, 40] ^= 1
try:
    kernels.decode(message, layout, torch.empty(100), 0, 0)
except zcomm.MessageError as error:
    print("refused:", error)
"""


def test_damaged_message_is_refused_with_checks_on(tmp_path: Path) -> None:
    script = tmp_path / "corrupt.py"
    script.write_text(CORRUPT)
    for setting, is_refused in (("1", True), ("0", False)):
        printed = run_on_forks(1, [[str(script)]], cwd=tmp_path, ZCOMM_CHECK=setting)
        assert ("refused: a message was damaged" in printed) == is_refused


def test_wrong_environment_is_named() -> None:
    with variables(ZCOMM_KERNELS="fast"), pytest.raises(zcomm.ConfigError, match="ZCOMM_KERNELS=fast"):
        env.value("ZCOMM_KERNELS")


def test_message_error_is_a_zcomm_error() -> None:
    assert issubclass(MessageError, zcomm.ZcommError)
