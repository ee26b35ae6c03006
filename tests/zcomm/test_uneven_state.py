"""Collectives that keep state, over shards of different lengths: delta gathers, node replicas, node sums, residuals."""

# covers zcomm/_stateful/uneven_state.py zcomm/_residuals/buffer_layout.py

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import ranks_over, run_ranks, topology
from tests.variables import variables
from tests.zcomm import oracle
from tests.zcomm.data import same_values
from tests.zcomm.oracle import Wire
from tests.zcomm.test_checked import checking
from tests.zcomm.test_delta import WIRES, _gathered_by_oracle, _owners, _weights
from zcomm import (
    BackendUnavailableError,
    DeltaGather,
    LayoutError,
    NodeReplica,
    NodeSums,
    RandomKey,
    Residual,
    StateError,
    volume,
)

PLACES = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]
"""Ranks, and how many of them are in a node."""
EVEN = 700


def _many_sizes(world_size: int) -> list[list[int]]:
    """No multiples of a block, one element, empty shards, a pack without any element, and nothing at all."""
    some = [300, 0, 1, 777]
    return [some[:world_size], [513, 257, 64, 1000][:world_size], [0, 0, 40, 300][-world_size:], [0] * world_size]


def _rows_of(full: Tensor, sizes: Sequence[int], rows: Sequence[int]) -> list[Tensor]:
    parts = torch.split(full, list(sizes))
    return [parts[row] for row in rows]


def _pack_of(t: zcomm.Topology) -> list[int]:
    """The rows of this rank's local rank, numbered local."""
    return [t.local_rank * t.num_nodes + n for n in range(t.num_nodes)]


# Equal sizes: the bits are those without sizes.


def _both_deltas(t: Any, over: Any, numbering: Any, wire: str, rank: int, dtype: torch.dtype) -> list[list[Tensor]]:
    size = t.num_nodes if over == "nodes" else t.world_size
    made = []
    for sizes in (None, [EVEN] * t.world_size):
        replica = torch.zeros(size * EVEN, dtype=dtype)
        gather = DeltaGather(replica, t, format=wire, numbering=numbering, over=over, shard_sizes=sizes)
        found = []
        for step in range(3):
            key = {"random": RandomKey(1, 2, step)} if step and "stochastic" in wire else {}
            call = gather.update if step else gather.refresh
            work = call(_weights(rank, step, EVEN), async_op=step != 1, **key)
            if work is not None:
                work.wait()
            found += [replica.clone(), gather.held.clone()]
        made.append(found)
    return made


def _input(rank: int, call: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)


def _sums(
    t: Any, sizes: Sequence[int] | None, formats: Any, rank: int, dtype: torch.dtype, numel: int, total: int
) -> list[Tensor]:
    """What a sequence of calls leaves: outputs and residuals."""
    spans = [("a", 0, total // 3), ("b", total // 3 + 1, total // 2)]
    residual = Residual(t, spans, total, numbering="local", beta=0.9, shard_sizes=sizes)
    sums, found = NodeSums(t, numel, formats, residual=residual, shard_sizes=sizes), []
    for step, scale in enumerate((1.0, 4.0, 1.0, 2.0)):
        output = torch.empty(numel)
        for micro in range(step % 3):
            work = sums.add(_input(rank, 10 * step + micro, total, dtype), async_op=micro == 1)
            if work is not None:
                work.wait()
        if step == 2:
            sums.forget(total // 5, total // 2)
            assert sums.rows is not None
            found.append(sums.rows.flatten().clone())
        last = None if step == 1 else _input(rank, 10 * step + 9, total, dtype)
        work = sums.reduce(output, last, scale=scale, async_op=step == 2)
        if work is not None:
            work.wait()
        (residual.rollback if step == 2 else residual.commit)()
        found += [output, residual.values().flatten()]
    sums.add(_input(rank, 99, total, dtype))
    assert not sums.is_empty
    sums.clear()
    assert sums.is_empty
    return found


def _check_equal_sizes(rank: int, per_node: int) -> None:
    t = topology(per_node)
    for wire, dtype in (
        ("int4", torch.bfloat16),
        ("nf4", torch.float32),
        ("none", torch.bfloat16),
        ("int8:stochastic", torch.float32),
    ):
        for over, numbering in (("world", "rank"), ("world", "local"), ("nodes", "local"), ("nodes", "rank")):
            even, uneven = _both_deltas(t, over, numbering, wire, rank, dtype)
            for a, b in zip(even, uneven, strict=True):
                assert same_values(a, b), (wire, over, numbering)
    sizes, total = [EVEN] * t.world_size, EVEN * t.world_size
    for formats in (("int8", "nf4"), ("none", "none"), ("int4", "bf16"), ("none", "int8"), ("int8:asym", "none")):
        for dtype in (torch.float32, torch.bfloat16):
            results = [_sums(t, s, formats, rank, dtype, EVEN, total) for s in (None, sizes)]
            for index, (a, b) in enumerate(zip(*results, strict=True)):
                assert same_values(a, b), (formats, dtype, index)
    replicas = [NodeReplica(t, EVEN, torch.bfloat16, shard_sizes=s) for s in (None, sizes)]
    full = [torch.zeros(total, dtype=torch.bfloat16) for _ in replicas]
    for step in range(3):
        for replica, output in zip(replicas, full, strict=True):
            (replica.update if step else replica.refresh)(_weights(rank, step, EVEN), async_op=True)
            replica.gather(output, 0, replica.part_numel)
        assert torch.equal(*full)
        assert torch.equal(*(replica.values.flatten() for replica in replicas))


@pytest.mark.parametrize(("world_size", "per_node"), PLACES)
def test_equal_sizes_give_the_bits_of_even_shards(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_equal_sizes, per_node)


# Different sizes: what the contract says.


def _check_deltas(rank: int, per_node: int) -> None:
    t = topology(per_node)
    for sizes in _many_sizes(t.world_size):
        for numbering, over, name in (("local", "world", "int4"), ("rank", "world", "nf4"), ("local", "nodes", "int8")):
            owners = _owners(t.world_size, per_node, numbering)
            rows = list(range(t.world_size)) if over == "world" else _pack_of(t)
            replica = torch.full((sum(sizes[row] for row in rows),), 9.0, dtype=torch.bfloat16)
            gather = DeltaGather(replica, t, format=name, numbering=numbering, over=over, shard_sizes=sizes)  # type: ignore[arg-type]
            numel = sizes[owners.index(rank)]
            with pytest.raises(StateError, match="refresh"):
                gather.update(torch.zeros(numel))
            for step in range(3):
                work = (gather.update if step else gather.refresh)(_weights(rank, step, numel), async_op=step != 1)
                if work is not None:
                    work.wait()
                if step == 0:
                    exact = [_weights(owners[row], 0, sizes[row]).bfloat16() for row in rows]
                    assert same_values(replica, torch.cat(exact))
            expected = [
                _weights(owners[row], 2, sizes[row]).bfloat16()  # no rank receives anything: exact
                if len(rows) == 1
                else _gathered_by_oracle(owners[row], 2, sizes[row], WIRES[name], torch.bfloat16)
                for row in rows
            ]
            assert same_values(replica, torch.cat(expected)), (sizes, numbering, over)
            assert same_values(gather.held, expected[rows.index(owners.index(rank))])


def _check_replica(rank: int, per_node: int) -> None:
    t = topology(per_node)
    own = t.shard_index("local")
    for sizes in _many_sizes(t.world_size):
        full = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(5)).bfloat16()
        replica = NodeReplica(t, sizes[own], torch.bfloat16, shard_sizes=sizes)
        assert replica.nbytes == 2 * replica.part_numel == 2 * sum(sizes[row] for row in _pack_of(t))
        replica.refresh(torch.split(full, sizes)[own].clone(), async_op=True)
        output = torch.zeros_like(full)
        with zcomm.traffic() as sent:
            work = replica.gather(output, 0, replica.part_numel, async_op=True)
            assert work is not None
            work.wait()
        assert torch.equal(output, full)
        assert sent.bytes(link="inter", operation="secondary_gather") == 0
        assert sent.bytes(link="intra", operation="secondary_gather") == (per_node - 1) * replica.nbytes
        replica.update((torch.split(full, sizes)[own].float() + 0.01).bfloat16(), async_op=True)
        replica.gather(output, 0, replica.part_numel)  # waits for the update
        assert torch.equal(replica.values, torch.cat(_rows_of(output, sizes, _pack_of(t))))
        assert torch.equal(torch.split(output, sizes)[own], replica.held)
        everyone = [torch.empty_like(output) for _ in range(t.world_size)]
        dist.all_gather(everyone, output)
        assert all(torch.equal(other, output) for other in everyone)
        if sum(sizes):
            assert 0 < (output.float() - full.float()).abs().max() < 0.1
            with pytest.raises(LayoutError, match="filled at once"):
                replica.gather(output, 0, replica.part_numel + 1)


class _SumsByOracle:
    """One process that plays all ranks, for the rows of one pack."""

    def __init__(self, sizes: list[int], t: zcomm.Topology, wires: tuple[Wire | None, Wire | None]) -> None:
        self.sizes, self.nodes, self.per_node, self.wires = sizes, range(t.num_nodes), t.ranks_per_node, wires
        self.residuals = {(n, row): oracle.residual_blocks(sizes[row]) for row in _pack_of(t) for n in self.nodes}

    def _sum_in_node(self, row: int, node: int, call: int) -> np.ndarray:
        first, numel = sum(self.sizes[:row]), self.sizes[row]
        ranks = range(node * self.per_node, (node + 1) * self.per_node)
        parts = [_input(rank, call, sum(self.sizes))[first : first + numel].numpy() for rank in ranks]
        wire = self.wires[0] if self.per_node > 1 else None
        return _sum_of([part if wire is None else oracle.decode([part], wire)[0] for part in parts])

    def reduce(self, row: int, calls: list[int]) -> np.ndarray:
        """The mean of what all ranks gave in ``calls``, the last first."""
        sent = []
        for node in self.nodes:
            total, wire = _sum_of([self._sum_in_node(row, node, call) for call in calls]), self.wires[1]
            if len(self.nodes) > 1 and wire is not None:
                key = node, row
                total, self.residuals[key] = oracle.encode_with_residual(total, self.residuals[key], wire, 1.0)
            sent.append(total)
        return np.asarray(_sum_of(sent) / np.float32(len(self.nodes) * self.per_node), np.float32)

    def residual(self, rows: Sequence[int], node: int) -> Tensor:
        return torch.from_numpy(np.concatenate([oracle.decode_residual(self.residuals[node, row]) for row in rows]))


def _sum_of(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


INT8, NF4 = Wire("int8", 256), Wire("nf4", 64)


def _check_sums(rank: int, per_node: int) -> None:
    t = topology(per_node)
    own = t.shard_index("local")
    for sizes in _many_sizes(t.world_size)[:3]:
        total = sum(sizes)
        for formats, wires in (
            (("none", "none"), (None, None)),
            (("int8", "nf4"), (INT8, NF4)),
            (("none", "nf4"), (None, NF4)),
        ):
            residual = Residual(t, [("w", 0, total)], total, numbering="local", shard_sizes=sizes)
            given = residual if wires[1] else None
            sums = NodeSums(t, sizes[own], formats, residual=given, shard_sizes=sizes)
            expected, output = _SumsByOracle(sizes, t, wires), torch.empty(sizes[own])
            for step, calls in enumerate(([1], [3, 2], [4])):
                for call in calls[1:]:
                    sums.add(_input(rank, call, total))
                sums.reduce(output, _input(rank, calls[0], total))
                means = {row: expected.reduce(row, calls) for row in _pack_of(t)}
                assert same_values(output, torch.from_numpy(means[own])), (sizes, formats, step)
                if given is not None and t.num_nodes > 1:
                    residual.commit()
                    assert same_values(residual.values(), expected.residual(_pack_of(t), t.node_rank))


@pytest.mark.parametrize(("world_size", "per_node"), PLACES)
def test_different_sizes_follow_the_contract(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_deltas, per_node)
    run_ranks(world_size, _check_replica, per_node)
    run_ranks(world_size, _check_sums, per_node)


def _check_forgets(rank: int) -> None:
    """A range across rows, packs and ranks is dropped."""
    t, sizes = topology(2), [300, 0, 1, 777]
    own, total = t.shard_index("local"), sum(sizes)
    sums, output = NodeSums(t, sizes[own], ("none", "none"), shard_sizes=sizes), torch.empty(sizes[own])
    sums.add(_input(rank, 0, total))
    sums.forget(100, 500)
    sums.reduce(output)
    inputs = torch.stack([_input(r, 0, total).double() for r in range(4)])
    inputs[:, 100:500] = 0
    torch.testing.assert_close(output.double(), torch.split(inputs.mean(0), sizes)[own], rtol=1e-5, atol=1e-6)


def test_a_part_of_the_sums_is_forgotten() -> None:
    run_ranks(4, _check_forgets)


# Bytes, errors, checks.


def _bytes_of_calls(rank: int, t: zcomm.Topology, sizes: list[int]) -> list[float]:
    """Bytes that all ranks together send between nodes, by call."""
    numel, total = sizes[t.shard_index("local")], sum(sizes)
    sums = NodeSums(t, numel, ("int8", "nf4"), shard_sizes=sizes)
    replica = NodeReplica(t, numel, torch.bfloat16, shard_sizes=sizes)
    gather = DeltaGather(torch.zeros(total), t, numbering="local", shard_sizes=sizes)
    full, counts = torch.zeros(total, dtype=torch.bfloat16), []
    for call in (
        lambda: sums.add(_input(rank, 0, total)),
        lambda: replica.gather(full, 0, replica.part_numel),
        lambda: sums.reduce(torch.empty(numel), _input(rank, 1, total)),
        lambda: replica.refresh(torch.ones(numel)),
        lambda: replica.update(torch.zeros(numel)),
        lambda: gather.refresh(torch.ones(numel)),
        lambda: gather.update(torch.zeros(numel)),
    ):
        with zcomm.traffic() as counted:
            call()
        counts.append(float(counted.bytes(link="inter")))
    found: list[float] = zcomm.control.gather_float64(torch.tensor(counts, dtype=torch.float64), t).sum(0).tolist()
    return found


def _check_bytes(rank: int) -> None:
    """Between nodes all ranks together send what they send for even shards of as many elements."""
    uneven, even = (_bytes_of_calls(rank, topology(2), sizes) for sizes in ([1024, 256, 0, 2816], [1024] * 4))
    assert uneven[:2] == even[:2] == [0, 0], "micro-batches and gathers stay in the node"
    assert all(a <= b for a, b in zip(uneven, even, strict=True)), (uneven, even)
    of_rank = volume.reduce_scatter_sent(1024, torch.float32, 2, 2, ("int8", "nf4"))
    assert even[2] == 4 * of_rank.inter


def test_bytes_between_nodes_are_those_of_even_shards() -> None:
    run_ranks(4, _check_bytes)


def _check_checked(rank: int, per_node: int) -> None:
    for context in (checking(), variables(ZCOMM_DEBUG="1")):
        with context:
            _check_replica(rank, per_node)
            _check_forgets(rank)
            _check_deltas(rank, per_node)


def test_with_checksums_and_with_compared_calls() -> None:
    run_ranks(4, _check_checked, 2)


def _check_refused(rank: int) -> None:
    t, sizes = topology(2), [300, 0, 1, 777]
    numel = sizes[t.shard_index("local")]
    for wrong in ([1, 2], "abcd", [1.0] * 4, [-1, 1, 1, 1]):
        for make in (
            lambda w=wrong: DeltaGather(torch.zeros(4), t, shard_sizes=w),
            lambda w=wrong: NodeReplica(t, 1, torch.float32, shard_sizes=w),
            lambda w=wrong: NodeSums(t, 1, ("none", "none"), shard_sizes=w),
            lambda w=wrong: Residual(t, [("a", 0, 1)], 4, shard_sizes=w),
        ):
            with pytest.raises(LayoutError, match="shard_sizes"):
                make()
    with pytest.raises(LayoutError, match="add up to numel"):
        Residual(t, [("a", 0, 1)], 1077, shard_sizes=sizes)
    with pytest.raises(LayoutError, match="elements of its rows"):
        DeltaGather(torch.zeros(1077), t, shard_sizes=sizes)
    for make in (
        lambda: NodeSums(t, numel + 1, ("none", "none"), shard_sizes=sizes),
        lambda: NodeReplica(t, numel + 1, torch.float32, shard_sizes=sizes),
    ):
        with pytest.raises(LayoutError, match="this rank's of shard_sizes"):
            make()
    residuals = [Residual(t, [("a", 0, 1)], 1078, numbering="local", shard_sizes=s) for s in (None, sizes[::-1])]
    for residual in residuals:
        sums = NodeSums(t, numel, ("none", "nf4"), residual=residual, shard_sizes=sizes)
        with pytest.raises(LayoutError, match="shards of other sizes"):
            sums.reduce(torch.empty(numel), torch.empty(1078))
    with pytest.raises(LayoutError, match="shards of other sizes"):
        zcomm.reduce_scatter_single(
            torch.empty(300), torch.empty(1200), group=t, format="int8", numbering="local",
            residual=Residual(t, [("a", 0, 1)], 1200, numbering="local", shard_sizes=[300] * 4),
        )  # fmt: skip
    sums = NodeSums(t, numel, ("none", "nf4"), shard_sizes=sizes)
    with pytest.raises(LayoutError, match="a shard for every rank"):
        sums.add(torch.empty(1077))
    with pytest.raises(LayoutError, match="one shard"):
        sums.reduce(torch.empty(numel + 1), torch.empty(1078))
    assert rank < 4


def _check_nccl(rank: int) -> None:
    t = topology(2)
    for make in (
        lambda: DeltaGather(torch.zeros(4), t, shard_sizes=[1] * 4),
        lambda: NodeReplica(t, 1, torch.float32, shard_sizes=[1] * 4),
        lambda: NodeSums(t, 1, ("none", "none"), shard_sizes=[1] * 4),
    ):
        with pytest.raises(BackendUnavailableError, match="nccl"):
            make()
    assert rank < 4


def test_wrong_arguments() -> None:
    run_ranks(4, _check_refused)
    with ranks_over("nccl"):
        run_ranks(4, _check_nccl)


# Residuals move to other layouts.

LENGTHS = {"a": 700, "b": 1, "c": 1300, "d": 513}
TOTAL = sum(LENGTHS.values())


def _made(t: Any, sizes: Sequence[int] | None, order: str, numbering: Any = "local") -> Residual:
    firsts = accumulate((LENGTHS[key] for key in order), initial=0)
    spans = [(key, first, LENGTHS[key]) for key, first in zip(order, firsts, strict=False)]
    return Residual(t, spans, TOTAL if sizes is None else sum(sizes), numbering=numbering, shard_sizes=sizes)


def _trained(t: Any, residual: Residual, rank: int) -> None:
    """Exchanges that leave a residual."""
    sizes = residual.layout.shard_sizes
    own = t.shard_index("local")
    numel = residual.layout.shard_numel if sizes is None else sizes[own]
    total = t.world_size * numel if sizes is None else sum(sizes)
    sums = NodeSums(t, numel, ("none", "int4"), residual=residual, shard_sizes=sizes)
    for step in range(2):
        sums.reduce(torch.empty(numel), _input(rank, step, total))
        residual.commit()


def _held(residual: Residual) -> dict[str, Tensor]:
    """Each parameter's residual, summed over all ranks."""
    layout, local_rank = residual.layout, residual.route.local_rank
    mine = {key: torch.zeros(numel, dtype=torch.float64) for key, numel in LENGTHS.items()}
    rows = layout.rows_in(residual.values(), local_rank)
    for piece in layout.pieces_of(local_rank):
        mine[str(piece.key)][piece.offset : piece.offset + piece.numel] += rows[piece.row][
            piece.column : piece.column + piece.numel
        ]
    everyone = zcomm.control.gather_float64(torch.cat([mine[key] for key in LENGTHS]), topology(dist.get_world_size()))
    return dict(zip(LENGTHS, torch.split(everyone.sum(0), list(LENGTHS.values())), strict=True))


def _same_but_for_encoding(before: dict[str, Tensor], after: dict[str, Tensor], num_times: int = 1) -> None:
    largest = max(float(values.abs().max()) for values in before.values())
    assert largest > 0
    for key in LENGTHS:
        assert (before[key] - after[key]).abs().max() <= num_times * largest / 127 / 2 * (1 + 2**-7), key


SIZES = [1000, 0, 14, 1500]


def _check_residuals(rank: int) -> None:
    t = topology(2)
    uneven = _made(t, SIZES, "abcd")
    _trained(t, uneven, rank)
    again = _made(t, SIZES, "abcd")
    again.load_state_dict(uneven.state_dict())
    assert torch.equal(again.values(), uneven.values())
    assert again.state_dict()["layout"] == uneven.state_dict()["layout"]
    assert uneven.nbytes == uneven.row_starts[-1] * 258 // 256
    for other in (_made(t, None, "abcd"), _made(t, SIZES[::-1], "abcd")):
        with pytest.raises(StateError, match="another layout"):
            other.load_state_dict(uneven.state_dict())
    even = _made(t, None, "dcba")
    assert "shard_sizes" not in even.state_dict()["layout"]
    _trained(t, even, rank)
    for old, sizes in ((uneven, None), (uneven, SIZES[::-1]), (even, SIZES)):
        expected, new = _held(old), _made(t, sizes, "bacd")
        with zcomm.traffic() as sent:
            zcomm.relayout_residuals([old], [new])
        assert sent.bytes(link="inter") == 0
        _same_but_for_encoding(expected, _held(new), 2)
        assert new.num_commits == 2
        states: list[Any] = [None] * 4
        dist.all_gather_object(states, old.state_dict())
        for per_node in (1, 2, 4):
            loaded = _made(topology(per_node), sizes, "bacd")
            zcomm.load_residuals(states, [loaded])
            _same_but_for_encoding(expected, _held(loaded), 2)


def test_residuals_move_between_even_and_uneven_shards() -> None:
    run_ranks(4, _check_residuals)
