"""Stochastic rounding in collectives: only the key and the element's place decide which numbers are drawn."""

# covers zcomm/_transport/chunks.py

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from zcomm import ConfigError, FormatError, RandomKey, Residual
from zcomm._transport import chunks

pytestmark = pytest.mark.usefixtures("both_backends")

ONE = zcomm.Topology.single()
KEY = RandomKey(seed=5, tensor=6, step=7)
INT8, INT4 = "int8:stochastic", "int4/64:stochastic"


def _data(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _sent(segments: list[np.ndarray], wire: str, hop: int, rank: int) -> np.ndarray:
    """The received values of what ``rank`` encodes on ``hop`` under KEY; elements are numbered across segments."""
    random = (5, 6, 7, hop, rank) if "stochastic" in wire else None
    name, block = ("int8", 256) if wire.startswith("int8") else ("int4", 64 if "64" in wire else 128)
    return oracle.decode(segments, Wire(name, block, random=random))


def _check_reduce_scatter(rank: int, per_node: int) -> None:
    t, n = topology(per_node), 130
    inputs = [list(_data(r, 4 * n).view(4, n).numpy()) for r in range(4)]
    out = torch.empty(n)
    for wire in ((INT8, INT4), ("int8", INT4), (INT4, "int8")):
        zcomm.reduce_scatter_single(out, _data(rank, 4 * n), group=t, format=wire, random=KEY)
        if per_node == 2:
            node, local = divmod(rank, 2)
            first = [_sent(inputs[r], wire[0], 0, r) for r in range(4)]
            sums = [first[2 * m] + first[2 * m + 1] for m in range(2)]
            # A rank's partial sums: those of the rows that the ranks of its local rank own, in node order.
            terms = [_sent([sums[m][local], sums[m][2 + local]], wire[1], 1, 2 * m + local)[node] for m in range(2)]
        else:
            used = wire[0] if per_node == 4 else wire[1]
            terms = [_sent(inputs[r], used, 0, r)[rank] for r in range(4)]
        expected = terms[0]
        for term in terms[1:]:
            expected = expected + term
        assert same_values(out, torch.from_numpy(expected)), wire


def _check_all_gather(rank: int, per_node: int) -> None:
    t, n = topology(per_node), 130
    for wire in ((INT4, INT4), (INT4, INT8), ("int8", INT4)):
        got = torch.empty(4, n)
        zcomm.all_gather_single(got.view(-1), _data(rank, n), t, format=wire, random=KEY)
        used = wire[1] if per_node == 4 else wire[0]
        expected = np.stack([_sent([_data(r, n).numpy()], used, 0, r)[0] for r in range(4)])
        if per_node == 2 and wire[0] != wire[1]:
            for local in range(2):  # in every node, with equal bits, what the nodes' ranks of a local rank hold
                expected[local::2] = _sent(list(expected[local::2]), wire[1], 1, local)
        assert same_values(got, torch.from_numpy(expected)), wire


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_numbers_are_those_of_the_contract(per_node: int) -> None:
    run_ranks(4, _check_reduce_scatter, per_node)
    run_ranks(4, _check_all_gather, per_node)


@contextmanager
def _chunks_of_at_least(numel: int) -> Iterator[None]:
    usual, chunks.MIN_CHUNK_NUMEL = chunks.MIN_CHUNK_NUMEL, numel
    try:
        yield
    finally:
        chunks.MIN_CHUNK_NUMEL = usual


def _results(rank: int, group: Any, wire: Any, numbering: Any, key: RandomKey) -> list[Tensor]:
    numel = 2 * 512 + 77
    gathered, parts = torch.empty(4 * numel), torch.empty(4 * numel)
    zcomm.all_gather_single(gathered, _data(rank, numel), group, format=wire, numbering=numbering, random=key)
    zcomm.all_to_all_single(parts, _data(rank, 4 * numel), group, format=wire, random=key)
    shard, total = torch.empty(numel), _data(rank, 4 * numel - 1)
    rows = _data(rank, 4 * numel)
    zcomm.reduce_scatter_single(shard, rows, "avg", group=group, format=wire, numbering=numbering, random=key)
    zcomm.all_reduce(total, group=group, format=wire, random=key)
    residual = Residual(group, [("w", 0, 4 * numel)], 4 * numel, numbering=numbering)
    after = torch.empty(numel)
    for _ in range(2):
        zcomm.reduce_scatter_single(
            after, rows, "avg", group=group, format=wire, numbering=numbering, residual=residual, random=key
        )
        residual.commit()
    replica = torch.zeros(4, numel)
    last = wire if isinstance(wire, str) else wire[1]
    if "stochastic" in last:
        deltas = zcomm.DeltaGather(replica, group, format=last, numbering=numbering)
        deltas.refresh(torch.zeros(numel))
        deltas.update(_data(rank, numel), random=key)
    return [gathered, parts, shard, total, after, residual.values(), replica]


def _check_chunks(rank: int, numbering: str) -> None:
    t = topology(2)
    for wire in (INT4, (INT8, INT4), ("none", INT4), (INT4, "int8")):
        whole, again = _results(rank, t, wire, numbering, KEY), _results(rank, t, wire, numbering, KEY)
        with _chunks_of_at_least(512):
            in_chunks = _results(rank, t, wire, numbering, KEY)
        for i, (a, b, c) in enumerate(zip(whole, again, in_chunks, strict=True)):
            assert torch.equal(a, b), (wire, i)
            assert torch.equal(a, c), (wire, i)
        others = (RandomKey(5, 6, 8), RandomKey(5, 7, 7), RandomKey(6, 6, 7))
        for key in others:
            other = _results(rank, t, wire, numbering, key)
            assert not any(torch.equal(a, b) for a, b in zip(whole[:6], other[:6], strict=True)), (wire, key)
    _results(rank, None, INT4, numbering, KEY)


@pytest.mark.parametrize("numbering", ["rank", "local"])
def test_a_restart_and_chunks_have_the_same_bits(numbering: str) -> None:
    run_ranks(4, _check_chunks, numbering)


def _bits_of_all(values: Tensor) -> list[Tensor]:
    of_ranks = [torch.empty_like(values) for _ in range(4)]
    torch.distributed.all_gather(of_ranks, values)
    return of_ranks


def _check_replicas(rank: int, numbering: str) -> None:
    """Deltas are encoded once and forwarded: ranks with the same shards have, and keep, the same bits."""
    t, numel = topology(2), 2 * 512 + 77
    everywhere = zcomm.DeltaGather(torch.zeros(4, numel), t, format=INT4, numbering=numbering)
    of_nodes = zcomm.NodeReplica(t, numel, torch.float32, format=INT4)
    everywhere.refresh(torch.zeros(numel))
    of_nodes.refresh(torch.zeros(numel))
    for step in range(3):
        everywhere.update(_data(rank, numel) * (step + 1), random=RandomKey(5, 0, step))
        of_nodes.update(_data(rank, numel) * (step + 1), random=RandomKey(5, 1, step), async_op=True)
    wholes, parts = _bits_of_all(everywhere.replica.clone()), _bits_of_all(of_nodes.values.clone())
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)
    assert torch.equal(parts[0], parts[2])
    assert torch.equal(parts[1], parts[3])
    assert 0 < float((of_nodes.held - 3 * _data(rank, numel)).norm() / (3 * _data(rank, numel)).norm()) < 0.1
    with pytest.raises(FormatError, match=r"needs random=zcomm\.RandomKey"):
        of_nodes.update(_data(rank, numel))


@pytest.mark.parametrize("numbering", ["rank", "local"])
def test_replicas_of_stochastic_deltas_have_the_same_bits(numbering: str) -> None:
    run_ranks(4, _check_replicas, numbering)


def _check_unbiased(rank: int) -> None:
    """The mean over steps approaches the exact sum, which rounding to nearest misses by the same amount each time."""
    t, n, num_steps = topology(2), 256, 200
    x = _data(rank, 4 * n)
    exact = torch.empty(n)
    zcomm.reduce_scatter_single(exact, x, group=t)
    means = []
    for wire in (INT4, "int4/64"):
        total = torch.zeros(n)
        for step in range(num_steps):
            out = torch.empty(n)
            random = RandomKey(1, 0, step) if wire == INT4 else None
            zcomm.reduce_scatter_single(out, x, group=t, format=wire, random=random)
            total += out
        means.append(float((total / num_steps - exact).norm() / exact.norm()))
    assert means[0] < means[1] / 3
    assert means[0] < 5 * 0.25 / num_steps**0.5 / 2


def test_stochastic_rounding_is_right_on_average() -> None:
    run_ranks(4, _check_unbiased)


@pytest.mark.parametrize("wire", [INT4, ("int8", INT4), (INT8, "none")])
def test_formats_that_draw_need_a_key(wire: Any) -> None:
    calls: list[Any] = [
        lambda **random: zcomm.all_gather_single(torch.zeros(4), torch.zeros(4), ONE, format=wire, **random),
        lambda **random: zcomm.all_to_all_single(torch.zeros(4), torch.zeros(4), ONE, format=wire, **random),
        lambda **random: zcomm.reduce_scatter_single(torch.zeros(4), torch.zeros(4), group=ONE, format=wire, **random),
        lambda **random: zcomm.all_reduce(torch.zeros(4), group=ONE, format=wire, **random),
        lambda **random: zcomm.all_reduce(torch.zeros(4), group=ONE, gather_format=wire, **random),
    ]
    for call in calls:
        with pytest.raises(FormatError, match=r"':?.*stochastic' rounds.*needs random=zcomm\.RandomKey"):
            call()
        with pytest.raises(FormatError, match=r"must be a zcomm\.RandomKey.*random=3"):
            call(random=3)
        call(random=KEY)


def test_formats_that_do_not_draw_take_no_key() -> None:
    for wire in ("none", "int8", ("int8", "int4")):
        with pytest.raises(FormatError, match=r"leave out random=: format="):
            zcomm.reduce_scatter_single(torch.zeros(4), torch.zeros(4), group=ONE, format=wire, random=KEY)
    gather = zcomm.DeltaGather(torch.zeros(4), ONE)
    gather.refresh(torch.zeros(4))
    with pytest.raises(FormatError, match="leave out random"):
        gather.update(torch.zeros(4), random=KEY)


@pytest.mark.parametrize("value", [-1, 2**32, 1.0, True])
def test_keys_are_32_bit_integers(value: Any) -> None:
    for name in ("seed", "tensor", "step"):
        with pytest.raises(ConfigError, match=f"{name}={value!r}"):
            RandomKey(**{"seed": 0, name: value})
