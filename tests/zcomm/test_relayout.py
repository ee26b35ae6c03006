"""Residuals of a checkpoint, loaded into other buckets and on other numbers of ranks."""

# covers zcomm/_residuals/relayout.py

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from zcomm import LayoutError, Residual, Span, StateError

LENGTHS = {"a": 700, "b": 1, "c": 2000, 7: 513}
TOTAL = sum(LENGTHS.values())


def _one_buffer(group: Any, numbering: Any = "rank") -> list[Residual]:
    """All parameters in one buffer, in order, with a gap before the last."""
    spans, first = [], 0
    for key, numel in LENGTHS.items():
        first += 100 * (key == 7)
        spans.append((key, first, numel))
        first += numel
    return [Residual(group, spans, first + 5, numbering=numbering)]


def _two_buffers(group: Any, numbering: Any = "local") -> list[Residual]:
    """Buckets with other neighbours; the longest parameter is split."""
    return [
        Residual(group, [Span("c", 0, 1201, offset=799), Span("a", 1300, 700)], 2000, numbering=numbering),
        Residual(group, [(7, 3, 513), ("c", 516, 799), ("b", 1315, 1)], 1316, numbering=numbering),
    ]


def _train(residuals: list[Residual], rank: int, group: Any, num_steps: int = 2) -> None:
    """Run exchanges that leave a residual."""
    for step in range(num_steps):
        for i, residual in enumerate(residuals):
            numel = residual.layout.shard_numel * residual.layout.world_size
            seed = 1000 * i + 10 * step + rank
            x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
            out, numbering = torch.empty(residual.layout.shard_numel), residual.layout.numbering
            zcomm.reduce_scatter_single(out, x, group=group, format="int4", numbering=numbering, residual=residual)
            residual.commit()


def _held(residuals: list[Residual], *, in_node: bool = False) -> dict[Any, Tensor]:
    """Each parameter's residual, summed over all ranks, or over those of this node, element by element."""
    total = {key: torch.zeros(numel, dtype=torch.float64) for key, numel in LENGTHS.items()}
    for residual in residuals:
        layout = residual.layout
        full = torch.zeros(layout.world_size, layout.shard_numel, dtype=torch.float64)
        full[layout.rows_of(residual.route.local_rank)] = residual.values().double()
        everyone = [torch.empty_like(full) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, full)
        if in_node:
            n, size = residual.route.node_rank, layout.ranks_per_node
            everyone = everyone[n * size : (n + 1) * size] if layout.has_two_hops else [full]
        flat = torch.stack(everyone).sum(0).view(-1)
        for key, first, numel, offset in layout.spans:
            total[key][offset : offset + numel] += flat[first : first + numel]
    return total


def _same_but_for_encoding(before: dict[Any, Tensor], after: dict[Any, Tensor], num_times: int = 1) -> None:
    """Compare up to half a scale of the largest value for each encoding; a sum over ranks has one from each."""
    largest = max(float(values.abs().max()) for values in before.values())
    for key, numel in LENGTHS.items():
        assert numel == 1 or before[key].norm() > 0.1
        assert (before[key] - after[key]).abs().max() <= num_times * largest / 127 / 2 * (1 + 2**-7), key


def _check_relayout(rank: int, per_node: int) -> None:
    t = topology(per_node)
    groups: list[Any] = [t] if per_node > 1 else [t, None]
    for group in groups:
        old = _one_buffer(group)
        _train(old, rank, group)
        of_node = _held(old, in_node=True)
        with zcomm.traffic() as sent:
            new = _two_buffers(group)
            zcomm.relayout_residuals(old, new)
        assert sent.bytes(link="inter") == 0
        assert (sent.bytes(link="intra") > 0) == (per_node == 2)
        assert [r.num_commits for r in new] == [2, 2]
        _same_but_for_encoding(of_node, _held(new, in_node=True))  # no node's errors go to another
        back = _one_buffer(group, numbering="local")
        zcomm.relayout_residuals(new, back)
        _same_but_for_encoding(of_node, _held(back, in_node=True), 2)
        _train(new, rank, group, num_steps=1)


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_other_buckets_hold_the_same(per_node: int) -> None:
    run_ranks(4, _check_relayout, per_node)


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def _check_resume(rank: int) -> None:
    t = topology(2)
    old, new = _two_buffers(t), _two_buffers(t)
    _train(old, rank, t)
    for one, other in zip(old, new, strict=True):
        other.load_state_dict(_through_a_file(one.state_dict()))
    _train(old, rank, t, num_steps=1)
    _train(new, rank, t, num_steps=1)
    for one, other in zip(old, new, strict=True):
        assert torch.equal(one.values(), other.values())
        assert one.num_commits == other.num_commits == 3
    with pytest.raises(StateError, match=r"another layout.*load_residuals"):
        new[0].load_state_dict(old[1].state_dict())
    other_rank = {**old[0].state_dict(), "node_rank": 1 - t.node_rank}
    with pytest.raises(StateError, match="another node_rank"):
        new[0].load_state_dict(other_rank)


def test_a_resumed_run_has_the_same_bits() -> None:
    run_ranks(4, _check_resume)


def _check_other_ranks(rank: int, before: int, after: int) -> None:
    """Load residuals of nodes of ``before`` ranks on nodes of ``after`` ranks."""
    group, other = topology(before), topology(after)
    old = _one_buffer(group)
    _train(old, rank, group)
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, [r.state_dict() for r in old])
    new = _two_buffers(other)
    zcomm.load_residuals((state for of_rank in states for state in of_rank), new)
    _same_but_for_encoding(_held(old), _held(new))
    assert [r.num_commits for r in new] == [2, 2]
    shares = [torch.empty_like(new[0].values()) for _ in range(4)]
    dist.all_gather(shares, new[0].values())
    peers = range(rank % 2, 4, 2) if after == 2 else range(4)
    assert all(torch.equal(shares[peer], shares[rank]) for peer in peers)  # split equally


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 2), (2, 1)])
def test_other_nodes_share_the_sum(before: int, after: int) -> None:
    run_ranks(4, _check_other_ranks, before, after)


def _saved_by(rank: int, path: str) -> None:
    t = topology(2)
    residuals = _one_buffer(t)
    _train(residuals, rank, t)
    torch.save([r.state_dict() for r in residuals], f"{path}/{rank}.pt")
    total = _held(residuals)
    if rank == 0:
        torch.save(total, f"{path}/total.pt")


def _loaded_on(rank: int, path: str) -> None:
    new = _two_buffers(topology(1))
    states = [s for r in range(4) for s in torch.load(f"{path}/{r}.pt", weights_only=True)]
    zcomm.load_residuals(states, new)
    _same_but_for_encoding(torch.load(f"{path}/total.pt", weights_only=True), _held(new))
    with pytest.raises(StateError, match=r"every rank.* = \[\(0, 0\), \(0, 1\), \(1, 0\)\], expected .*\(1, 1\)\]"):
        zcomm.load_residuals(states[:3], new)


def test_a_world_of_another_size_shares_the_sum(tmp_path: Any) -> None:
    run_ranks(4, _saved_by, str(tmp_path))
    run_ranks(2, _loaded_on, str(tmp_path))


def test_other_parameters_are_refused() -> None:
    one = zcomm.Topology.single()
    old = [Residual(one, [("a", 0, 4), ("b", 4, 4)], 8)]
    for spans in ([("a", 0, 4)], [("a", 0, 4), ("b", 4, 3)], [("a", 0, 4), ("b", 4, 4), ("c", 8, 1)]):
        new = [Residual(one, spans, 9)]
        with pytest.raises(LayoutError, match="same elements of the same parameters"):
            zcomm.relayout_residuals(old, new)
        with pytest.raises(LayoutError, match="same elements of the same parameters"):
            zcomm.load_residuals([old[0].state_dict()], new)
