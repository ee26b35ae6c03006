"""Small exchanges by which ranks agree: maxima of flags, float64 partial sums, initial values. Always synchronous.

They are between hosts (:attr:`Topology.on_host`): no device is waited for, but by a broadcast of what is on one.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import backend
from zcomm.backend import ALONE, Hop, Sent
from zcomm.errors import TopologyError
from zcomm.topology import Topology, hop_of_group

__all__ = [
    "agree_max",
    "any_",
    "are_equal",
    "broadcast_",
    "gather_beside",
    "gather_float64",
    "gather_texts",
    "texts_over",
    "whole_texts",
]

TEXT_NBYTES = 512


def agree_max(values: Tensor, topology: Topology) -> Tensor:
    """The elementwise maximum of int64 ``values`` over all ranks, on the CPU, the same on every rank."""
    agreed = values.to("cpu", torch.int64, copy=True)
    _keep_order(topology)
    backend.max_(agreed, topology.on_host)
    return agreed


def any_(flag: Tensor, topology: Topology) -> Tensor:
    """Whether the bool scalar ``flag`` is true on any rank, on its device. On CUDA the host waits for nothing."""
    agreed = flag.to(torch.uint8, copy=True).view(1)
    _keep_order(topology)
    backend.max_(agreed, _hop_for(agreed, topology))
    return agreed.bool().view(())


def gather_float64(values: Tensor, topology: Topology) -> Tensor:
    """Every rank's float64 ``values`` [n] as [world_size, n], in rank order, on the CPU."""
    return gather_beside(values.to("cpu", torch.float64), topology)


def gather_beside(values: Tensor, topology: Topology) -> Tensor:
    """Every rank's ``values`` [n] as [world_size, n], in rank order, on their device. CUDA: no host waits."""
    mine = values.contiguous()
    _keep_order(topology)
    of_ranks = mine.new_empty((topology.world_size, mine.numel()))
    work = backend.all_gather(of_ranks, mine, _hop_for(mine, topology), Sent("control", "none", mine.numel()))
    if work is not None:
        work.wait()
    return of_ranks


def are_equal(text: str, ranks: Topology | dist.ProcessGroup | None) -> bool:
    """Whether every rank has the same ``text``, by 64-bit digests: 8 bytes to every other rank. None: all ranks."""
    if isinstance(ranks, Topology):
        _keep_order(ranks)
    hop = ranks.on_host if isinstance(ranks, Topology) else hop_of_group(ranks)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64)
    of_ranks = torch.empty(hop.size, dtype=torch.int64)
    work = backend.all_gather(of_ranks, mine, hop, Sent("control", "none", 1))
    if work is not None:
        work.wait()
    return bool((of_ranks == mine).all())


def gather_texts(text: str, ranks: Topology | dist.ProcessGroup | None) -> list[str]:
    """The first 512 bytes of every rank's ``text``, in rank order. None: all ranks of torch.distributed."""
    if not isinstance(ranks, Topology):
        return texts_over(hop_of_group(ranks), text)
    _keep_order(ranks)
    return texts_over(ranks.on_host, text)


def texts_over(hop: Hop, text: str) -> list[str]:
    """As :func:`gather_texts`, where nothing else is under way."""
    mine = torch.frombuffer(bytearray(text.encode()[:TEXT_NBYTES].ljust(TEXT_NBYTES, b"\0")), dtype=torch.uint8)
    of_ranks = torch.empty((hop.size, TEXT_NBYTES), dtype=torch.uint8)
    work = backend.all_gather(of_ranks, mine, hop, Sent("control", "none", TEXT_NBYTES))
    if work is not None:
        work.wait()
    data = of_ranks.numpy().tobytes()
    rows = [data[at : at + TEXT_NBYTES] for at in range(0, len(data), TEXT_NBYTES)]
    texts = {row: row.rstrip(b"\0").decode(errors="replace") for row in set(rows)}
    return [texts[row] for row in rows]


def whole_texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Every rank's ``text``, of any length, in rank order; None: this rank's alone.

    Cost: two all-gathers, the second of the longest text's bytes.
    """
    hop = ALONE if group is None else hop_of_group(group)
    data = text.encode()
    lengths = torch.empty(hop.size, dtype=torch.int64)
    _gather_now(lengths, torch.tensor([len(data)]), hop)
    longest = int(lengths.max())
    of_ranks = torch.empty((hop.size, longest), dtype=torch.uint8)
    _gather_now(of_ranks, torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8), hop)
    rows = zip(of_ranks.numpy(), lengths.tolist(), strict=True)
    return [row[:length].tobytes().decode() for row, length in rows]


def _gather_now(of_ranks: Tensor, mine: Tensor, hop: Hop) -> None:
    work = backend.all_gather(of_ranks, mine, hop, Sent("control", "none", mine.numel()))
    if work is not None:
        work.wait()


def broadcast_(tensor: Tensor, src: int, topology: Topology) -> None:
    """Overwrite ``tensor``, of any dtype and shape, with rank ``src``'s.

    Raises:
        TopologyError: ``src`` is not a rank of ``topology``.
    """
    if not 0 <= src < topology.world_size:
        raise TopologyError(f"src must be a rank: src={src}, world_size={topology.world_size}")
    _keep_order(topology)
    values = tensor.detach().contiguous()
    backend.broadcast_(values, src, _hop_for(values, topology))
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)


def _hop_for(tensor: Tensor, topology: Topology) -> Hop:
    return topology.on_host if tensor.device.type == "cpu" else topology.world


def _keep_order(topology: Topology) -> None:
    """Let what is queued finish first if it runs over the same group: exchanges of a group start in program order."""
    topology.queue.check_open()
    if not topology.has_two_hops or topology.uses_world:
        topology.queue.drain()
