"""Bytes that a rank sends in a step and the number of its exchanges, by purpose: :mod:`zcomm.volume` for each bucket.

Bytes are those that :func:`zcomm.traffic` counts, without control exchanges (a few bytes each). One exchange is a
message to each peer on a link; an agreement of all ranks counts as one, too. Where shards differ in length, bytes are
those of the rank of the shape. For k micro-batches, and at stage 3 as an
upper bound:

    stage 0           k or 1 reductions (no_sync), and the gradients gathered once
    stage 1           one reduction at the boundary, and the new parameters gathered once
    stage 2           k reductions, and the new parameters gathered once
      no_sync         one reduction; at stage 3 one gather, if parameters stay full, and none for backward
    stage 3           k reductions, 2k gathers: for forward and for backward,       ZeRO, section 7
                      also of embeddings and the last layer, which backward does not gather
      hpZ             of them one over all ranks, the others inside the node        ZeRO++, section 3.2
      delta-hpZ       2k gathers inside the node; k first hops, one second;         zero._modes.delta_hpz
                      and the deltas of the shards once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from zcomm import Topology
from zcomm._kernels.grid import expected_nbytes
from zcomm._transport.backend_choice import BackendName, KernelsName
from zcomm._transport.topology import Numbering
from zcomm.volume import (
    Exchanged,
    Pair,
    Sent,
    all_gather_sent,
    exchanged,
    one_hop_sent,
    reduce_scatter_sent,
    secondary_gather_sent,
    uneven_all_gather_sent,
    uneven_reduce_scatter_sent,
)
from zero._config.settings import Effective, ZeroSettings
from zero._gather.gather_sources import GatherOptions, gather_options
from zero._gradients.bucket_reduce_scatter import WIRE_NAMES
from zero._modes import MODES, resolve_mode
from zero._modes.deltas import CHANGE_FORMAT
from zero._modes.mode import Mode, StepSchedule
from zero._sharding.layout import BucketLayout

KINDS = ("gathers", "gathers inside the node", "reductions", "new parameters", "agreements")
"""The purposes of exchanges, in the order of a step."""


class MovedBytes(NamedTuple):
    """Bytes that a rank sends, and the exchanges that it takes part in."""

    sent: Sent
    exchanges: Exchanged


NOTHING = MovedBytes(Sent(0, 0), Exchanged(0, 0))
UNEVEN: Mapping[Callable[..., Sent], Callable[..., Sent]] = {
    all_gather_sent: uneven_all_gather_sent, reduce_scatter_sent: uneven_reduce_scatter_sent
}  # fmt: skip
"""The formulas of shards of different lengths by those of equal shards."""


@dataclass(frozen=True, slots=True)
class TopologyShape:
    """The fields of a Topology that settings depend on, without process groups: a plan needs no ranks."""

    num_nodes: int
    ranks_per_node: int
    rank: int = 0
    backend: BackendName = "torch"
    kernels: KernelsName = "auto"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.ranks_per_node

    def shard_index(self, numbering: Numbering) -> int:
        """As that of a Topology."""
        node, local = divmod(self.rank, self.ranks_per_node)
        return self.rank if numbering == "rank" else local * self.num_nodes + node


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The settings that decide how the buckets of a step are sent."""

    settings: ZeroSettings
    effective: Effective
    options: GatherOptions
    shape: TopologyShape | Topology
    dtype: torch.dtype
    gradient_dtype: torch.dtype

    @classmethod
    def of(cls, settings: ZeroSettings, num_nodes: int, ranks_per_node: int, dtype: torch.dtype) -> Exchanges:
        """Resolve ``settings`` for parameters of ``dtype``; ConfigError for settings that cannot be combined."""
        shape = TopologyShape(num_nodes, ranks_per_node)
        topology = cast(Topology, shape)
        effective = resolve_mode(settings, topology)
        options = gather_options(settings, effective, topology)
        return cls(settings, effective, options, shape, dtype, settings.gradient_dtype or torch.float32)

    @property
    def mode(self) -> Mode:
        """The mode in effect."""
        return MODES[self.effective.mode]

    def gather(self, layout: BucketLayout) -> MovedBytes:
        """The gather of a bucket's full parameters from the primary partition, over all ranks."""
        wire = (self.effective.weight_format,) * 2
        return self._moved(all_gather_sent, layout, _sizes(self.options.columns(layout)), self.dtype, wire)

    def gather_in_node(self, layout: BucketLayout) -> MovedBytes:
        """The gather of a bucket's full parameters from the secondary partition, inside the node."""
        per_node = self.shape.ranks_per_node
        parts = [n * layout.world_size for n in _sizes(self.options.columns(layout))]
        if layout.sizes is not None:  # at once; a secondary partition is equal all the same, and a replica is not
            own = layout.node_numel(self._row, self.shape.num_nodes)
            parts = [layout.numel if self.mode.deltas_over != "nodes" else own * per_node]
        sent = [secondary_gather_sent(n, self.dtype, per_node) for n in parts]
        return total([MovedBytes(part, Exchanged(int(per_node > 1), 0)) for part in sent])

    def reduce(self, layout: BucketLayout) -> MovedBytes:
        """The reduction of a bucket's gradients to their shards."""
        narrow = "none" if self.gradient_dtype == self.dtype else WIRE_NAMES[self.dtype]
        wire = self.effective.gradient_formats or (narrow, narrow)
        chunks = _sizes(layout.chunks(self.settings.reduce_bucket_size))
        parts = chunks if self.mode.is_chunked else [layout.shard_numel]
        if self.effective.gradient_error:
            return self._reduce_coded(layout, wire)
        return self._moved(reduce_scatter_sent, layout, parts, self.gradient_dtype, wire)

    def _reduce_coded(self, layout: BucketLayout, wire: Pair) -> MovedBytes:
        """Rows are sent as if they differed in length, and between nodes they are messages of expected lengths."""
        nodes = self.shape.num_nodes, self.shape.ranks_per_node
        sizes = layout.sizes or (layout.shard_numel,) * layout.world_size
        sent = uneven_reduce_scatter_sent(sizes, self._row, self.gradient_dtype, *nodes, wire, "local")
        first = self._row - self._row % self.shape.num_nodes
        rows = [row for row in range(first, first + self.shape.num_nodes) if row != self._row]
        between = sum(expected_nbytes(sizes[row], self.effective.gradient_error) for row in rows)
        return MovedBytes(sent._replace(inter=between), exchanged(1, *nodes, wire))

    def write_back(self, layout: BucketLayout) -> MovedBytes:
        """The gather after a step: below stage 3 of new parameters (stage 0: of gradients), or of deltas."""
        if (wire := self.change_wire) is not None:
            if self.mode.deltas_over == "world":
                return self._moved(all_gather_sent, layout, [layout.shard_numel], torch.float32, (wire, wire))
            start, stop = layout.shard_range(self._row)
            sent = one_hop_sent(stop - start, torch.float32, 0, self.shape.num_nodes - 1, wire)
            return MovedBytes(sent, Exchanged(0, int(self.shape.num_nodes > 1)))  # one hop, never in chunks
        if self.effective.stage.shards_parameters:
            return NOTHING
        if not self.effective.stage.shards_states:
            parts = _sizes(layout.chunks(self.settings.reduce_bucket_size))
            return self._moved(all_gather_sent, layout, parts, self.gradient_dtype, ("none", "none"))
        return self._gather_new(layout)

    @property
    def change_wire(self) -> str | None:
        """The format that deltas take as many bytes as; None: there are none.

        The length of exact changes is known only after encoding. Over the schedule of a small GPT 4.7 to 3.0 bits an
        element were measured (bench/results/change_entropy.md), about what int4 takes; at lower learning rates less.
        """
        return CHANGE_FORMAT if self.effective.sends_exact_changes else self.effective.change_format

    def _gather_new(self, layout: BucketLayout) -> MovedBytes:
        """The gather of new parameters after a step."""
        parts, wire = _sizes(layout.chunks(self.options.max_numel)), self.effective.weight_format
        return self._moved(all_gather_sent, layout, parts, self.dtype, (wire, wire))

    @property
    def _row(self) -> int:
        return self.shape.shard_index("local")

    def _moved(
        self, sent: Callable[..., Sent], layout: BucketLayout, parts: list[int], dtype: torch.dtype, wire: Pair
    ) -> MovedBytes:
        """``parts``: what each exchange has of every shard, if shards are equal."""
        nodes = self.shape.num_nodes, self.shape.ranks_per_node
        if layout.sizes is not None:
            nbytes = UNEVEN[sent](layout.sizes, self._row, dtype, *nodes, wire, "local")
            return MovedBytes(nbytes, exchanged(1, *nodes, wire))
        return total([MovedBytes(sent(n, dtype, *nodes, wire), exchanged(n, *nodes, wire)) for n in parts])

    def agreements(self, num_micro: int, *, is_once: bool = False) -> MovedBytes:
        """The control exchanges of a step: one before each reduction, one before the update. Bytes count as 0."""
        if self.shape.world_size == 1:
            return NOTHING
        count = 1 + (num_micro if self.effective.stage.reduces_every_micro_batch and not is_once else 1)
        return MovedBytes(Sent(0, 0), Exchanged(0, count) if self.shape.num_nodes > 1 else Exchanged(count, 0))

    def schedule(self, num_micro: int, *, is_once: bool = False) -> StepSchedule:
        """How often a step of ``num_micro`` micro-batches sends a trainable bucket; at stage 3 at most.

        ``is_once``: parameters and gradients stay full from the first micro-batch to the last, by
        ``stage3_max_reuse_distance`` and ``no_sync``.
        """
        counted = 1 if is_once else num_micro
        often = self.mode.schedule(self.effective.stage, counted, has_secondary=self.effective.has_secondary)
        if not is_once:
            return often
        gathers = min(often.gathers, 1)  # none for backward
        return often._replace(gathers=gathers, node_gathers=min(often.node_gathers, 1 - gathers))

    def moved_for(
        self, layout: BucketLayout, often: StepSchedule, *, is_trainable: bool, is_persistent: bool = False
    ) -> dict[str, MovedBytes]:
        """What is sent for one bucket in a step, by kind; ``often``: how often it is sent."""
        found = dict.fromkeys(KINDS, NOTHING)
        if often.gathers:
            found[KINDS[0]] = times(self.gather(layout), often.gathers)
        if often.node_gathers:
            found[KINDS[1]] = times(self.gather_in_node(layout), often.node_gathers)
        if is_trainable:
            once = self.reduce(layout)
            in_node, between = times(once, often.node_reductions), times(once, often.reductions)
            found[KINDS[2]] = MovedBytes(
                Sent(in_node.sent.intra, between.sent.inter),
                Exchanged(in_node.exchanges.intra, between.exchanges.inter),
            )
            found[KINDS[3]] = self._gather_new(layout) if is_persistent else self.write_back(layout)
        return found


def _sizes(spans: Iterable[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in spans]


def times(moved: MovedBytes, factor: int) -> MovedBytes:
    """``factor`` times ``moved``."""
    return MovedBytes(Sent(*(n * factor for n in moved.sent)), Exchanged(*(n * factor for n in moved.exchanges)))


def total(parts: list[MovedBytes]) -> MovedBytes:
    """The sum of ``parts``."""
    sent, counts = [part.sent for part in parts], [part.exchanges for part in parts]
    return MovedBytes(
        Sent(sum(part.intra for part in sent), sum(part.inter for part in sent)),
        Exchanged(sum(part.intra for part in counts), sum(part.inter for part in counts)),
    )
