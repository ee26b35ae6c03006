"""All-to-all with split sizes: parts of different lengths, as experts of a mixture receive their tokens.

    1. every rank encodes each of its parts as a message of its own
    2. every rank gathers the sizes that all ranks have passed, and checks them
    3. message i goes to rank i, in one hop over all ranks; empty parts are not sent

Invariants:
    I1  Nothing is sent before all ranks know that the sizes of every pair of ranks agree: gloo ends a process that
        receives more than it expects. A rank that refuses its own arguments takes part in step 2 and reports that, so
        that an error on one rank is an error on all.
    I2  Between steps 2 and 3 nothing can fail on one rank alone. Hence messages and buffers are made before step 2.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm._base import env
from zcomm._base.arguments import as_count, shown
from zcomm._collectives.auto_format import AUTO
from zcomm._collectives.encoder import check_random
from zcomm._collectives.plans import CallOptions
from zcomm._formats.formats import Format, codec_for
from zcomm._formats.message import MessageInfo, MessageLayout
from zcomm._formats.philox import Draw, RandomKey
from zcomm._kernels import kernels
from zcomm._transport import backend
from zcomm._transport.backend import Hop
from zcomm._transport.route import Group, Route, WireFormat, check_apart, find_route, format_pair
from zcomm._transport.tagged_group import ranks_of
from zcomm._transport.topology import Topology
from zcomm._transport.traffic import record
from zcomm._transport.work import Steps, Work, run
from zcomm.errors import BackendUnavailableError, FormatError, LayoutError

REFUSED = -1
"""In place of every size of a rank that refuses its own arguments."""


class Splits(NamedTuple):
    """Rows of the parts of output and input, as a caller has passed them; None: equal parts."""

    output: Any
    input: Any


class _Call(NamedTuple):
    """One call, without its tensors."""

    route: Route
    hop: Hop
    """All ranks."""
    on_host: Hop
    """All ranks, for host tensors."""
    nodes: Sequence[int]
    """The node of each rank."""
    wires: Sequence[Format]
    """The format of the parts that are exchanged with each rank."""
    format: str
    """All formats, as text."""
    random: RandomKey | None


def uneven_all_to_all(output: Tensor, input: Tensor, group: Group, splits: Splits, options: CallOptions) -> Work | None:
    """:func:`zcomm.all_to_all_single` with ``splits``."""
    format, backend, async_op, random, *_ = options
    if format == AUTO:
        raise FormatError(
            'format="auto" chooses by size, and with split sizes ranks have different sizes: name a format'
        )
    route = find_route("all_to_all", group, format, first="intra", num_hops=1, backend=backend)
    if route.backend == "nccl":
        raise BackendUnavailableError(
            "backend='nccl' does not serve an all_to_all with split sizes: use backend='torch'"
        )
    call = _call_over(route, group, format, random)
    for wire in call.wires:
        codec_for(wire, input.dtype)
    check_random(random, format)
    route.compare(dtype=input.dtype, formats=call.format, random=random)
    if isinstance(group, Topology):
        group.uses_world = True  # from now on its control exchanges keep the order with these
    return run(_steps(output, input, splits, call), output, input, async_op=async_op, queue=route.queue)


def _call_over(route: Route, group: Group, format: WireFormat, random: RandomKey | None) -> _Call:
    hop, wire = route.hops[0]
    on_host, nodes = hop, nodes_of(route, hop)
    wires, text = [wire] * hop.size, str(wire)
    if isinstance(group, Topology):
        on_host = group.on_host
        if isinstance(format, tuple) and group.has_two_hops:
            inside, _ = format_pair(format)
            wires = [inside if node == nodes[hop.rank] else wire for node in nodes]
            text = f"{inside}+{wire}"
    return _Call(route, hop, on_host, nodes, wires, text, random)


def nodes_of(route: Route, hop: Hop) -> list[int]:
    """The node of each rank of ``hop``, which is over all ranks."""
    if route.queue is not None or hop.group is None:
        return [rank // route.ranks_per_node for rank in range(hop.size)]
    per_node = env.torchrun_variable("LOCAL_WORLD_SIZE", dist.get_world_size(), at_least=1)  # as in hop_of_group()
    return [rank // per_node for rank in ranks_of(hop.group)]


def _steps(output: Tensor, source: Tensor, splits: Splits, call: _Call) -> Steps:
    try:
        sent_numels = _part_numels("input", source, splits.input, call.hop.size)
        numels = _part_numels("output", output, splits.output, call.hop.size)
        if output.device != source.device:
            raise LayoutError(f"output and input must be on one device: {output.device}, {source.device}")
        check_apart("output", output, "input", source)
    except LayoutError:
        _gather_sizes([REFUSED] * (2 * call.hop.size), source.dtype, call)  # I1: the other ranks raise, too
        raise
    messages = _encoded(source, sent_numels, call)
    parts, layouts = torch.split(output.view(-1), numels), _layouts(numels, source.dtype, call)
    received = [
        part if _travels_as_is(part, layout) else layout.new_to_receive(1, part.device)
        for part, layout in zip(parts, layouts, strict=True)
    ]
    total = _check_sizes(_gather_sizes([*sent_numels, *numels], source.dtype, call))
    _count(messages, sent_numels, call)
    info = MessageInfo(call.route.operation, call.format, source.numel())
    yield backend.exchange_parts(received, messages, call.hop, info, total * source.element_size())
    for part, layout, message in zip(parts, layouts, received, strict=True):
        if message is not part:
            kernels.decode(message, layout, part, 0, 0)


def _part_numels(name: str, tensor: Tensor, sizes: Any, world_size: int) -> list[int]:
    """Elements of each part of ``tensor``. Raises LayoutError unless everything fits."""
    if tensor.ndim == 0 or not tensor.is_contiguous():
        raise LayoutError(
            f"{name} must be contiguous and have rows, got shape={tuple(tensor.shape)}, stride={tensor.stride()}"
        )
    rows = tensor.shape[0]
    if sizes is None:
        if rows % world_size:
            raise LayoutError(
                f"rows of {name} must divide over the ranks without {name}_split_sizes: rows={rows}, "
                f"world_size={world_size}"
            )
        sizes = [rows // world_size] * world_size
    return [size * math.prod(tensor.shape[1:]) for size in check_split_sizes(name, sizes, world_size, rows)]


def check_split_sizes(name: str, sizes: Any, world_size: int, rows: int | None = None) -> list[int]:
    """``sizes``, the split sizes of ``name``. Raises LayoutError unless they are counts that add up to ``rows``."""
    what = f"{name}_split_sizes"
    if not isinstance(sizes, (list, tuple)) or len(sizes) != world_size:
        raise LayoutError(
            f"{what} must be a list with the rows of each rank: {what}={shown(sizes)}, world_size={world_size}"
        )
    counts = [as_count(f"{what}[{rank}]", size) for rank, size in enumerate(sizes)]
    if rows is not None and sum(counts) != rows:
        raise LayoutError(f"{what} must add up to the rows of {name}: sum={sum(counts)}, rows={rows}")
    return counts


def _layouts(numels: Sequence[int], dtype: torch.dtype, call: _Call) -> list[MessageLayout]:
    return [call.route.layout(wire, dtype, 1, numel) for wire, numel in zip(call.wires, numels, strict=True)]


def _travels_as_is(part: Tensor, layout: MessageLayout) -> bool:
    return layout.codec.dtype == part.dtype or not part.numel()


def _encoded(source: Tensor, numels: list[int], call: _Call) -> list[Tensor]:
    """The message to each rank: its part of ``source`` itself if that can be sent as it is."""
    messages, first = [], 0
    layouts = _layouts(numels, source.dtype, call)
    for part, layout, wire in zip(torch.split(source.view(-1), numels), layouts, call.wires, strict=True):
        message = part
        if not _travels_as_is(part, layout):
            draw, key = None, call.random
            if wire.is_random and key is not None:
                # Numbered through the whole input, so that no two parts draw the same numbers.
                draw = Draw(key.seed, key.tensor, key.step, 0, call.hop.rank, first)
            message = layout.new(1, part.device)
            kernels.quantize(part, layout, message, 0, 0, draw)
        messages.append(message)
        first += part.numel()
    return messages


def _gather_sizes(sizes: Sequence[int], dtype: torch.dtype, call: _Call) -> Tensor:
    """From every rank: a hash of its dtype and formats, then its ``sizes``. Waits for all ranks."""
    kind = zlib.crc32(f"{dtype} {call.format}".encode())
    mine = torch.tensor([kind, *sizes], dtype=torch.int64, device="cpu")
    of_ranks = mine.new_empty((call.hop.size, mine.numel()))
    pending = backend.all_gather(of_ranks, mine, call.on_host, MessageInfo("control", "none", mine.numel()))
    if pending is not None:
        pending.wait()  # not in Work.wait(): when an asynchronous call returns, its parts are in flight
    return of_ranks


def _check_sizes(of_ranks: Tensor) -> int:
    """Raise LayoutError, the same on every rank, unless all sizes fit; returns the elements that all ranks send."""
    kinds, (sent, expected) = of_ranks[:, 0], of_ranks[:, 1:].chunk(2, dim=1)
    if refusing := (sent[:, 0] == REFUSED).nonzero().flatten().tolist():
        raise LayoutError(f"ranks {refusing} refuse their arguments of all_to_all_single: see their errors")
    if differing := (kinds != kinds[0]).nonzero().flatten().tolist():
        raise LayoutError(
            "all_to_all_single needs the same format, and a tensor of the same dtype, on all ranks: those of ranks "
            f"{differing} differ from those of rank 0; ZCOMM_DEBUG=1 names them"
        )
    for rank, peer in (sent != expected.t()).nonzero().tolist():
        raise LayoutError(
            f"the split sizes of all ranks must fit: rank {rank} sends {sent[rank, peer]} elements to rank {peer}, "
            f"whose output_split_sizes expect {expected[peer, rank]} from it"
        )
    return int(sent.sum())


def _count(messages: Sequence[Tensor], numels: Sequence[int], call: _Call) -> None:
    own = call.hop.rank
    for rank, (message, numel, wire) in enumerate(zip(messages, numels, call.wires, strict=True)):
        if numel and rank != own:
            link = "intra" if call.nodes[rank] == call.nodes[own] else "inter"
            record((call.route.operation, str(wire), link), 1, numel, message.nbytes)
