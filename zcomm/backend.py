"""The only module that calls torch.distributed's collectives: absorbs their renames, counts what is sent.

Tensors travel as bytes, so every dtype goes through every backend. A hop of one rank is a local copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.traffic import Key, record

__all__ = [
    "Hop",
    "Sent",
    "all_gather",
    "all_to_all",
    "broadcast_",
    "control_device",
    "destroy_group",
    "gather_ints",
    "max_",
    "new_group",
]

# torch 2.13 renamed all_gather_into_tensor to all_gather_single and deprecated the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Hop:
    """The ranks that one exchange runs over, as seen from this one."""

    group: dist.ProcessGroup | None
    """None: this rank alone."""
    size: int
    rank: int
    num_intra_peers: int
    num_inter_peers: int


class Sent(NamedTuple):
    """What a message is, for the counters."""

    operation: str
    format: str
    numel: int


def _count(hop: Hop, sent: Sent, nbytes: int) -> None:
    for link, peers in (("intra", hop.num_intra_peers), ("inter", hop.num_inter_peers)):
        record(Key(sent.operation, sent.format, link), num_messages=peers, numel=sent.numel, nbytes=nbytes)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def all_gather(output: Tensor, message: Tensor, hop: Hop, sent: Sent) -> dist.Work | None:
    """Start gathering ``message`` from every rank into contiguous ``output``; may be ``output``'s own part already."""
    if message.numel() == 0:
        return None
    _count(hop, sent, message.numel() * message.element_size())
    if hop.group is None:
        if output.data_ptr() != message.data_ptr():
            _bytes(output).copy_(_bytes(message))
        return None
    return _started(_all_gather(_bytes(output), _bytes(message), group=hop.group, async_op=True))


def all_to_all(output: Tensor, messages: Tensor, hop: Hop, sent: Sent) -> dist.Work | None:
    """Start sending part i of contiguous ``messages`` to rank i; part j of ``output`` comes from rank j."""
    if messages.numel() == 0:
        return None
    _count(hop, sent, messages.numel() * messages.element_size() // hop.size)
    if hop.group is None:
        _bytes(output).copy_(_bytes(messages))
        return None
    return _started(dist.all_to_all_single(_bytes(output), _bytes(messages), group=hop.group, async_op=True))


def broadcast_(tensor: Tensor, src: int, hop: Hop) -> None:
    """Overwrite contiguous ``tensor`` with rank ``src``'s, ``src`` counted in the hop."""
    if hop.group is None or tensor.numel() == 0:
        return
    if hop.rank == src:
        nbytes = tensor.numel() * tensor.element_size()
        _count(hop, Sent("control", "none", tensor.numel()), nbytes)
    dist.broadcast(_bytes(tensor), dist.get_global_rank(hop.group, src), group=hop.group)


def max_(tensor: Tensor, hop: Hop) -> None:
    """Overwrite an integer ``tensor`` with the elementwise maximum over the ranks."""
    if hop.group is not None:
        _count(hop, Sent("control", "none", tensor.numel()), tensor.numel() * tensor.element_size())
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=hop.group)


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small tensors must lie for ``group``'s backend."""
    is_nccl = dist.is_initialized() and "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def gather_ints(value: int, group: dist.ProcessGroup | None) -> list[int]:
    """Every rank's ``value``, in rank order."""
    mine = torch.tensor([value], dtype=torch.int64, device=control_device(group))
    of_ranks = mine.new_empty(dist.get_world_size(group))
    _started(_all_gather(of_ranks, mine, group=group, async_op=True)).wait()
    return [int(v) for v in of_ranks.tolist()]


def _started(work: Any) -> dist.Work:
    assert work is not None, "torch.distributed returned no Work for async_op=True"
    return work  # type: ignore[no-any-return]


def new_group(ranks: list[int], parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A process group of global ``ranks`` with ``parent``'s backend. Collective over ``ranks``, in the same order on each."""
    group = dist.new_group(ranks, backend=dist.get_backend(parent), use_local_synchronization=True)
    assert group is not None, "torch.distributed created no group"
    return group  # type: ignore[return-value]


def destroy_group(group: dist.ProcessGroup) -> None:
    """Free a group of :func:`new_group`."""
    if dist.is_initialized():
        dist.destroy_process_group(group)
