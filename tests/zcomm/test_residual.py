"""Residuals: arithmetic against the oracle, when they are committed, and how much accuracy they gain."""

# covers triton_kernels/residuals.py zcomm/_residuals/buffer_layout.py zcomm/_transport/route.py

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm import oracle
from tests.zcomm.data import same_values
from tests.zcomm.oracle import Wire
from zcomm import ConfigError, LayoutError, Residual, StateError
from zcomm._collectives.auto_format import FormatTable, ProbedChoice
from zcomm._transport import chunks
from zcomm._transport.route import find_route

pytestmark = pytest.mark.usefixtures("both_backends")

ONE = zcomm.Topology.single()
WIRES = {"int8": Wire("int8", 256), "int4": Wire("int4", 128), "nf4": Wire("nf4", 64), "int8/48": Wire("int8", 48)}


def _data(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def _owners(world_size: int, per_node: int, numbering: str) -> list[int]:
    """The rank that owns each row."""
    if numbering == "rank" or per_node in (1, world_size):
        return list(range(world_size))
    return [node * per_node + local for local in range(per_node) for node in range(world_size // per_node)]


class _Simulated:
    """The reduction of one owner's row by all ranks that take part, in NumPy."""

    def __init__(self, owners: list[int], owner: int, per_node: int, numel: int, wire: tuple[str, str]) -> None:
        self.row, self.per_node, self.numel, self.wire = owners.index(owner), per_node, numel, wire
        self.world_size = len(owners)
        nodes = self.world_size // per_node
        self.has_two_hops = nodes > 1 and per_node > 1
        num_senders = nodes if self.has_two_hops else self.world_size
        self.residuals = [oracle.residual_blocks(numel) for _ in range(num_senders)]

    def step(self, inputs: list[np.ndarray], beta: float) -> np.ndarray:
        terms = [x[self.row * self.numel : (self.row + 1) * self.numel] for x in inputs]
        last = self.wire[1]
        if self.has_two_hops:
            first = [oracle.decode([x], WIRES[self.wire[0]])[0] for x in terms]
            terms = [_sum(first[n : n + self.per_node]) for n in range(0, self.world_size, self.per_node)]
        elif self.per_node == self.world_size:
            last = self.wire[0]
        sent = []
        for i, x in enumerate(terms):
            decoded, self.residuals[i] = oracle.encode_with_residual(x, self.residuals[i], WIRES[last], beta)
            sent.append(decoded)
        return _sum(sent) / np.float32(self.world_size)


def _sum(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _check_contract(rank: int, per_node: int, numbering: Any) -> None:
    t = topology(per_node)
    owners = _owners(t.world_size, per_node, numbering)
    cases = (
        (300, ("int8", "int4"), 1.0), (513, ("int8", "nf4"), 0.8), (1, ("int4", "int8"), 0.5),
        (600, ("int8", "int8/48"), 0.8), (600, ("int8/48", "int8"), 0.8),  # encoded in steps, not by one kernel
    )  # fmt: skip
    for numel, wire, beta in cases:
        residual = Residual(t, [("w", 0, t.world_size * numel)], t.world_size * numel, numbering=numbering, beta=beta)
        simulated = _Simulated(owners, rank, per_node, numel, wire)
        for step in range(3):
            inputs = [_data(r, step, t.world_size * numel).numpy() for r in range(t.world_size)]
            if step == 1:  # overflows on rank 0, in block 1 of every row
                for row in range(t.world_size):
                    inputs[0][row * numel + numel // 2] = np.inf
            expected = simulated.step(inputs, beta)
            out = torch.empty(numel)
            work = zcomm.reduce_scatter_single(
                out, torch.from_numpy(inputs[rank]), "avg", group=t, format=wire, numbering=numbering,
                residual=residual, async_op=step == 2,
            )  # fmt: skip
            if work is not None:
                work.wait()
            assert same_values(out, torch.from_numpy(expected)), (numel, wire, step)
            residual.commit()
        lost = residual.values()
        assert bool(lost.isfinite().all())
        mine = residual.layout.rows_of(t.local_rank).index(owners.index(rank))
        sender = t.node_rank if residual.layout.has_two_hops else rank
        exact = oracle.decode_residual(simulated.residuals[sender])
        assert same_values(lost[mine], torch.from_numpy(exact))


@pytest.mark.parametrize("numbering", ["rank", "local"])
@pytest.mark.parametrize(("world_size", "per_node"), [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4)])
def test_residuals_are_what_the_contract_says(world_size: int, per_node: int, numbering: str) -> None:
    run_ranks(world_size, _check_contract, per_node, numbering)


def _check_what_is_lost_comes_back(rank: int) -> None:
    """Over any number of steps: sum of results = sum of exact sums of hop 1 - the current residuals of all nodes."""
    t, numel = topology(2), 700
    spans = [("a", 0, 1000), ("b", 1000, 1500)]
    for numbering in ("rank", "local"):
        residual = Residual(t, spans, 4 * numel, numbering=numbering)
        assert residual.nbytes == 2 * (3 * 256 + 3 * 2)  # 2 nodes' rows of 3 blocks: half of the buffer
        total, exact = torch.zeros(numel), torch.zeros(numel)
        row = t.shard_index(numbering)
        for step in range(4):
            out = torch.empty(numel)
            mine = _data(rank, step, 4 * numel)
            zcomm.reduce_scatter_single(
                out, mine, group=t, format=("none", "int4"), numbering=numbering, residual=residual
            )
            residual.commit()
            total += out
            exact += sum(_data(r, step, 4 * numel).view(4, -1)[row] for r in range(4))
        held = torch.zeros(4, numel)
        held[residual.layout.rows_of(t.local_rank)] = residual.values()
        zcomm.all_reduce(held.view(-1), group=t)
        assert (total - exact).norm() > 0.01 * exact.norm()  # there is something to compare
        assert (total + held[row] - exact).norm() < 4 * (0.5 / 127) * 0.2 * exact.norm()  # int8 of each step's residual


def test_what_is_lost_comes_back() -> None:
    run_ranks(4, _check_what_is_lost_comes_back)


def _reduced(residual: Residual, step: int, rank: int) -> Tensor:
    out = torch.empty(512)
    source = _data(rank, step, 4 * 512)
    zcomm.reduce_scatter_single(out, source, group=topology(2), format=("int8", "int4"), residual=residual)
    return out


def _check_commit_and_rollback(rank: int) -> None:
    def new(**options: Any) -> Residual:
        return Residual(topology(2), [("w", 0, 2048)], 2048, **options)

    plain, skipping = new(), new()
    results = [_reduced(plain, 0, rank), _reduced(plain, 1, rank)]
    assert not plain.values().any()  # kept aside
    plain.commit()
    assert plain.values().any()
    assert plain.norm() == pytest.approx(float(plain.values().norm()))
    for step in (0, 7):  # a skipped step leaves no trace
        _reduced(skipping, step, rank)
    skipping.rollback()
    assert torch.equal(_reduced(skipping, 0, rank), results[0])
    skipping.commit()  # committed in between or not: what one exchange leaves the next one adds
    assert torch.equal(_reduced(skipping, 1, rank), results[1])
    skipping.commit()
    assert torch.equal(skipping.values(), plain.values())
    assert not torch.equal(_reduced(new(), 1, rank), results[1])
    resetting = new(reset_interval=2)
    for step in range(2):
        assert bool(resetting.values().any()) == (step == 1)
        _reduced(resetting, step, rank)
        resetting.commit()
    assert not resetting.values().any()


def test_commit_and_rollback() -> None:
    run_ranks(4, _check_commit_and_rollback)


def _check_all_reduce(rank: int, per_node: int) -> None:
    """With an exact gather, every rank gets what the reduce-scatter gives the owner; numel is not divisible."""
    for group in (topology(per_node), None):
        for numbering in ("rank", "local"):
            numel, shard = 4 * 300 - 3, 300
            flat = Residual(group, [("w", 0, numel)], numel, numbering=numbering)
            rows = Residual(group, [("w", 0, 4 * shard)], 4 * shard, numbering=numbering)
            wire: Any = ("int8", "int4") if group is not None else "int4"
            for step in range(2):
                tensor, padded = _data(rank, step, numel), torch.zeros(4 * shard)
                padded[:numel] = tensor
                out, gathered = torch.empty(shard), torch.empty(4 * shard)
                zcomm.all_reduce(tensor, "avg", group, format=wire, gather_format="none", residual=flat)
                zcomm.reduce_scatter_single(
                    out, padded, "avg", group=group, format=wire, numbering=numbering, residual=rows
                )
                zcomm.all_gather_single(gathered, out, group, numbering=numbering)
                assert torch.equal(tensor, gathered[:numel])
                flat.commit()
                rows.commit()
            assert torch.equal(flat.values(), rows.values())


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_all_reduce_takes_a_residual(per_node: int) -> None:
    run_ranks(4, _check_all_reduce, per_node)


def _check_chunks(rank: int) -> None:
    numel = 5 * 512 + 77
    found = []
    for at_least in (2**18, 512):
        usual, chunks.MIN_CHUNK_NUMEL = chunks.MIN_CHUNK_NUMEL, at_least
        residual = Residual(topology(2), [("w", 0, 4 * numel)], 4 * numel)
        for step in range(2):
            out = torch.empty(numel)
            zcomm.reduce_scatter_single(
                out, _data(rank, step, 4 * numel), group=topology(2), format=("int8", "nf4"), residual=residual
            )
            residual.commit()
        chunks.MIN_CHUNK_NUMEL = usual
        found.append((out, residual.values()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_chunks_change_nothing() -> None:
    run_ranks(4, _check_chunks)


def _check_asynchronous(rank: int) -> None:
    """commit() and rollback() wait for their exchange."""
    residuals = []
    for async_op in (False, True):
        residual = Residual(topology(2), [("w", 0, 2048)], 2048)
        for step in range(4):
            for micro_batch in range(2):
                x = _data(rank, 2 * step + micro_batch, 2048)
                zcomm.reduce_scatter_single(
                    torch.empty(512), x, group=topology(2), format="int4", residual=residual, async_op=async_op
                )
            if step == 1:
                with pytest.raises(StateError, match=r"commit\(\) or rollback\(\) before state_dict\(\)"):
                    residual.state_dict()
                residual.rollback()
            else:
                residual.commit()
        residuals.append(residual)
    assert torch.equal(residuals[0].values(), residuals[1].values())
    assert residuals[0].values().any()


def test_commit_waits() -> None:
    run_ranks(4, _check_asynchronous)


def _check_failed_exchange(rank: int) -> None:
    """An exchange that another rank damages: commit() raises, rollback() restores."""
    t = topology(2)
    residual = Residual(t, [("w", 0, 1000)], 1000)
    wire = zcomm.get_format("int8", block=256 if rank == 0 else 250)  # as many blocks, so as many bytes
    work = zcomm.reduce_scatter_single(
        torch.empty(500), _data(rank, 0, 1000), group=t, format=wire, residual=residual, async_op=True
    )
    assert work is not None
    for call in (work.wait, residual.commit):
        with pytest.raises(zcomm.MessageError, match="hash"):
            call()
    residual.rollback()
    residual.commit()
    assert not residual.values().any()


def test_a_failed_exchange_is_rolled_back() -> None:
    run_ranks(2, _check_failed_exchange)


@pytest.mark.parametrize(
    ("spans", "options", "error", "message"),
    [
        ([("a", 0, 9)], {}, LayoutError, "numel=8"),
        ([("a", -1, 2)], {}, LayoutError, "first=-1"),
        ([("a", 0, 5), ("b", 4, 4)], {}, LayoutError, "overlap in the buffer.*'a'.*'b'"),
        ([("a", 0, 4), ("a", 4, 4, 3)], {}, LayoutError, "overlap in their parameter"),
        ([], {"beta": 0}, ConfigError, "beta=0"),
        ([], {"beta": float("nan")}, ConfigError, "beta=nan"),
        ([], {"reset_interval": -1}, ConfigError, "reset_interval=-1"),
        ([], {"numbering": "column"}, zcomm.TopologyError, "column"),
    ],
)
def test_bad_residuals(spans: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Residual(ONE, spans, 8, **options)


def test_a_residual_of_another_exchange_is_refused() -> None:
    residual = Residual(ONE, [("a", 0, 8)], 8)
    for numel, dtype, wire in ((9, torch.float32, "int4"), (8, torch.float64, "none")):
        x = torch.ones(numel, dtype=dtype)
        with pytest.raises(LayoutError, match="residual"):
            zcomm.reduce_scatter_single(torch.empty(numel), x, group=ONE, format=wire, residual=residual)
        with pytest.raises(LayoutError, match="residual"):
            zcomm.all_reduce(x, group=ONE, format=wire, residual=residual)


def _check_other_hops(rank: int) -> None:
    """The same ranks as one group have one hop and a residual of all rows; with two hops it has other rows."""
    t = topology(2)
    residual = Residual(t, [("w", 0, 16)], 16)
    route = find_route("reduce_scatter", t, "int4", first="intra", num_hops=1)
    with pytest.raises(LayoutError, match="the residual is for 2 hops, the exchange has 1"):
        residual.check(route, "rank", 4, torch.zeros(16))
    for group, other in ((t, None), (None, t)):
        residual = Residual(group, [("w", 0, 16)], 16)
        with pytest.raises(LayoutError, match="pass the group that the residual was made for"):
            zcomm.reduce_scatter_single(torch.zeros(4), torch.zeros(16), group=other, format="int4", residual=residual)
    for call in (zcomm.all_reduce, zcomm.reduce_scatter_single):  # auto must not choose the hops then
        residual = Residual(t, [("w", 0, 16)], 16)
        out: Any = () if call is zcomm.all_reduce else (torch.zeros(4),)
        one_hop = [(0, ProbedChoice.parse("int4", 1))]
        table = FormatTable("cpu", {"all_reduce": one_hop, "reduce_scatter": one_hop})
        t.auto_table, usual = table, t.auto_table
        try:
            call(*out, torch.ones(16), group=t, format="auto", residual=residual)
        finally:
            t.auto_table = usual
        residual.commit()
        assert residual.values().shape == (2, 4)


def test_a_residual_of_other_hops_is_refused() -> None:
    run_ranks(4, _check_other_hops)


# What residuals are worth: 8 ranks as 2 nodes x 4.

NUMEL = 2**15


def _signal(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(77))


def _gradient(rank: int, step: int, numel: int, signal_to_noise: float) -> Tensor:
    """A persistent signal plus fresh noise for each rank and step."""
    return signal_to_noise * _signal(numel) + _data(rank, step, numel)


def _mean_of_eight(rank: int, step: int, wire: Any, residual: Residual | None, snr: float) -> tuple[Tensor, Tensor]:
    """This rank's shard of the mean, and the exact one."""
    t, n = topology(4), NUMEL // 8
    out = torch.empty(n)
    mine = _gradient(rank, step, NUMEL, snr)
    zcomm.reduce_scatter_single(out, mine, "avg", group=t, format=wire, residual=residual)
    if residual is not None:
        residual.commit()
    exact = torch.stack([_gradient(r, step, NUMEL, snr)[rank * n : (rank + 1) * n].double() for r in range(8)]).mean(0)
    return out, exact


def _over_ranks(*squares: Tensor) -> list[float]:
    """The square root of the sum over ranks."""
    total = zcomm.control.gather_float64(torch.stack(squares).double(), topology(4)).sum(0)
    return total.sqrt().tolist()


def _check_error_of_the_mean(rank: int, limits: dict[tuple[str, str], float]) -> None:
    for wire, limit in limits.items():
        out, exact = _mean_of_eight(rank, 0, wire, None, 0.0)
        error, norm = _over_ranks((out - exact).square().sum(), exact.square().sum())
        assert 0.8 * limit < error / norm <= limit, (wire, error / norm)


@pytest.mark.slow
def test_relative_error_of_the_mean_of_eight_ranks() -> None:
    limits = {("int4", "int4"): 0.170, ("int8", "int4"): 0.120, ("int8", "nf4"): 0.094}
    run_ranks(8, _check_error_of_the_mean, limits)


def _check_accumulated_error(rank: int, num_steps: int) -> None:
    errors = {}
    for has_residual in (False, True):
        residual = Residual(topology(4), [("w", 0, NUMEL)], NUMEL) if has_residual else None
        total, exact_total = torch.zeros(NUMEL // 8), torch.zeros(NUMEL // 8, dtype=torch.float64)
        for step in range(num_steps):
            out, exact = _mean_of_eight(rank, step, ("int8", "nf4"), residual, 0.3)
            total += out
            exact_total += exact
        error, norm = _over_ranks((total - exact_total).square().sum(), exact_total.square().sum())
        errors[has_residual] = error / norm
    assert errors[True] <= errors[False] / 4, errors
    assert errors[False] > 0.005, errors


@pytest.mark.slow
def test_a_residual_on_hop_two_quarters_the_accumulated_error() -> None:
    run_ranks(8, _check_accumulated_error, 64)
