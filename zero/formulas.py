"""Bytes on one rank as formulas: arithmetic alone, for the estimate and for planning. Every count is in elements.

P parameters of which T are trainable, N ranks, L of them on a node, U elements in the largest unit (a layer), b bytes
of an element: b_p of what the forward reads, b_g of gradients at rest, b_s of states.

    kind                  bytes                                               where           source
    parameters            b_p P; stage 3: b_p P / N                           parameter tier  ZeRO, section 5
    gradients             b_g T; from stage 2: b_g T / N                      device, host    ZeRO, section 5
    states                b_s T; from stage 1: b_s T / N                      optimizer tier  ZeRO, section 3.1
    buckets               from stage 2: gradients on their way, 3 b_g B;      device          zero.grads
                          stage 3: and the layer in use, b_p U                                zero.bucket
    prefetch              stage 3: the layer after it, b_p U                  device          zero.gather
    secondary partition   hpZ on several nodes: b_p P / L                     device          ZeRO++, section 3.2
    residuals             error feedback of hop 2: (1 + 2/256) T / L          device          zcomm.Residual
    pinned buffers        NVMe: elements of all its buffers x b               host            ZeRO-Infinity, section 6
    activations           12 h b s b_p for each layer                         device          ZeRO, section 6.1
      with k checkpoints  12 h b s b_p (layers / k): one segment at a time    device          Chen et al.
      checkpoints         h b s b_p k; / m if partitioned over m ranks        or host, NVMe   ZeRO, section 6.1

B is the largest bucket: U, or below stage 3 what small layers share. k is the square root of the number of layers
unless it is given; the forward again is a third more computation.
Sources: ZeRO, arXiv:1910.02054; ZeRO-Infinity, arXiv:2104.07857; ZeRO++, arXiv:2306.10209; Chen et al.,
arXiv:1604.06174.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["RECOMPUTATION", "Activations", "Counts", "Setup", "Tier", "Usage", "usage_of"]

RECOMPUTATION = 1 / 3
"""More computation with checkpoints: the forward again, beside a backward of twice its cost."""
NUM_GRADIENT_BUFFERS = 3
"""One that is filled and two that are being reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Elements of a model."""

    numel: int
    """All parameters."""
    trainable: int | None = None
    """Of them; default: all."""
    largest_unit: int = 0
    """Of the parameters that are gathered together: the largest layer, or the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What a transformer's forward leaves for the backward on one rank."""

    hidden: int
    num_layers: int
    batch: int
    """Sequences a rank and backward."""
    sequence: int
    """Tokens each."""
    is_checkpointed: bool = False
    num_checkpoints: int | None = None
    """Default: the square root of ``num_layers``."""
    model_parallel: int = 1
    """Ranks that checkpoints are partitioned over; 1: they are not."""
    on_host: bool = False
    """Checkpoints rest in host memory."""
    in_files: bool = False
    """They rest in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Where shards rest: each ``device``, ``host`` or ``nvme``."""

    parameters: str = "device"
    """Stage 3 only."""
    states: str = "device"
    """And the reduced gradients, from stage 2 on. From stage 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is trained."""

    stage: int
    num_nodes: int = 1
    ranks_per_node: int = 1
    tier: Tier = Tier()
    param_nbytes: int = 2
    """An element of what the forward reads."""
    gradient_nbytes: int = 4
    """An element at rest."""
    state_nbytes: int = 12
    """An element: 4 of a master, unless the forward reads the same, and 4 of each moment."""
    merged_numel: int = 2**20
    """Elements up to which small layers share an exchange below stage 3."""
    has_secondary: bool = False
    has_residuals: bool = False
    pinned_numels: tuple[int, int] = (0, 0)
    """Elements of all NVMe buffers, for parameters and for states."""

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of one kind in one place."""

    kind: str
    place: str
    nbytes: float


def usage_of(counts: Counts, setup: Setup, activations: Activations | None = None) -> list[Usage]:
    """Every kind with its bytes on one rank; kinds of which there is nothing are left out."""
    found = [*_model_states(counts, setup), *_buffers(counts, setup)]
    if activations is not None:
        found += _activations(activations, setup)
    return [usage for usage in found if usage.nbytes]


def _model_states(counts: Counts, setup: Setup) -> list[Usage]:
    numel, stage, ranks = counts.numel, setup.stage, setup.world_size
    trainable = numel if counts.trainable is None else counts.trainable
    tier = setup.tier
    states = tier.states if stage >= 1 else "device"
    return [
        Usage(
            "parameters", tier.parameters if stage == 3 else "device", setup.param_nbytes * numel / _of(ranks, stage, 3)
        ),
        Usage(
            "gradients",
            states if stage >= 2 else "device",
            setup.gradient_nbytes * trainable / _of(ranks, stage, 2),
        ),
        Usage("states", states, setup.state_nbytes * trainable / _of(ranks, stage, 1)),
    ]


def _of(ranks: int, stage: int, first_stage: int) -> int:
    """Ranks that what is sharded from ``first_stage`` is divided over."""
    return ranks if stage >= first_stage else 1


def _buffers(counts: Counts, setup: Setup) -> list[Usage]:
    trainable = counts.numel if counts.trainable is None else counts.trainable
    unit, found = min(counts.largest_unit, counts.numel), []
    if setup.stage == 3:
        found.append(Usage("prefetch", "device", setup.param_nbytes * min(unit, counts.numel - unit)))
    live = setup.param_nbytes * unit if setup.stage == 3 else 0
    bucket = unit if setup.stage == 3 else max(unit, setup.merged_numel)
    on_their_way = min(NUM_GRADIENT_BUFFERS * bucket, trainable) if setup.stage >= 2 else 0
    found.append(Usage("buckets", "device", live + setup.gradient_nbytes * on_their_way))
    if setup.has_secondary and setup.stage == 3 and setup.num_nodes > 1:
        found.append(Usage("secondary partition", "device", setup.param_nbytes * counts.numel / setup.ranks_per_node))
    if setup.has_residuals and setup.stage >= 1:
        found.append(Usage("residuals", "device", (1 + 2 / 256) * trainable / setup.ranks_per_node))
    for place, numel, nbytes in (
        (setup.tier.parameters if setup.stage == 3 else "device", setup.pinned_numels[0], setup.param_nbytes),
        (setup.tier.states if setup.stage >= 1 else "device", setup.pinned_numels[1], 4),
    ):
        if place == "nvme":
            found.append(Usage("pinned buffers", "host", numel * nbytes))
    return found


def _activations(shape: Activations, setup: Setup) -> list[Usage]:
    tokens = shape.hidden * shape.batch * shape.sequence * setup.param_nbytes
    if not shape.is_checkpointed:
        return [Usage("activations", "device", 12 * tokens * shape.num_layers)]
    checkpoints = shape.num_checkpoints or max(round(math.sqrt(shape.num_layers)), 1)
    return [
        Usage("activations", "device", 12 * tokens * shape.num_layers / checkpoints),
        Usage(
            "activation checkpoints",
            "nvme" if shape.in_files else "host" if shape.on_host else "device",
            tokens * checkpoints / shape.model_parallel,
        ),
    ]
