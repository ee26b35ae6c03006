"""All-reduce in any wire format: a reduce-scatter, then an all-gather of the reduced shards, in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._collectives.all_gather import gather_steps
from zcomm._collectives.auto_format import is_auto, resolve
from zcomm._collectives.coalesced import LIST, as_lists, check_no_residual, coalesced, world_size_of
from zcomm._collectives.encoder import Encoder, check_random
from zcomm._collectives.plans import CallOptions, Checked, planned
from zcomm._collectives.reduce_scatter import reduce_steps
from zcomm._formats.formats import Format
from zcomm._formats.philox import RandomKey
from zcomm._residuals.residual import Residual
from zcomm._transport.backend_choice import BackendName
from zcomm._transport.route import (
    Group,
    GroupOrMesh,
    Route,
    WireFormat,
    as_flat,
    as_group,
    check_arguments,
    check_flat,
    divisor_of,
    find_route,
)
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Steps, Work, run

FIRST_GATHER_HOP = 2
"""Hop numbers in random keys: 0 and 1 in the reduce-scatter, 2 and 3 in the gather, so that no number is used twice."""


def all_reduce(
    tensor: Tensor | Sequence[Tensor],
    op: Any = "sum",
    group: GroupOrMesh = None,
    *,
    format: WireFormat = "none",
    gather_format: WireFormat | None = None,
    residual: Residual | None = None,
    random: RandomKey | None = None,
    async_op: bool = False,
    backend: BackendName | None = None,
) -> Work | None:
    """Sum or average ``tensor`` over all ranks, in place; the same bits on every rank.

    Args:
        tensor: floating point, contiguous, of any shape (padded internally). As many elements on every rank. Or a list
            of tensors, as for :func:`zcomm.all_gather_single`.
        op: "sum" or "avg", or ``ReduceOp.SUM`` / ``AVG``.
        group: a ProcessGroup (default: all ranks), a DeviceMesh of one dimension, or a :class:`zcomm.Topology`.
        format: of the reduce-scatter, as for :func:`zcomm.reduce_scatter_single`; also ``"auto"``.
        gather_format: of the all-gather; default: ``format``, with the same format on each link class.
        residual: of the reduce-scatter; the gather's loss is not kept. Not with a list.
        random: required for formats that round stochastically, refused for others. A new key for each call.
        async_op: return a Work at once. Over a ProcessGroup the gather only starts in ``wait()``: call it at the same
            point of the program on every rank, or the ranks deadlock. Over a Topology both overlap the caller's work.
        backend: "torch" or "nccl"; default: the Topology's, or torch over a ProcessGroup.

    Returns: A Work if ``async_op``, else None.
    Raises:
        LayoutError, FormatError: As the two collectives. Raised before any communication.
    Cost for each rank: that of both collectives on shards of ceil(n / world_size) elements; two copies for an uneven n.
    """
    wires = format, format if gather_format is None else gather_format
    group = as_group(group)
    if isinstance(tensor, LIST):
        check_no_residual(residual)
        given: dict[str, Any] = {"format": format, "gather_format": gather_format, "random": random}
        call = partial(all_reduce, op=op, group=group, backend=backend, **given)
        return _all_reduce_list(call, tensor, group, wires, async_op=async_op)
    options = CallOptions(format, backend, async_op, random, "rank", op, gather_format, residual)
    reducing, (_, tensor) = planned("all_reduce", group, (tensor, tensor), options, _checked, first="intra")
    gathering = _gathering_route(tensor, group, options)
    shard_numel = -(-tensor.numel() // reducing.world_size)
    numbering: Numbering = "local" if len(reducing.hops) == 2 else "rank"
    if residual is not None:
        numbering = residual.layout.numbering
        residual.check(reducing, numbering, shard_numel, tensor)
    reducer = Encoder(reducing, shard_numel, random, residual)
    gatherer = Encoder(gathering, shard_numel, random, first_hop=FIRST_GATHER_HOP)
    divisor = divisor_of(op, reducing.world_size)
    if env.is_set("ZCOMM_DEBUG"):
        gathers = " -> ".join(str(wire) for _, wire in gathering.hops)
        facts = {"op": "avg" if divisor > 1 else "sum", "random": random, "residual": residual is not None}
        reducing.compare(numel=tensor.numel(), dtype=tensor.dtype, gather_format=gathers, **facts)
    steps = all_reduce_steps(tensor, reducer, gatherer, numbering, divisor)
    work = run(steps, tensor, async_op=async_op, queue=reducing.queue, num_exchanges=2 * len(reducing.hops))
    return work if residual is None else residual.watch(work)


def _checked(tensor: Tensor, _: Tensor, group: Group, options: CallOptions) -> Checked:
    """The flat tensor, twice."""
    wires = options.format, options.format if options.gather_format is None else options.gather_format
    found = check_arguments(group, *wires, async_op=options.async_op, residual=options.residual, tensor=tensor)
    flat = as_flat(*found)
    divisor_of(options.op, 1)
    check_flat("tensor", flat)
    reducing, gathering = _routes(flat, group, options)
    reducing.check_dtype(flat.dtype)
    gathering.check_dtype(flat.dtype)
    formats = options.format, _gather_format(options)
    check_random(options.random, *(wire for wire in formats if not is_auto(wire)))
    return reducing, (flat, flat)


def _gather_format(options: CallOptions) -> WireFormat:
    if options.gather_format is not None:
        return options.gather_format
    return options.format if isinstance(options.format, (str, Format)) else options.format[::-1]


def _gathering_route(tensor: Tensor, group: Group, options: CallOptions) -> Route:
    wire = _gather_format(options)
    if is_auto(options.format) or is_auto(wire):
        return _routes(tensor, group, options)[1]
    return find_route("all_reduce", group, wire, first="inter", backend=options.backend)


def _all_reduce_list(
    call: partial[Work | None], tensors: Any, group: Group, formats: tuple[WireFormat, WireFormat], *, async_op: bool
) -> Work | None:
    (found,) = as_lists(group, formats, tensor=tensors)
    for index, tensor in enumerate(found):
        check_flat(f"tensor[{index}]", tensor)
    rows = [_padded_rows(tensor, world_size_of(group)) for tensor in found]

    def exchange(target: Tensor, _: Tensor, /, *, async_op: bool) -> Work | None:
        return call(target, async_op=async_op)

    def finish() -> None:
        for tensor, padded in zip(found, rows, strict=True):
            _unpad(tensor, padded)

    return coalesced(exchange, rows, rows, *formats, async_op=async_op, then=finish)


def _routes(tensor: Tensor, group: Group, options: CallOptions) -> tuple[Route, Route]:
    """Routes of both collectives, over the same hops; two hops if a residual needs them."""
    backend, numel = options.backend, tensor.numel()
    reduced = resolve(options.format, "all_reduce", group, tensor, numel, first="intra")
    gathered = resolve(_gather_format(options), "all_reduce", group, tensor, numel, first="inter")
    num_hops = 2 if options.residual is not None else max(reduced.num_hops, gathered.num_hops)
    reducing = find_route("all_reduce", group, reduced.format, first="intra", num_hops=num_hops, backend=backend)
    gathering = find_route("all_reduce", group, gathered.format, first="inter", num_hops=num_hops, backend=backend)
    return reducing, gathering


def all_reduce_steps(tensor: Tensor, reducer: Encoder, gatherer: Encoder, numbering: Numbering, divisor: int) -> Steps:
    """The steps of :func:`all_reduce` on checked arguments."""
    if not tensor.numel():
        return
    rows = _padded_rows(tensor, reducer.route.world_size)
    if any(wire.name == "none" for _, wire in gatherer.route.hops):
        shard = rows[reducer.route.own_row(numbering)]  # in place: the sums are written after all rows were sent
    else:
        shard = torch.empty(rows.shape[1], dtype=_sum_dtype(tensor.dtype), device=tensor.device)
    yield from reduce_steps(shard, rows, numbering, divisor, reducer)
    yield from gather_steps(rows, shard, numbering, gatherer)
    _unpad(tensor, rows)


def _padded_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """``tensor`` as [num_rows, n]: a view if num_rows divides it, else a copy padded with zeros."""
    numel = tensor.numel()
    if numel % num_rows == 0:
        return tensor.view(num_rows, -1)
    rows = tensor.new_empty(num_rows, -(-numel // num_rows))
    rows.view(-1)[:numel].copy_(tensor)
    rows.view(-1)[numel:].zero_()
    return rows


def _unpad(tensor: Tensor, rows: Tensor) -> None:
    """Write ``rows`` back to ``tensor``, unless they are a view of it."""
    if rows.data_ptr() != tensor.data_ptr():
        tensor.copy_(rows.view(-1)[: tensor.numel()])


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are float32 or float64, so that only the gather's format rounds them."""
    return torch.float64 if dtype == torch.float64 else torch.float32
