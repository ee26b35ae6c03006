"""Over backend="nccl" what has no CUDA kernels goes hop by hop as bytes: with the bits of torch, and over no group.

The communicator is a stand-in here that reads and writes the addresses it is given, on the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from tests.ranks import run_ranks
from tests.zcomm.calls import WORLD_SIZE, assert_same_bits, collectives, kept, with_residual
from zcomm import Topology, backend, chunks, nccl_bytes, nccl_communicators, nccl_steps, route, secondary
from zcomm.backend import Hop
from zcomm.nccl_communicators import Communicator as Over
from zcomm.topology import hop_of_group

FORMATS = ("int8:stochastic", "int4:asym", "nf4/32:hadamard", "int4/96", "int8", "none")
STREAM = 11


def _at(address: int, nbytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class StandIn:
    """The native communicator's exchanges of bytes, by gloo."""

    calls = 0

    def __init__(self, hops: Sequence[Hop]) -> None:
        self._hops = hops

    def exchange_bytes(self, index: int, is_gather: bool, *place: int) -> None:  # noqa: FBT001  (as in C++)
        source, output, stride, nbytes, stream = place
        assert stream == STREAM
        StandIn.calls += 1
        hop = self._hops[index]
        rows = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(hop.size)]
        if is_gather:
            dist.all_gather(rows, _at(source, nbytes).clone(), group=hop.group)
        else:
            parts = _at(source, nbytes * hop.size).clone()
            received = torch.empty_like(parts)
            dist.all_to_all_single(received, parts, group=hop.group)
            rows = list(received.view(hop.size, nbytes))
        for i, row in enumerate(rows):
            _at(output + i * stride, nbytes).copy_(row)


class _Side:
    def after_current(self, *_: Any) -> Any:
        return nullcontext(SimpleNamespace(cuda_stream=STREAM))


def _over_nccl_only(exchange: Any) -> Any:
    def checked(output: Any, message: Any, hop: Any, words: Any) -> Any:
        assert hop.carrier is not None, "an exchange over torch's group"
        return exchange(output, message, hop, words)

    return checked


@contextmanager
def _over_stand_in() -> Iterator[None]:
    """The stand-in carries what goes over NCCL; torch's groups carry none of it."""
    sides: Any = (_Side(), _Side())
    with pytest.MonkeyPatch.context() as patch:
        for module in (nccl_bytes, nccl_steps, route, secondary):
            patch.setattr(module, "check_device", lambda *_: None)
        patch.setattr(nccl_steps, "_has_kernels", lambda _: False)
        patch.setattr(nccl_bytes, "communicator_over", lambda hops, _: Over(StandIn(hops), sides))
        patch.setattr(nccl_bytes.torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None, wait=lambda: None))
        for name in ("_gather", "_exchange"):
            patch.setattr(backend, name, _over_nccl_only(getattr(backend, name)))
        before = StandIn.calls
        yield
        assert before < StandIn.calls, "nothing went over the stand-in"


def _check_all(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "MIN_CHUNK_NUMEL", 1024)
        _check_calls(rank)


def _check_calls(rank: int) -> None:
    topology = Topology(ranks_per_node=2)
    wires = [*FORMATS, ("int8", "int4:asym"), ("none", "int4:stochastic")]
    cases = [(wire, torch.float32, 3000) for wire in wires]
    for wire, dtype, numel in [*cases, ("none", torch.float64, 33), ("int4/96", torch.bfloat16, 1)]:
        for group in (topology, None):
            if group is None and isinstance(wire, tuple):
                continue
            with zcomm.traffic() as expected_traffic:
                expected = collectives(rank, "torch", group, wire, dtype, numel)
            with _over_stand_in(), zcomm.traffic() as traffic:
                got = collectives(rank, "nccl", group, wire, dtype, numel)
            assert_same_bits(f"{wire}, {dtype}, {numel}", got, expected)
            assert traffic.as_dict() == expected_traffic.as_dict()
    for group in (topology, None):
        expected = with_residual(rank, "torch", group, 1000)
        with _over_stand_in():
            assert_same_bits("residual", with_residual(rank, "nccl", group, 1000), expected)
    expected = kept(rank, topology, 501)
    topology.backend = "nccl"  # what a build without CUDA cannot construct
    with _over_stand_in():
        assert_same_bits("kept", kept(rank, topology, 501), expected)
    _check_closing(topology)


class _Counted:
    """In place of a native communicator."""


def _check_closing(topology: Topology) -> None:
    """Closing a topology frees what was made over its groups, and so does the end of a group that a call was given."""
    alive: weakref.WeakSet[_Counted] = weakref.WeakSet()

    def make(hops: Sequence[Hop], device: torch.device) -> Over:
        native = _Counted()
        alive.add(native)
        return Over(native, ())

    def communicate(hops: tuple[Hop, ...]) -> None:
        nccl_communicators.communicator_over(hops, torch.device("cpu"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_communicators, "_make", make)
        for t in (topology, topology.companion):
            for hops in ((t.intra, t.inter), (t.world,), (t.world,)):
                communicate(hops)
        of_caller = dist.new_group(list(range(WORLD_SIZE)))
        communicate((hop_of_group(of_caller),))
    assert len(alive) == 5
    topology.close()
    assert len(alive) == 1
    dist.destroy_process_group(of_caller)
    del of_caller
    gc.collect()
    assert not alive
    assert not nccl_communicators._OF_GROUPS


def test_bytes_over_nccl_have_the_bits_of_torch() -> None:
    run_ranks(WORLD_SIZE, _check_all)
