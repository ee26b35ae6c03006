"""Bytes that a collective sends, by formula: what :func:`zcomm.traffic` counts, without running anything.

Per rank, by link class. N nodes of L ranks, W = N * L, shards of n elements, m(s) the message of s segments of n.

    one hop            m(1) to each of W - 1 ranks
    all_gather         two hops: m(1) x (N - 1) between, N m(1) x (L - 1) inside, or m(N) if formats differ
    reduce_scatter     two hops: m(N) x (L - 1) inside, m(1) x (N - 1) between
    all_reduce         both, n = ceil(numel / W)
    all_to_all         two hops: N m(1) x (L - 1) inside, L m(1) x (N - 1) between
    secondary gather   ceil(numel / L) elements x (L - 1) inside
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zcomm.formats import Format, codec_for, get_format
from zcomm.message import layout_of

__all__ = [
    "Sent",
    "all_gather_sent",
    "all_reduce_sent",
    "all_to_all_sent",
    "inter_node_model_units",
    "one_hop_sent",
    "reduce_scatter_sent",
    "secondary_gather_sent",
]

Wire = str | Format
Pair = tuple[Wire, Wire]


class Sent(NamedTuple):
    """Bytes that one rank sends."""

    intra: int
    inter: int


def _message(wire: Wire, dtype: torch.dtype, num_segments: int, numel: int) -> int:
    return layout_of("volume", get_format(wire), dtype, num_segments, numel).nbytes if numel else 0


def _is_same(pair: Pair, dtype: torch.dtype) -> bool:
    """Whether both formats put the same bytes on the wire."""
    first, second = get_format(pair[0]), get_format(pair[1])
    return codec_for(first, dtype) == codec_for(second, dtype) and first.block == second.block


def one_hop_sent(shard_numel: int, dtype: torch.dtype, num_intra_peers: int, num_inter_peers: int, wire: Wire) -> Sent:
    """An all-gather, reduce-scatter or all-to-all over a ProcessGroup; shards or parts of ``shard_numel``."""
    message = _message(wire, dtype, 1, shard_numel)
    return Sent(num_intra_peers * message, num_inter_peers * message)


def all_gather_sent(shard_numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: Pair) -> Sent:
    """Over a Topology; ``wire`` as (between nodes, inside the node)."""
    between, inside = wire
    if num_nodes == 1:
        return one_hop_sent(shard_numel, dtype, ranks_per_node - 1, 0, inside)
    first = _message(between, dtype, 1, shard_numel)
    second = num_nodes * first if _is_same(wire, dtype) else _message(inside, dtype, num_nodes, shard_numel)
    return Sent((ranks_per_node - 1) * second, (num_nodes - 1) * first)


def reduce_scatter_sent(shard_numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: Pair) -> Sent:
    """Over a Topology; ``wire`` as (inside the node, between nodes)."""
    inside, between = wire
    if num_nodes == 1:
        return one_hop_sent(shard_numel, dtype, ranks_per_node - 1, 0, inside)
    first = _message(inside, dtype, num_nodes, shard_numel)
    return Sent((ranks_per_node - 1) * first, (num_nodes - 1) * _message(between, dtype, 1, shard_numel))


def all_reduce_sent(numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: Pair) -> Sent:
    """Over a Topology; ``wire`` as (inside the node, between nodes), the gather the same on each kind of link."""
    shard_numel = -(-numel // (num_nodes * ranks_per_node))
    reduced = reduce_scatter_sent(shard_numel, dtype, num_nodes, ranks_per_node, wire)
    gathered = all_gather_sent(shard_numel, dtype, num_nodes, ranks_per_node, (wire[1], wire[0]))
    return Sent(reduced.intra + gathered.intra, reduced.inter + gathered.inter)


def all_to_all_sent(part_numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: Pair) -> Sent:
    """Over a Topology, parts of ``part_numel``; ``wire`` as (inside the node, between nodes)."""
    inside, between = (_message(format, dtype, 1, part_numel) for format in wire)
    if num_nodes == 1 or ranks_per_node == 1:
        return Sent((ranks_per_node - 1) * inside, (num_nodes - 1) * between)
    return Sent((ranks_per_node - 1) * num_nodes * inside, (num_nodes - 1) * ranks_per_node * between)


def secondary_gather_sent(numel: int, dtype: torch.dtype, ranks_per_node: int) -> Sent:
    """A gather of a SecondaryPartition of ``numel`` elements."""
    return Sent((ranks_per_node - 1) * -(-numel // ranks_per_node) * dtype.itemsize, 0)


def inter_node_model_units(bytes_of_all_ranks: float, num_nodes: int, numel: int) -> float:
    """Inter-node bytes, summed over ranks, in units of the bf16 model M = 2 * numel bytes, per other node."""
    return bytes_of_all_ranks / max(num_nodes - 1, 1) / (2 * numel)
