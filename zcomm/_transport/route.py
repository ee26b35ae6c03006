"""Argument checks and routing of collectives: hops, formats and sizes, all decided before any communication.

An error on one rank alone leaves the other ranks waiting. So checks use, if they can, only what is equal on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zcomm._base import env
from zcomm._base.arguments import check_choice, check_flag, check_process_group
from zcomm._formats.formats import Format, codec_for, get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._transport.backend import Hop, row_stride
from zcomm._transport.backend_choice import (
    BackendName,
    BackendWish,
    KernelsName,
    check_names,
    chosen_backend,
    unavailable_reason,
    unserved_reason,
)
from zcomm._transport.chunks import min_chunk_numel
from zcomm._transport.debug import compare_calls
from zcomm._transport.nccl_communicators import check_device, over_nccl
from zcomm._transport.topology import Numbering, Topology, hop_of_group
from zcomm._transport.work import WorkQueue
from zcomm.errors import BackendUnavailableError, ConfigError, FormatError, LayoutError, TopologyError

Group = dist.ProcessGroup | Topology | None
GroupOrMesh = Group | DeviceMesh
WireFormat = str | Format | tuple[str | Format, str | Format]


@dataclass(eq=False, slots=True)  # not frozen, as a Hop
class Route:
    """The hops of one collective, in order, each with its format."""

    operation: str
    hops: tuple[tuple[Hop, Format], ...]
    num_nodes: int
    ranks_per_node: int
    local_rank: int
    queue: WorkQueue | None
    """The Topology's; None for a ProcessGroup."""
    all_ranks: Hop
    """One hop over all ranks."""
    node_rank: int = 0
    backend: BackendName = "torch"
    kernels: str = "auto"

    def layout(self, wire: Format, dtype: torch.dtype, num_segments: int, segment_numel: int) -> MessageLayout:
        """The layout of messages in format ``wire``: see :func:`zcomm._formats.message.layout_of`."""
        return layout_of(self.operation, wire, dtype, num_segments, segment_numel, self.kernels)

    def compare(self, **facts: object) -> None:
        """For ZCOMM_DEBUG=1: raise on every rank unless all make this call with equal ``facts``."""
        compare_calls(self.operation, self.hops, self.all_ranks, **facts)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise FormatError unless every hop's format takes values of ``dtype``."""
        for _, wire in self.hops:
            codec_for(wire, dtype)

    def check_device(self, device: torch.device) -> None:
        """Raise BackendUnavailableError if the backend does not support ``device``."""
        if self.backend == "nccl":
            check_device(self.operation, device)

    def divisor_inside(self, dtype: torch.dtype, divisor: float, *, has_residual: bool = False) -> int:
        """What sums inside a node are divided by before hop 2, for a mean (``divisor`` above 1) of ``dtype``.

        fp16 ends at 65,504: a node's sum may lie beyond, though the mean does not. A power of two, so other bits stay
        as they are. 1 for other formats, for a sum, which overflows as in one hop, and with a residual, which is in the
        units of the sum.
        """
        if divisor == 1 or has_residual or len(self.hops) == 1:
            return 1
        if codec_for(self.hops[-1][1], dtype).dtype != torch.float16:
            return 1
        return int(1 << (self.ranks_per_node - 1).bit_length())

    def min_chunk_numel(self, device: torch.device) -> int:
        """The smallest worthwhile chunk of a shard on ``device``, in elements."""
        return min_chunk_numel(device.type, self.world_size, () if self.queue is None else self.queue.links)

    def own_row(self, numbering: Numbering) -> int:
        """The index of the row that this rank owns."""
        to_local_rank, to_node = self.strides(numbering, 1)
        return self.local_rank * to_local_rank + self.node_rank * to_node

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def is_plain(self) -> bool:
        """Whether it is one hop over torch's process group, which needs no views of contiguous tensors."""
        return len(self.hops) == 1 and self.backend == "torch"

    def strides(self, numbering: Numbering, row: int) -> tuple[int, int]:
        """Elements from shard (n, l) to (n, l + 1) and to (n + 1, l), with shards of ``row`` elements."""
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
    """The route over ``group``. With two hops, ``first`` is the first one, and formats are in the order of the hops.

    ``num_hops=1`` sends to all ranks at once although there are several nodes, in the inter-node format.
    ``backend=None`` is the Topology's, or torch over a ProcessGroup.
    """
    check_group(group)
    carried_by = chosen_backend(backend, group.backend if isinstance(group, Topology) else None)
    pair = (get_format(format), get_format(format)) if isinstance(format, (str, Format)) else format_pair(format)
    if not isinstance(group, Topology):
        if not isinstance(format, (str, Format)):
            raise FormatError(f"a pair of formats needs a Topology as group: format={format!r}, group={group!r}")
        return route_over(group, operation, pair[0], backend)
    key = (operation, *pair, first, num_hops, carried_by, env.is_set("ZCOMM_CHECK"))
    route = group.routes.get(key)
    if route is None:
        route = group.routes[key] = _route_of(operation, group, pair, first, num_hops, carried_by)
    return cast(Route, route)


def route_over(group: dist.ProcessGroup | None, operation: str, wire: Format, backend: BackendName | None) -> Route:
    """The route over a process group: one hop. Not kept, since it would keep the group alive."""
    carried_by, hop = chosen_backend(backend, None), hop_of_group(group)
    if carried_by == "nccl":
        (hop,) = over_nccl(hop)
    return Route(operation, ((hop, wire),), 1, hop.size, hop.rank, None, hop, 0, carried_by)


def _route_of(
    operation: str, t: Topology, pair: tuple[Format, Format], first: str, num_hops: int, carried_by: BackendName
) -> Route:
    if t.has_two_hops and num_hops == 2:
        both = _over_backend(carried_by, *((t.intra, t.inter) if first == "intra" else (t.inter, t.intra)))
        hops = tuple(zip(paired_hops(*both), pair, strict=True))
    else:
        chosen = pair[0] if (t.num_nodes == 1) == (first == "intra") else pair[1]
        hops = ((_over_backend(carried_by, t.world)[0], chosen),)
    place = t.num_nodes, t.ranks_per_node, t.local_rank, t.queue, t.world, t.node_rank
    return Route(operation, hops, *place, carried_by, t.kernels)


def paired_hops(first: Hop, second: Hop) -> tuple[Hop, Hop]:
    """The two hops of a collective. With ZCOMM_CHECK=1 the ranks of each receive the verdict of the other."""
    return (first.paired_with(second), second.paired_with(first)) if env.is_set("ZCOMM_CHECK") else (first, second)


def separate_hops(topology: Topology) -> tuple[Hop, Hop]:
    """The intra-node and the inter-node hop, for exchanges over one of the two at a time."""
    intra, inter = _over_backend(topology.backend, topology.intra, topology.inter)
    return paired_hops(intra, inter) if topology.has_two_hops else (intra, inter)


def intra_hop(topology: Topology) -> Hop:
    """The intra-node hop. With ZCOMM_CHECK=1 a damaged message in one node raises on the ranks of all nodes."""
    if topology.has_two_hops:
        return separate_hops(topology)[0]
    return _over_backend(topology.backend, topology.intra)[0]


def _over_backend(backend: BackendName, *hops: Hop) -> tuple[Hop, ...]:
    return over_nccl(*hops) if backend == "nccl" else hops


def format_pair(formats: Any) -> tuple[Format, Format]:
    """Two formats, in the order of the hops. Raises FormatError unless ``formats`` is a pair."""
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
    """Check the types of a collective's arguments, before anything else is done.

    Returns:
        ``tensors``, in the order given. Under no_grad() they are detached, as torch's collectives do: an exchange may
        complete in a thread in which gradients are recorded.

    Raises:
        LayoutError: A tensor cannot be sent: :func:`check_sendable`.
        TopologyError: ``group`` is not a group, or ``numbering`` is unknown.
        FormatError: One of ``formats`` is not a name, a Format or a pair of them.
        ConfigError: ``async_op`` is not a bool, or ``residual`` not a Residual.
    """
    found = []
    for name, tensor in tensors.items():
        takes_part = isinstance(tensor, Tensor) and tensor.requires_grad and not torch.is_grad_enabled()
        found.append(check_sendable(name, cast("Tensor", tensor).detach() if takes_part else tensor))
    check_group(group)
    check_numbering(numbering)
    for wire in formats:
        if not isinstance(wire, (str, Format)):
            format_pair(wire)
    check_flag("async_op", async_op)
    if residual is not None and not hasattr(residual, "set_loss_scale"):
        raise ConfigError(f"residual must be a zcomm.Residual or None: residual={residual!r}")
    return found


def check_group(group: object) -> None:
    """Raise TopologyError unless ``group`` is a Topology, a ProcessGroup or None."""
    if not isinstance(group, Topology):
        check_process_group(group, "a ProcessGroup, a zcomm.Topology, or None for all ranks")


def as_group(group: GroupOrMesh) -> Group:
    """``group``, or the process group of a mesh. Raises TopologyError for a mesh of several dimensions."""
    if group is not None and not isinstance(group, Topology) and isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise TopologyError(
                f"a mesh as group must have one dimension: ndim={group.ndim}; pass mesh[name] for one hop, or "
                "zcomm.Topology.from_mesh(mesh), made once, for two"
            )
        return group.get_group()
    return group


def as_flat(tensor: Tensor) -> Tensor:
    """``tensor`` as one dimension, if it is contiguous."""
    return tensor.view(-1) if tensor.ndim != 1 and tensor.is_contiguous() else tensor


def check_topology(topology: object) -> None:
    if not isinstance(topology, Topology):
        raise TopologyError(
            f"topology must be a zcomm.Topology: got {type(topology).__name__}; make one with "
            "Topology(ranks_per_node=..., group=...) or Topology.from_env()"
        )


def check_sendable(name: str, tensor: object) -> Tensor:
    """Return ``tensor`` if it is a dense floating-point tensor with memory and without requires_grad.

    Raises:
        LayoutError: It is not. A DTensor is not; its local part is.
    """
    if not isinstance(tensor, Tensor):
        raise LayoutError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    is_plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    if is_plain and not tensor.requires_grad and tensor.is_floating_point():  # the usual case, without the rest
        return tensor
    problem = None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a wrapper without memory
        of_dtensor = ": pass tensor.to_local()" if hasattr(tensor, "to_local") else ""
        problem = f"a plain tensor, got {type(tensor).__name__}{of_dtensor}"
    elif tensor.layout is not torch.strided:
        problem = f"dense, got layout={tensor.layout}"
    elif not tensor.is_floating_point():
        problem = f"real floating point, got dtype={tensor.dtype}"
    elif tensor.device.type == "meta":
        problem = "on a device with memory, got device=meta"
    elif tensor.requires_grad:
        problem = "without requires_grad (only zcomm.functional differentiates): pass tensor.detach(), or use no_grad()"
    if problem is not None:
        raise LayoutError(f"{name} must be {problem}")
    return tensor


def check_flat(name: str, tensor: Tensor) -> None:
    """Raise LayoutError unless ``tensor`` is sendable (:func:`check_sendable`), flat and contiguous."""
    check_sendable(name, tensor)
    _check_contiguous(name, tensor)


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise LayoutError(
            f"{name} must be flat and contiguous, got shape={tuple(tensor.shape)}, stride={tensor.stride()}"
        )


def check_backend(
    what: str, topology: Topology | None, backend: BackendWish, kernels: KernelsName, device: torch.device
) -> None:
    """Check that backend and kernels support ``what``, whose tensors are on ``device``. No communication.

    Raises:
        ConfigError: The backend or the kernels do not exist, or ``topology`` has others.
        BackendUnavailableError: They do not support the device, or are unavailable in this process.
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
    """``tensor`` as [world_size, n]. It is flat and contiguous, or 2-D with contiguous rows."""
    check_sendable(name, tensor)
    if tensor.ndim == 2 and tensor.shape[0] == world_size:
        _check_contiguous(name, tensor[0])
        if world_size > 1 and tensor.stride(0) < tensor.shape[1]:
            raise LayoutError(f"rows of {name} must not overlap: shape={tuple(tensor.shape)}, stride={tensor.stride()}")
        return tensor
    _check_contiguous(name, tensor)
    if tensor.numel() % world_size:
        raise LayoutError(f"{name} must divide over the ranks: numel={tensor.numel()}, world_size={world_size}")
    return tensor.view(world_size, -1)


def check_shard(shard_name: str, shard: Tensor, rows_name: str, rows: Tensor) -> None:
    """Raise LayoutError unless ``shard``, which is sendable, is flat, as long as a row of ``rows``, and where it is."""
    _check_contiguous(shard_name, shard)
    if shard.numel() != rows.shape[1]:
        raise LayoutError(
            f"{rows_name} must have world_size times as many elements as {shard_name}: {rows_name} {rows.numel()}, "
            f"{shard_name} {shard.numel()}, world_size={rows.shape[0]}"
        )
    if shard.device != rows.device:
        raise LayoutError(f"{shard_name} and {rows_name} must be on one device: {shard.device}, {rows.device}")


def check_apart(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise LayoutError if the tensors share memory: one is written while the other is still being sent."""
    if tensor.numel() and other.numel() and _begin(tensor) < _end(other) and _begin(other) < _end(tensor):
        raise LayoutError(f"{name} and {other_name} must not overlap in memory: {_extent(tensor)}, {_extent(other)}")


def check_own_row(shard: Tensor, rows: Tensor, route: Route, numbering: Numbering) -> None:
    """Raise LayoutError unless ``shard`` is this rank's row of ``rows`` or shares no memory with them."""
    begin, of_rows = shard.data_ptr(), rows.data_ptr()
    if rows.is_contiguous() and (begin + shard.nbytes <= of_rows or of_rows + rows.nbytes <= begin):
        return
    stride = row_stride(rows, route.world_size) * rows.element_size()
    if begin != of_rows + route.own_row(numbering) * stride or shard.dtype != rows.dtype:
        check_apart("input", shard, "output (but for this rank's own row in it)", rows)


def _begin(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _end(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.data_ptr() + tensor.nbytes
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _extent(tensor: Tensor) -> str:
    return f"bytes {_begin(tensor):#x} to {_end(tensor):#x}"


def divisor_of(op: Any, world_size: int) -> int:
    """The divisor of a sum: 1 for SUM, the world size for AVG."""
    if isinstance(op, (str, dist.ReduceOp, dist.ReduceOp.RedOpType)):
        if op in ("sum", dist.ReduceOp.SUM):
            return 1
        if op in ("avg", dist.ReduceOp.AVG):
            return world_size
    raise LayoutError(f"op must be 'sum' or 'avg': op={op!r}")


def check_numbering(numbering: object) -> None:
    check_choice("numbering", numbering, ("rank", "local"), TopologyError)
