"""Communication volume by formula: the bytes that :func:`zcomm.traffic` would count, without running anything.

Per rank, by link class (intra-node, inter-node). N nodes of L ranks, W = N * L, shards of n elements, m(s) the bytes of
a message of s segments of n elements. On two hops large shards are sent in chunks; m(s) is then the sum over chunks.

    one hop            m(1) to each of W - 1 ranks
    all_gather         two hops: m(1) x (N - 1) inter, N m(1) x (L - 1) intra, or m(N) x (L - 1) if the formats differ
    reduce_scatter     two hops: m(N) x (L - 1) intra, m(1) x (N - 1) inter
    all_reduce         the sum of both, n = ceil(numel / W)
    all_to_all         two hops: N m(1) x (L - 1) intra, L m(1) x (N - 1) inter
    secondary gather   ceil(numel / L) elements x (L - 1) intra
    uneven shards      a message of one segment for each shard; on two hops m summed over the shards of a local rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from zcomm._base.arguments import shown
from zcomm._formats.formats import Format, get_format, is_same_wire
from zcomm._formats.message import layout_of
from zcomm._transport.chunks import chunks_of
from zcomm.errors import LayoutError

__all__ = [
    "Exchanged",
    "Sent",
    "all_gather_sent",
    "all_reduce_sent",
    "all_to_all_sent",
    "exchanged",
    "inter_node_model_units",
    "one_hop_sent",
    "reduce_scatter_sent",
    "secondary_gather_sent",
    "uneven_all_gather_sent",
    "uneven_reduce_scatter_sent",
]

Wire = str | Format
Pair = tuple[Wire, Wire]


class Sent(NamedTuple):
    """Bytes that one rank sends."""

    intra: int
    inter: int


class Exchanged(NamedTuple):
    """Exchanges that one rank takes part in. Each is with all its peers of that link class at once."""

    intra: int
    inter: int


def _message(wire: Wire, dtype: torch.dtype, num_segments: int, numel: int) -> int:
    return layout_of("volume", get_format(wire), dtype, num_segments, numel).nbytes if numel else 0


def _messages(pair: Pair, dtype: torch.dtype, num_segments: tuple[int, int], numel: int) -> tuple[int, int]:
    """Bytes that a rank's two messages, one per hop, take over all chunks of a shard of ``numel`` elements."""
    first, second = (get_format(wire) for wire in pair)
    chunks = [c.stop - c.start for c in chunks_of(numel, first, second)]
    of_chunks = [[_message(f, dtype, s, n) for n in chunks] for f, s in zip((first, second), num_segments, strict=True)]
    return sum(of_chunks[0]), sum(of_chunks[1])


def one_hop_sent(shard_numel: int, dtype: torch.dtype, num_intra_peers: int, num_inter_peers: int, wire: Wire) -> Sent:
    """Bytes of an all-gather, reduce-scatter or all-to-all over a ProcessGroup, of shards of ``shard_numel``."""
    message = _message(wire, dtype, 1, shard_numel)
    return Sent(num_intra_peers * message, num_inter_peers * message)


def all_gather_sent(shard_numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: Pair) -> Sent:
    """Bytes of an all-gather over a Topology; ``wire`` is (between nodes, inside the node)."""
    inter, intra = wire
    if num_nodes == 1 or ranks_per_node == 1:
        return one_hop_sent(shard_numel, dtype, ranks_per_node - 1, num_nodes - 1, intra if num_nodes == 1 else inter)
    first, second = _messages(wire, dtype, (1, num_nodes), shard_numel)
    if is_same_wire(get_format(inter), get_format(intra), dtype):
        second = num_nodes * first  # messages are forwarded, not encoded again
    return Sent((ranks_per_node - 1) * second, (num_nodes - 1) * first)


def reduce_scatter_sent(shard_numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: Pair) -> Sent:
    """Bytes of a reduce-scatter over a Topology; ``wire`` is (inside the node, between nodes)."""
    intra, inter = wire
    if num_nodes == 1 or ranks_per_node == 1:
        return one_hop_sent(shard_numel, dtype, ranks_per_node - 1, num_nodes - 1, intra if num_nodes == 1 else inter)
    first, second = _messages(wire, dtype, (num_nodes, 1), shard_numel)
    return Sent((ranks_per_node - 1) * first, (num_nodes - 1) * second)


def all_reduce_sent(numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: Pair) -> Sent:
    """Bytes of an all-reduce over a Topology; ``wire`` is (inside the node, between nodes), also of the gather."""
    shard_numel = -(-numel // (num_nodes * ranks_per_node))
    reduced = reduce_scatter_sent(shard_numel, dtype, num_nodes, ranks_per_node, wire)
    gathered = all_gather_sent(shard_numel, dtype, num_nodes, ranks_per_node, (wire[1], wire[0]))
    return Sent(reduced.intra + gathered.intra, reduced.inter + gathered.inter)


def all_to_all_sent(part_numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: Pair) -> Sent:
    """Bytes of an all-to-all of ``part_numel`` over a Topology; ``wire`` is (inside the node, between nodes)."""
    if num_nodes == 1 or ranks_per_node == 1:
        return one_hop_sent(part_numel, dtype, ranks_per_node - 1, num_nodes - 1, wire[0 if num_nodes == 1 else 1])
    intra, inter = _messages(wire, dtype, (1, 1), part_numel)
    return Sent((ranks_per_node - 1) * num_nodes * intra, (num_nodes - 1) * ranks_per_node * inter)


def secondary_gather_sent(numel: int, dtype: torch.dtype, ranks_per_node: int) -> Sent:
    """Bytes of a gather of a SecondaryPartition of ``numel`` elements."""
    return Sent((ranks_per_node - 1) * -(-numel // ranks_per_node) * dtype.itemsize, 0)


def uneven_all_gather_sent(
    numels: Sequence[int],
    row: int,
    dtype: torch.dtype,
    num_nodes: int,
    ranks_per_node: int,
    wire: Pair,
    numbering: Literal["rank", "local"] = "rank",
) -> Sent:
    """Bytes of an all-gather with ``output_split_sizes``, for the rank that owns ``row``.

    Args:
        numels: elements of each rank's shard, in the order of ``numbering``.
        row: the place of the rank in that order.
        dtype: of the shards.
        num_nodes: of the Topology; 1 over a ProcessGroup of one node.
        ranks_per_node: of the Topology; over a ProcessGroup its ranks.
        wire: (between nodes, inside the node).
        numbering: as in the call.
    """
    inter, intra = wire
    pack = next(pack for pack in _packs(numels, row, num_nodes, ranks_per_node, numbering) if row in pack)
    own = _message(intra if num_nodes == 1 else inter, dtype, 1, numels[row])
    if num_nodes == 1 or ranks_per_node == 1:
        return Sent((ranks_per_node - 1) * own, (num_nodes - 1) * own)
    forwarded = sum(_message(intra, dtype, 1, numels[of_node]) for of_node in pack)
    return Sent((ranks_per_node - 1) * forwarded, (num_nodes - 1) * own)


def uneven_reduce_scatter_sent(
    numels: Sequence[int],
    row: int,
    dtype: torch.dtype,
    num_nodes: int,
    ranks_per_node: int,
    wire: Pair,
    numbering: Literal["rank", "local"] = "rank",
) -> Sent:
    """Bytes of a reduce-scatter with ``input_split_sizes``, for the rank that owns ``row``.

    As :func:`uneven_all_gather_sent`, but ``wire`` is (inside the node, between nodes).
    """
    intra, inter = wire
    packs = _packs(numels, row, num_nodes, ranks_per_node, numbering)
    if num_nodes == 1 or ranks_per_node == 1:
        used = intra if num_nodes == 1 else inter
        others = sum(_message(used, dtype, 1, numel) for at, numel in enumerate(numels) if at != row)
        return Sent(others, 0) if num_nodes == 1 else Sent(0, others)
    inside = sum(_message(intra, dtype, 1, numels[at]) for pack in packs if row not in pack for at in pack)
    between = sum(_message(inter, dtype, 1, numels[at]) for pack in packs if row in pack for at in pack if at != row)
    return Sent(inside, between)


def _packs(numels: Sequence[int], row: int, num_nodes: int, ranks_per_node: int, numbering: str) -> list[list[int]]:
    """By local rank, the rows of its ranks."""
    if len(numels) != num_nodes * ranks_per_node or not 0 <= row < len(numels):
        raise LayoutError(
            f"numels must have one number for each rank, and row be one of them: numels={shown(numels)}, row={row}, "
            f"num_nodes={num_nodes}, ranks_per_node={ranks_per_node}"
        )
    rows = range(len(numels))
    if numbering == "rank":
        return [list(rows[local::ranks_per_node]) for local in range(ranks_per_node)]
    return [list(rows[first : first + num_nodes]) for first in rows[::num_nodes]]


def exchanged(shard_numel: int, num_nodes: int, ranks_per_node: int, wire: Pair) -> Exchanged:
    """Exchanges of an all-gather, reduce-scatter or all-to-all over a Topology: one per hop and chunk."""
    if num_nodes * ranks_per_node == 1 or not shard_numel:
        return Exchanged(0, 0)
    if num_nodes == 1 or ranks_per_node == 1:
        return Exchanged(int(num_nodes == 1), int(num_nodes > 1))
    chunks = len(chunks_of(shard_numel, *(get_format(part) for part in wire)))
    return Exchanged(chunks, chunks)


def inter_node_model_units(bytes_of_all_ranks: float, num_nodes: int, numel: int) -> float:
    """Inter-node bytes of all ranks per other node, in units of the bf16 model, M = 2 * numel bytes (as in ZeRO++)."""
    return bytes_of_all_ranks / max(num_nodes - 1, 1) / (2 * numel)
