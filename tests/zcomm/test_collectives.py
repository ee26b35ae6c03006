"""Collectives on live ranks against oracles that compute every rank's data from its seed."""

# covers zcomm/_bench/workloads.py zcomm/_collectives/reduce_scatter.py zcomm/_stateful/secondary.py

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm import oracle
from tests.zcomm.data import same_values
from tests.zcomm.oracle import Wire
from zcomm import LayoutError, MessageError, StateError, TopologyError
from zcomm.volume import all_gather_sent, reduce_scatter_sent

pytestmark = pytest.mark.usefixtures("both_backends")
TOPOLOGIES = [(1, 1), (2, 2), (2, 1), (3, 3), (4, 1), (4, 2), (4, 4)]
NUMELS = [1, 300, 513]


def _data(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * (rank + 1)).to(dtype)


def _shards(world_size: int, ranks_per_node: int, numbering: str) -> list[int]:
    """The rank that owns each row."""
    nodes = world_size // ranks_per_node
    if numbering == "rank":
        return list(range(world_size))
    return [node * ranks_per_node + local for local in range(ranks_per_node) for node in range(nodes)]


def _twice(call: Any, make_output: Any) -> Tensor:
    """Compute synchronously and asynchronously; both results must have the same bits."""
    first, second = make_output(), make_output()
    assert call(first, async_op=False) is None
    work = call(second, async_op=True)
    work.wait()
    work.wait()
    assert work.is_completed()
    assert same_values(first, second)
    return first


def _agree(tensor: Tensor) -> None:
    """Check that all ranks hold the same bits."""
    mine = tensor.contiguous().view(-1).view(torch.uint8)
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    assert all(torch.equal(other, mine) for other in others)


def _check_all_gather(rank: int, per_node: int, numbering: Any, dtype: torch.dtype) -> None:
    t = topology(per_node)
    owners = _shards(t.world_size, per_node, numbering)
    assert owners[t.shard_index(numbering)] == rank
    for numel in NUMELS:
        exact = torch.stack([_data(owner, numel, dtype) for owner in owners])
        for wire in ("none", "bf16", "int8", ("int8", "none"), ("int4", "int8")):

            def call(out: Tensor, wire: Any = wire, numel: int = numel, **kw: Any) -> Any:
                return zcomm.all_gather_single(
                    out, _data(rank, numel, dtype), t, format=wire, numbering=numbering, **kw
                )

            got = _twice(call, lambda numel=numel: torch.full((t.world_size * numel,), 9.0, dtype=dtype))
            strided = torch.full((t.world_size, numel + 5), 9.0, dtype=dtype)
            call(strided[:, :numel])
            assert same_values(strided[:, :numel].reshape(-1), got)
            assert bool((strided[:, numel:] == 9).all())
            _agree(got)
            _check_gathered(got.view(t.world_size, numel), exact, wire, t)


def _check_gathered(got: Tensor, exact: Tensor, wire: Any, t: zcomm.Topology) -> None:
    first, second = (wire, wire) if isinstance(wire, str) else wire
    used = [second] if t.num_nodes == 1 else [first] if t.ranks_per_node == 1 else list(dict.fromkeys([first, second]))
    expected = exact.float()
    for name in used:
        if name == "bf16":
            expected = expected.bfloat16().float()
        elif name != "none":
            block = {"int8": 256, "int4": 128}[name]
            rows = [oracle.decode([row], Wire(name, block))[0] for row in expected.numpy()]
            expected = torch.from_numpy(np.stack(rows))
    assert same_values(got, expected.to(exact.dtype)), wire


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("numbering", ["rank", "local"])
@pytest.mark.parametrize(("world_size", "per_node"), TOPOLOGIES)
def test_all_gather(world_size: int, per_node: int, numbering: str, dtype: torch.dtype) -> None:
    run_ranks(world_size, _check_all_gather, per_node, numbering, dtype)


def _summed(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _reduced(owner: int, owners: list[int], per_node: int, numel: int, wire: tuple[str, str]) -> np.ndarray:
    """The sum for ``owner`` by the contract: rank order inside the node, then node order."""
    row = owners.index(owner)

    def sent(values: np.ndarray, name: str) -> np.ndarray:
        return values if name == "none" else oracle.decode([values], Wire(name, {"int8": 256, "int4": 128}[name]))[0]

    nodes = len(owners) // per_node
    inputs = [_data(rank, len(owners) * numel).numpy()[row * numel : (row + 1) * numel] for rank in range(len(owners))]
    if nodes == 1 or per_node == 1:
        return _summed([sent(x, wire[0] if nodes == 1 else wire[1]) for x in inputs])
    of_nodes = [_summed([sent(x, wire[0]) for x in inputs[n * per_node : (n + 1) * per_node]]) for n in range(nodes)]
    return _summed([sent(x, wire[1]) for x in of_nodes])


def _check_reduce_scatter(rank: int, per_node: int, numbering: Any) -> None:
    t = topology(per_node)
    owners = _shards(t.world_size, per_node, numbering)
    for numel in NUMELS:
        for wire in (("none", "none"), ("int8", "int8"), ("int4", "int4"), ("int8", "int4"), ("none", "int8")):
            exact = _reduced(rank, owners, per_node, numel, wire)
            x = _data(rank, t.world_size * numel)
            wide = torch.zeros(t.world_size, numel + 3)
            wide[:, :numel] = x.view(t.world_size, numel)
            for op, expected in (("sum", exact), ("avg", exact / np.float32(t.world_size))):
                for source in (x, wide[:, :numel]):

                    def call(out: Tensor, source: Tensor = source, op: str = op, wire: Any = wire, **kw: Any) -> Any:
                        return zcomm.reduce_scatter_single(
                            out, source, op, group=t, format=wire, numbering=numbering, **kw
                        )

                    got = _twice(call, lambda numel=numel: torch.full((numel,), 9.0))
                    assert same_values(got, torch.from_numpy(expected)), (numel, wire, op)
            assert torch.equal(x, _data(rank, t.world_size * numel))


@pytest.mark.parametrize("numbering", ["rank", "local"])
@pytest.mark.parametrize(("world_size", "per_node"), TOPOLOGIES)
def test_reduce_scatter(world_size: int, per_node: int, numbering: str) -> None:
    run_ranks(world_size, _check_reduce_scatter, per_node, numbering)


def _check_all_reduce(rank: int, per_node: int) -> None:
    t = topology(per_node)
    for numel in (0, 1, 3, 1001):
        integers = torch.arange(numel) % 100 - 50.0  # sums of integers are exact in any order
        expected = sum((integers + r for r in range(t.world_size)), torch.zeros(numel))
        for group in (t, None):
            x = integers + rank
            zcomm.all_reduce(x, group=group)
            assert torch.equal(x, expected)
            x = (integers + rank).double()
            work = zcomm.all_reduce(x, dist.ReduceOp.AVG, group, async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(x, expected.double() / t.world_size)
        x = _data(rank, numel)
        zcomm.all_reduce(x, "avg", t, format=("int8", "int4"))
        _agree(x)
        mean = torch.stack([_data(r, numel) for r in range(t.world_size)]).mean(0)
        assert numel == 0 or (x - mean).norm() <= 0.3 * mean.norm() + 0.1
        x = torch.ones(numel)  # what fills up the last shard counts in no scale: three encodings err by half a one each
        zcomm.all_reduce(x, "avg", t, format="int4")
        assert bool(((x - 1).abs() <= 3 * 0.5 / 7 * 1.01).all())
    _check_sums_are_wide(rank, t.world_size)


def _check_sums_are_wide(rank: int, world_size: int) -> None:
    """A sum of bf16 is rounded once, by the format of the gather, and not for each term."""
    numel, dtype = 60 * world_size, torch.bfloat16
    x = _data(rank, numel, dtype)
    zcomm.all_reduce(x, format="none", gather_format="int8")
    total = _summed([_data(r, numel, dtype).float().numpy() for r in range(world_size)])
    shards = [oracle.decode([shard], Wire("int8", 256))[0] for shard in total.reshape(world_size, -1)]
    assert same_values(x, torch.from_numpy(np.concatenate(shards)).to(dtype))


def _check_all_to_all(rank: int, per_node: int) -> None:
    t = topology(per_node)
    numel = 33

    def part(source: int, target: int) -> Tensor:
        return _data(100 * source + target, numel)

    x = torch.cat([part(rank, target) for target in range(t.world_size)])
    for group, wire in ((t, "none"), (None, "none"), (t, "int8"), (t, ("none", "int8"))):

        def call(out: Tensor, group: Any = group, wire: Any = wire, **kw: Any) -> Any:
            return zcomm.all_to_all_single(out, x, group, format=wire, **kw)

        got = _twice(call, lambda: torch.empty(t.world_size * numel)).view(t.world_size, numel)
        for source in range(t.world_size):
            exact = part(source, rank).numpy()
            is_quantized = wire == "int8" or (isinstance(wire, tuple) and t.num_nodes > 1)
            expected = oracle.decode([exact], Wire("int8", 256))[0] if is_quantized else exact
            assert same_values(got[source], torch.from_numpy(expected)), (wire, source)


@pytest.mark.parametrize(("world_size", "per_node"), TOPOLOGIES)
def test_all_reduce_and_all_to_all(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_all_reduce, per_node)
    run_ranks(world_size, _check_all_to_all, per_node)


def _check_in_place(rank: int) -> None:
    for per_node in (1, 2, 4):
        t = topology(per_node)
        for wire in ("none", "int8"):
            full = torch.zeros(4 * 512)
            row = t.shard_index("local")
            mine = full[row * 512 : (row + 1) * 512]
            mine.copy_(_data(rank, 512))
            zcomm.all_gather_single(full, mine, t, format=wire, numbering="local")
            other = torch.zeros(4 * 512)
            zcomm.all_gather_single(other, _data(rank, 512), t, format=wire, numbering="local")
            assert torch.equal(full, other)


def test_gather_in_place() -> None:
    run_ranks(4, _check_in_place)


def _check_nan(rank: int) -> None:
    t = topology(2)
    x = torch.ones(4 * 512)
    if rank == 3:
        x[5] = float("inf")
    for wire in ("int8", ("int8", "int4"), ("none", "int4")):
        out = torch.zeros(512)
        zcomm.reduce_scatter_single(out, x, group=t, format=wire)
        assert bool(out[5].isfinite()) == (rank != 0)
    x = torch.full((512,), 3e38)  # finite terms whose sum is not: visible, too
    out = torch.zeros(128)
    zcomm.reduce_scatter_single(out, x, group=t, format="none")
    assert bool(out.isinf().all())


def test_overflow_is_never_hidden() -> None:
    run_ranks(4, _check_nan)


def _check_traffic(rank: int, per_node: int) -> None:
    t = topology(per_node)
    nodes, numel = t.num_nodes, 1000
    for wire in (("none", "none"), ("int8", "int8"), ("bf16", "int4")):
        with zcomm.traffic() as sent:
            zcomm.all_gather_single(torch.empty(4 * numel), _data(rank, numel), t, format=wire)
        expected = all_gather_sent(numel, torch.float32, nodes, per_node, wire)
        assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == expected
        with zcomm.traffic() as sent:
            zcomm.reduce_scatter_single(torch.empty(numel), _data(rank, 4 * numel), group=t, format=wire)
        expected = reduce_scatter_sent(numel, torch.float32, nodes, per_node, wire)
        assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == expected
    if per_node == 2:
        with zcomm.traffic() as sent:
            zcomm.reduce_scatter_single(torch.empty(numel), _data(rank, 4 * numel), group=t, format="int4")
        # By hand: 8 blocks a segment; hop 1 carries 2: 32 bytes of scales, 1000 of codes, 8 of trailer.
        assert sent.as_dict() == {
            "reduce_scatter|int4|inter": {"calls": 1, "elements": 1000, "bytes": 528},
            "reduce_scatter|int4|intra": {"calls": 1, "elements": 2000, "bytes": 1040},
        }
        assert "reduce_scatter" in str(sent)


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_traffic_is_what_the_formulas_say(per_node: int) -> None:
    run_ranks(4, _check_traffic, per_node)


def _check_secondary(rank: int) -> None:
    for per_node in (1, 2, 4):
        t = topology(per_node)
        for numel in (0, 1, 7, 512):
            partition = zcomm.SecondaryPartition(t, numel, torch.bfloat16)
            assert partition.nbytes == 2 * -(-numel // per_node)
            full = _data(3, numel, torch.bfloat16)
            out = torch.zeros(numel, dtype=torch.bfloat16)
            with pytest.raises(StateError, match="fill"):
                partition.gather(out)
            partition.fill(full)
            with zcomm.traffic() as sent:
                partition.gather(out)
                again = torch.zeros_like(out)
                work = partition.gather(again, async_op=True)
                assert work is not None
                work.wait()
            assert torch.equal(out, full)
            assert torch.equal(again, full)
            assert sent.bytes(link="inter") == 0
            assert sent.bytes() == 2 * (per_node - 1) * partition.nbytes
            partition.invalidate()
            assert not partition.is_valid
            with pytest.raises(LayoutError, match="must fit"):
                partition.fill(torch.zeros(numel + 1, dtype=torch.bfloat16))
    assert rank == topology(2).rank


def test_secondary_partition() -> None:
    run_ranks(4, _check_secondary)


def _check_order(rank: int) -> None:
    """Asynchronous and synchronous calls of one topology, mixed: each gets its own result."""
    t = topology(2)
    outputs, works = [], []
    for i in range(6):
        out = torch.empty(4 * 64)
        works.append(zcomm.all_gather_single(out, _data(rank + 10 * i, 64), t, format="none", async_op=i % 3 != 2))
        outputs.append(out)
    for work in reversed(works):
        if work is not None:
            work.wait()
    for i, out in enumerate(outputs):
        assert torch.equal(out, torch.cat([_data(r + 10 * i, 64) for r in range(4)]))


def test_order_of_mixed_calls() -> None:
    run_ranks(4, _check_order)


def _gather_and_wait(shard: Tensor, t: zcomm.Topology, wire: zcomm.Format, *, async_op: bool) -> None:
    out = torch.empty(t.world_size * shard.numel())
    work = zcomm.all_gather_single(out, shard, t, format=wire, async_op=async_op)
    if work is not None:
        work.wait()


def _check_mismatch(rank: int) -> None:
    """A rank that uses another format of the same length is detected on every rank."""
    t = topology(2)
    block = 256 if rank == 0 else 250  # as many blocks, so as many bytes
    for async_op in (False, True):
        with pytest.raises(MessageError, match=r"hash|another layout than this rank expects"):
            _gather_and_wait(_data(rank, 500), t, zcomm.get_format("int8", block=block), async_op=async_op)


def test_mismatched_formats_raise_on_every_rank() -> None:
    run_ranks(2, _check_mismatch)


def _check_control(rank: int, backend: str) -> None:
    """With "nccl", which does not support host tensors, control exchanges must not use that group."""
    t = topology(2).clone()
    t.world = replace(t.world, backend=backend)
    assert (t.on_host.group is t.world.group) == (backend == "gloo")
    assert zcomm.control.agree_max(torch.tensor([rank, -rank]), t).tolist() == [3, 0]
    flags = [rank == 3, False, *(i == rank for i in range(9))]
    agreed = zcomm.control.agree([rank - 2**62, 7], flags, t)
    assert agreed == ([-(2**62), 7], [3 - 2**62, 7], [True, False, *(i < 4 for i in range(9))])
    assert zcomm.control.agree([], [], t) == ([], [], [])
    assert zcomm.control.gather_float64(torch.tensor([rank / 3]), t).flatten().tolist() == [
        float(torch.tensor(r / 3)) for r in range(4)
    ]
    tall = torch.full((2, 3), rank, dtype=torch.int64).t()  # not contiguous
    flag, scalar = torch.tensor(rank == 2), torch.tensor(rank * 1.5)
    for value in (tall, flag, scalar):
        zcomm.control.broadcast_(value, 2, t)
    assert torch.equal(tall, torch.full((3, 2), 2))
    assert flag.item() is True
    assert scalar.item() == 3.0
    with pytest.raises(TopologyError, match="src=4"):
        zcomm.control.broadcast_(torch.zeros(1), 4, t)
    t.close()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_control(backend: str) -> None:
    run_ranks(4, _check_control, backend)


def _flat_results(x: Tensor, group: Any, format: str) -> list[Tensor]:
    """What the four collectives give for the flat elements of ``x``."""
    flat, world_size = x.reshape(-1), dist.get_world_size()
    full, shard, total, parts = (
        flat.new_empty(world_size * len(flat)),
        flat.new_empty(len(flat) // 2),
        flat + 0,
        flat + 0,
    )
    zcomm.all_gather_single(full, flat, group, format=format)
    zcomm.reduce_scatter_single(shard, flat, group=group, format=format)
    zcomm.all_reduce(total, group=group, format=format)
    zcomm.all_to_all_single(parts, flat, group, format=format)
    return [full, shard, total, parts]


def _check_shapes(rank: int) -> None:
    """Tensors of several dimensions have the bits of flat ones, over a group, a mesh and a Topology."""
    x = _data(rank, 4 * 3 * 70).view(4, 3, 70)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    both = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    for group in (None, mesh, both["outer"], topology(1)):
        for format in ("none", "int8"):
            full, shard, total, parts = x.new_empty(8, 3, 70), x.new_empty(2, 3, 70), x.clone(), x.new_empty(4, 3, 70)
            zcomm.all_gather_single(full, x, group, format=format)
            zcomm.reduce_scatter_single(shard, x, group=group, format=format)
            zcomm.all_reduce(total, group=group, format=format)
            zcomm.all_to_all_single(parts, x, group, format=format)
            of_functional = [
                zcomm.functional.all_gather_single(x, group, format=format),
                zcomm.functional.reduce_scatter_single(x, "sum", group, format=format),
                zcomm.functional.all_reduce(x, "sum", group, format=format),
                zcomm.functional.all_to_all_single(x, group, format=format),
            ]
            expected = _flat_results(x, None if isinstance(group, type(mesh)) else group, format)
            for mine, also, flat in zip((full, shard, total, parts), of_functional, expected, strict=True):
                assert mine.shape == also.shape
                assert same_values(mine.view(-1), flat)
                assert same_values(also.view(-1), flat)
    number = torch.tensor(rank + 1.0)
    zcomm.all_reduce(number)
    assert number.item() == 3
    with pytest.raises(TopologyError, match=r"one dimension: ndim=2.*from_mesh"):
        zcomm.all_reduce(x, group=both)
    with pytest.raises(LayoutError, match="rows=3, world_size=2"):
        zcomm.all_to_all_single(x.new_empty(3, 2), x.new_empty(3, 2))
    with pytest.raises(LayoutError, match=r"shape=\(3, 2\), world_size=2"):
        zcomm.functional.reduce_scatter_single(x.new_empty(3, 2))
    with pytest.raises(LayoutError, match="contiguous"):
        zcomm.all_reduce(x.transpose(0, 1))


def test_tensors_of_any_shape_and_meshes() -> None:
    run_ranks(2, _check_shapes)


def _check_destroyed(rank: int) -> None:
    """What is kept of a group is not used after it was destroyed, or for another group."""
    group, x = dist.new_group([0, 1]), torch.ones(3)
    zcomm.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="not registered"):
        zcomm.all_reduce(x, group=group)
    with zcomm.traffic() as sent:
        zcomm.all_reduce(x)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="1"), zcomm.traffic() as sent_between:
        zcomm.all_reduce(x, group=dist.new_group())
    assert sent.bytes(link="intra") == sent_between.bytes(link="inter") > 0
    assert sent.bytes(link="inter") == sent_between.bytes(link="intra") == 0
    assert x.tolist() == [8] * 3


def test_what_is_known_of_a_group_ends_with_it() -> None:
    run_ranks(2, _check_destroyed)
