"""Delta weights: arithmetic against the oracle; errors do not accumulate."""

# covers zcomm/_stateful/delta_gather.py

from __future__ import annotations

from typing import Any

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
from zcomm import DeltaGather, FormatError, LayoutError, StateError, TopologyError, volume
from zcomm._transport import chunks

pytestmark = pytest.mark.usefixtures("both_backends")

ONE = zcomm.Topology.single()
WIRES = {"int8": Wire("int8", 256), "int4": Wire("int4", 128), "nf4": Wire("nf4", 64)}


def _weights(rank: int, step: int, numel: int) -> Tensor:
    """The weights of ``rank`` at ``step``: they drift by a hundredth in each step."""
    generator = torch.Generator().manual_seed(rank)
    weights = torch.randn(numel, generator=generator)
    for _ in range(step):
        weights += 0.01 * torch.randn(numel, generator=generator)
    return weights


def _owners(world_size: int, per_node: int, numbering: str) -> list[int]:
    """The rank that owns each row."""
    if numbering == "rank" or per_node in (1, world_size):
        return list(range(world_size))
    return [node * per_node + local for local in range(per_node) for node in range(world_size // per_node)]


def _gathered_by_oracle(owner: int, num_steps: int, numel: int, wire: Wire, dtype: torch.dtype) -> Tensor:
    held = _weights(owner, 0, numel).to(dtype)
    for step in range(1, num_steps + 1):
        delta = _weights(owner, step, numel).numpy() - held.float().numpy()
        total = held.float().numpy() + oracle.decode([delta], wire)[0]
        assert total.dtype == np.float32
        held = torch.from_numpy(total).to(dtype)
    return held


def _check_contract(rank: int, per_node: int, numbering: Any) -> None:
    t = topology(per_node)
    for numel, name, dtype in ((300, "int4", torch.bfloat16), (65, "nf4", torch.float32), (1, "int8", torch.float16)):
        for over in ("world", "nodes"):
            owners = _owners(t.world_size, per_node, numbering)
            if over == "nodes":
                owners = [node * per_node + t.local_rank for node in range(t.num_nodes)]
            wide = torch.full((len(owners), numel + 3), 9.0, dtype=dtype)
            gather = DeltaGather(wide[:, :numel], t, format=name, numbering=numbering, over=over)  # type: ignore[arg-type]
            for step in range(3):
                shard = _weights(rank, step, numel)
                work = (gather.update if step else gather.refresh)(shard, async_op=step != 1)
                if work is not None:
                    work.wait()
            expected = [_gathered_by_oracle(owner, 2, numel, WIRES[name], dtype) for owner in owners]
            if len(owners) == 1:  # no rank receives anything: exact
                expected = [shard.to(dtype)]
            assert same_values(gather.replica.contiguous(), torch.stack(expected)), (numel, name, over)
            assert torch.equal(gather.held, gather.replica[owners.index(rank)])
            assert bool((wide[:, numel:] == 9).all())


@pytest.mark.parametrize("numbering", ["rank", "local"])
@pytest.mark.parametrize(("world_size", "per_node"), [(1, 1), (2, 1), (4, 2), (4, 4)])
def test_replicas_are_what_the_contract_says(world_size: int, per_node: int, numbering: str) -> None:
    run_ranks(world_size, _check_contract, per_node, numbering)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def _check_no_drift(rank: int) -> None:
    t, numel, num_steps = topology(2), 1024, 200
    shard = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    drift = torch.Generator().manual_seed(50 + rank)
    replica, naive = torch.zeros(4 * numel, dtype=torch.bfloat16), torch.zeros(4, numel)
    gather = DeltaGather(replica, t, format="int4")
    gather.refresh(shard)
    distances = []
    for _ in range(num_steps):
        shard = shard + 0.003 * torch.randn(numel, generator=drift) + 0.001 * shard.sign()
        gather.update(shard)
        exact = torch.empty(4 * numel)
        zcomm.all_gather_single(exact, shard, t)
        distances.append(_distance(replica, exact))
    zcomm.all_gather_single(naive.view(-1), shard, t, format="int4")
    of_bf16 = _distance(exact.bfloat16(), exact)
    of_one_step = 0.2 * 0.0035  # int4 loses at most a fifth of the change of a step
    assert max(distances[100:]) <= 1.1 * max(distances[19], of_bf16)
    assert max(distances) <= of_bf16 + of_one_step
    assert _distance(naive.view(-1), exact) > 20 * max(distances)
    everyone = [torch.empty_like(replica) for _ in range(4)]
    dist.all_gather(everyone, replica)
    assert all(same_values(other, replica) for other in everyone)
    gather.refresh(shard)
    assert torch.equal(replica, exact.bfloat16())


def test_errors_do_not_add_up() -> None:
    run_ranks(4, _check_no_drift)


def _check_bytes(rank: int) -> None:
    t, n = topology(2), 1000
    gather, between = (
        DeltaGather(torch.zeros(size * n), t, format="nf4", over=over) for size, over in ((4, "world"), (2, "nodes"))
    )  # type: ignore[arg-type]
    exact, nf4 = (("none", "none"), ("nf4", "nf4"))
    for wire, call, call_between in ((exact, gather.refresh, between.refresh), (nf4, gather.update, between.update)):
        with zcomm.traffic() as sent:
            call(torch.ones(n))
        expected = volume.all_gather_sent(n, torch.float32, 2, 2, wire)
        assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == expected
        with zcomm.traffic() as sent:
            call_between(torch.ones(n))
        assert sent.bytes(link="intra") == 0
        assert sent.bytes(link="inter") == volume.one_hop_sent(n, torch.float32, 0, 1, wire[0]).inter


def test_bytes_are_those_of_an_all_gather() -> None:
    run_ranks(4, _check_bytes)


def _check_nan(rank: int) -> None:
    t = topology(2)
    gather = DeltaGather(torch.zeros(4, 512), t, format="int4")
    with pytest.raises(StateError, match=r"refresh\(shard\) before update"):
        gather.update(torch.ones(512))
    gather.refresh(torch.ones(512))
    shard = torch.full((512,), 2.0)
    if rank == 1:
        shard[5] = float("inf")
    gather.update(shard)
    assert gather.replica[1, :128].isnan().all()
    gather.update(torch.ones(512))
    assert gather.replica[1, :128].isnan().all()  # not hidden
    assert torch.equal(gather.replica[0], torch.ones(512))
    gather.refresh(torch.ones(512))
    assert torch.equal(gather.replica, torch.ones(4, 512))
    gather.invalidate()
    with pytest.raises(StateError, match="refresh"):
        gather.update(torch.ones(512))


def test_what_is_not_finite_stays_visible_until_a_refresh() -> None:
    run_ranks(4, _check_nan)


def _check_chunks_and_order(rank: int) -> None:
    """Chunks do not change results; calls that are not waited for run in order."""
    numel, found = 5 * 512 + 77, []
    for at_least, is_async in ((2**18, False), (2**18, True), (512, True)):
        usual, chunks.MIN_CHUNK_NUMEL = chunks.MIN_CHUNK_NUMEL, at_least
        for group in (topology(2), None):
            gather = DeltaGather(torch.zeros(4, numel, dtype=torch.bfloat16), group, format="int4")
            gather.refresh(_weights(rank, 0, numel), async_op=is_async)
            for step in (1, 2):
                work = gather.update(_weights(rank, step, numel), async_op=is_async)
            if work is not None:
                work.wait()
            found.append(gather.replica)
        chunks.MIN_CHUNK_NUMEL = usual
    assert all(torch.equal(replica, found[0]) for replica in found)


def test_chunks_and_asynchronous_calls_change_nothing() -> None:
    run_ranks(4, _check_chunks_and_order)


def _check_failed_update(rank: int) -> None:
    t = topology(2)
    gather = DeltaGather(torch.zeros(2, 500), t, format=zcomm.get_format("int8", block=256 if rank == 0 else 250))
    gather.refresh(torch.ones(500))
    with pytest.raises(zcomm.MessageError, match="hash"):
        gather.update(torch.zeros(500))
    with pytest.raises(StateError, match="refresh"):
        gather.update(torch.zeros(500))
    gather.refresh(torch.ones(500))
    assert torch.equal(gather.replica, torch.ones(2, 500))


def test_after_a_failed_update_a_refresh_is_needed() -> None:
    run_ranks(2, _check_failed_update)


def test_bad_arguments() -> None:
    replica = torch.zeros(8)
    with pytest.raises(TopologyError, match="needs a Topology"):
        DeltaGather(replica, over="nodes")
    with pytest.raises(TopologyError, match="over='node'"):
        DeltaGather(replica, ONE, over="node")  # type: ignore[arg-type]
    with pytest.raises(FormatError):
        DeltaGather(replica, ONE, format=("int8", "int4"))  # type: ignore[arg-type]
    gather = DeltaGather(replica, ONE)
    for shard in (torch.zeros(9), torch.zeros(8, dtype=torch.int32), torch.zeros(2, 4)):
        with pytest.raises(LayoutError, match="shard must be"):
            gather.refresh(shard)
    gather.refresh(torch.ones(8))
    with pytest.raises(LayoutError, match="must not overlap"):
        gather.update(replica)
