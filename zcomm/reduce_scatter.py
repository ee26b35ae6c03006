"""Reduce-scatter by exchange and local sum, in rank order, in any wire format (qgZ of "ZeRO++", arXiv:2306.10209).

    one hop     rows --quantize--> messages --all-to-all--> messages --decode, sum--> output
    two hops    rows --quantize, permuted--> inside the node --decode, sum, requantize--> between nodes --decode, sum-->

With N nodes of L ranks and shards of m elements, hop 1 sends each local rank the N shards that its ranks of all nodes
own, [N, m]; hop 2 sends each node its one, 1 / L of what one hop would send between nodes. Sums are in float32, in
rank order (then node order), so the bits do not depend on timing or on the backend's algorithm. Large shards go in
chunks: hop 2 of one overlaps hop 1 of the next (:mod:`zcomm.chunks`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zcomm import backend, kernels
from zcomm.auto import resolve
from zcomm.backend import Sent
from zcomm.chunks import chunks_of, pipelined
from zcomm.formats import codec_for
from zcomm.message import MessageLayout, layout_of
from zcomm.route import Group, Route, WireFormat, check_numbering, check_shard, divisor_of, find_route, rows_of
from zcomm.topology import Numbering
from zcomm.work import Steps, Work, nothing, run

__all__ = ["reduce_scatter_single", "reduce_steps"]


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: Any = "sum",
    *,
    group: Group = None,
    format: WireFormat = "none",
    numbering: Numbering = "rank",
    async_op: bool = False,
) -> Work | None:
    """Sum or average ``input`` over all ranks; each ends with its shard.

    Args:
        output: this rank's shard, floating point, [n] contiguous; its dtype may be wider than ``input``'s.
        input: floating point, [world_size * n] contiguous, or [world_size, n] with contiguous rows. Unchanged; must not
            be changed before an asynchronous call has been waited for.
        op: "sum" or "avg", or ``ReduceOp.SUM`` / ``AVG``. A mean is one division, after the last hop.
        group: a ProcessGroup (default: all ranks) for one hop, or a :class:`zcomm.Topology` for two.
        format: a wire format; with a Topology also a pair, (inside the node, between nodes). ``"none"`` is ``input``'s
            dtype on both hops, ``"auto"`` what was measured to be fastest (:mod:`zcomm.auto`). The same on every rank.
        numbering: which row is whose; "rank" as in torch, or "local" (:mod:`zcomm.topology`).
        async_op: return a Work at once.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        LayoutError, FormatError: Sizes, dtypes, op or formats do not fit. Raised before any communication.
        MessageError: Another rank sent something else, or bytes were damaged (with ZCOMM_CHECK=1).

    Cost for each rank: sends one message to every other rank; with two hops one of num_nodes segments to every other
    rank of the node, and one segment to one rank of every other node. Scratch: the messages sent and received.
    """
    check_numbering(numbering)
    chosen = resolve(format, "reduce_scatter", group, input, input.numel(), first="intra", numbering=numbering)
    route = find_route("reduce_scatter", group, chosen.format, first="intra", num_hops=chosen.num_hops)
    divisor = divisor_of(op, route.world_size)
    rows = rows_of("input", input, route.world_size)
    check_shard("output", output, "input", rows)
    for _, hop_format in route.hops:
        codec_for(hop_format, input.dtype)
    steps = reduce_steps(output, rows, route, numbering, divisor)
    return run(steps, async_op=async_op, device=output.device, queue=route.queue, num_exchanges=len(route.hops))


def reduce_steps(output: Tensor, rows: Tensor, route: Route, numbering: Numbering, divisor: int) -> Steps:
    """The steps of :func:`reduce_scatter_single` on checked arguments."""
    if not output.numel():
        return nothing()
    if len(route.hops) == 1:
        return _one_hop(output, rows, route, divisor)
    chunks = chunks_of(output.numel(), *(wire for _, wire in route.hops))
    of_chunks = [_two_hops(output[c], rows[:, c], route, numbering, divisor) for c in chunks]
    return pipelined(of_chunks, num_exchanges=2)


def _one_hop(output: Tensor, rows: Tensor, route: Route, divisor: int) -> Steps:
    hop, wire = route.hops[0]
    numel = output.numel()
    layout = layout_of(route.operation, wire, rows.dtype, 1, numel)
    received = layout.new(hop.size, output.device)
    sending = _encoded(rows, layout, hop.size, (rows.stride(0), 0), is_in_order=True)
    yield backend.all_to_all(received, sending, hop, Sent(route.operation, str(wire), numel))
    kernels.decode_sum(received, layout, output, 0, divisor)


def _two_hops(output: Tensor, rows: Tensor, route: Route, numbering: Numbering, divisor: int) -> Steps:
    """``output`` and ``rows`` [world_size, n] may be a chunk of a larger shard."""
    (intra, wire), (inter, wire_between) = route.hops
    numel, device = output.numel(), output.device
    layout = layout_of(route.operation, wire, rows.dtype, route.num_nodes, numel)
    received = layout.new(intra.size, device)
    strides = route.strides(numbering, rows.stride(0))
    sending = _encoded(rows, layout, intra.size, strides, is_in_order=numbering == "local")
    yield backend.all_to_all(received, sending, intra, Sent(route.operation, str(wire), layout.numel))
    between = layout_of(route.operation, wire_between, rows.dtype, 1, numel)
    partial = between.new(inter.size, device)
    kernels.decode_sum_requantize(received, layout, partial, between)
    received = between.new(inter.size, device)
    yield backend.all_to_all(received, partial, inter, Sent(route.operation, str(wire_between), numel))
    kernels.decode_sum(received, between, output, 0, divisor)


def _encoded(
    rows: Tensor, layout: MessageLayout, num_messages: int, strides: tuple[int, int], *, is_in_order: bool
) -> Tensor:
    """The messages of hop 1; ``rows`` themselves where they are the bytes to send."""
    if is_in_order and rows.is_contiguous() and layout.codec.dtype == rows.dtype:
        return rows
    messages = layout.new(num_messages, rows.device)
    kernels.quantize(rows, layout, messages, *strides)
    return messages
