"""Bytes on one rank as formulas: arithmetic alone, for the estimate and for planning. Every count is in elements.

P parameters of which T are trainable, N ranks, L of them on a node, U elements in the largest unit (a layer), b bytes
of an element: b_p of what the forward reads, b_g of gradients at rest, b_w of those on their way to the host, b_t of
those on their way to other ranks, b_s of states.

    kind                  bytes                                               where           source
    parameters            b_p P; stage 3: b_p P / N                           parameter tier  ZeRO, section 5
      frozen as INT8      stage 3: (1 + 2/256) (P - T) / N                    device, host    zcomm.EncodedShard
    gradients             b_g T; from stage 2: b_g T / N                      device          ZeRO, section 5
      of offloaded states instead, or at stage 1 too: b_w T / N; + b_g T / N  host            zero._storage.host_gradient
                          if micro-batches are summed
      of states on NVMe   b_g T / N, at stage 1 too                           nvme            zero._optim.gradient_files
    delayed update        gradients once more, in memory; 2 b_p T / N         host            zero._optim.delayed_update
    states                b_s T; from stage 1: b_s T / N                      optimizer tier  ZeRO, section 3.1
      on NVMe             twice as much, if steps may fail                    nvme            zero._optim.state_files
    buckets               from stage 2: gradients on their way, 3 b_t B;      device          zero._gradients.reducer
                          stage 3: and the layer in use, b_p U                                zero._sharding.bucket
    prefetch              stage 3: the layer after it, b_p U                  device          zero._gather.gatherer
    secondary partition   hpZ on several nodes: b_p P / L                     device          ZeRO++, section 3.2
    residuals             error feedback of hop 2: (1 + 2/256) T / L          device          zcomm.Residual
    NVMe buffers          sub-groups under way x (b_s + b_g); and those     host            ZeRO-Infinity, section 6
                          of parameters being read and written                                zero._storage.staging_buffers
    activations           12 h b s b_p for each layer                         device          ZeRO, section 6.1
      with k checkpoints  12 h b s b_p (layers / k): one segment at a time    device          Chen et al.
      checkpoints         h b s b_p k; / m if partitioned over m ranks        or host, NVMe   ZeRO, section 6.1

What is offloaded to the host is page-locked, unless pin_memory is false; not so INT8 codes and activations. Of
parameters on NVMe the first max_in_cpu elements of the shards stay in host memory. b_s has 4 bytes of a master where
the forward does not read that itself: with 16-bit parameters, with quantized weights below stage 3, and wherever states
are offloaded.

B is the largest bucket: U, or below stage 3 what small layers share. k is the square root of the number of layers
unless it is given; the forward again is a third more computation.
Sources: ZeRO, arXiv:1910.02054; ZeRO-Infinity, arXiv:2104.07857; ZeRO++, arXiv:2306.10209; Chen et al.,
arXiv:1604.06174.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RECOMPUTATION = 1 / 3
"""More computation with checkpoints: the forward again, beside a backward of twice its cost."""
ENCODED_NBYTES = 1 + 2 / 256
"""Of an element as INT8, in blocks of 256 with a scale of 2 bytes each."""
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
class ShardTiers:
    """Where shards rest: each ``device``, ``host`` or ``nvme``."""

    parameters: str = "device"
    """Stage 3 only."""
    states: str = "device"
    """And the reduced gradients. From stage 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeFiles:
    """How the NVMe tier is used."""

    numel_in_memory: int = 0
    """Elements of a rank's parameters that stay in host memory."""
    buffer_numel: int = 0
    """Elements of parameters that are read ahead, and as many that are being written, at most."""
    sub_group_numel: int = 2**22
    """Elements of states that are updated at a time, at most."""
    num_sub_groups: int = 1
    """In memory at a time."""
    num_generations: int = 2
    """Places of each state in the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is trained."""

    stage: int
    num_nodes: int = 1
    ranks_per_node: int = 1
    tier: ShardTiers = ShardTiers()
    param_nbytes: int = 2
    """An element of what the forward reads."""
    gradient_nbytes: int = 4
    """An element at rest."""
    state_nbytes: float = 12
    """An element: 4 of a master, and 4 of each moment."""
    shared_nbytes: int = 0
    """Of them, those of a master that forward reads itself, where it is not offloaded."""
    sent_nbytes: int = 4
    """An element of a gradient on its way to the host, where it rests as it came."""
    travel_nbytes: int = 4
    """An element of a gradient between the ranks."""
    sums_gradients: bool = False
    """Whether a step has several micro-batches."""
    merged_numel: int = 2**20
    """Elements up to which small layers share an exchange below stage 3."""
    has_secondary: bool = False
    has_residuals: bool = False
    sums_in_node: bool = False
    """Gradients of the micro-batches are summed up inside the node: ``mode="delta_hpz"``."""
    keeps_shards: bool = False
    """Trainable shards rest beside full parameters, to which changes are sent: ``mode="delta"``, stages 1 and 2."""
    quantizes_weights: bool = False
    """Forward reads quantized weights: below stage 3 exact ones are kept beside them."""
    encodes_frozen: bool = False
    """At stage 3 frozen parameters rest as INT8 blocks of 256."""
    files: NvmeFiles = NvmeFiles()
    offloaded_share: float = 1.0
    """Of the states, where they are offloaded."""
    delays_update: bool = False
    """Offloaded states are updated during the next step."""
    pins_memory: bool = True
    """Host memory of what is offloaded is page-locked."""

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def offloads_states(self) -> bool:
        """Whether states rest off the device."""
        return self.stage >= 1 and self.tier.states != "device"


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes of one kind in one place."""

    kind: str
    place: str
    nbytes: float
    is_pinned: bool = False
    """Page-locked host memory."""


def usage_of(counts: Counts, setup: Setup, activations: Activations | None = None) -> list[MemoryUsage]:
    """Every kind with its bytes on one rank; kinds of which there is nothing are left out."""
    found = [*_model_states(counts, setup), *_buffers(counts, setup)]
    if activations is not None:
        found += _activations(activations, setup)
    return [usage for usage in found if usage.nbytes]


def _model_states(counts: Counts, setup: Setup) -> list[MemoryUsage]:
    return [*_parameters(counts, setup), *_gradients(counts, setup), *_states(counts, setup)]


def _parameters(counts: Counts, setup: Setup) -> list[MemoryUsage]:
    trainable, frozen = _trainable_and_frozen(counts)
    if setup.stage < 3:
        shards = trainable / setup.world_size if setup.keeps_shards and setup.stage else 0.0
        return [MemoryUsage("parameters", "device", setup.param_nbytes * (counts.numel + shards))]
    ranks, place = setup.world_size, setup.tier.parameters
    codes = ENCODED_NBYTES * frozen / ranks if setup.encodes_frozen else 0.0
    numel = (trainable if setup.encodes_frozen else counts.numel) / ranks
    in_files = max(numel - setup.files.numel_in_memory, 0) if place == "nvme" else 0
    near = "device" if place == "device" else "host"
    return [
        MemoryUsage("parameters", near, setup.param_nbytes * (numel - in_files), near == "host" and setup.pins_memory),
        MemoryUsage("parameters", "nvme", setup.param_nbytes * in_files),
        MemoryUsage("frozen as INT8", near, codes),
    ]


def _gradients(counts: Counts, setup: Setup) -> list[MemoryUsage]:
    trainable, _ = _trainable_and_frozen(counts)
    share = setup.offloaded_share if setup.offloads_states else 0.0
    at_rest = trainable / _of(setup.world_size, setup.stage, 2)
    on_device = at_rest * (1 - share) if setup.stage >= 2 else at_rest
    on_host = share * trainable / setup.world_size
    place = "host" if setup.delays_update else setup.tier.states
    in_memory = (setup.sent_nbytes + setup.gradient_nbytes * setup.sums_gradients) * on_host
    return [
        MemoryUsage("gradients", "device", setup.gradient_nbytes * on_device),
        MemoryUsage(
            "gradients",
            place,
            setup.gradient_nbytes * on_host if place == "nvme" else in_memory,
            place == "host" and setup.pins_memory,
        ),
        *(_delayed(in_memory, on_host, setup) if setup.delays_update else []),
    ]


def _delayed(gradient_nbytes: float, numel: float, setup: Setup) -> list[MemoryUsage]:
    """What an update reads while the next gradients come, and what it writes before that is published."""
    nbytes = gradient_nbytes + 2 * setup.param_nbytes * numel
    return [MemoryUsage("delayed update", "host", nbytes, setup.pins_memory)]


def _states(counts: Counts, setup: Setup) -> list[MemoryUsage]:
    trainable, frozen = _trainable_and_frozen(counts)
    numel = trainable / _of(setup.world_size, setup.stage, 1)
    share = setup.offloaded_share if setup.offloads_states else 0.0
    is_exact = setup.quantizes_weights and setup.stage in (1, 2)  # beside what forward reads
    on_device = setup.state_nbytes - (0 if is_exact else setup.shared_nbytes)
    copies = setup.files.num_generations if setup.tier.states == "nvme" else 1
    exact_frozen = setup.param_nbytes * frozen / setup.world_size if is_exact else 0
    return [
        MemoryUsage("states", "device", on_device * numel * (1 - share) + exact_frozen),
        MemoryUsage(
            "states",
            setup.tier.states,
            copies * setup.state_nbytes * numel * share,
            setup.tier.states == "host" and setup.pins_memory,
        ),
    ]


def _trainable_and_frozen(counts: Counts) -> tuple[int, int]:
    trainable = counts.numel if counts.trainable is None else counts.trainable
    return trainable, counts.numel - trainable


def _of(ranks: int, stage: int, first_stage: int) -> int:
    """Ranks that what is sharded from ``first_stage`` is divided over."""
    return ranks if stage >= first_stage else 1


def _buffers(counts: Counts, setup: Setup) -> list[MemoryUsage]:
    trainable = counts.numel if counts.trainable is None else counts.trainable
    unit, found = min(counts.largest_unit, counts.numel), []
    if setup.stage == 3:
        found.append(MemoryUsage("prefetch", "device", setup.param_nbytes * min(unit, counts.numel - unit)))
    live = setup.param_nbytes * unit if setup.stage == 3 else 0
    bucket = unit if setup.stage == 3 else max(unit, setup.merged_numel)
    on_their_way = min(NUM_GRADIENT_BUFFERS * bucket, trainable) if setup.stage >= 2 else 0
    found.append(MemoryUsage("buckets", "device", live + setup.travel_nbytes * on_their_way))
    if setup.has_secondary and setup.stage == 3 and setup.num_nodes > 1:
        found.append(
            MemoryUsage("secondary partition", "device", setup.param_nbytes * counts.numel / setup.ranks_per_node)
        )
    if setup.has_residuals and setup.stage >= 1:
        found.append(MemoryUsage("residuals", "device", (1 + 2 / 256) * trainable / setup.ranks_per_node))
    if setup.sums_in_node and setup.stage == 3 and setup.num_nodes > 1:
        found.append(MemoryUsage("sums of the node", "device", 4 * trainable / setup.ranks_per_node))
    return [*found, *_file_buffers(counts, setup)]


def _file_buffers(counts: Counts, setup: Setup) -> list[MemoryUsage]:
    """Host memory between files and what computes."""
    files, found = setup.files, []
    numel = setup.param_nbytes * counts.numel / setup.world_size
    if setup.stage == 3 and setup.tier.parameters == "nvme" and counts.numel > files.numel_in_memory * setup.world_size:
        found.append(min(2 * setup.param_nbytes * files.buffer_numel, numel))
    if setup.offloads_states and setup.tier.states == "nvme":
        trainable, _ = _trainable_and_frozen(counts)
        bucket = min(max(counts.largest_unit, setup.merged_numel if setup.stage < 3 else 0), trainable)
        sub_group = min(files.sub_group_numel, bucket / setup.world_size)
        nbytes = setup.state_nbytes + (0 if setup.delays_update else setup.gradient_nbytes)
        found.append(nbytes * sub_group * files.num_sub_groups)
    return [MemoryUsage("NVMe buffers", "host", nbytes, setup.pins_memory) for nbytes in found]


def _activations(shape: Activations, setup: Setup) -> list[MemoryUsage]:
    tokens = shape.hidden * shape.batch * shape.sequence * setup.param_nbytes
    if not shape.is_checkpointed:
        return [MemoryUsage("activations", "device", 12 * tokens * shape.num_layers)]
    checkpoints = shape.num_checkpoints or max(round(math.sqrt(shape.num_layers)), 1)
    return [
        MemoryUsage("activations", "device", 12 * tokens * shape.num_layers / checkpoints),
        MemoryUsage(
            "activation checkpoints",
            "nvme" if shape.in_files else "host" if shape.on_host else "device",
            tokens * checkpoints / shape.model_parallel,
        ),
    ]
