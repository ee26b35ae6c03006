"""Small exchanges by which ranks agree: maxima of flags, float64 partial sums, initial values. Always synchronous.

They are between hosts (:attr:`Topology.on_host`): no device is waited for, but by a broadcast of what is on one. Over
a process group of NCCL, before there is a Topology, ranks meet in torch.distributed's store instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import backend, env
from zcomm.backend import ALONE, Hop, Sent
from zcomm.calls import here
from zcomm.debug import compare_calls
from zcomm.errors import TopologyError
from zcomm.first_rank import gather_to_first, scatter_from_first
from zcomm.formats import get_format
from zcomm.meeting import meet
from zcomm.topology import Topology, hop_of_group

__all__ = [
    "agree_max",
    "any_",
    "are_equal",
    "broadcast_",
    "gather_beside",
    "gather_float64",
    "gather_texts",
    "text_from_first",
    "texts_to_first",
]

TEXT_NBYTES = 512


def agree_max(values: Tensor, topology: Topology) -> Tensor:
    """The elementwise maximum of int64 ``values`` over all ranks, on the CPU, the same on every rank."""
    mine = values.to("cpu", torch.int64).contiguous()
    topology.keep_order()
    return _gather(mine, topology.on_host).amax(0).view(mine.shape)


def any_(flag: Tensor, topology: Topology) -> Tensor:
    """Whether the bool scalar ``flag`` is true on any rank, on its device. On CUDA the host waits for nothing."""
    mine = flag.to(torch.uint8).view(1)
    topology.keep_order()
    return _gather(mine, _hop_for(mine, topology)).amax().bool()


def gather_float64(values: Tensor, topology: Topology) -> Tensor:
    """Every rank's float64 ``values`` [n] as [world_size, n], in rank order, on the CPU."""
    return gather_beside(values.to("cpu", torch.float64), topology)


def gather_beside(values: Tensor, topology: Topology) -> Tensor:
    """Every rank's ``values`` [n] as [world_size, n], in rank order, on their device. CUDA: no host waits."""
    mine = values.contiguous()
    topology.keep_order()
    return _gather(mine, _hop_for(mine, topology))


def are_equal(text: str, ranks: Topology | dist.ProcessGroup | None) -> bool:
    """Whether every rank has the same ``text``, by 64-bit digests: 8 bytes to every other rank. None: all ranks."""
    if isinstance(ranks, Topology):
        ranks.keep_order()
    hop = ranks.on_host if isinstance(ranks, Topology) else hop_of_group(ranks)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    if _meets(hop):
        return len(set(_met(digest.hex(), hop))) == 1
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64)
    return bool((_gather(mine, hop) == mine).all())


def gather_texts(text: str, ranks: Topology | dist.ProcessGroup | None) -> list[str]:
    """The first 512 bytes of every rank's ``text``, in rank order. None: all ranks of torch.distributed."""
    if isinstance(ranks, Topology):
        ranks.keep_order()
    hop = ranks.on_host if isinstance(ranks, Topology) else hop_of_group(ranks)
    if _meets(hop):
        return [told.encode()[:TEXT_NBYTES].decode(errors="replace") for told in _met(text, hop)]
    mine = torch.frombuffer(bytearray(text.encode()[:TEXT_NBYTES].ljust(TEXT_NBYTES, b"\0")), dtype=torch.uint8)
    data = _gather(mine, hop).numpy().tobytes()
    rows = [data[at : at + TEXT_NBYTES] for at in range(0, len(data), TEXT_NBYTES)]
    texts = {row: row.rstrip(b"\0").decode(errors="replace") for row in set(rows)}
    return [texts[row] for row in rows]


def texts_to_first(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """On the first rank every rank's ``text``, of any length, in rank order; on the others []. None: this rank alone.

    Cost: 8 bytes to every other rank, and from each to the first as many as the longest text has.
    """
    hop, data = _hop_of(group), text.encode()
    lengths = _gather(torch.tensor([len(data)]), hop).flatten().tolist()
    mine = torch.frombuffer(bytearray(data.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    of_ranks = gather_to_first(mine, hop)
    if of_ranks is None:
        return []
    return [row[:length].tobytes().decode() for row, length in zip(of_ranks.numpy(), lengths, strict=True)]


def text_from_first(texts: Sequence[str], group: dist.ProcessGroup | None) -> str:
    """What the first rank has for this one among its ``texts``, one a rank; those of other ranks do not count.

    Cost: 8 bytes to every other rank, and from the first to each as many as the longest text has.
    """
    hop = _hop_of(group)
    data = [text.encode() for text in texts] if hop.rank == 0 else []
    lengths = torch.tensor([len(part) for part in data] or [0] * hop.size)
    _compare("broadcast", lengths, hop)
    backend.broadcast_(lengths, 0, hop)
    longest, rows = int(lengths.max()), None
    if data:
        whole = bytearray(b"".join(part.ljust(longest, b"\0") for part in data))
        rows = torch.frombuffer(whole, dtype=torch.uint8).view(hop.size, longest)
    mine = scatter_from_first(rows, longest, hop)
    return mine.numpy()[: int(lengths[hop.rank])].tobytes().decode()


def _gather(mine: Tensor, hop: Hop) -> Tensor:
    """Every rank's ``mine``, of any shape, as [hop size, numel]."""
    _compare("all_gather", mine, hop)
    of_ranks = mine.new_empty((hop.size, mine.numel()))
    work = backend.all_gather(of_ranks, mine, hop, Sent("control", "none", mine.numel()))
    if work is not None:
        work.wait()
    return of_ranks


def _compare(operation: str, tensor: Tensor, hop: Hop) -> None:
    """With ZCOMM_DEBUG=1, raise on every rank unless all make this exchange, for the same public call."""
    if env.is_set("ZCOMM_DEBUG"):
        call = here().call or "forward, backward, or none of zero's"
        compare_calls(f"control {operation}", ((hop, get_format("none")),), hop, nbytes=tensor.nbytes, call=call)


def _meets(hop: Hop) -> bool:
    """Whether hosts meet in the store: a caller's group over NCCL takes no host tensors, and has no gloo beside it."""
    return hop.group is not None and not backend.takes_host_tensors(hop.backend)


def _met(text: str, hop: Hop) -> list[str]:
    ranks = dist.get_process_group_ranks(hop.group)
    return meet(ranks, text, lane="control", timeout=backend.timeout_of(hop.group))


def _hop_of(group: dist.ProcessGroup | None) -> Hop:
    return ALONE if group is None else hop_of_group(group)


def broadcast_(tensor: Tensor, src: int, topology: Topology) -> None:
    """Overwrite ``tensor``, of any dtype and shape, with rank ``src``'s.

    Raises:
        TopologyError: ``src`` is not a rank of ``topology``.
    """
    if not 0 <= src < topology.world_size:
        raise TopologyError(f"src must be a rank: src={src}, world_size={topology.world_size}")
    topology.keep_order()
    values = tensor.detach().contiguous()
    _compare("broadcast", values, topology.world)
    backend.broadcast_(values, src, _hop_for(values, topology))
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)


def _hop_for(tensor: Tensor, topology: Topology) -> Hop:
    return topology.on_host if tensor.device.type == "cpu" else topology.world
