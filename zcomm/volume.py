"""Bytes that a collective sends, by formula: what :func:`zcomm.traffic` counts, without running anything.

Per rank, by link class. N nodes of L ranks, W = N * L, shards of n elements, m(s) the message of s segments of n.

    all_gather       one hop: m(1) to W - 1 ranks       two hops: m(1) x (N - 1) between, [N messages] x (L - 1) inside
    reduce_scatter   one hop: m(1) to W - 1 ranks       two hops: m(N) x (L - 1) inside, m(1) x (N - 1) between
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zcomm.formats import Format, get_format
from zcomm.message import layout_of

__all__ = ["Sent", "all_gather_sent", "inter_node_model_units", "reduce_scatter_sent"]


class Sent(NamedTuple):
    """Bytes that one rank sends."""

    intra: int
    inter: int


def _message(wire: str | Format, dtype: torch.dtype, num_segments: int, numel: int) -> int:
    return layout_of("volume", get_format(wire), dtype, num_segments, numel).nbytes


def all_gather_sent(
    shard_numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: tuple[str | Format, str | Format]
) -> Sent:
    """Over a Topology; ``wire`` as (between nodes, inside the node)."""
    between, inside = wire
    if num_nodes == 1:
        return Sent((ranks_per_node - 1) * _message(inside, dtype, 1, shard_numel), 0)
    first = _message(between, dtype, 1, shard_numel)
    if get_format(between) == get_format(inside):
        second = num_nodes * first
    else:
        second = _message(inside, dtype, num_nodes, shard_numel)
    return Sent((ranks_per_node - 1) * second, (num_nodes - 1) * first)


def reduce_scatter_sent(
    shard_numel: int, dtype: torch.dtype, num_nodes: int, ranks_per_node: int, wire: tuple[str | Format, str | Format]
) -> Sent:
    """Over a Topology; ``wire`` as (inside the node, between nodes)."""
    inside, between = wire
    if num_nodes == 1:
        return Sent((ranks_per_node - 1) * _message(inside, dtype, 1, shard_numel), 0)
    first = _message(inside, dtype, num_nodes, shard_numel)
    return Sent((ranks_per_node - 1) * first, (num_nodes - 1) * _message(between, dtype, 1, shard_numel))


def inter_node_model_units(bytes_of_all_ranks: float, num_nodes: int, numel: int) -> float:
    """Inter-node bytes, summed over ranks, in units of the bf16 model M = 2 * numel bytes, per other node."""
    return bytes_of_all_ranks / max(num_nodes - 1, 1) / (2 * numel)
