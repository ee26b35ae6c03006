"""What every collective checks and decides before it communicates: the way over the ranks, formats, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm._base import env
from zcomm._base.arguments import check_choice, check_flag, check_process_group
from zcomm._formats.formats import Format, get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._transport.backend import Hop
from zcomm._transport.backend_choice import (
    BackendName,
    BackendWish,
    KernelsName,
    check_names,
    chosen_backend,
    unavailable_reason,
    unserved_reason,
)
from zcomm._transport.chunks import least_chunk
from zcomm._transport.debug import compare_calls
from zcomm._transport.nccl_communicators import check_device, over_nccl
from zcomm._transport.topology import Numbering, Topology, hop_of_group
from zcomm._transport.work import WorkQueue
from zcomm.errors import BackendUnavailableError, ConfigError, FormatError, LayoutError, TopologyError

Group = dist.ProcessGroup | Topology | None
WireFormat = str | Format | tuple[str | Format, str | Format]


@dataclass(frozen=True)
class Route:
    """The hops of one collective, in the order they happen, each with its format."""

    operation: str
    hops: tuple[tuple[Hop, Format], ...]
    num_nodes: int
    ranks_per_node: int
    local_rank: int
    queue: WorkQueue | None
    """The Topology's; None for a ProcessGroup."""
    whole: Hop
    """All ranks in one hop."""
    node_rank: int = 0
    backend: BackendName = "torch"
    """What carries it."""
    kernels: str = "auto"
    """What encodes and decodes its messages."""

    def layout(self, wire: Format, dtype: torch.dtype, num_segments: int, segment_numel: int) -> MessageLayout:
        """That of its messages in format ``wire``: see :func:`zcomm._formats.message.layout_of`."""
        return layout_of(self.operation, wire, dtype, num_segments, segment_numel, self.kernels)

    def compare(self, **facts: object) -> None:
        """With ZCOMM_DEBUG=1, raise on every rank unless all make this call with equal ``facts``."""
        compare_calls(self.operation, self.hops, self.whole, **facts)

    def check_device(self, device: torch.device) -> None:
        """Raise BackendUnavailableError if this goes over NCCL, and ``device`` is not a GPU."""
        if self.backend == "nccl":
            check_device(self.operation, device)

    def least_chunk(self, device: torch.device) -> int:
        """Elements of a shard on ``device`` from which a chunk is worth what it costs."""
        return least_chunk(device.type, self.world_size, () if self.queue is None else self.queue.links)

    def own_row(self, numbering: Numbering) -> int:
        """The row that this rank owns."""
        to_local_rank, to_node = self.strides(numbering, 1)
        return self.local_rank * to_local_rank + self.node_rank * to_node

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_nodes * self.ranks_per_node

    def strides(self, numbering: Numbering, row: int) -> tuple[int, int]:
        """Elements from shard (n, l) to (n, l + 1), and to (n + 1, l), if shards are ``row`` elements apart."""
        return (row, row * self.ranks_per_node) if numbering == "rank" else (row * self.num_nodes, row)


def find_route(
    operation: str,
    group: Group,
    format: WireFormat,
    *,
    first: Literal["intra", "inter"],
    num_hops: int = 2,
    backend: BackendName | None = None,
) -> Route:
    """The hops over ``group``; with two, ``first`` says which comes first, and formats are in that order.

    ``num_hops`` 1: all ranks at once although there are nodes, in the format that would travel between them.
    ``backend`` None: the Topology's, or torch over a ProcessGroup.
    """
    check_group(group)
    carrier = chosen_backend(backend, group.backend if isinstance(group, Topology) else None)
    pair = (get_format(format), get_format(format)) if isinstance(format, (str, Format)) else pair_of(format)
    if not isinstance(group, Topology):
        if not isinstance(format, (str, Format)):
            raise FormatError(f"a pair of formats needs a Topology as group: format={format!r}, group={group!r}")
        (hop,) = _carried(carrier, hop_of_group(group))
        return Route(operation, ((hop, pair[0]),), 1, hop.size, hop.rank, None, hop, 0, carrier)
    t = group
    if t.has_two_hops and num_hops == 2:
        both = _carried(carrier, *((t.intra, t.inter) if first == "intra" else (t.inter, t.intra)))
        both = linked(*both)
        return Route(
            operation,
            tuple(zip(both, pair, strict=True)),
            t.num_nodes,
            t.ranks_per_node,
            t.local_rank,
            t.queue,
            t.world,
            t.node_rank,
            carrier,
            t.kernels,
        )
    is_intra = t.num_nodes == 1
    chosen = pair[0] if is_intra == (first == "intra") else pair[1]
    hops = ((_carried(carrier, t.world)[0], chosen),)
    place = t.num_nodes, t.ranks_per_node, t.local_rank, t.queue, t.world, t.node_rank
    return Route(operation, hops, *place, carrier, t.kernels)


def linked(first: Hop, second: Hop) -> tuple[Hop, Hop]:
    """The two hops of a collective of all ranks: with ZCOMM_CHECK=1 those of each hear of damage in the other's."""
    return (first.next_to(second), second.next_to(first)) if env.is_set("ZCOMM_CHECK") else (first, second)


def hops_apart(topology: Topology) -> tuple[Hop, Hop]:
    """The ranks of this node, and those of equal local rank, for exchanges over one of the two at a time."""
    intra, inter = _carried(topology.backend, topology.intra, topology.inter)
    return linked(intra, inter) if topology.has_two_hops else (intra, inter)


def hop_inside(topology: Topology) -> Hop:
    """The ranks of this node, for exchanges among them. With ZCOMM_CHECK=1 damage to one is reported to all nodes."""
    if topology.has_two_hops:
        return hops_apart(topology)[0]
    return _carried(topology.backend, topology.intra)[0]


def _carried(backend: BackendName, *hops: Hop) -> tuple[Hop, ...]:
    return over_nccl(*hops) if backend == "nccl" else hops


def pair_of(formats: Any) -> tuple[Format, Format]:
    """Two formats, in the order of the hops; FormatError unless ``formats`` are a pair."""
    if not isinstance(formats, tuple) or len(formats) != 2:
        raise FormatError(f"format must be one format, or a pair in the order of the hops: format={formats!r}")
    return get_format(formats[0]), get_format(formats[1])


def check_arguments(
    group: object,
    *formats: object,
    numbering: object = "rank",
    async_op: object = False,
    residual: object = None,
    **tensors: object,
) -> list[Tensor]:
    """What kind of thing each argument of a collective is, asked before anything else is.

    Returns:
        ``tensors``, in the order given; detached where gradients are not recorded, as torch's collectives take them:
        an exchange may end in a thread that records them.

    Raises:
        LayoutError: A tensor is none that can be sent: :func:`check_sendable`.
        TopologyError: ``group`` is none, or ``numbering`` is unknown.
        FormatError: One of ``formats`` is neither a name nor a Format nor a pair of them.
        ConfigError: ``async_op`` is neither True nor False, or ``residual`` no Residual.
    """
    found = []
    for name, tensor in tensors.items():
        takes_part = isinstance(tensor, Tensor) and tensor.requires_grad and not torch.is_grad_enabled()
        found.append(check_sendable(name, cast("Tensor", tensor).detach() if takes_part else tensor))
    check_group(group)
    check_numbering(numbering)
    for wire in formats:
        if not isinstance(wire, (str, Format)):
            pair_of(wire)
    check_flag("async_op", async_op)
    if residual is not None and not hasattr(residual, "set_loss_scale"):
        raise ConfigError(f"residual must be a zcomm.Residual or None: residual={residual!r}")
    return found


def check_group(group: object) -> None:
    """Raise TopologyError unless ``group`` can be communicated over."""
    if not isinstance(group, Topology):
        check_process_group(group, "a ProcessGroup, a zcomm.Topology, or None for all ranks")


def check_topology(topology: object) -> None:
    """Raise TopologyError unless ``topology`` is one."""
    if not isinstance(topology, Topology):
        raise TopologyError(
            f"topology must be a zcomm.Topology: got {type(topology).__name__}; make one with "
            "Topology(ranks_per_node=..., group=...) or Topology.from_env()"
        )


def check_sendable(name: str, tensor: object) -> Tensor:
    """``tensor``, which is dense, floating point, with memory of its own, without gradient; of any shape.

    Raises:
        LayoutError: It is not; a DTensor is none, its local part is.
    """
    if not isinstance(tensor, Tensor):
        raise LayoutError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    problem = None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # it stands for others, and has no memory
        of_dtensor = ": pass tensor.to_local()" if hasattr(tensor, "to_local") else ""
        problem = f"a plain tensor, got {type(tensor).__name__}{of_dtensor}"
    elif tensor.layout is not torch.strided:
        problem = f"dense, got layout={tensor.layout}"
    elif not tensor.is_floating_point():
        problem = f"real floating point, got dtype={tensor.dtype}"
    elif tensor.device.type == "meta":
        problem = "on a device with memory, got device=meta"
    elif tensor.requires_grad:
        problem = "without requires_grad (collectives are not differentiated): pass tensor.detach(), or use no_grad()"
    if problem is not None:
        raise LayoutError(f"{name} must be {problem}")
    return tensor


def check_flat(name: str, tensor: Tensor) -> None:
    """``tensor`` can be sent as it lies: :func:`check_sendable`, flat and contiguous."""
    check_sendable(name, tensor)
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise LayoutError(
            f"{name} must be flat and contiguous, got shape={tuple(tensor.shape)}, stride={tensor.stride()}"
        )


def check_carrier(
    what: str, topology: Topology | None, backend: BackendWish, kernels: KernelsName, device: torch.device
) -> None:
    """Raise unless ``what``, whose tensors are on ``device``, can be carried as is asked for. No communication.

    Raises:
        ConfigError: There is no such backend, or no such kernels; or the given ``topology`` has others.
        BackendUnavailableError: They do not serve the device, or this process cannot have them.
    """
    check_names(backend, kernels)
    if topology is not None:
        for name, asked, has in (("backend", backend, topology.backend), ("kernels", kernels, topology.kernels)):
            if asked not in ("auto", has):
                raise ConfigError(
                    f"{name}={asked!r}, but the given topology has {name}={has!r}: leave one out, or give a Topology "
                    f"that was made with {name}={asked!r}"
                )
        backend, kernels = topology.backend, topology.kernels
    if backend == "nccl":
        check_device(what, device)
    if reason := unserved_reason(kernels, device.type):
        raise BackendUnavailableError(
            f"kernels={kernels!r} do not serve this {what}, whose tensors are on {device}: {reason}; use kernels='auto'"
        )
    if reason := unavailable_reason(backend, kernels):
        raise BackendUnavailableError(reason)


def rows_of(name: str, tensor: Tensor, world_size: int) -> Tensor:
    """``tensor`` as [world_size, n]: flat and contiguous, or 2-D with contiguous rows."""
    check_sendable(name, tensor)
    if tensor.ndim == 2 and tensor.shape[0] == world_size and tensor.layout is torch.strided:
        check_flat(name, tensor[0])
        if world_size > 1 and tensor.stride(0) < tensor.shape[1]:
            raise LayoutError(f"rows of {name} must not overlap: shape={tuple(tensor.shape)}, stride={tensor.stride()}")
        return tensor
    check_flat(name, tensor)
    if tensor.numel() % world_size:
        raise LayoutError(f"{name} must divide over the ranks: numel={tensor.numel()}, world_size={world_size}")
    return tensor.view(world_size, -1)


def check_shard(shard_name: str, shard: Tensor, rows_name: str, rows: Tensor) -> None:
    """``shard`` is as long as a row of ``rows``, on the same device."""
    check_flat(shard_name, shard)
    if shard.numel() != rows.shape[1]:
        raise LayoutError(
            f"{rows_name} must have world_size times as many elements as {shard_name}: {rows_name} {rows.numel()}, "
            f"{shard_name} {shard.numel()}, world_size={rows.shape[0]}"
        )
    if shard.device != rows.device:
        raise LayoutError(f"{shard_name} and {rows_name} must be on one device: {shard.device}, {rows.device}")


def check_apart(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """``tensor`` and ``other`` share no memory: one is written while the other is still being sent."""
    if tensor.numel() and other.numel() and _begin(tensor) < _end(other) and _begin(other) < _end(tensor):
        raise LayoutError(f"{name} and {other_name} must not overlap in memory: {_extent(tensor)}, {_extent(other)}")


def check_own_row(shard: Tensor, rows: Tensor, row: int) -> None:
    """``shard`` is row ``row`` of ``rows``, or shares no memory with them."""
    if shard.data_ptr() != rows.data_ptr() + row * rows.stride(0) * rows.element_size() or shard.dtype != rows.dtype:
        check_apart("input", shard, "output (but for this rank's own row in it)", rows)


def _begin(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _end(tensor: Tensor) -> int:
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _extent(tensor: Tensor) -> str:
    return f"bytes {_begin(tensor):#x} to {_end(tensor):#x}"


def divisor_of(op: Any, world_size: int) -> int:
    """What a sum is divided by: 1 for SUM, the world size for AVG."""
    if isinstance(op, (str, dist.ReduceOp, dist.ReduceOp.RedOpType)):
        if op in ("sum", dist.ReduceOp.SUM):
            return 1
        if op in ("avg", dist.ReduceOp.AVG):
            return world_size
    raise LayoutError(f"op must be 'sum' or 'avg': op={op!r}")


def check_numbering(numbering: object) -> None:
    """``numbering`` is known."""
    check_choice("numbering", numbering, ("rank", "local"), TopologyError)
