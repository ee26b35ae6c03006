"""Over backend="nccl", formats without CUDA kernels go hop by hop as bytes: the bits of torch, over no group.

The communicator is over the emulated NCCL.
"""

# covers zcomm/_transport/nccl_communicators.py zcomm/_transport/topology.py

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import ranks_over, run_ranks
from tests.zcomm.calls import WORLD_SIZE, assert_same_bits, collectives, kept, with_residual
from zcomm import Topology
from zcomm._collectives import nccl_steps
from zcomm._transport import backend, chunks, nccl_communicators
from zcomm._transport.backend import Hop
from zcomm._transport.nccl_communicators import Communicator as Over
from zcomm._transport.topology import hop_of_group

FORMATS = ("int8:stochastic", "int4:asym", "nf4/32:hadamard", "int4/96", "int8", "none")


def _over_nccl_only(exchange: Any) -> Any:
    def checked(output: Any, message: Any, hop: Any, *about: Any, **words: Any) -> Any:
        assert hop.nccl is not None, "an exchange over torch's group"
        return exchange(output, message, hop, *about, **words)

    return checked


@contextmanager
def _hop_by_hop() -> Iterator[None]:
    """Disable the pipeline in C++ and fail exchanges over torch's groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_steps, "_has_kernels", lambda _: False)
        patch.setattr(backend, "_exchange", _over_nccl_only(backend._exchange))
        yield


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
            with _hop_by_hop(), zcomm.traffic() as traffic:
                got = collectives(rank, "nccl", group, wire, dtype, numel)
            assert_same_bits(f"{wire}, {dtype}, {numel}", got, expected)
            assert traffic.as_dict() == expected_traffic.as_dict()
    for group in (topology, None):
        expected = with_residual(rank, "torch", group, 1000)
        with _hop_by_hop():
            assert_same_bits("residual", with_residual(rank, "nccl", group, 1000), expected)
    topology.backend = "torch"
    expected = kept(rank, topology, 501)
    topology.backend = "nccl"
    with _hop_by_hop():
        assert_same_bits("kept", kept(rank, topology, 501), expected)
    topology.close()
    _check_closing(Topology(ranks_per_node=2))


class _Counted:
    """A fake native communicator that counts calls."""

    def close(self) -> None:
        pass


def _check_closing(topology: Topology) -> None:
    """Closing a topology frees the communicators over its groups, and so does destroying a group passed to a call."""
    alive: weakref.WeakSet[_Counted] = weakref.WeakSet()

    def make(hops: Sequence[Hop], device: torch.device) -> Over:
        native = _Counted()
        alive.add(native)
        return Over(native, ())

    def communicate(hops: tuple[Hop, ...]) -> None:
        nccl_communicators.communicator_over(hops, torch.device("cpu"))

    nccl_communicators.close_communicators()  # of calls before
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
    assert not any(nccl_communicators._OF_GROUPS.values())


def test_bytes_over_nccl_have_the_bits_of_torch() -> None:
    with ranks_over("nccl"):
        run_ranks(WORLD_SIZE, _check_all)
