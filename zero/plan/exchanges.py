"""Bytes that a rank sends in a step, and the exchanges they go in, by what for: :mod:`zcomm.volume` over the buckets.

What :func:`zcomm.traffic` counts, but for the agreements (operation "control"), a few bytes a rank; a message to each
peer on a link is one exchange, and so is an agreement of all ranks. At stage 3 the most: see below. k micro-batches:

    stage 0           k or 1 reductions (no_sync), and the gradients gathered once
    stage 1           one reduction at the boundary, and the new parameters gathered once
    stage 2           k reductions, and the new parameters gathered once
    stage 3           k reductions, 2k gathers: for forward and for backward,       ZeRO, section 7
                      also of embeddings and the last layer, which backward does without
      hpZ             of them one over all ranks, the others inside the node        ZeRO++, section 3.2
      delta-hpZ       2k gathers inside the node; k first hops, one second;         zero._config.delta_hpz_settings
                      and the changes of the shards once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from zcomm import Topology
from zcomm._transport.backend_choice import BackendName, KernelsName
from zcomm.volume import (
    Exchanged,
    Sent,
    all_gather_sent,
    exchanged,
    one_hop_sent,
    reduce_scatter_sent,
    secondary_gather_sent,
)
from zero._config.delta_hpz_settings import resolve_mode
from zero._config.settings import Effective, ZeroSettings
from zero._gather.gather_sources import GatherOptions, gather_options
from zero._gradients.reduction import WIRE_NAMES
from zero._model.model_layout import MERGED_NUMEL
from zero._sharding.layout import BucketLayout
from zero.plan.model import Model

KINDS = ("gathers", "gathers inside the node", "reductions", "new parameters", "agreements")
"""What is sent for, in the order of a step."""


class MovedBytes(NamedTuple):
    """What a rank moves."""

    sent: Sent
    exchanges: Exchanged


NOTHING = MovedBytes(Sent(0, 0), Exchanged(0, 0))


@dataclass(frozen=True, slots=True)
class TopologyShape:
    """As much of a Topology as decisions need that are made without communication."""

    num_nodes: int
    ranks_per_node: int
    rank: int = 0
    backend: BackendName = "torch"
    kernels: KernelsName = "auto"

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What every bucket of a step is sent by."""

    settings: ZeroSettings
    effective: Effective
    options: GatherOptions
    shape: TopologyShape
    dtype: torch.dtype
    gradient_dtype: torch.dtype

    @classmethod
    def of(cls, settings: ZeroSettings, num_nodes: int, ranks_per_node: int, dtype: torch.dtype) -> Exchanges:
        """With parameters of ``dtype``; ConfigError for what cannot be combined."""
        shape = TopologyShape(num_nodes, ranks_per_node)
        topology = cast(Topology, shape)
        effective = resolve_mode(settings, topology)
        options = gather_options(settings, effective, topology)
        return cls(settings, effective, options, shape, dtype, settings.gradient_dtype or torch.float32)

    def gather(self, layout: BucketLayout) -> MovedBytes:
        """All of a bucket's parameters, from all ranks."""
        wire = (self.effective.weight_format,) * 2
        return self._gathered([stop - start for start, stop in self.options.columns(layout)], self.dtype, wire)

    def gather_inside(self, layout: BucketLayout) -> MovedBytes:
        """The same from the node's own copy."""
        parts = [(stop - start) * layout.world_size for start, stop in self.options.columns(layout)]
        per_node = self.shape.ranks_per_node
        sent = [secondary_gather_sent(n, self.dtype, per_node) for n in parts]
        return _total([MovedBytes(part, Exchanged(int(per_node > 1), 0)) for part in sent])

    def reduce(self, layout: BucketLayout) -> MovedBytes:
        """A bucket's gradients to the shards."""
        wire = self.effective.gradient_formats
        if wire is None:
            narrow = "none" if self.gradient_dtype == self.dtype else WIRE_NAMES[self.dtype]
            wire = (narrow, narrow)
        ends = layout.chunks(self.settings.reduce_bucket_size)
        parts = [stop - start for start, stop in ends] if self.effective.change_format is None else [layout.shard_numel]
        return _total(
            [
                MovedBytes(
                    reduce_scatter_sent(n, self.gradient_dtype, *self._nodes, wire), exchanged(n, *self._nodes, wire)
                )
                for n in parts
            ]
        )

    def publish(self, layout: BucketLayout) -> MovedBytes:
        """Below stage 3: new parameters, or at stage 0 whole gradients. In delta-hpZ the changes."""
        if (wire := self.effective.change_format) is not None:
            sent = one_hop_sent(layout.shard_numel, torch.float32, 0, self.shape.num_nodes - 1, wire)
            return MovedBytes(sent, Exchanged(0, int(self.shape.num_nodes > 1)))  # one hop, never cut
        if self.effective.stage.shards_parameters:
            return NOTHING
        if not self.effective.stage.shards_states:
            parts, wire, dtype = layout.chunks(self.settings.reduce_bucket_size), "none", self.gradient_dtype
        else:
            parts, wire, dtype = layout.chunks(self.options.max_numel), self.effective.weight_format, self.dtype
        return self._gathered([stop - start for start, stop in parts], dtype, (wire, wire))

    def _gathered(self, parts: list[int], dtype: torch.dtype, wire: tuple[str, str]) -> MovedBytes:
        of_parts = [(all_gather_sent(n, dtype, *self._nodes, wire), exchanged(n, *self._nodes, wire)) for n in parts]
        return _total([MovedBytes(*part) for part in of_parts])

    def agree(self, num_micro: int) -> MovedBytes:
        """The agreements of a step: one on what each reduction takes, one on the update; their bytes do not count."""
        if self.shape.world_size == 1:
            return NOTHING
        count = 1 + (num_micro if self.effective.stage.reduces_every_micro_batch else 1)
        return MovedBytes(Sent(0, 0), Exchanged(0, count) if self.shape.num_nodes > 1 else Exchanged(count, 0))

    @property
    def _nodes(self) -> tuple[int, int]:
        return self.shape.num_nodes, self.shape.ranks_per_node

    def of_bucket(self, layout: BucketLayout, num_micro: int, *, is_trainable: bool) -> dict[str, MovedBytes]:
        """What one bucket moves in a step of ``num_micro`` micro-batches, by kind."""
        stage, has_copy = self.effective.stage, self.effective.change_format is not None
        whole, inside = (0, 0) if not stage.shards_parameters else (2 * num_micro, 0)
        if has_copy:
            whole, inside = 0, whole
        elif self.effective.has_secondary:
            whole, inside = 1, whole - 1
        found = {
            KINDS[0]: _times(self.gather(layout), whole) if whole else NOTHING,
            KINDS[1]: _times(self.gather_inside(layout), inside) if inside else NOTHING,
            KINDS[2]: NOTHING,
            KINDS[3]: NOTHING,
            KINDS[4]: NOTHING,
        }
        if is_trainable:
            once = self.reduce(layout)
            times = num_micro if stage.reduces_every_micro_batch else 1
            found[KINDS[2]] = _times(once, times)
            if has_copy:  # the second hop once
                sent, counts = found[KINDS[2]]
                found[KINDS[2]] = MovedBytes(
                    sent._replace(inter=once.sent.inter), counts._replace(inter=once.exchanges.inter)
                )
            found[KINDS[3]] = self.publish(layout)
        return found


def step_moved(model: Model, exchanges: Exchanges, num_micro: int = 1) -> dict[str, MovedBytes]:
    """Bytes that each rank sends in a step, and exchanges that it takes part in, by kind and link."""
    settings, shape = exchanges.settings, exchanges.shape
    merged = min(MERGED_NUMEL, settings.reduce_bucket_size, settings.allgather_bucket_size)
    if exchanges.effective.stage.shards_parameters:
        merged = 0
    totals = dict.fromkeys(KINDS, NOTHING)
    for layout, repeats, is_trainable in model.layouts(shape.world_size, merged):
        for kind, moved in exchanges.of_bucket(layout, num_micro, is_trainable=is_trainable).items():
            totals[kind] = _total([totals[kind], _times(moved, repeats)])
    return totals | {KINDS[4]: exchanges.agree(num_micro)}


def kernel_nbytes(model: Model, exchanges: Exchanges, num_micro: int = 1) -> float:
    """Bytes of device memory that a rank's kernels read and write in a step to encode, decode and sum what is sent.

    For each element, w bytes on the wire: a gathered one w + b_p, unless it travels as it is; a reduced one b_g + w to
    be encoded and w to be summed on the first hop. What later hops add is 1 / L of that, and left out.
    """
    effective, numel = exchanges.effective, model.numel
    if exchanges.shape.world_size == 1:
        return 0.0
    of_gather, of_gradient = exchanges.dtype.itemsize, exchanges.gradient_dtype.itemsize
    wire = effective.gradient_formats or (WIRE_NAMES[exchanges.dtype],) * 2
    first = wire[0] if exchanges.shape.ranks_per_node > 1 else wire[1]
    on_wire = _wire_nbytes(first, exchanges.gradient_dtype)
    reductions = num_micro if effective.stage.reduces_every_micro_batch else 1
    found = reductions * (of_gradient + 2 * on_wire) * numel
    if effective.change_format is not None:
        found += (
            (_wire_nbytes(effective.change_format, torch.float32) + 2 * of_gather)
            * numel
            / exchanges.shape.ranks_per_node
        )
    elif effective.weight_format != "none":
        gathers = 1 if effective.has_secondary or not effective.stage.shards_parameters else 2 * num_micro
        found += gathers * (_wire_nbytes(effective.weight_format, exchanges.dtype) + of_gather) * numel
    return found


def _wire_nbytes(wire: str, dtype: torch.dtype) -> float:
    """Bytes of an element, scales included."""
    numel = 2**20
    return one_hop_sent(numel, dtype, 1, 0, wire).intra / numel


def _times(moved: MovedBytes, factor: int) -> MovedBytes:
    sent, counts = moved
    return MovedBytes(
        Sent(sent.intra * factor, sent.inter * factor), Exchanged(counts.intra * factor, counts.inter * factor)
    )


def _total(parts: list[MovedBytes]) -> MovedBytes:
    sent, counts = [part.sent for part in parts], [part.exchanges for part in parts]
    return MovedBytes(
        Sent(sum(part.intra for part in sent), sum(part.inter for part in sent)),
        Exchanged(sum(part.intra for part in counts), sum(part.inter for part in counts)),
    )
