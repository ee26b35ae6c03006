"""Node sums and node replicas, compared with the collectives that do the same in one call."""

# covers zcomm/_stateful/node_replica.py zcomm/_stateful/node_sums.py

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from zcomm import FormatError, LayoutError, Residual
from zcomm._stateful.node_replica import NodeReplica
from zcomm._stateful.node_sums import NodeSums

pytestmark = pytest.mark.usefixtures("both_backends")

SHARD = 700  # no multiple of a block


def _input(rank: int, call: int, world_size: int) -> Tensor:
    return torch.randn(world_size * SHARD, generator=torch.Generator().manual_seed(100 * call + rank))


def _residual(per_node: int, world_size: int) -> Residual:
    return Residual(topology(per_node), [("w", 0, world_size * SHARD)], world_size * SHARD, numbering="local")


def _check_one_input_is_the_two_hop_reduction(rank: int, per_node: int) -> None:
    t = topology(per_node)
    world = t.world_size
    for formats in (("int8", "nf4"), ("none", "none"), ("int4", "bf16")):
        mine, theirs = _residual(per_node, world), _residual(per_node, world)
        sums = NodeSums(t, SHARD, formats, residual=mine)
        got, expected = torch.empty(SHARD), torch.empty(SHARD)
        for call in range(3):  # the second has a residual, the third one that was rolled back to it
            given = _input(rank, call, world)
            work = sums.reduce(got, given, async_op=call == 1)
            if work is not None:
                work.wait()
            zcomm.reduce_scatter_single(
                expected, given, "avg", group=t, format=formats, numbering="local", residual=theirs
            )
            assert torch.equal(got, expected), (formats, call)
            for residual in (mine, theirs):
                (residual.rollback if call == 1 else residual.commit)()
            assert torch.equal(mine.values(), theirs.values())
        assert sums.nbytes == 0, "no memory without add()"


def _check_sums(rank: int, per_node: int) -> None:
    t = topology(per_node)
    world, row = t.world_size, t.shard_index("local")
    sums, got = NodeSums(t, SHARD, ("none", "none")), torch.empty(SHARD)
    inputs = [[_input(r, call, world) for r in range(world)] for call in range(3)]
    own = slice(row * SHARD, (row + 1) * SHARD)

    def mean(calls: range) -> Tensor:
        of_ranks = [torch.stack([inputs[c][r].double() for c in calls]).sum(0) for r in range(world)]
        return (torch.stack(of_ranks).sum(0) / world)[own]

    with zcomm.traffic() as sent:
        sums.add(inputs[0][rank])
        sums.add(inputs[1][rank], async_op=True).wait()
    assert sent.bytes(link="inter") == 0, "micro-batches stay in the node"
    assert not sums.is_empty
    sums.reduce(got, inputs[2][rank])
    torch.testing.assert_close(got.double(), mean(range(3)), rtol=1e-5, atol=1e-6)
    sums.add(inputs[0][rank])
    sums.reduce(got)
    torch.testing.assert_close(got.double(), mean(range(1)), rtol=1e-5, atol=1e-6)
    sums.add(inputs[0][rank])
    sums.clear()
    sums.add(inputs[1][rank])
    sums.forget(SHARD // 2, SHARD * (world - 1))  # across rows and ranks
    sums.reduce(got, inputs[2][rank])
    kept = [x.clone() for x in inputs[1]]
    for x in kept:
        x[SHARD // 2 : SHARD * (world - 1)] = 0
    expected = (torch.stack([a.double() + b.double() for a, b in zip(kept, inputs[2], strict=True)]).sum(0) / world)[
        own
    ]
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


def _check_residual_is_without_the_scale(rank: int, per_node: int) -> None:
    t = topology(per_node)
    plain, scaled = _residual(per_node, t.world_size), _residual(per_node, t.world_size)
    one, other = (NodeSums(t, SHARD, ("none", "nf4"), residual=r) for r in (plain, scaled))
    got, expected = torch.empty(SHARD), torch.empty(SHARD)
    for call, scale in enumerate((2.0**10, 2.0**9)):  # a scale that changes between steps
        given = _input(rank, call, t.world_size)
        one.reduce(expected, given)
        other.reduce(got, given * scale, scale=scale)
        assert torch.equal(got, expected * scale)
        plain.commit()
        scaled.commit()
        assert torch.equal(plain.values(), scaled.values())
        assert plain.norm() > 0
    for dtype in (torch.float16, torch.bfloat16):  # rounded once, with the scale: without it 3e-8 is a subnormal
        sums, shard = NodeSums(t, SHARD, ("none", "none")), torch.empty(SHARD, dtype=dtype)
        sums.reduce(shard, torch.full((SHARD * t.world_size,), 3e-8 * 2**16, dtype=dtype), scale=2.0**16)
        assert torch.equal(shard, torch.full((SHARD,), 3e-8 * 2**16, dtype=dtype))


def _check_replica(rank: int, per_node: int) -> None:
    t = topology(per_node)
    generator = torch.Generator().manual_seed(5)
    full = torch.randn(t.world_size * SHARD, generator=generator).to(torch.bfloat16)
    row = t.shard_index("local")
    own = slice(row * SHARD, (row + 1) * SHARD)
    replica = NodeReplica(t, SHARD, torch.bfloat16)
    replica.refresh(full[own].clone(), async_op=True)
    output, cut = torch.zeros_like(full), 256 * t.num_nodes
    with zcomm.traffic() as sent:
        replica.gather(output, 0, cut)
        replica.gather(output, cut, replica.part_numel, async_op=True).wait()
    assert torch.equal(output, full)
    assert sent.bytes(link="inter") == 0
    replica.update((full[own].float() + 0.01).to(torch.bfloat16), async_op=True)
    replica.gather(output, 0, replica.part_numel)  # waits for the update
    assert torch.equal(output[own], replica.held)
    assert 0 < (output.float() - full.float()).abs().max() < 0.1
    with pytest.raises(LayoutError, match="full buffer"):
        replica.gather(output.float(), 0, 1)


def _check_all(rank: int, per_node: int) -> None:
    if topology(per_node).num_nodes > 1:
        _check_one_input_is_the_two_hop_reduction(rank, per_node)
        _check_residual_is_without_the_scale(rank, per_node)
    _check_sums(rank, per_node)
    _check_replica(rank, per_node)
    t = topology(per_node)
    with pytest.raises(FormatError, match="stochastically"):
        NodeSums(t, SHARD, ("none", dataclasses.replace(zcomm.FORMATS["int4"], rounding="stochastic")))
    with pytest.raises(LayoutError, match="nothing to reduce"):
        NodeSums(t, SHARD, ("none", "none")).reduce(torch.empty(SHARD))
    with pytest.raises(LayoutError, match="a shard for every rank"):
        NodeSums(t, SHARD, ("none", "none")).add(torch.zeros(t.world_size * 3))


@pytest.mark.parametrize(("world_size", "per_node"), [(1, 1), (2, 1), (4, 2), (4, 4)])
def test_sums_and_replicas_of_a_node(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_all, per_node)


def _check_chunks(rank: int) -> None:
    """Shards in chunks have the same bits as in one piece, and several additions may be in flight."""
    t, shard = topology(2), 3 * 2**18
    given = torch.randn(4 * shard, generator=torch.Generator().manual_seed(rank))
    spans, got, expected = [("w", 0, 4 * shard)], torch.empty(shard), torch.empty(shard)
    residuals = [Residual(t, spans, 4 * shard, numbering="local") for _ in range(2)]
    sums = NodeSums(t, shard, ("int8", "nf4"), residual=residuals[0])
    sums.reduce(got, given)
    zcomm.reduce_scatter_single(
        expected, given, "avg", group=t, format=("int8", "nf4"), numbering="local", residual=residuals[1]
    )
    assert torch.equal(got, expected)
    works = [sums.add(given, async_op=True), sums.add(given, async_op=True)]
    for work in works:
        work.wait()
    residuals[0].rollback()
    sums.reduce(got)
    torch.testing.assert_close(got, 2 * expected, rtol=0.3, atol=0.3)


def test_chunks() -> None:
    run_ranks(4, _check_chunks)
