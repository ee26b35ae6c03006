"""Collectives over the emulated NCCL, in several processes: every format with every option has the bits of torch's
backend, unsupported calls raise a named error, and a failure is a named error on every rank.
"""

# covers zcomm/errors.py

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.conftest import SUMMARY_LINE
from tests.ranks import ranks_over, run_ranks, topology
from tests.zcomm.calls import WORLD_SIZE, assert_same_bits, collectives, kept, with_residual
from tests.zcomm.test_checked import checking
from zcomm._collectives import nccl_steps
from zcomm._formats.formats import FORMATS
from zcomm._kernels import kernels
from zcomm._transport import chunks, nccl_communicators, nccl_library
from zcomm.errors import BackendUnavailableError, CommunicationError, DivergedError, FormatError, MessageError

BLOCKS = (None, 32, 96, 2048)
"""The options for float32 tensors; others are tested with the defaults."""
OPTIONS = tuple(itertools.product((True, False), ("nearest", "stochastic"), (None, "hadamard")))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PAIRS = (("int8", "int4"), ("none", "int8"), ("int4:asym", "nf4"), ("bf16", "int4:stochastic"), ("fp8_e4m3", "none"))
REFUSED: list[str] = []
"""Combinations that torch's backend supports and this one does not; at most 5."""
NUMEL = 3000


def _formats(dtype: torch.dtype) -> list[zcomm.Format]:
    """Every format with every block and option that it supports."""
    found, blocks = {}, BLOCKS if dtype == torch.float32 else BLOCKS[:1]
    for name, block, (symmetric, rounding, rotation) in itertools.product(FORMATS, blocks, OPTIONS):
        try:
            made = zcomm.get_format(name, block=block, symmetric=symmetric, rounding=rounding, rotation=rotation)
        except FormatError:
            continue
        found[str(made)] = made
    return list(found.values())


@contextmanager
def small_chunks() -> Iterator[None]:
    """Make chunks so small that a call has several, wherever they are cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MIN_CHUNK_NUMEL", 1024)
        patch.setattr(nccl_steps, "MIN_CHUNK_NUMEL", 1024)
        yield


def _refused(rank: int, group: Any, wire: Any, dtype: torch.dtype) -> str:
    """Compare the two backends; return the refusal of backend="nccl", if any."""
    expected = collectives(rank, "torch", group, wire, dtype, NUMEL)
    try:
        got = collectives(rank, "nccl", group, wire, dtype, NUMEL)
    except BackendUnavailableError as error:
        return f"{wire}, {dtype}: {error}"
    assert_same_bits(f"{wire}, {dtype}", got, expected)
    return ""


def _check_formats(rank: int, dtype: torch.dtype, refused: list[str]) -> None:
    wires: list[Any] = [*_formats(dtype), *PAIRS]
    with small_chunks():
        found = [_refused(rank, topology(2), wire, dtype) for wire in wires]
        found += [_refused(rank, None, wire, dtype) for wire in wires if not isinstance(wire, tuple)]
    assert [text for text in found if text] == refused


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_format_and_option_has_the_bits_of_torch(dtype: torch.dtype, record_property: Any) -> None:
    with ranks_over("nccl"):
        run_ranks(WORLD_SIZE, _check_formats, dtype, REFUSED)
    assert len(REFUSED) <= 5
    record_property(
        SUMMARY_LINE, f"emulated NCCL, {dtype}: {len(_formats(dtype))} formats, refused: {', '.join(REFUSED) or 'none'}"
    )


def _check_beside_formats(rank: int, *, is_checked: bool) -> None:
    """Residuals, and classes that keep shards; ``is_checked``: with message checksums."""
    results: dict[str, list[Tensor]] = {}
    with checking() if is_checked else nullcontext(), small_chunks():
        for name in ("torch", "nccl"):
            t = zcomm.Topology(ranks_per_node=2, backend=name)  # type: ignore[arg-type]
            made = results[name] = kept(rank, t, 501)
            for group in (t, None):
                made += with_residual(rank, name, group, 1000)
                made += collectives(rank, name, group, "int4", torch.bfloat16, 1000)
            t.close()
    assert_same_bits(f"checked: {is_checked}", results["nccl"], results["torch"])


@pytest.mark.parametrize("is_checked", [False, True])
def test_residuals_and_what_keeps_shards_have_the_bits_of_torch(*, is_checked: bool) -> None:
    with ranks_over("nccl"):
        run_ranks(WORLD_SIZE, _check_called, is_checked)


def _check_called(rank: int, is_checked: bool) -> None:  # noqa: FBT001  (what ranks are sent has no keywords)
    _check_beside_formats(rank, is_checked=is_checked)


def _gather(full: Tensor, shard: Tensor, group: Any, wire: str, *, async_op: bool) -> None:
    work = zcomm.all_gather_single(full, shard, group, format=wire, async_op=async_op)
    if work is not None:
        work.wait()


def _check_other_format(rank: int) -> None:
    """Rank 3's messages have the same size in another format: its receivers raise, and no rank hangs."""
    t, wire = zcomm.Topology(ranks_per_node=2), "fp8_e4m3/256" if rank == 3 else "int8/256"
    shard, full = torch.ones(NUMEL), torch.empty(4 * NUMEL)
    for group in (t, None):
        for async_op in (False, True):
            with small_chunks(), pytest.raises(MessageError, match="another layout than this rank expects"):
                _gather(full, shard, group, wire, async_op=async_op)
    zcomm.all_gather_single(full, shard, t, format="none")
    assert bool((full == 1).all())
    t.close()


def _check_other_size(rank: int) -> None:
    """The error names both lengths, and the communicator fails afterwards; a topology's watch detects it."""
    numel = 500 if rank == 0 else 600
    own, other = ("2000", "2400") if rank == 0 else ("2400", "2000")
    group: Any = dist.new_group([0, 1])
    for _ in range(2):
        with pytest.raises(CommunicationError, match=f"sends {other} bytes where this rank expects {own}|disconnected"):
            zcomm.all_gather_single(torch.empty(2 * numel), torch.ones(numel), group, format="none")
    dist.destroy_process_group(group)
    t = zcomm.Topology(ranks_per_node=2)
    for _ in range(2):
        with pytest.raises(DivergedError, match=r"rank 0: all_gather of 2000 .*rank 1: all_gather of 2400 "):
            zcomm.all_gather_single(torch.empty(2 * numel), torch.ones(numel), t, format="none")
    t.close()


def test_messages_of_another_format_or_size_are_errors_on_every_rank() -> None:
    with ranks_over("nccl"):
        run_ranks(WORLD_SIZE, _check_other_format)
        run_ranks(2, _check_other_size)


def test_other_threads_run_while_a_communicator_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library.env, "value", lambda _: "emulated")
    nccl_library._forget()
    try:
        library, native = nccl_library.nccl_library(), kernels.native()
    finally:
        nccl_library._forget()
    unique_id, made, ticks = native.nccl_unique_id(library), dict[int, Any](), list[float]()

    def make(rank: int) -> None:
        made[rank] = native.NcclCommunicator(library, 0, [(unique_id, 2, rank)], 2.0)

    makers = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    stream, data = native.HostStream(), torch.zeros(192, dtype=torch.uint8)
    address = data.data_ptr()
    made[0].exchange_bytes(0, True, address, address + 64, 64, 64, stream.address)  # the other rank never calls
    has_ended = threading.Event()

    def tick() -> None:
        while not has_ended.wait(0.01):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    begin = time.monotonic()
    del made[0]  # waits for the call, up to the timeout
    end = time.monotonic()
    has_ended.set()
    ticking.join()
    assert end - begin > 1
    assert sum(begin + 0.2 < at < end - 0.2 for at in ticks) > 10, "the others stood still"


def test_it_takes_tensors_of_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library.env, "value", lambda _: "emulated")
    nccl_library._forget()
    try:
        assert "emulated in host memory, for tests only" in nccl_library.nccl_description()
        nccl_communicators.check_device("all_gather", torch.device("cpu"))
        with pytest.raises(BackendUnavailableError, match="takes CPU tensors, got device=cuda:0"):
            nccl_communicators.check_device("all_gather", torch.device("cuda", 0))
    finally:
        nccl_library._forget()
