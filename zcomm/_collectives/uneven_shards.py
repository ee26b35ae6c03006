"""All-gather and reduce-scatter of shards of different lengths: a ZeRO optimizer may give ranks whole tensors.

    all-gather      [own message]         --between nodes--> [messages of my local rank] --inside the node--> all
    reduce-scatter  [message of each row] --inside the node--> [sums for my local rank] --between nodes--> my sum

Hops and traffic between nodes are those of even shards (:mod:`zcomm._collectives.all_gather`,
:mod:`zcomm._collectives.reduce_scatter`). A row is the shard of one rank, and a message of its own; an empty row is
none. On the hop inside the node a rank's messages of all nodes lie side by side, a pack: two ranks exchange one tensor.
Packs are in the order of local ranks. One hop is like two on nodes of one rank.

Every rank knows the sizes of all shards. So none are exchanged, and which exchanges are made depends on nothing else.

Large shards are reduced in chunks (:mod:`zcomm._transport.chunks`), of the same columns of every row, where both hops
send plain arrays: on CPUs over gloo, 2 nodes of 2 ranks, shards of 4 M elements on average took 0.57 (float32) and 0.76
(bfloat16) of the time. That is due to memory: receive buffers below 32 MiB are reused by glibc's malloc, larger ones
are mapped anew. With an allocator that keeps them, chunks take 1.3 to 1.6 of the time. So gathers, which receive in
place, and block formats, whose messages are small, are sent at once: they take 0.5 to 0.7 of the time of equal shards
in chunks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._base.pending import Pending
from zcomm._collectives.auto_format import First, is_auto
from zcomm._collectives.coalesced import LIST
from zcomm._collectives.encoder import Encoder, check_random
from zcomm._collectives.plans import CallOptions
from zcomm._collectives.uneven_all_to_all import check_split_sizes, nodes_of
from zcomm._formats.formats import Codec, codec_for, is_same_wire
from zcomm._formats.message import MessageInfo, MessageLayout
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels
from zcomm._transport import backend
from zcomm._transport.backend import UNEVEN_GATHER, UNEVEN_SCATTER, Hop
from zcomm._transport.call_context import current_context, in_bucket
from zcomm._transport.chunks import chunks_of, pipelined
from zcomm._transport.route import Group, Route, check_apart, check_arguments, divisor_of, find_route
from zcomm._transport.topology import Numbering
from zcomm._transport.traffic import record
from zcomm._transport.work import Steps, Work, nothing, run
from zcomm.errors import BackendUnavailableError, FormatError, LayoutError

Rows = Sequence[int]
"""Indices of rows."""


@dataclass(eq=False, slots=True)
class UnevenShards:
    """The shards of one call, without their values."""

    route: Route
    encoder: Encoder
    numbering: Numbering
    dtype: torch.dtype
    """Of the values that are sent."""
    numels: list[int]
    """Elements of each row."""
    packs: list[list[int]]
    """The rows of the ranks of each local rank, in the order of nodes. On one hop all rows are one pack."""

    @property
    def own(self) -> int:
        """This rank's row."""
        return self.route.own_row(self.numbering)

    @property
    def own_pack(self) -> int:
        return self.route.local_rank if len(self.packs) > 1 else 0

    @property
    def in_order(self) -> list[int]:
        """All rows, pack after pack."""
        return [row for pack in self.packs for row in pack]

    @property
    def is_ordered(self) -> bool:
        """Whether packs lie in memory as rows do."""
        return self.in_order == list(range(len(self.numels)))

    def numel(self, rows: Rows) -> int:
        return sum(self.numels[row] for row in rows)

    def codec(self, hop: int) -> Codec:
        return codec_for(self.route.hops[hop][1], self.dtype)

    def layout(self, hop: int, numel: int) -> MessageLayout:
        """Of a message of ``numel`` elements on hop number ``hop``."""
        return self.route.layout(self.route.hops[hop][1], self.dtype, 1, numel)

    def nbytes(self, hop: int, rows: Rows) -> int:
        """Bytes of the messages of ``rows``."""
        return sum(self.layout(hop, self.numels[row]).nbytes for row in rows if self.numels[row])

    def split(self, hop: int, flat: Tensor, groups: Sequence[Rows]) -> list[Tensor]:
        """Where the messages of each of ``groups`` lie in ``flat``, which holds those of all, side by side."""
        return list(torch.split(flat, [self.nbytes(hop, rows) for rows in groups]))

    def encode(self, hop: int, values: Tensor, message: Tensor, draw: Draw | None = None) -> None:
        """Encode ``values`` [n] as ``message`` uint8 [nbytes]; a cast format's may be that of several rows."""
        if values.numel():
            kernels.quantize(values, self.layout(hop, values.numel()), message.view(1, -1), 0, 0, draw)

    def decode(self, hop: int, message: Tensor, values: Tensor) -> None:
        if values.numel():
            kernels.decode(message.view(1, -1), self.layout(hop, values.numel()), values, 0, 0)

    def gather(self, hop: int, received: Sequence[Tensor], mine: Tensor, groups: Sequence[Rows]) -> Pending | None:
        """Start sending ``mine`` to every rank of hop number ``hop``; rank i sends the messages of ``groups[i]``."""
        over, wire = self.route.hops[hop]
        info = MessageInfo(self.route.operation, str(wire), self.numel(groups[over.rank]))
        if mine.numel():
            backend.count(over, info, mine.nbytes)
        sent, received = [mine] * over.size, list(received)
        if mine.data_ptr() == received[over.rank].data_ptr():  # in its place: nothing for this rank to copy
            sent[over.rank] = received[over.rank] = mine[:0]
        return self._exchange(hop, (received, sent), info, UNEVEN_GATHER, groups)

    def scatter(
        self, hop: int, received: Sequence[Tensor], sent: Sequence[Tensor], groups: Sequence[Rows]
    ) -> Pending | None:
        """Start sending ``sent[i]``, the messages of ``groups[i]``, to rank i of hop number ``hop``."""
        over, wire = self.route.hops[hop]
        for peer, (part, link) in enumerate(zip(sent, links_of(self.route, over), strict=True)):
            if part.numel() and peer != over.rank:
                record((self.route.operation, str(wire), link), 1, self.numel(groups[peer]), part.nbytes)
        info = MessageInfo(self.route.operation, str(wire), sum(map(self.numel, groups)))
        return self._exchange(hop, (received, sent), info, UNEVEN_SCATTER, groups)

    def _exchange(
        self,
        hop: int,
        parts: tuple[Sequence[Tensor], Sequence[Tensor]],
        info: MessageInfo,
        operation: str,
        groups: Sequence[Rows],
    ) -> Pending | None:
        of_all = self.nbytes(hop, range(len(self.numels)))  # the same on the hops of all nodes
        sizes = [self.nbytes(hop, rows) for rows in groups]
        return backend.exchange_parts(*parts, self.route.hops[hop][0], info, of_all, operation=operation, sizes=sizes)


def links_of(route: Route, hop: Hop) -> list[str]:
    """The link class to each rank of ``hop``."""
    if not hop.num_intra_peers or not hop.num_inter_peers:
        return ["inter" if hop.num_inter_peers else "intra"] * hop.size
    nodes = nodes_of(route, hop)
    return ["intra" if node == nodes[hop.rank] else "inter" for node in nodes]


def uneven_all_gather(output: Any, input: Any, group: Group, sizes: Any, options: CallOptions) -> Work | None:
    """:func:`zcomm.all_gather_single` with ``output_split_sizes``."""
    shards, full, shard = _checked("all_gather", group, sizes, options, "inter", output=output, input=input)
    own_rows = torch.split(full, shards.numels)[shards.own]
    if shard.dtype != full.dtype or shard.data_ptr() != own_rows.data_ptr():
        check_apart("input", shard, "output (but for this rank's own rows in it)", full)
    return _run(gather_rows(full, shard, shards), full, shard, shards, options)


def uneven_reduce_scatter(output: Any, input: Any, group: Group, sizes: Any, options: CallOptions) -> Work | None:
    """:func:`zcomm.reduce_scatter_single` with ``input_split_sizes``."""
    shards, full, shard = _checked("reduce_scatter", group, sizes, options, "intra", input=input, output=output)
    divisor = divisor_of(options.op, shards.route.world_size)
    return _run(_reduce(shard, full, divisor, shards), full, shard, shards, options)


def _run(steps: Steps, full: Tensor, shard: Tensor, shards: UnevenShards, options: CallOptions) -> Work | None:
    route = shards.route
    if env.is_set("ZCOMM_DEBUG"):
        facts: dict[str, Any] = {"dtype": shards.dtype, "numbering": shards.numbering, "random": options.random}
        if options.op is not None:
            facts["op"] = "avg" if divisor_of(options.op, route.world_size) > 1 else "sum"
        route.compare(split_numels=shards.numels, **facts)
    if not full.numel():
        steps = nothing()
    with of_sizes(shards.numbering, shards.numels):
        return run(steps, full, shard, async_op=options.async_op, queue=route.queue, num_exchanges=len(route.hops))


def of_sizes(numbering: str, numels: Sequence[int]) -> AbstractContextManager[None]:
    """A context whose exchanges match those of ranks with the same shards only; these have ``numels`` elements."""
    # Other sizes may have the same sum. Exchanges of ranks that differ must not match: gloo ends a process that
    # receives more than it expects. Here they wait, and the watch finds them.
    digest = zlib.crc32(f"{numbering} {list(numels)}".encode())
    return in_bucket(f"{current_context().bucket}sizes {digest:08x}")


def _checked(
    operation: str, group: Group, sizes: Any, options: CallOptions, first: First, **tensors: Any
) -> tuple[UnevenShards, Tensor, Tensor]:
    """The shards, and the tensors, the one of all ranks first, as one dimension each."""
    wire, wished, async_op, random, numbering, op, *_ = options
    (full_name, full), (shard_name, shard) = tensors.items()
    what = f"{full_name}_split_sizes"
    if isinstance(full, LIST) or isinstance(shard, LIST):
        raise LayoutError(f"{what} must be left out with lists: pass {full_name} and {shard_name} as one tensor each")
    if options.residual is not None:
        raise LayoutError(f"residual must be left out with {what}: zcomm.NodeSums takes one with shard_sizes")
    full, shard = check_arguments(group, wire, numbering=numbering, async_op=async_op, **tensors)
    if is_auto(wire):
        raise FormatError(f'format="auto" is measured on even shards: name a format with {what}')
    route = find_route(operation, group, wire, first=first, backend=wished)
    if route.backend == "nccl":
        raise BackendUnavailableError(f"backend='nccl' does not serve {what}: use backend='torch'")
    if operation == "reduce_scatter":
        divisor_of(op, route.world_size)
    check_random(random, wire)
    source = tensors["input"]
    route.check_dtype(source.dtype)
    numels = _numels_of(full_name, full, sizes, route.world_size)
    _check_shard(shard_name, shard, what, numels[route.own_row(numbering)], full)
    encoder = Encoder(route, 0, random)
    shards = UnevenShards(route, encoder, numbering, source.dtype, numels, packs_of(route, numbering))
    return shards, _flat(full), _flat(shard)


def _flat(tensor: Tensor) -> Tensor:
    """Contiguous ``tensor`` as [n] of stride 1; that of a slice of one element may be another, which view() rejects."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _numels_of(name: str, full: Tensor, sizes: Any, world_size: int) -> list[int]:
    """Elements of each row of ``full``. Raises LayoutError unless the sizes fit."""
    if full.ndim == 0 or not full.is_contiguous():
        raise LayoutError(
            f"{name} must be contiguous and have rows, got shape={tuple(full.shape)}, stride={full.stride()}"
        )
    counts = check_split_sizes(name, sizes, world_size, full.shape[0])
    return [count * math.prod(full.shape[1:]) for count in counts]


def _check_shard(name: str, shard: Tensor, what: str, numel: int, full: Tensor) -> None:
    if not shard.is_contiguous() or shard.numel() != numel:
        raise LayoutError(
            f"{name} must be contiguous and have the elements of this rank's rows by {what}: shape="
            f"{tuple(shard.shape)}, stride={shard.stride()}, elements by {what}={numel}"
        )
    if shard.device != full.device:
        raise LayoutError(f"output and input must be on one device: {shard.device}, {full.device}")


def packs_of(route: Route, numbering: Numbering) -> list[list[int]]:
    """The rows of the ranks of each local rank, in the order of nodes."""
    if len(route.hops) == 1:
        return [list(range(route.world_size))]
    to_local, to_node = route.strides(numbering, 1)
    return [[local * to_local + n * to_node for n in range(route.num_nodes)] for local in range(route.ranks_per_node)]


def new_to_receive(codec: Codec, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A buffer for messages of several lengths, without trailers (M4): one launch clears all."""
    return (torch.zeros if codec.is_block else torch.empty)(shape, dtype=torch.uint8, device=device)


def gather_rows(output: Tensor, shard: Tensor, shards: UnevenShards) -> Steps:
    """The steps of :func:`uneven_all_gather`.

    ``messages``: those of all rows in the format of the last hop, pack after pack.
    """
    route, pack, rows = shards.route, shards.packs[shards.own_pack], shards.in_order
    last = len(route.hops) - 1
    codec, outputs = shards.codec(last), torch.split(output, shards.numels)
    in_pieces = last == 1 and codec.dtype is not None and not shards.is_ordered and _are_large(shards, output.device)
    in_place = codec.dtype == output.dtype and (shards.is_ordered or in_pieces)
    if in_place:
        messages = [outputs[row].view(torch.uint8) for row in rows]
        flat = output.view(torch.uint8)
    else:
        flat = new_to_receive(codec, (shards.nbytes(last, rows),), output.device)
        messages = shards.split(last, flat, [[row] for row in rows])
    first = shards.own_pack * len(pack)
    of_nodes = received = messages[first : first + len(pack)]
    is_forwarded = last == 0 or is_same_wire(route.hops[0][1], route.hops[1][1], shards.dtype)
    if not is_forwarded:
        buffer = new_to_receive(shards.codec(0), (shards.nbytes(0, pack),), output.device)
        received = shards.split(0, buffer, [[row] for row in pack])
    mine = shard.view(torch.uint8)
    if shards.codec(0).dtype != shard.dtype:
        mine = received[route.hops[0][0].rank]
        shards.encode(0, shard, mine, shards.encoder.draw(0))
    yield shards.gather(0, received, mine, [[row] for row in pack])
    if not is_forwarded:
        _encode_again(received, of_nodes, pack, shards)
    if in_pieces:
        yield _inside_in_pieces(messages, shards)
    elif last == 1:
        packed = shards.split(last, flat, shards.packs)
        yield shards.gather(last, packed, packed[shards.own_pack], shards.packs)
    if not in_place:
        for message, row in zip(messages, rows, strict=True):
            shards.decode(last, message, outputs[row])


def _are_large(shards: UnevenShards, device: torch.device) -> bool:
    """Whether a copy costs more than an exchange for each node: the same on every rank."""
    return max(shards.numels) > shards.route.min_chunk_numel(device)


def _inside_in_pieces(messages: Sequence[Tensor], shards: UnevenShards) -> Pending | None:
    """One gather for the rows of each node, wherever they lie."""
    num_nodes, exchanges = shards.route.num_nodes, []
    for node in range(num_nodes):
        of_node = messages[node::num_nodes]
        exchanges.append(shards.gather(1, of_node, of_node[shards.own_pack], [[pack[node]] for pack in shards.packs]))
    return backend.combined(exchanges)


def _encode_again(received: Sequence[Tensor], messages: Sequence[Tensor], pack: Rows, shards: UnevenShards) -> None:
    """Encode what the messages ``received`` on hop 1 hold, for hop 2."""
    codec, first = shards.codec(1), 0
    # All nodes encode the same values. With random numbers of their own they would end with different bits.
    encoder = replace(shards.encoder, rank=shards.route.local_rank)
    for old, new, row in zip(received, messages, pack, strict=True):
        if codec.dtype is not None:
            shards.decode(0, old, new.view(codec.dtype))
        else:
            dtype = codec.dtype_between(shards.codec(0))
            values = torch.empty(shards.numels[row], dtype=dtype, device=old.device)
            shards.decode(0, old, values)
            shards.encode(1, values, new, encoder.at(first).draw(1))
        first += shards.numels[row]


def _reduce(output: Tensor, source: Tensor, divisor: int, shards: UnevenShards) -> Steps:
    chunks, rows = _chunks(shards, output.device), torch.split(source, shards.numels)
    if len(chunks) == 1:
        return _reduce_rows(output, source, rows, divisor, shards)
    steps = []
    for chunk in chunks:
        numels = [len(range(*chunk.indices(numel))) for numel in shards.numels]
        part = replace(shards, numels=numels)
        steps.append(_reduce_rows(output[chunk], None, [row[chunk] for row in rows], divisor, part))
    return pipelined(steps, num_exchanges=2)


def _chunks(shards: UnevenShards, device: torch.device) -> list[slice]:
    """The columns of rows that are reduced together; of all ranks the same."""
    formats = [wire for _, wire in shards.route.hops]
    if len(formats) == 1 or any(shards.codec(hop).dtype is None for hop in (0, 1)):
        return [slice(None)]
    return chunks_of(max(shards.numels), *formats, min_numel=shards.route.min_chunk_numel(device)) or [slice(None)]


def _reduce_rows(
    output: Tensor, source: Tensor | None, rows: Sequence[Tensor], divisor: int, shards: UnevenShards
) -> Steps:
    """``source``: where ``rows`` lie side by side, if they do."""
    hops, last = shards.route.hops, len(shards.route.hops) - 1
    inside = shards.route.divisor_inside(shards.dtype, divisor)
    pack = [[row] for row in shards.packs[shards.own_pack]]
    groups = shards.packs if last else pack
    sent = _encoded_rows(rows, groups, shards) if source is None else encoded_groups(source, groups, shards)
    if last:
        sent = yield from _sums_inside(sent, inside, shards)
    layout, size = shards.layout(last, output.numel()), hops[last][0].size
    received = output.new_empty((size, 0), dtype=torch.uint8)
    if output.numel():
        received = layout.new_to_receive(size, output.device)
    yield shards.scatter(last, received.unbind(0), sent, pack)
    if output.numel():
        kernels.decode_sum(received, layout, output, 0, divisor / inside)


def encoded_groups(source: Tensor, groups: Sequence[Rows], shards: UnevenShards) -> list[Tensor]:
    """The messages of each of ``groups`` on the first hop, side by side; ``source`` itself if that can be sent."""
    codec = shards.codec(0)
    if codec.dtype == source.dtype and shards.is_ordered:
        return shards.split(0, source.view(torch.uint8), groups)
    if codec.dtype is not None and shards.is_ordered:
        flat = torch.empty(shards.nbytes(0, shards.in_order), dtype=torch.uint8, device=source.device)
        shards.encode(0, source, flat)
        return shards.split(0, flat, groups)
    return _encoded_rows(torch.split(source, shards.numels), groups, shards)


def _encoded_rows(rows: Sequence[Tensor], groups: Sequence[Rows], shards: UnevenShards) -> list[Tensor]:
    flat = torch.empty(shards.nbytes(0, shards.in_order), dtype=torch.uint8, device=rows[0].device)
    starts = list(accumulate(shards.numels, initial=0))
    for row, message in zip(shards.in_order, shards.split(0, flat, [[row] for row in shards.in_order]), strict=True):
        shards.encode(0, rows[row], message, shards.encoder.at(starts[row]).draw(0))
    return shards.split(0, flat, groups)


def _sums_inside(
    sent: list[Tensor], divisor: int, shards: UnevenShards
) -> Generator[Pending | None, None, list[Tensor]]:
    """Exchange packs inside the node. Returns the messages of this rank's pack's sums / ``divisor``, for hop 2."""
    pack, device = shards.packs[shards.own_pack], sent[0].device
    singles = [[row] for row in pack]
    shape = shards.route.ranks_per_node, shards.nbytes(0, pack)
    received = new_to_receive(shards.codec(0), shape, device)
    yield shards.scatter(0, received.unbind(0), sent, shards.packs)
    flat = torch.empty(shards.nbytes(1, pack), dtype=torch.uint8, device=device)
    messages = shards.split(1, flat, singles)
    if shards.numel(pack):
        _encode_sums(received, flat, pack, divisor, shards)
    return messages


def _encode_sums(received: Tensor, flat: Tensor, pack: Rows, divisor: int, shards: UnevenShards) -> None:
    """Encode the sums of the packs ``received`` uint8 [ranks_per_node, nbytes] / ``divisor``, side by side.

    They go into ``flat`` uint8 [n].
    """
    numels, singles = [shards.numels[row] for row in pack], [[row] for row in pack]
    total, first = sum(numels), 0
    are_casts = [shards.codec(hop).dtype is not None for hop in (0, 1)]
    if all(are_casts) and divisor == 1:  # plain arrays
        kernels.decode_sum_requantize(received, shards.layout(0, total), flat.view(1, -1), shards.layout(1, total))
        return
    sums = None
    if are_casts[0]:
        values = torch.empty(total, dtype=torch.float32, device=flat.device)
        kernels.decode_sum(received, shards.layout(0, total), values, 0, divisor)
        sums = torch.split(values, numels)
    parts = torch.split(received, [shards.nbytes(0, row) for row in singles], dim=1)
    for i, message in enumerate(shards.split(1, flat, singles)):
        draw = shards.encoder.at(first).draw(1)
        if sums is not None:
            shards.encode(1, sums[i], message, draw)
        elif numels[i]:
            messages, layouts = parts[i].contiguous(), [shards.layout(hop, numels[i]) for hop in (0, 1)]
            if divisor == 1:
                kernels.decode_sum_requantize(messages, layouts[0], message.view(1, -1), layouts[1], draw)
            else:
                values = torch.empty(numels[i], dtype=torch.float32, device=flat.device)
                kernels.decode_sum(messages, layouts[0], values, 0, divisor)
                shards.encode(1, values, message, draw)
        first += numels[i]
