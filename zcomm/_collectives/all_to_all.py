"""All-to-all in any wire format: part i of the input goes to rank i.

two hops    inside the node to the destination's local rank, then between nodes: two nodes exchange one message per
            local rank instead of one per pair of ranks; large parts are sent in chunks
            (:mod:`zcomm._transport.chunks`)
split sizes :mod:`zcomm._collectives.uneven_all_to_all`
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zcomm._base import env
from zcomm._collectives.auto_format import resolve
from zcomm._collectives.encoder import Encoder, check_random
from zcomm._collectives.nccl_steps import exchange_over_nccl, is_native
from zcomm._collectives.plans import CallOptions, Checked, planned
from zcomm._collectives.uneven_all_to_all import Splits, uneven_all_to_all
from zcomm._formats.formats import codec_for
from zcomm._formats.message import MessageInfo
from zcomm._formats.philox import RandomKey
from zcomm._kernels import kernels
from zcomm._transport import backend
from zcomm._transport.backend_choice import BackendName
from zcomm._transport.chunks import chunks_of, pipelined
from zcomm._transport.route import (
    Group,
    GroupOrMesh,
    WireFormat,
    as_flat,
    as_group,
    check_apart,
    check_arguments,
    check_flat,
    find_route,
)
from zcomm._transport.work import Steps, Work, nothing, run
from zcomm.errors import LayoutError


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    group: GroupOrMesh = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    format: WireFormat = "none",
    random: RandomKey | None = None,
    async_op: bool = False,
    backend: BackendName | None = None,
) -> Work | None:
    """Send part i of ``input`` to rank i; part j of ``output`` comes from rank j.

    Args:
        output: floating point, contiguous, of any shape with as many elements as ``input``.
        input: floating point, contiguous, [world_size * n, ...]: part i is rows i * n to (i + 1) * n. The same n on
            every rank.
        group: a ProcessGroup (default: all ranks) or a DeviceMesh of one dimension for one hop, or a
            :class:`zcomm.Topology` for two.
        output_split_sizes: rows of ``output`` [rows, ...] that come from each rank, as in torch; None: equally many.
        input_split_sizes: rows of ``input`` [rows, ...] for each rank. Both None on every rank, or on none.
        format: a wire format; with a Topology also a pair, (inside the node, between nodes); or ``"auto"``, the fastest
            one measured (:mod:`zcomm._collectives.auto_format`), but not with split sizes.
        random: required for formats that round stochastically, refused for others. A new key for each call.
        async_op: return a Work at once; with split sizes once every rank has made the call.
        backend: "torch" or "nccl" (not with split sizes); default: the Topology's, or torch over a ProcessGroup.

    Returns:
        A Work if ``async_op``, else None.

    Raises:
        LayoutError, FormatError: Sizes, dtypes, formats or random do not fit. Raised before any communication; on every
            rank if split sizes do not fit on one, or those of two ranks do not fit each other.

    Cost for each rank: one message to every other rank; with two hops num_nodes messages to every other rank of the
    node and ranks_per_node messages to one rank of every other node. With split sizes it is always one hop over all
    ranks: one message to every other rank that gets a row, in the format of that link. Before it the ranks compare
    their sizes in a small all-gather, for which the host waits: 8 * (2 * world_size + 1) bytes to every other rank.
    """
    group = as_group(group)
    options = CallOptions(format, backend, async_op, random)
    if output_split_sizes is not None or input_split_sizes is not None:
        output, input = check_arguments(group, format, async_op=async_op, output=output, input=input)
        return uneven_all_to_all(output, input, group, Splits(output_split_sizes, input_split_sizes), options)
    route, (source, parts) = planned("all_to_all", group, (input, output), options, _checked, first="intra")
    check_apart("output", parts, "input", source)
    if env.is_set("ZCOMM_DEBUG"):
        route.compare(numel=source.numel(), dtype=source.dtype, random=random)
    steps = _steps(parts, source, Encoder(route, source.numel() // route.all_ranks.size, random))
    return run(steps, parts, source, async_op=async_op, queue=route.queue, num_exchanges=len(route.hops))


def _checked(input: Tensor, output: Tensor, group: Group, options: CallOptions) -> Checked:
    wire, backend, async_op, random, *_ = options
    rows = input.shape[0] if isinstance(input, Tensor) and input.ndim > 1 else 0
    output, source = map(as_flat, check_arguments(group, wire, async_op=async_op, output=output, input=input))
    chosen = resolve(wire, "all_to_all", group, source, source.numel(), first="intra")
    route = find_route("all_to_all", group, chosen.format, first="intra", num_hops=chosen.num_hops, backend=backend)
    check_random(random, chosen.format)
    check_flat("input", source)
    check_flat("output", output)
    if rows % route.world_size:
        raise LayoutError(f"rows of input must divide over the ranks: rows={rows}, world_size={route.world_size}")
    if source.numel() % route.world_size or output.numel() != source.numel() or output.device != source.device:
        raise LayoutError(
            "input and output must be equally long, divide over the ranks and be on one device: "
            f"input numel={source.numel()} on {source.device}, output numel={output.numel()} on {output.device}, "
            f"world_size={route.world_size}"
        )
    route.check_dtype(source.dtype)
    views = source, output
    return route, views if route.is_plain else (source.view(route.world_size, -1), output.view(route.world_size, -1))


def _steps(parts: Tensor, source_parts: Tensor, encoder: Encoder) -> Steps:
    if not source_parts.numel():
        return nothing()
    route = encoder.route
    if is_native(encoder, parts, source_parts):
        return exchange_over_nccl(parts, source_parts, encoder)
    if len(route.hops) == 1:
        return _one_hop(parts, source_parts, encoder)
    least = route.min_chunk_numel(parts.device)
    chunks = chunks_of(parts.shape[1], *(wire for _, wire in route.hops), min_numel=least)
    return pipelined([_two_hops(parts[:, c], source_parts[:, c], encoder.at(c.start)) for c in chunks], num_exchanges=2)


def _one_hop(output: Tensor, source: Tensor, encoder: Encoder) -> Steps:
    route = encoder.route
    hop, wire = route.hops[0]
    numel = encoder.shard_numel
    layout = route.layout(wire, source.dtype, 1, numel)
    if source.dtype == output.dtype == layout.codec.dtype:
        yield backend.all_to_all(output, source, hop, layout.info)
        return
    messages, received = layout.new(hop.size, source.device), layout.new(hop.size, source.device)
    kernels.quantize(source, layout, messages, numel, 0, encoder.draw(0), expected=received)
    yield backend.all_to_all(received, messages, hop, layout.info)
    kernels.decode(received, layout, output, numel, 0)


def _two_hops(output: Tensor, source: Tensor, encoder: Encoder) -> Steps:
    """Both hops of ``output`` and ``source`` [world_size, n], which may be a chunk of every part."""
    route = encoder.route
    (intra, wire), (inter, inter_wire) = route.hops
    nodes, locals_, numel = route.num_nodes, route.ranks_per_node, source.shape[1]
    layout = route.layout(wire, source.dtype, 1, numel)
    messages = layout.new(route.world_size, source.device)
    num_hops = 2 if wire == inter_wire else 1  # hop 2 encodes nothing if it forwards: clear its trailers here
    received = layout.new(num_hops * route.world_size, source.device)
    kernels.quantize(source, layout, messages, source.stride(0), 0, encoder.draw(0), expected=received)
    received, last = received[: route.world_size], received[route.world_size :]
    messages = messages.view(nodes, locals_, -1).transpose(0, 1).contiguous()  # to [local rank, node]
    yield backend.all_to_all(received, messages, intra, MessageInfo(route.operation, str(wire), nodes * numel))
    messages = received.view(locals_, nodes, -1).transpose(0, 1).contiguous()  # [to node, from local rank]
    if wire != inter_wire:
        between = codec_for(inter_wire, source.dtype)
        values = encoder.buffer(1, route.world_size, numel, between.dtype_between(layout.codec), source.device)
        kernels.decode(messages.view(route.world_size, -1), layout, values, values.stride(0), 0)
        layout = route.layout(inter_wire, source.dtype, 1, numel)
        messages = layout.new(route.world_size, source.device)
        last = layout.new(route.world_size, source.device)
        encoder.encode(1, values, messages, layout, expected=last)
    yield backend.all_to_all(last, messages, inter, MessageInfo(route.operation, str(inter_wire), locals_ * numel))
    kernels.decode(last, layout, output, output.stride(0), 0)  # [from node, from local rank]: rank order
