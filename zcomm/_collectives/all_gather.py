"""All-gather in any wire format (qwZ of "ZeRO++", arXiv:2306.10209).

    one hop     shard --quantize--> message --all-gather--> messages --decode--> output
    two hops    first between nodes, among the ranks of equal local rank, then inside the node: each byte crosses the
                network once per node. With the same format on both hops messages are forwarded; otherwise they are
                decoded and encoded again.

A shard that is sent in its own dtype into rows of that dtype is gathered in place, without a copy; on two hops a small
one only if the rows are contiguous and numbered local. On two hops large shards are sent in chunks, so that hop 2 of a
chunk overlaps hop 1 of the next (:mod:`zcomm._transport.chunks`).

Shards of different lengths: :mod:`zcomm._collectives.uneven_shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from zcomm._base import env
from zcomm._collectives.auto_format import resolve
from zcomm._collectives.coalesced import LIST, coalesced, rows_and_shards
from zcomm._collectives.encoder import Encoder, check_random
from zcomm._collectives.nccl_steps import gather_over_nccl, is_native
from zcomm._collectives.plans import CallOptions, Checked, planned
from zcomm._collectives.uneven_shards import uneven_all_gather
from zcomm._formats.formats import codec_for, is_same_wire
from zcomm._formats.message import MessageInfo, MessageLayout
from zcomm._formats.philox import RandomKey
from zcomm._kernels import kernels
from zcomm._transport import backend
from zcomm._transport.backend_choice import BackendName
from zcomm._transport.chunks import chunks_of, pipelined
from zcomm._transport.route import (
    Group,
    GroupOrMesh,
    Route,
    WireFormat,
    as_flat,
    as_group,
    check_arguments,
    check_own_row,
    check_shard,
    find_route,
    rows_of,
)
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Steps, Work, nothing, run


def all_gather_single(
    output: Tensor | Sequence[Tensor],
    input: Tensor | Sequence[Tensor],
    group: GroupOrMesh = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
    format: WireFormat = "none",
    numbering: Numbering = "rank",
    random: RandomKey | None = None,
    async_op: bool = False,
    backend: BackendName | None = None,
) -> Work | None:
    """Gather the ``input`` of every rank into ``output``.

    Args:
        output: floating point, [world_size * n, ...] contiguous, or [world_size, n] with contiguous rows. It holds the
            same bits on every rank: a rank's own shard is decoded from its own message, too.
        input: this rank's shard, floating point, [n, ...] contiguous; may be its own row of ``output``. As many
            elements on every rank. Or lists of outputs and inputs, each of one dtype, which are gathered in one
            exchange for a copy each way (:mod:`zcomm._collectives.coalesced`).
        group: a ProcessGroup (default: all ranks) or a DeviceMesh of one dimension for one hop, or a
            :class:`zcomm.Topology` for two.
        output_split_sizes: for shards of different lengths: how many rows of ``output`` [rows, ...] each rank's are, in
            the order of ``numbering``; 0 is allowed. The same on every rank, and not compared unless ZCOMM_DEBUG=1.
            Not with lists, ``"auto"`` or backend "nccl". See :mod:`zcomm._collectives.uneven_shards`.
        format: a wire format; with a Topology also a pair, (between nodes, inside the node). ``"none"`` is ``input``'s
            dtype, ``"auto"`` the fastest one measured (:mod:`zcomm._collectives.auto_format`). The same on every rank.
        numbering: which rank owns which row: "rank" as in torch, or "local" (:mod:`zcomm._transport.topology`).
        random: required for formats that round stochastically, refused for others. A new key for each call.
        async_op: return a Work at once; ``output`` may be read, and ``input`` changed, only after its ``wait()``.
        backend: "torch" or "nccl"; default: the Topology's, or torch over a ProcessGroup. The same on every rank.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        LayoutError, FormatError: Sizes, dtypes, formats or random do not fit. Raised before any communication.
        BackendUnavailableError: The backend does not support the device. Raised before any communication.
        MessageError: Another rank sent another layout, or a message was damaged (with ZCOMM_CHECK=1).

    Cost for each rank: one message to every other rank; on two hops one message to one rank of every other node, and
    num_nodes messages to every other rank of the node. On CUDA no host sync beyond those of the process group.
    """
    group = as_group(group)
    options = CallOptions(format, backend, async_op, random, numbering)
    if output_split_sizes is not None:
        return uneven_all_gather(output, input, group, output_split_sizes, options)
    if isinstance(output, LIST) or isinstance(input, LIST):
        lists = rows_and_shards(group, [format], output=output, input=input)
        given: dict[str, Any] = {"format": format, "numbering": numbering, "random": random, "backend": backend}
        return coalesced(partial(all_gather_single, group=group, **given), *lists, format, async_op=async_op)
    route, (rows, shard) = planned("all_gather", group, (output, input), options, _checked, first="inter")
    check_own_row(shard, rows, route, numbering)
    if env.is_set("ZCOMM_DEBUG"):
        route.compare(numel=shard.numel(), dtype=shard.dtype, numbering=numbering, random=random)
    steps = gather_steps(rows, shard, numbering, Encoder(route, shard.numel(), random))
    return run(steps, rows, shard, async_op=async_op, queue=route.queue, num_exchanges=len(route.hops))


def _checked(output: Tensor, input: Tensor, group: Group, options: CallOptions) -> Checked:
    wire, backend, async_op, random, numbering, *_ = options
    found = check_arguments(group, wire, numbering=numbering, async_op=async_op, output=output, input=input)
    output, input = map(as_flat, found)
    chosen = resolve(wire, "all_gather", group, input, output.numel(), first="inter", numbering=numbering)
    route = find_route("all_gather", group, chosen.format, first="inter", num_hops=chosen.num_hops, backend=backend)
    rows = rows_of("output", output, route.world_size)
    check_shard("input", input, "output", rows)
    route.check_dtype(input.dtype)
    check_random(random, chosen.format)
    return route, (found[0], found[1]) if route.is_plain else (rows, input)


def gather_steps(rows: Tensor, shard: Tensor, numbering: Numbering, encoder: Encoder) -> Steps:
    """The steps of :func:`all_gather_single` on checked arguments; on a plain route, of any shape if contiguous."""
    if not shard.numel():
        return nothing()
    route = encoder.route
    if is_native(encoder, rows, shard):
        return gather_over_nccl(rows, shard, numbering, encoder)
    if len(route.hops) == 1:
        return _one_hop(rows, shard, encoder)
    steps = _two_hops_recoded
    (_, wire), (_, intra_wire) = route.hops
    chunks = chunks_of(shard.numel(), wire, intra_wire, min_numel=route.min_chunk_numel(shard.device))
    if is_same_wire(wire, intra_wire, shard.dtype):
        is_plain = codec_for(wire, shard.dtype).dtype == shard.dtype
        if is_plain and len(chunks) > 1:
            steps = _two_hops_in_pieces
        elif is_plain and numbering == "local" and rows.dtype == shard.dtype and rows.is_contiguous():
            steps = _two_hops_in_place
        else:
            steps = _two_hops_forwarded
    if len(chunks) == 1:
        return steps(rows, shard, numbering, encoder)
    return pipelined([steps(rows[:, c], shard[c], numbering, encoder.at(c.start)) for c in chunks], num_exchanges=2)


def own_message(messages: Tensor, route: Route) -> Tensor:
    """The row of ``messages`` that this rank sends, uint8 [1, nbytes], for :func:`gather_messages`."""
    nbytes = messages.shape[1]
    first = nbytes * route.own_row("local" if len(route.hops) == 2 else "rank")
    return messages.as_strided((1, nbytes), (nbytes, 1), messages.storage_offset() + first)


def gather_messages(messages: Tensor, own: Tensor, layout: MessageLayout, route: Route) -> Steps:
    """Gather every rank's message into ``messages`` uint8 [world_size, nbytes], of which ``own`` is this rank's.

    On one hop in rank order. On two hops (inter, then intra) numbered local.
    """
    hop = route.hops[0][0]
    if len(route.hops) == 1:
        yield backend.all_gather(messages, own, hop, layout.info)
        return
    of_nodes = messages.view(route.ranks_per_node, route.num_nodes, -1)[route.local_rank]
    yield backend.all_gather(of_nodes, own, hop, layout.info)
    hop, wire = route.hops[1]
    sent = MessageInfo(route.operation, str(wire), route.num_nodes * layout.numel)
    yield backend.all_gather(messages, of_nodes, hop, sent)


def _one_hop(rows: Tensor, shard: Tensor, encoder: Encoder) -> Steps:
    route = encoder.route
    hop, wire = route.hops[0]
    layout = route.layout(wire, shard.dtype, 1, shard.numel())
    if layout.codec.dtype == shard.dtype == rows.dtype:
        yield backend.all_gather(rows, shard, hop, layout.info)
        return
    messages = layout.new(hop.size, shard.device)
    own = own_message(messages, route)
    kernels.quantize(shard, layout, own, 0, 0, encoder.draw(0), expected=messages)
    yield from gather_messages(messages, own, layout, route)
    kernels.decode(messages, layout, rows, backend.row_stride(rows, hop.size), 0)


def _two_hops_in_place(rows: Tensor, shard: Tensor, numbering: Numbering, encoder: Encoder) -> Steps:
    assert numbering == "local", "only then are the shards of ranks of equal local rank adjacent"
    route = encoder.route
    (inter, wire), (intra, intra_wire) = route.hops
    of_nodes = rows.view(route.ranks_per_node, -1)[route.local_rank]
    yield backend.all_gather(of_nodes, shard, inter, MessageInfo(route.operation, str(wire), shard.numel()))
    yield backend.all_gather(rows, of_nodes, intra, MessageInfo(route.operation, str(intra_wire), of_nodes.numel()))


def _two_hops_in_pieces(rows: Tensor, shard: Tensor, numbering: Numbering, encoder: Encoder) -> Steps:
    """In place with any numbering and strides: inside the node, one gather for each node's shards.

    Rows of another dtype are gathered in the same way into a buffer: another rank's rows may have the shard's dtype,
    and all ranks must make the same exchanges.
    """
    route = encoder.route
    (inter, wire), (intra, intra_wire) = route.hops
    shape = (route.ranks_per_node, route.num_nodes, shard.numel())
    target = rows.as_strided(shape, (*route.strides(numbering, rows.stride(0)), 1), rows.storage_offset())
    gathered = target if rows.dtype == shard.dtype else shard.new_empty(shape)
    of_nodes = gathered[route.local_rank]
    yield backend.all_gather(of_nodes, shard, inter, MessageInfo(route.operation, str(wire), shard.numel()))
    sent = MessageInfo(route.operation, str(intra_wire), shard.numel())
    yield backend.combined([backend.all_gather(gathered[:, n], of_nodes[n], intra, sent) for n in range(shape[1])])
    if gathered is not target:
        target.copy_(gathered)


def _two_hops_forwarded(rows: Tensor, shard: Tensor, numbering: Numbering, encoder: Encoder) -> Steps:
    route = encoder.route
    layout = route.layout(route.hops[0][1], shard.dtype, 1, shard.numel())
    messages = layout.new(route.world_size, shard.device)
    own = own_message(messages, route)
    kernels.quantize(shard, layout, own, 0, 0, encoder.draw(0), expected=messages)
    yield from gather_messages(messages, own, layout, route)
    if numbering == "local":
        kernels.decode(messages, layout, rows, rows.stride(0), 0)
        return
    for local_rank, of_nodes in enumerate(messages.view(route.ranks_per_node, route.num_nodes, -1)):
        kernels.decode(of_nodes, layout, rows[local_rank:], route.ranks_per_node * rows.stride(0), 0)


def _two_hops_recoded(rows: Tensor, shard: Tensor, numbering: Numbering, encoder: Encoder) -> Steps:
    route = encoder.route
    (inter, wire), (intra, intra_wire) = route.hops
    numel, device = shard.numel(), shard.device
    layout = route.layout(wire, shard.dtype, 1, numel)
    intra_layout = route.layout(intra_wire, shard.dtype, route.num_nodes, numel)
    of_nodes = layout.new(route.num_nodes, device)
    messages = intra_layout.new(route.ranks_per_node, device)
    mine = of_nodes[inter.rank : inter.rank + 1]
    kernels.quantize(shard, layout, mine, 0, 0, encoder.draw(0), expected=of_nodes)
    yield backend.all_gather(of_nodes, mine, inter, layout.info)
    mine = messages[intra.rank : intra.rank + 1]
    if intra_layout.codec.dtype is not None:  # a cast codec, which needs no second pass
        kernels.decode(of_nodes, layout, mine.view(-1).view(intra_layout.codec.dtype), numel, 0)
    else:
        dtype = intra_layout.codec.dtype_between(layout.codec)
        values = encoder.buffer(1, route.num_nodes, numel, dtype, device)
        kernels.decode(of_nodes, layout, values, values.stride(0), 0)
        # All nodes encode the same values. With random numbers of their own they would end with different bits.
        draw = replace(encoder, rank=route.local_rank).draw(1)
        kernels.quantize(values, intra_layout, mine, 0, values.stride(0), draw, expected=messages)
    yield backend.all_gather(messages, mine, intra, intra_layout.info)
    kernels.decode(messages, intra_layout, rows, *route.strides(numbering, rows.stride(0)))
