"""Reduce-scatter in any wire format, as an all-to-all and a local sum (qgZ of "ZeRO++", arXiv:2306.10209).

    one hop     rows --quantize--> messages --all-to-all--> messages --decode, sum--> output
    two hops    rows --quantize, permuted--> inside the node --decode, sum, requantize--> between nodes --decode, sum-->

N nodes of L ranks, shards of m elements. Hop 1 sends local rank l of the node the shards that the ranks of local rank l
of all nodes own, [N, m]. Hop 2 sends each node its shard of the sum: 1 / L of what one hop would send between nodes.

Sums are in float32, in rank order (then node order), so the bits do not depend on timing or on the backend's algorithm.
Large shards are sent in chunks, so that hop 2 of a chunk overlaps hop 1 of the next (:mod:`zcomm._transport.chunks`).
Shards of different lengths: :mod:`zcomm._collectives.uneven_shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._collectives.auto_format import resolve
from zcomm._collectives.coalesced import LIST, check_no_residual, coalesced, rows_and_shards
from zcomm._collectives.encoder import Encoder, check_random
from zcomm._collectives.nccl_steps import is_native, reduce_over_nccl
from zcomm._collectives.plans import CallOptions, Checked, planned
from zcomm._collectives.uneven_shards import uneven_reduce_scatter
from zcomm._formats.philox import RandomKey
from zcomm._kernels import kernels
from zcomm._residuals.residual import Residual
from zcomm._transport import backend
from zcomm._transport.backend_choice import BackendName
from zcomm._transport.chunks import chunks_of, pipelined
from zcomm._transport.route import (
    Group,
    GroupOrMesh,
    WireFormat,
    as_flat,
    as_group,
    check_arguments,
    check_shard,
    divisor_of,
    find_route,
    rows_of,
)
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Steps, Work, nothing, run


def reduce_scatter_single(
    output: Tensor | Sequence[Tensor],
    input: Tensor | Sequence[Tensor],
    op: Any = "sum",
    *,
    group: GroupOrMesh = None,
    input_split_sizes: Sequence[int] | None = None,
    format: WireFormat = "none",
    numbering: Numbering = "rank",
    residual: Residual | None = None,
    random: RandomKey | None = None,
    async_op: bool = False,
    backend: BackendName | None = None,
) -> Work | None:
    """Sum or average ``input`` over all ranks; each rank gets its shard of the result.

    Args:
        output: this rank's shard, floating point, [n, ...] contiguous; its dtype may be wider than ``input``'s.
        input: floating point, [world_size * n, ...] contiguous, or [world_size, n] with contiguous rows. Not written;
            do not change it before an asynchronous call has been waited for. Or lists of outputs and inputs, as for
            :func:`zcomm.all_gather_single`.
        op: "sum" or "avg", or ``ReduceOp.SUM`` / ``AVG``. A mean is one division, after the last hop; if that sends
            fp16, a power of two is divided by before it, so a mean of finite numbers is finite.
        group: a ProcessGroup (default: all ranks) or a DeviceMesh of one dimension for one hop, or a
            :class:`zcomm.Topology` for two.
        input_split_sizes: rows of ``input`` [rows, ...] for each rank, as for :func:`zcomm.all_gather_single`.
        format: a wire format; with a Topology also a pair, (inside the node, between nodes). ``"none"`` is ``input``'s
            dtype on both hops, ``"auto"`` the fastest one measured (:mod:`zcomm._collectives.auto_format`). The same on
            every rank.
        numbering: which rank owns which row: "rank" as in torch, or "local" (:mod:`zcomm._transport.topology`).
        residual: error feedback on the last hop; call its ``commit()`` afterwards. On every rank or on none, and not
            with lists or split sizes.
        random: required for formats that round stochastically, refused for others. A new key for each call.
        async_op: return a Work at once.
        backend: "torch" or "nccl"; default: the Topology's, or torch over a ProcessGroup. The same on every rank.

    Returns: A Work if ``async_op``, else None.

    Raises:
        LayoutError, FormatError: Sizes, dtypes, op, formats, residual or random do not fit. Before any communication.
        MessageError: Another rank sent another layout, or a message was damaged (with ZCOMM_CHECK=1).

    Cost for each rank: one message to every other rank; on two hops one message of num_nodes segments to every other
    rank of the node, and one of one segment to one rank of every other node. Scratch: the messages;
    with a residual also the sums in float32, three times.
    """
    group = as_group(group)
    options = CallOptions(format, backend, async_op, random, numbering, op, residual=residual)
    if input_split_sizes is not None:
        return uneven_reduce_scatter(output, input, group, input_split_sizes, options)
    if isinstance(output, LIST) or isinstance(input, LIST):
        return _of_lists(output, input, group, options)
    route, (rows, shard) = planned("reduce_scatter", group, (input, output), options, _checked, first="intra")
    divisor = divisor_of(op, route.world_size)
    if env.is_set("ZCOMM_DEBUG"):
        facts = {"numbering": numbering, "random": random, "residual": residual is not None}
        route.compare(numel=shard.numel(), dtype=rows.dtype, op="avg" if divisor > 1 else "sum", **facts)
    steps = reduce_steps(shard, rows, numbering, divisor, Encoder(route, rows.shape[1], random, residual))
    work = run(steps, shard, rows, async_op=async_op, queue=route.queue, num_exchanges=len(route.hops))
    return work if residual is None else residual.watch(work)


def _of_lists(output: Any, input: Any, group: Group, options: CallOptions) -> Work | None:
    wire, backend, async_op, random, numbering, op, *_ = options
    check_no_residual(options.residual)
    inputs, shards = rows_and_shards(group, [wire], input=input, output=output)
    given: dict[str, Any] = {"format": wire, "numbering": numbering, "random": random, "backend": backend}
    exchange = partial(reduce_scatter_single, op=op, group=group, **given)
    return coalesced(exchange, shards, inputs, wire, async_op=async_op)


def _checked(input: Tensor, output: Tensor, group: Group, options: CallOptions) -> Checked:
    wire, backend, async_op, random, numbering, op, _, residual = options
    facts: dict[str, Any] = {"numbering": numbering, "async_op": async_op, "residual": residual}
    output, source = map(as_flat, check_arguments(group, wire, output=output, input=input, **facts))
    hops_of = numbering if residual is None else "local"  # a residual needs two hops, and "local" rules out one
    chosen = resolve(wire, "reduce_scatter", group, source, source.numel(), first="intra", numbering=hops_of)
    route = find_route("reduce_scatter", group, chosen.format, first="intra", num_hops=chosen.num_hops, backend=backend)
    check_random(random, chosen.format)
    divisor_of(op, route.world_size)
    rows = rows_of("input", source, route.world_size)
    check_shard("output", output, "input", rows)
    route.check_dtype(source.dtype)
    if residual is not None:
        residual.check(route, numbering, rows.shape[1], rows)
    return route, (rows, output)


def reduce_steps(output: Tensor, rows: Tensor, numbering: Numbering, divisor: int, encoder: Encoder) -> Steps:
    """The steps of :func:`reduce_scatter_single` on checked arguments."""
    if not output.numel():
        return nothing()
    route = encoder.route
    if is_native(encoder, output, rows) and encoder.divisor_inside(rows.dtype, divisor) == 1:
        return reduce_over_nccl(output, rows, numbering, divisor, encoder)
    if len(route.hops) == 1:
        return _one_hop(output, rows, divisor, encoder)
    least = route.min_chunk_numel(output.device)
    chunks = chunks_of(output.numel(), *(wire for _, wire in route.hops), min_numel=least)
    of_chunks = [_two_hops(output[c], rows[:, c], numbering, divisor, encoder.at(c.start)) for c in chunks]
    return pipelined(of_chunks, num_exchanges=2)


def _one_hop(output: Tensor, rows: Tensor, divisor: int, encoder: Encoder) -> Steps:
    route = encoder.route
    hop, wire = route.hops[0]
    numel = output.numel()
    layout = route.layout(wire, rows.dtype, 1, numel)
    received = layout.new(hop.size, output.device)
    sending = rows
    if encoder.residual is not None:
        sending = layout.new(hop.size, rows.device)
        encoder.encode(0, rows.to(torch.float32, copy=True), sending, layout, expected=received)
    elif not rows.is_contiguous() or layout.codec.dtype != rows.dtype:
        sending = layout.new(hop.size, rows.device)
        kernels.quantize(rows, layout, sending, rows.stride(0), 0, encoder.draw(0), expected=received)
    yield backend.all_to_all(received, sending, hop, layout.info)
    kernels.decode_sum(received, layout, output, 0, divisor)


def _two_hops(output: Tensor, rows: Tensor, numbering: Numbering, divisor: int, encoder: Encoder) -> Steps:
    """``output`` and ``rows`` [world_size, n] may be a chunk of a larger shard."""
    route = encoder.route
    (intra, wire), (inter, wire_between) = route.hops
    numel, device, inside = output.numel(), output.device, encoder.divisor_inside(rows.dtype, divisor)
    layout = route.layout(wire, rows.dtype, route.num_nodes, numel)
    received = layout.new(intra.size, device)
    sending = rows
    if numbering != "local" or not rows.is_contiguous() or layout.codec.dtype != rows.dtype:
        sending = layout.new(intra.size, device)
        strides = route.strides(numbering, rows.stride(0))
        kernels.quantize(rows, layout, sending, *strides, encoder.draw(0), expected=received)
    yield backend.all_to_all(received, sending, intra, layout.info)
    between = route.layout(wire_between, rows.dtype, 1, numel)
    partial = between.new(inter.size, device)
    last = between.new(inter.size, device)
    encoder.encode_sum(1, received, layout, partial, between, divisor=inside, expected=last)
    yield backend.all_to_all(last, partial, inter, between.info)
    kernels.decode_sum(last, between, output, 0, divisor / inside)
