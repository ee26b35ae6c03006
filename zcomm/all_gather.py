"""All-gather: every rank's shard, whole on every rank, in any wire format (qwZ of "ZeRO++", arXiv:2306.10209).

    one hop     shard --quantize--> message --all-gather--> messages --decode--> output
    two hops    between the nodes among equal local ranks first, then inside the node: each byte crosses the network
                once per node. The same format on both hops: bytes are forwarded. Otherwise decoded and encoded again.

A shard that travels in its own dtype into contiguous rows is gathered in place, without staging.
"""

from __future__ import annotations

from torch import Tensor

from zcomm import backend, kernels
from zcomm.backend import Sent
from zcomm.formats import Format, codec_for
from zcomm.message import MessageLayout, layout_of
from zcomm.route import Group, Route, WireFormat, check_numbering, check_shard, find_route, rows_of
from zcomm.topology import Numbering
from zcomm.work import Steps, Work, run

__all__ = ["all_gather_single", "gather_steps"]

OPERATION = "all_gather"


def all_gather_single(
    output: Tensor,
    input: Tensor,
    group: Group = None,
    *,
    format: WireFormat = "none",
    numbering: Numbering = "rank",
    async_op: bool = False,
) -> Work | None:
    """Gather ``input`` of every rank into ``output``.

    Args:
        output: floating point, [world_size * n] contiguous, or [world_size, n] with contiguous rows. Every rank ends with
            the same bits in it, its own shard included, which is decoded from its own message.
        input: this rank's shard, floating point, [n] contiguous; may be its own place in ``output``. The same n on every
            rank.
        group: a ProcessGroup (default: all ranks) for one hop, or a :class:`zcomm.Topology` for two.
        format: a wire format; with a Topology also a pair, (between nodes, inside the node). ``"none"`` is ``output``'s
            dtype. The same on every rank.
        numbering: which row is whose; "rank" as in torch, or "local" (:mod:`zcomm.topology`).
        async_op: return a Work at once; ``output`` may be read, and ``input`` changed, after its ``wait()``.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        LayoutError, FormatError: Sizes, dtypes or formats do not fit. Raised before any communication.
        MessageError: Another rank sent something else, or bytes were damaged (with ZCOMM_CHECK=1).

    Cost for each rank: sends its message to every other rank; with two hops its message to one rank of every other node,
    and as many messages as there are nodes inside the node. No host sync on CUDA beyond the process group's.
    """
    route = find_route(group, format, "inter")
    check_numbering(numbering)
    rows = rows_of("output", output, route.world_size)
    check_shard("input", input, "output", rows)
    for _, hop_format in route.hops:
        codec_for(hop_format, input.dtype)
    steps = gather_steps(rows, input, route, numbering)
    return run(steps, async_op=async_op, queue=route.queue, device=output.device)


def gather_steps(rows: Tensor, shard: Tensor, route: Route, numbering: Numbering) -> Steps:
    """The steps of :func:`all_gather_single` on checked arguments."""
    if len(route.hops) == 1:
        return _one_hop(rows, shard, route)
    formats = [hop_format for _, hop_format in route.hops]
    if formats[0] == formats[1]:
        if numbering == "local" and _goes_in_place(rows, shard, formats[0]):
            return _two_hops_in_place(rows, shard, route)
        return _two_hops_forwarded(rows, shard, route, numbering)
    return _two_hops_recoded(rows, shard, route, numbering)


def _goes_in_place(rows: Tensor, shard: Tensor, format: Format) -> bool:
    return rows.is_contiguous() and shard.dtype == rows.dtype == codec_for(format, rows.dtype).dtype


def _sent(layout: MessageLayout, format: Format) -> Sent:
    return Sent(OPERATION, str(format), layout.numel)


def _one_hop(rows: Tensor, shard: Tensor, route: Route) -> Steps:
    hop, wire = route.hops[0]
    layout = layout_of(OPERATION, wire, rows.dtype, 1, shard.numel())
    if _goes_in_place(rows, shard, wire):
        yield backend.all_gather(rows, shard, hop, _sent(layout, wire))
        return
    message, messages = layout.new(1, shard.device), layout.new(hop.size, shard.device)
    kernels.quantize(shard, layout, message, 0, 0)
    yield backend.all_gather(messages, message, hop, _sent(layout, wire))
    kernels.decode(messages, layout, rows, rows.stride(0), 0)


def _two_hops_in_place(rows: Tensor, shard: Tensor, route: Route) -> Steps:
    (inter, wire), (intra, _) = route.hops
    of_local_rank = rows.view(route.ranks_per_node, -1)[route.local_rank]
    layout = layout_of(OPERATION, wire, rows.dtype, 1, shard.numel())
    yield backend.all_gather(of_local_rank, shard, inter, _sent(layout, wire))
    sent = Sent(OPERATION, str(wire), of_local_rank.numel())
    yield backend.all_gather(rows, of_local_rank, intra, sent)


def _two_hops_forwarded(rows: Tensor, shard: Tensor, route: Route, numbering: Numbering) -> Steps:
    (inter, wire), (intra, _) = route.hops
    layout = layout_of(OPERATION, wire, rows.dtype, 1, shard.numel())
    message = layout.new(1, shard.device)
    kernels.quantize(shard, layout, message, 0, 0)
    of_nodes = layout.new(route.num_nodes, shard.device)
    yield backend.all_gather(of_nodes, message, inter, _sent(layout, wire))
    messages = layout.new(route.world_size, shard.device)  # [local rank, node]
    yield backend.all_gather(messages, of_nodes, intra, Sent(OPERATION, str(wire), route.num_nodes * layout.numel))
    if numbering == "local":
        kernels.decode(messages, layout, rows, rows.stride(0), 0)
        return
    per_local_rank, per_node = route.strides(numbering, rows.stride(0))
    for local_rank, of_nodes in enumerate(messages.view(route.ranks_per_node, route.num_nodes, -1)):
        kernels.decode(of_nodes, layout, _from(rows, local_rank * per_local_rank), per_node, 0)


def _from(rows: Tensor, offset: int) -> Tensor:
    """The memory of ``rows`` from element ``offset`` on, for kernels that address by strides."""
    return rows.as_strided((0,), (1,), rows.storage_offset() + offset)


def _two_hops_recoded(rows: Tensor, shard: Tensor, route: Route, numbering: Numbering) -> Steps:
    (inter, wire), (intra, wire_inside) = route.hops
    numel, device = shard.numel(), shard.device
    layout = layout_of(OPERATION, wire, rows.dtype, 1, numel)
    message, of_nodes = layout.new(1, device), layout.new(route.num_nodes, device)
    kernels.quantize(shard, layout, message, 0, 0)
    yield backend.all_gather(of_nodes, message, inter, _sent(layout, wire))
    values = rows.new_empty(route.num_nodes * numel)
    kernels.decode(of_nodes, layout, values, numel, 0)
    inside = layout_of(OPERATION, wire_inside, rows.dtype, route.num_nodes, numel)
    mine, messages = inside.new(1, device), inside.new(route.ranks_per_node, device)
    kernels.quantize(values, inside, mine, 0, numel)
    yield backend.all_gather(messages, mine, intra, _sent(inside, wire_inside))
    kernels.decode(messages, inside, rows, *route.strides(numbering, rows.stride(0)))
