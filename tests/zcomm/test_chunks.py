"""Chunks: their boundaries and the order of their exchanges; they change nothing but time."""

# covers zcomm/_transport/chunks.py

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import zcomm
from tests.ranks import run_ranks, topology
from tests.zcomm.data import mixture, same_values
from zcomm import Format, volume
from zcomm._collectives import nccl_steps
from zcomm._transport import chunks
from zcomm._transport.work import Link, Steps, Work

INT8, INT4, NONE = (zcomm.get_format(name) for name in ("int8", "int4", "none"))
NUMEL = 5 * 512 + 77


@contextmanager
def _chunks_of_at_least(numel: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MIN_CHUNK_NUMEL", numel)
        patch.setattr(nccl_steps, "MIN_CHUNK_NUMEL", numel)
        yield


@pytest.mark.parametrize(
    "formats", [(NONE, NONE), (INT8, INT4), (Format("int8", 1000), INT4), (Format("int4", 6), NONE)]
)
@pytest.mark.parametrize("numel", [1, 2**18, 2**18 + 1, 2**20, 3 * 2**20 + 5, 2**26 + 1])
def test_chunks_cover_a_shard_in_whole_blocks(numel: int, formats: tuple[Format, Format]) -> None:
    cut = chunks.chunks_of(numel, *formats)
    assert (cut[0].start, cut[-1].stop) == (0, numel)
    assert all(a.stop == b.start for a, b in pairwise(cut))
    assert len(cut) <= 16
    for chunk in cut[:-1]:
        assert chunk.stop - chunk.start >= 2**18
        assert all(chunk.stop % (format.block or 1) == 0 for format in formats)


def test_small_shards_are_not_cut() -> None:
    assert chunks.chunks_of(2**18, INT8) == [slice(0, 2**18)]
    assert len(chunks.chunks_of(2**21, INT8, INT4)) == 8
    assert chunks.chunks_of(2**21, Format("int8", 65536), Format("int4", 65534)) == [slice(0, 2**21)]


def test_on_gpus_a_chunk_takes_several_times_what_it_costs_the_host() -> None:
    """Computed independently: bytes over the rate, against the host's time."""
    slow, fast = Link(20e-6, 2e9), Link(5e-6, 900e9)
    cases = ((8, (), 450e9, 0), (8, (slow, fast), 900e9, 25e-6), (2, (slow,), 2e9, 20e-6))
    for num_ranks, links, rate, latency_s in cases:
        least = chunks.min_chunk_numel("cuda", num_ranks, links)
        assert least >= 2**24
        assert least == 2**24 or least * num_ranks / rate == pytest.approx(4 * (300e-6 + latency_s), rel=1e-3)
    assert chunks.min_chunk_numel("cpu", 8, (slow, fast)) == 2**18
    assert len(chunks.chunks_of(2**24, INT8, min_numel=chunks.min_chunk_numel("cuda", 8))) == 1
    assert len(chunks.chunks_of(2**30, INT8, min_numel=chunks.min_chunk_numel("cuda", 8))) > 4


class _Exchange:
    """An exchange that logs the wait for it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"{self.name} ended")

    def is_completed(self) -> bool:
        return False


def _chunk(log: list[str], name: str, *, fails_after: int = 99) -> Steps:
    for hop in range(3):
        if hop == fails_after:
            raise ValueError(f"chunk {name}")
        if hop == 2:
            log.append(f"{name} done")
        else:
            log.append(f"{name}{hop + 1} starts")
            yield _Exchange(log, f"{name}{hop + 1}")


def _run(*of_chunks: Steps) -> None:
    Work(chunks.pipelined(of_chunks, num_exchanges=2)).wait()


def test_hop_two_of_a_chunk_overlaps_hop_one_of_the_next() -> None:
    log: list[str] = []
    _run(_chunk(log, "a"), _chunk(log, "b"), _chunk(log, "c"))
    assert log == [
        "a1 starts",
        "b1 starts", "a1 ended", "a2 starts",
        "c1 starts", "b1 ended", "b2 starts", "a2 ended", "a done",
        "c1 ended", "c2 starts", "b2 ended", "b done",
        "c2 ended", "c done",
    ]  # fmt: skip


def test_a_chunk_that_cannot_be_decoded_does_not_keep_others_from_their_exchanges() -> None:
    log: list[str] = []
    with pytest.raises(ValueError, match="chunk a"):
        _run(_chunk(log, "a", fails_after=2), _chunk(log, "b", fails_after=2), _chunk(log, "c"))
    assert "a2 ended" in log
    assert log[-2:] == ["c2 ended", "c done"]


def test_after_a_failure_before_an_exchange_none_is_started_and_none_forgotten() -> None:
    log: list[str] = []
    with pytest.raises(ValueError, match="chunk b"):
        _run(_chunk(log, "a"), _chunk(log, "b", fails_after=1), _chunk(log, "c"))
    assert log[-2:] == ["a2 ended", "c1 ended"]
    assert "c2 starts" not in log


def _results(rank: int, numbering: Any, wire: Any, dtype: torch.dtype) -> list[Tensor]:
    """Results of the collectives of two hops, in contiguous and strided rows, of the tensor's dtype and another."""
    t = topology(2)
    found = []
    for out_dtype in (dtype, torch.float32):
        wide = torch.full((4, NUMEL + 3), 9.0, dtype=out_dtype)
        flat = torch.full((4 * NUMEL,), 9.0, dtype=out_dtype)
        for full in (wide[:, :NUMEL], flat):
            zcomm.all_gather_single(full, mixture(NUMEL, rank, dtype), t, format=wire, numbering=numbering)
        assert bool((wide[:, NUMEL:] == 9).all())
        shard = torch.full((NUMEL,), 9.0, dtype=out_dtype)
        rows = mixture(4 * NUMEL, rank, dtype)
        zcomm.reduce_scatter_single(shard, rows, "avg", group=t, format=wire, numbering=numbering)
        found += [wide, flat, shard]
    row = t.shard_index(numbering)
    mine = torch.zeros(4, NUMEL, dtype=dtype)
    mine[row] = mixture(NUMEL, rank, dtype)
    work = zcomm.all_gather_single(mine, mine[row], t, format=wire, numbering=numbering, async_op=True)
    total = mixture(4 * NUMEL + 1, rank, dtype)
    zcomm.all_reduce(total, group=t, format=wire)
    parts = torch.empty(4 * NUMEL, dtype=dtype)
    zcomm.all_to_all_single(parts, mixture(4 * NUMEL, rank, dtype), t, format=wire)
    assert work is not None
    work.wait()
    return [*found, mine, total, parts]


def _check_same_bits(rank: int, numbering: str, dtype: torch.dtype) -> None:
    for wire in ("none", "bf16", "int8", ("int4", "int8"), ("int8", "none"), ("none", "int4")):
        whole = _results(rank, numbering, wire, dtype)
        with _chunks_of_at_least(512):
            in_chunks = _results(rank, numbering, wire, dtype)
        assert all(same_values(a, b) for a, b in zip(whole, in_chunks, strict=True)), wire


@pytest.mark.usefixtures("both_backends")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("numbering", ["rank", "local"])
def test_results_do_not_depend_on_chunks(numbering: str, dtype: torch.dtype) -> None:
    run_ranks(4, _check_same_bits, numbering, dtype)


def _check_bytes(rank: int) -> None:
    t = topology(2)
    with _chunks_of_at_least(512):
        for wire in (("int8", "int8"), ("int8", "int4"), ("none", "none"), ("none", "int8")):
            with zcomm.traffic() as sent:
                zcomm.all_gather_single(torch.empty(4 * NUMEL), torch.ones(NUMEL), t, format=wire)
            expected = volume.all_gather_sent(NUMEL, torch.float32, 2, 2, wire)
            assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == expected
            with zcomm.traffic() as sent:
                zcomm.reduce_scatter_single(torch.empty(NUMEL), torch.ones(4 * NUMEL), group=t, format=wire)
            expected = volume.reduce_scatter_sent(NUMEL, torch.float32, 2, 2, wire)
            assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == expected
            with zcomm.traffic() as sent:
                zcomm.all_to_all_single(torch.empty(4 * NUMEL), torch.ones(4 * NUMEL), t, format=wire)
            expected = volume.all_to_all_sent(NUMEL, torch.float32, 2, 2, wire)
            assert (sent.bytes(link="intra"), sent.bytes(link="inter")) == expected
        with zcomm.traffic() as sent:
            zcomm.reduce_scatter_single(torch.empty(1000), torch.ones(4000), group=t, format="int8")
    # By hand: chunks of 512 and 488 elements. Two scales a segment; between nodes 16 + 512 + 8, up to a multiple of 16.
    assert sent.as_dict() == {
        "reduce_scatter|int8|inter": {"calls": 2, "elements": 1000, "bytes": 544 + 512},
        "reduce_scatter|int8|intra": {"calls": 2, "elements": 2000, "bytes": 1056 + 1008},
    }


def test_chunks_are_counted_exactly() -> None:
    run_ranks(4, _check_bytes)


def _check_errors(rank: int) -> None:
    """Rank 3 gathers in another format of the same size: its receivers raise, and no rank hangs."""
    t = zcomm.Topology(ranks_per_node=2)
    block = 256 if rank != 3 else 254
    shard, full = torch.ones(2 * 65024), torch.empty(8 * 65024)
    with _chunks_of_at_least(65024), pytest.raises(zcomm.MessageError, match="hash"):
        zcomm.all_gather_single(full, shard, t, format=Format("int8", block))
    t.close()


def test_a_wrong_message_is_an_error_on_every_rank_that_gets_it() -> None:
    run_ranks(4, _check_errors)
