"""All-reduce in place: a reduce-scatter, then an all-gather of the reduced shards."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zcomm.all_gather import gather_steps
from zcomm.formats import Format, codec_for
from zcomm.reduce_scatter import reduce_steps
from zcomm.route import Group, Route, WireFormat, check_flat, divisor_of, find_route
from zcomm.work import Steps, Work, run

__all__ = ["all_reduce"]


def all_reduce(
    tensor: Tensor,
    op: Any = "sum",
    group: Group = None,
    *,
    format: WireFormat = "none",
    gather_format: WireFormat | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sum or average ``tensor`` over all ranks, in place; the same bits on every rank.

    Args:
        tensor: floating point, [n] contiguous, any n (padded inside). The same n on every rank.
        op: "sum" or "avg", or ``ReduceOp.SUM`` / ``AVG``.
        group: a ProcessGroup (default: all ranks), or a :class:`zcomm.Topology`.
        format: of the reduce-scatter, as there.
        gather_format: of the all-gather, as there; default: ``format``, each kind of link as in the reduce-scatter.
        async_op: return a Work at once.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        LayoutError, FormatError: As the two collectives. Raised before any communication.

    Cost for each rank: that of both collectives on ceil(n / world_size) elements a shard, and one copy each way.
    """
    check_flat("tensor", tensor)
    if gather_format is None:
        gather_format = format if isinstance(format, (str, Format)) else (format[1], format[0])
    reducing, gathering = find_route(group, format, "intra"), find_route(group, gather_format, "inter")
    for _, hop_format in (*reducing.hops, *gathering.hops):
        codec_for(hop_format, tensor.dtype)
    steps = _steps(tensor, reducing, gathering, divisor_of(op, reducing.world_size))
    return run(steps, async_op=async_op, queue=reducing.queue, device=tensor.device)


def _steps(tensor: Tensor, reducing: Route, gathering: Route, divisor: int) -> Steps:
    world_size = reducing.world_size
    rows = tensor.new_zeros(world_size, -(-tensor.numel() // world_size))
    rows.view(-1)[: tensor.numel()].copy_(tensor)
    shard = tensor.new_empty(rows.shape[1])
    yield from reduce_steps(shard, rows, reducing, "local", divisor)
    yield from gather_steps(rows, shard, gathering, "local")
    tensor.copy_(rows.view(-1)[: tensor.numel()])
