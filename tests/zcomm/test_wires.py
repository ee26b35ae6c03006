"""Collectives in less common cases: every dtype and format, error bounds, overflow, memory, large messages, bytes."""

# covers zcomm/volume.py

from __future__ import annotations

import os
import time
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
from zcomm import LayoutError, volume

pytestmark = pytest.mark.usefixtures("both_backends")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BLOCKS = {"int8": 256, "int4": 128}


def _data(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * (rank + 1)).to(dtype)


def _wired(x: Tensor, wire: str) -> Tensor:
    """The exact value of ``x`` after one trip in ``wire``, in float64."""
    if wire in BLOCKS:
        decoded = oracle.decode([x.float().numpy()], Wire(wire, BLOCKS[wire]))[0]
        return torch.from_numpy(decoded.astype(np.float64))
    return {"none": x, "bf16": x.float().bfloat16(), "fp16": x.float().half()}[wire].double()


def _check_every_dtype_and_format(rank: int, dtype: torch.dtype) -> None:
    t, numel = topology(2), 300
    for wire in ("none", "bf16", "fp16", "int8", "int4"):
        exact = torch.stack([_wired(_data(r, numel, dtype), wire) for r in range(4)])
        got = torch.empty(4, numel, dtype=dtype)
        zcomm.all_gather_single(got.view(-1), _data(rank, numel, dtype), t, format=wire)
        assert same_values(got, exact.to(dtype)), wire
        for out_dtype in (torch.float32, torch.float64):
            wide = torch.empty(4, numel, dtype=out_dtype)
            zcomm.all_gather_single(wide.view(-1), _data(rank, numel, dtype), t, format=wire)
            assert same_values(wide, exact.to(out_dtype)), (wire, out_dtype)
        for group in (t, None):
            terms = [_data(r, 4 * numel, dtype)[rank * numel : (rank + 1) * numel] for r in range(4)]
            _check_sum(group, rank, terms, wire)


def _check_sum(group: Any, rank: int, terms: list[Tensor], wire: str) -> None:
    numel, dtype = terms[0].numel(), terms[0].dtype
    wide = torch.float64 if dtype == torch.float64 and wire == "none" else torch.float32
    sent = [_wired(x, wire).to(wide) for x in terms]
    if group is None:
        expected = ((sent[0] + sent[1]) + sent[2]) + sent[3]
    else:
        sums = [(sent[0] + sent[1]), (sent[2] + sent[3])]
        hop_2 = [_wired(s.to(dtype) if wire == "none" else s, wire).to(wide) for s in sums]
        expected = hop_2[0] + hop_2[1]
    for out_dtype in (dtype, torch.float32):
        got = torch.empty(numel, dtype=out_dtype)
        zcomm.reduce_scatter_single(got, _data(rank, 4 * numel, dtype), "avg", group=group, format=wire)
        assert same_values(got, (expected / 4).to(out_dtype)), (wire, out_dtype, group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_format(dtype: torch.dtype) -> None:
    run_ranks(4, _check_every_dtype_and_format, dtype)


def _check_plain_gather_sends_the_inputs_dtype(rank: int) -> None:
    wide = torch.empty(2 * 100)
    with zcomm.traffic() as sent:
        zcomm.all_gather_single(wide, _data(rank, 100, torch.bfloat16), topology(2))
    assert sent.bytes() == 2 * 100
    assert torch.equal(wide, torch.cat([_data(r, 100, torch.bfloat16).float() for r in range(2)]))


def test_plain_gather_sends_the_inputs_dtype() -> None:
    run_ranks(2, _check_plain_gather_sends_the_inputs_dtype)


def _check_error_bound(rank: int, wire: tuple[str, str]) -> None:
    """Each hop adds at most half of the scale that it transmits, for each of its terms."""
    t, numel = topology(2), 700
    inputs = [_data(r, 4 * numel)[rank * numel : (rank + 1) * numel].numpy() for r in range(4)]
    bound = sum(oracle.half_scales(x, wire[0], BLOCKS[wire[0]]) for x in inputs)
    for node in range(2):
        pair = [oracle.decode([x], Wire(wire[0], BLOCKS[wire[0]]))[0] for x in inputs[2 * node : 2 * node + 2]]
        bound = bound + oracle.half_scales(pair[0] + pair[1], wire[1], BLOCKS[wire[1]])
    got = torch.empty(numel)
    zcomm.reduce_scatter_single(got, _data(rank, 4 * numel), group=t, format=wire)
    exact = np.sum([x.astype(np.float64) for x in inputs], axis=0)
    error = np.abs(got.numpy() - exact)
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max() > 0.2 * bound.max()  # the bound is about what it costs


@pytest.mark.parametrize("wire", [("int8", "int8"), ("int4", "int4"), ("int8", "int4"), ("int4", "int8")], ids=str)
def test_error_is_at_most_half_a_scale_a_hop(wire: tuple[str, str]) -> None:
    run_ranks(4, _check_error_bound, wire)


def _check_infinity_reaches_every_rank(rank: int) -> None:
    for wire in ("int8", "int4", ("int8", "int4"), ("none", "int8")):
        for group in (topology(2), topology(4)):
            x = torch.ones(4 * 512)
            if rank == 1:
                x[700] = float("inf")
            zcomm.all_reduce(x, group=group, format=wire)
            assert not bool(x[700].isfinite()), wire
            assert bool(x[:512].isfinite().all())
            got = torch.empty(4 * 512)
            mine = torch.ones(512)
            if rank == 2:
                mine[3] = float("nan")
            zcomm.all_gather_single(got, mine, group, format=wire)
            assert bool(got[2 * 512 + 3].isnan())
            assert bool(got[:1024].isfinite().all())


def test_infinity_reaches_every_rank() -> None:
    run_ranks(4, _check_infinity_reaches_every_rank)


def _means(t: zcomm.Topology, given: Tensor, wire: Any, numel: int) -> tuple[Tensor, list[Tensor]]:
    """The mean of ``given`` over all ranks by an all-reduce, and this rank's shard of it, by all that reduces."""
    whole, splits = given.clone(), (None,) if t.backend == "nccl" else (None, [numel] * t.world_size)
    zcomm.all_reduce(whole, "avg", t, format=wire)
    shards = [torch.empty(numel, dtype=given.dtype) for _ in splits]
    for shard, split in zip(shards, splits, strict=True):
        options: dict[str, Any] = {"format": wire, "numbering": "local", "input_split_sizes": split}
        zcomm.reduce_scatter_single(shard, given, "avg", group=t, **options)
    if wire == "none":  # node sums are float32
        return whole, shards
    pair = wire if isinstance(wire, tuple) else (wire, wire)
    for split in splits:
        sums = zcomm.NodeSums(t, numel, pair, shard_sizes=split)
        for is_kept in (False, True):  # kept sums are encoded by themselves
            shards.append(torch.empty(numel, dtype=given.dtype))
            if is_kept:
                sums.add(given)
            sums.reduce(shards[-1], None if is_kept else given)
    return whole, shards


def _check_means_in_fp16(rank: int, per_node: int) -> None:
    """A mean of large numbers is finite; of moderate ones it has the bits of sums that were not divided before."""
    t, numel = topology(per_node), 300
    own = slice(t.shard_index("local") * numel, (t.shard_index("local") + 1) * numel)
    for limit in (60000.0, 100.0):
        draw = torch.Generator().manual_seed(7)
        terms = [
            (limit * (1 - torch.rand(t.world_size * numel, generator=draw) / 5)).half() for _ in range(t.world_size)
        ]
        exact = torch.stack(terms).double().mean(0)
        of_nodes = torch.stack(terms).float().view(t.num_nodes, per_node, -1)
        sums = [sum(of_node, torch.zeros(())) for of_node in of_nodes]
        in_fp16 = (sum((one.half().float() for one in sums), torch.zeros(())) / t.world_size).half()
        for wire in ("none", "fp16", ("none", "fp16"), ("int8", "fp16")):
            whole, shards = _means(t, terms[rank], wire, numel)
            tolerance = limit * (2**-7 if wire == ("int8", "fp16") else 2**-10)
            for got, part in ((whole, slice(None)), *((shard, own) for shard in shards)):
                assert (got.double() - exact[part]).abs().max() < tolerance, (wire, limit)
                if limit == 100.0 and wire != ("int8", "fp16"):
                    assert torch.equal(got, in_fp16[part]), wire


@pytest.mark.parametrize(("world_size", "per_node"), [(4, 2), (6, 3)])
def test_a_mean_in_fp16_is_finite_if_its_terms_are(world_size: int, per_node: int) -> None:
    run_ranks(world_size, _check_means_in_fp16, per_node)


def _check_large_messages(rank: int) -> None:
    """Rows may lie apart on some ranks and not on others."""
    numel = 2**16 + 3
    for per_node in (1, 2, 4):
        t = topology(per_node)
        expected = torch.stack([_data(r, numel) for r in range(4)])
        wide = torch.full((4, numel + (5 if rank % 2 else 0)), 7.0)
        out = wide[:, :numel]
        works = [
            zcomm.all_gather_single(out, _data(rank, numel), t, async_op=True),
            zcomm.all_gather_single(torch.empty(4 * numel), _data(rank, numel), t, async_op=True),
        ]
        for work in reversed(works):
            assert work is not None
            work.wait()
            assert work.is_completed()
        assert torch.equal(out, expected)
        assert bool((wide[:, numel:] == 7).all())
        other = torch.empty(numel)
        dist.broadcast(other.copy_(_data(rank, numel)), 0)  # the default group is as it was


def test_large_messages() -> None:
    run_ranks(4, _check_large_messages)


def _check_small_strided_rows(rank: int) -> None:
    """Ranks may differ in whether their rows are contiguous, also for small ones."""
    wide = torch.full((3, 40 + rank), 7.0)
    zcomm.all_gather_single(wide[:, :40], _data(rank, 40), topology(3))
    assert torch.equal(wide[:, :40], torch.stack([_data(r, 40) for r in range(3)]))


def test_small_strided_rows() -> None:
    run_ranks(3, _check_small_strided_rows)


def _check_polling(rank: int) -> None:
    work = zcomm.all_reduce(x := _data(rank, 5000), group=topology(2), async_op=True)
    assert work is not None
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    expected = (_data(0, 5000) + _data(1, 5000)) + (_data(2, 5000) + _data(3, 5000))
    assert torch.equal(x, expected)


def test_polling_ends() -> None:
    run_ranks(4, _check_polling)


ONE = zcomm.Topology.single()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: zcomm.all_gather_single(x[:8], x[1:9], ONE),
        lambda x: zcomm.all_gather_single(x[:8], x[4:12], ONE, format="int8"),
        lambda x: zcomm.all_to_all_single(x[:8], x[:8], ONE),
        lambda x: zcomm.all_to_all_single(x[:8], x[7:15], ONE),
    ],
)
def test_overlapping_memory_is_refused(call: Any) -> None:
    with pytest.raises(LayoutError, match="must not overlap"):
        call(torch.zeros(16))


def test_overlapping_rows_are_refused() -> None:
    run_ranks(2, _check_overlapping_rows)


def _check_overlapping_rows(rank: int) -> None:
    with pytest.raises(LayoutError, match=r"rows of output must not overlap.*stride=\(0, 1\)"):
        zcomm.all_gather_single(torch.zeros(1, 8).expand(2, 8), torch.zeros(8), topology(2))
    with pytest.raises(LayoutError, match="must not overlap"):
        zcomm.all_gather_single(full := torch.zeros(16), full[:8] if rank else full[8:], topology(2))


def test_own_row_by_numbering() -> None:
    run_ranks(4, _check_own_row)


def _check_own_row(rank: int) -> None:
    for numbering in ("rank", "local"):
        t, full = topology(2), torch.zeros(4 * 6)
        row = t.shard_index(numbering)
        full[6 * row : 6 * row + 6] = rank + 1.0
        zcomm.all_gather_single(full, full[6 * row : 6 * row + 6], t, numbering=numbering)
        owners = [0, 1, 2, 3] if numbering == "rank" else [0, 2, 1, 3]
        assert full[::6].tolist() == [owner + 1 for owner in owners]


def _check_bytes(rank: int, per_node: int) -> None:
    t, n = topology(per_node), 1000
    for wire in (("none", "none"), ("int8", "int8"), ("bf16", "int4")):
        with zcomm.traffic() as sent:
            zcomm.all_reduce(_data(rank, n + 1), group=t, format=wire)
            assert sent.bytes() == sum(volume.all_reduce_sent(n + 1, torch.float32, t.num_nodes, per_node, wire))
        expected = volume.all_reduce_sent(n + 1, torch.float32, t.num_nodes, per_node, wire)
        assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == expected
        assert sent.bytes(operation="all_reduce") == sum(expected)
        with zcomm.traffic() as sent:
            zcomm.all_to_all_single(torch.empty(4 * n), _data(rank, 4 * n), t, format=wire)
        expected = volume.all_to_all_sent(n, torch.float32, t.num_nodes, per_node, wire)
        assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == expected
    with zcomm.traffic() as sent:
        zcomm.all_gather_single(torch.empty(0), torch.empty(0), t, format="int8")
        zcomm.reduce_scatter_single(torch.empty(0), torch.empty(0), group=t, format="int8")
        zcomm.all_to_all_single(torch.empty(0), torch.empty(0), t, format="int8")
    assert sent.as_dict() == {}


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_bytes_are_what_the_formulas_say(per_node: int) -> None:
    run_ranks(4, _check_bytes, per_node)


def _check_one_hop_bytes(rank: int) -> None:
    """A ProcessGroup on nodes of two: of three ranks, one has its node alone."""
    group = dist.new_group([0, 1, 2])
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        if rank < 3:
            with zcomm.traffic() as sent:
                zcomm.all_gather_single(torch.empty(3 * 256), _data(rank, 256), group, format="int8")
            # By hand: 1 scale, 256 codes from byte 16, trailer to a multiple of 16: 288 bytes to each peer.
            intra, inter = (1, 1) if rank < 2 else (0, 2)
            assert sent.bytes(link="intra") == 288 * intra
            assert sent.bytes(link="inter") == 288 * inter
            assert volume.one_hop_sent(256, torch.float32, intra, inter, "int8") == (288 * intra, 288 * inter)
            assert sent.elements() == 2 * 256
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        if rank < 3:
            dist.destroy_process_group(group)


def test_one_hop_bytes() -> None:
    run_ranks(4, _check_one_hop_bytes)


def test_secondary_formula() -> None:
    assert volume.secondary_gather_sent(7, torch.bfloat16, 2) == (8, 0)
    assert volume.secondary_gather_sent(7, torch.bfloat16, 1) == (0, 0)


def _check_single_elements(rank: int) -> None:
    """One element counts as contiguous whatever its stride says."""
    for per_node in (1, 2, 4):
        t = topology(per_node)
        mine = torch.full((3, 2), float(rank))[::2, :1].t()[0, :1]
        assert mine.stride() != (1,)
        for wire in ("none", "bf16", "int8"):
            rows = torch.full((4, 6), 7.0)[:, ::3]
            zcomm.all_gather_single(rows[:, 1:], mine, t, format=wire)
            assert [round(v) for v in rows[:, 1].tolist()] == [0, 1, 2, 3]
            got = torch.zeros(2, 2)[:, :1].t()[0, :1]
            zcomm.reduce_scatter_single(got, rows[:, 1:], group=t, format=wire)
            assert round(got.item()) == 4 * rank


def test_single_elements() -> None:
    run_ranks(4, _check_single_elements)
