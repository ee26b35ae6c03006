"""Memory usage of one rank as formulas, for the estimate and for planning. No model and no device is needed.

P parameters, T of them trainable; N ranks, L of them on a node; U elements in the largest unit (a layer). Where an
optimizer updates whole tensors (Muon), the elements of a rank's shards stand for P / N and T / N, those of its node's
ranks with its local rank for P / L and T / L, and b_s is that of each kind of tensors. Bytes of an
element: b_p of what the forward reads; of gradients b_g where they are stored, b_w while they are copied to the host
and b_t while they are reduced; b_s of states. Counts are in elements.

    kind                  bytes                                               where           source
    parameters            b_p P; stage 3: b_p P / N                           parameter tier  ZeRO, section 5
      frozen as INT8      stage 3: (1 + 2/256) (P - T) / N                    device, host    zcomm.EncodedShard
    gradients             b_g T; from stage 2: b_g T / N                      device          ZeRO, section 5
      offloaded states    instead, from stage 1: b_w T / N; + b_g T / N       host            zero._storage
                          if micro-batches are summed                                         .host_gradient
      states on NVMe      b_g T / N, from stage 1                             nvme            zero._optim.gradient_files
    delayed update        gradients once more, in memory; 2 b_p T / N         host            zero._optim.delayed_update
    states                b_s T; from stage 1: b_s T / N                      optimizer tier  ZeRO, section 3.1
      on NVMe             twice as much, if steps may fail                    nvme            zero._optim.state_files
      no_sync             from stage 2: also b_g T unreduced, and at          device          zero._gradients.reducer
                          stage 3 b_p P gathered; no buckets and prefetch
    buckets               from stage 2: gradients in flight, 3 b_t B;         device          zero._gradients.reducer
                          stage 3: and the layer in use, b_p U                                zero._sharding.bucket
    prefetch              stage 3: the next layer, b_p U                      device          zero._gather.gatherer
    secondary partition   hpZ on several nodes: b_p P / L                     device          ZeRO++, section 3.2
    residuals             error feedback of hop 2: (1 + 2/256) T / L          device          zcomm.Residual
    NVMe buffers          sub-groups in flight x (b_s + b_g); and those       host            ZeRO-Infinity, section 6
                          of parameters being read and written                                zero._storage
                                                                                              .staging_buffers
    activations           12 h b s b_p for each layer                         device          ZeRO, section 6.1
      with k checkpoints  12 h b s b_p (layers / k): one segment at a time    device          Chen et al.
      checkpoints         h b s b_p k; / m if partitioned over m ranks        or host, NVMe   ZeRO, section 6.1

Host memory of offloaded tensors is page-locked unless pin_memory is false; INT8 codes and activations are not. Of
parameters on NVMe, the first max_in_cpu elements of a rank's shards stay in host memory. b_s includes 4 bytes of a
master if the forward does not read the master itself: with 16-bit parameters, with quantized weights below stage 3,
and if states are offloaded.

B is the largest bucket: U, or below stage 3 what small layers share. k is the square root of the number of layers
unless it is set; recomputing the forward is a third more computation.
Sources: ZeRO, arXiv:1910.02054; ZeRO-Infinity, arXiv:2104.07857; ZeRO++, arXiv:2306.10209; Chen et al.,
arXiv:1604.06174.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero._modes import MODES
from zero._modes.mode import MemoryShape

RECOMPUTATION = 1 / 3
"""Additional computation with activation checkpoints: one more forward; a backward costs two."""
ENCODED_NBYTES = 1 + 2 / 256
"""Bytes of an element as INT8, in blocks of 256 with a scale of 2 bytes each."""
NUM_GRADIENT_BUFFERS = 3
"""One that backward fills and two that are being reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Elements that one rank has."""

    numel: float
    """Of its shards."""
    trainable: float
    """Those of them that are trained."""
    whole: float
    """Those of tensors that are updated as a whole."""
    node_numel: float
    """Of the shards of its local rank on all nodes: its part of the node's copy of the model."""
    node_trainable: float
    """Those of them that are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of elements in a model."""

    numel: int
    """Elements of all parameters."""
    trainable: int | None = None
    """Elements of trainable parameters; default: all."""
    largest_unit: int = 0
    """Elements of the largest unit, which is gathered as one: a layer, or the embedding."""
    whole: int = 0
    """Elements of the tensors that their optimizer updates as a whole."""
    shares: tuple[Share, ...] = ()
    """What each rank has, in order; empty: all have the same."""

    @property
    def num_trained(self) -> int:
        """Elements of trainable parameters."""
        return self.numel if self.trainable is None else self.trainable

    def share(self, setup: TrainingSetup, rank: int) -> Share:
        """What ``rank`` has of a model whose states are sharded."""
        if self.shares:
            return self.shares[rank]
        trainable, ranks, per_node = self.num_trained, setup.world_size, setup.ranks_per_node
        return Share(
            numel=self.numel / ranks,
            trainable=trainable / ranks,
            whole=self.whole / ranks,
            node_numel=self.numel / per_node,
            node_trainable=trainable / per_node,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The shape of the activations that a transformer's forward saves for the backward on one rank."""

    hidden: int
    num_layers: int
    batch: int
    """Sequences of a rank in one backward."""
    sequence: int
    """Tokens of a sequence."""
    is_checkpointed: bool = False
    num_checkpoints: int | None = None
    """Default: the square root of ``num_layers``."""
    model_parallel: int = 1
    """Ranks that checkpoints are partitioned over; 1: not partitioned."""
    on_host: bool = False
    """Whether checkpoints are stored in host memory."""
    in_files: bool = False
    """Whether checkpoints are stored in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTiers:
    """Where shards are stored: each ``device``, ``host`` or ``nvme``."""

    parameters: str = "device"
    """Parameters, at stage 3."""
    states: str = "device"
    """Optimizer states and reduced gradients, from stage 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeFiles:
    """Sizes and counts of the NVMe tier's files and buffers."""

    numel_in_memory: int = 0
    """Elements of a rank's parameters that stay in host memory."""
    buffer_numel: int = 0
    """Most elements of parameters that are read ahead; the same number may be in flight to the files."""
    sub_group_numel: int = 2**22
    """Most elements of a sub-group, which is updated as one."""
    num_sub_groups: int = 1
    """Sub-groups in memory at a time, at most."""
    num_generations: int = 2
    """Copies of each state in the files."""
    unused_nbytes: float = 0
    """Bytes of room for an element that its optimizer does not use, at least: files have room for the states of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """How a model is trained: everything but the model that memory usage depends on."""

    stage: int
    num_nodes: int = 1
    ranks_per_node: int = 1
    tier: ShardTiers = ShardTiers()
    param_nbytes: int = 2
    """Bytes of a parameter's element, as the forward reads it."""
    gradient_nbytes: int = 4
    """Bytes of a gradient's element where gradients are summed and stored."""
    state_nbytes: float = 12
    """Bytes of states for an element: 4 of the master, and 4 of each moment."""
    whole_state_nbytes: float = 12
    """The same of tensors that are updated as a whole: Muon keeps one moment."""
    shared_nbytes: int = 0
    """Bytes of ``state_nbytes`` that are the parameter itself: a master that the forward reads, if not offloaded."""
    sent_nbytes: int = 4
    """Bytes of a gradient's element that is copied to the host, and stored there in the same dtype."""
    reduced_nbytes: int = 4
    """Bytes of a gradient's element while it is reduced between the ranks."""
    sums_gradients: bool = False
    """Whether a step has several micro-batches."""
    is_once: bool = False
    """Whether parameters and gradients of them stay full until the last."""
    merged_numel: int = 2**20
    """Below stage 3, layers of up to so many elements share an exchange."""
    has_secondary: bool = False
    mode: str | None = None
    """The mode in effect."""
    quantizes_weights: bool = False
    """Whether the forward reads quantized weights: below stage 3, exact ones are kept beside them."""
    encodes_frozen: bool = False
    """Whether frozen parameters are stored as INT8, in blocks of 256, at stage 3."""
    files: NvmeFiles = NvmeFiles()
    offloaded_share: float = 1.0
    """Share of the states that is offloaded."""
    delays_update: bool = False
    """Whether offloaded states are updated during the next step."""
    pins_memory: bool = True
    """Whether host memory of offloaded tensors is page-locked."""

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def sums_on_shards(self) -> bool:
        """Whether gradients of micro-batches are summed where they are reduced."""
        return self.sums_gradients and not self.is_once

    @property
    def offloads_states(self) -> bool:
        """Whether states are stored on another tier than the device."""
        return self.stage >= 1 and self.tier.states != "device"


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes of one kind of memory in one place."""

    kind: str
    place: str
    nbytes: float
    is_pinned: bool = False
    """Whether it is page-locked host memory."""


def usage_of(
    counts: Counts, setup: TrainingSetup, activations: Activations | None = None, rank: int | None = None
) -> list[MemoryUsage]:
    """Return the bytes of every kind on ``rank``, without kinds that use none; default: the rank that has most."""
    if rank is None:
        ranks = range(len(counts.shares) or 1)
        return max((usage_of(counts, setup, activations, one) for one in ranks), key=_total)
    share = counts.share(setup, rank)
    found = [*_parameters(counts, share, setup), *_gradients(counts, share, setup)]
    found += [*_states(counts, share, setup), *_buffers(counts, share, setup)]
    if activations is not None:
        found += _activations(activations, setup)
    return [usage for usage in found if usage.nbytes]


def _offloadable(kind: str, place: str, nbytes: float, setup: TrainingSetup) -> MemoryUsage:
    """Memory of tensors that may be offloaded: page-locked in host memory."""
    return MemoryUsage(kind, place, nbytes, place == "host" and setup.pins_memory)


def _total(usages: list[MemoryUsage]) -> float:
    return sum(usage.nbytes for usage in usages)


def _parameters(counts: Counts, share: Share, setup: TrainingSetup) -> list[MemoryUsage]:
    if setup.stage < 3:
        shards = _of_mode(counts, share, setup).get("parameters", 0.0)
        return [MemoryUsage("parameters", "device", setup.param_nbytes * counts.numel + shards)]
    place = setup.tier.parameters
    codes = ENCODED_NBYTES * (share.numel - share.trainable) if setup.encodes_frozen else 0.0
    numel = share.trainable if setup.encodes_frozen else share.numel
    in_files = max(numel - setup.files.numel_in_memory, 0) if place == "nvme" else 0
    memory = "device" if place == "device" else "host"
    return [
        _offloadable("parameters", memory, setup.param_nbytes * (numel - in_files), setup),
        MemoryUsage("parameters", "nvme", setup.param_nbytes * in_files),
        MemoryUsage("frozen as INT8", memory, codes),
    ]


def _gradients(counts: Counts, share: Share, setup: TrainingSetup) -> list[MemoryUsage]:
    offloaded = setup.offloaded_share if setup.offloads_states else 0.0
    on_device = share.trainable * (1 - offloaded) if setup.stage >= 2 else counts.num_trained
    on_host = offloaded * share.trainable
    place = "host" if setup.delays_update else setup.tier.states
    in_memory = (setup.sent_nbytes + setup.gradient_nbytes * setup.sums_on_shards) * on_host
    # Gradients that a delayed update reads while new ones arrive, and parameters that it writes before they are used.
    delayed = in_memory + 2 * setup.param_nbytes * on_host if setup.delays_update else 0
    unreduced = counts.num_trained if setup.is_once and setup.stage >= 2 else 0
    return [
        MemoryUsage("gradients", "device", setup.gradient_nbytes * on_device),
        MemoryUsage("unreduced gradients", "device", setup.gradient_nbytes * unreduced),
        _offloadable("gradients", place, setup.gradient_nbytes * on_host if place == "nvme" else in_memory, setup),
        _offloadable("delayed update", "host", delayed, setup),
    ]


def _states(counts: Counts, share: Share, setup: TrainingSetup) -> list[MemoryUsage]:
    trainable, whole = share.trainable, share.whole
    if setup.stage == 0:
        trainable, whole = counts.num_trained, counts.whole
    nbytes = setup.state_nbytes * (trainable - whole) + setup.whole_state_nbytes * whole
    offloaded = setup.offloaded_share if setup.offloads_states else 0.0
    is_exact = setup.quantizes_weights and setup.stage in (1, 2)  # beside what forward reads
    on_device = nbytes - (0 if is_exact else setup.shared_nbytes * trainable)
    in_files = setup.tier.states == "nvme"
    if in_files and setup.files.unused_nbytes:
        nbytes = (setup.state_nbytes + setup.files.unused_nbytes) * trainable
    copies = setup.files.num_generations if in_files else 1
    exact_frozen = setup.param_nbytes * (share.numel - share.trainable) if is_exact else 0
    return [
        MemoryUsage("states", "device", on_device * (1 - offloaded) + exact_frozen),
        _offloadable("states", setup.tier.states, copies * nbytes * offloaded, setup),
    ]


def _buffers(counts: Counts, share: Share, setup: TrainingSetup) -> list[MemoryUsage]:
    trainable = counts.num_trained
    unit, found = min(counts.largest_unit, counts.numel), []
    if setup.stage == 3:
        ahead = counts.numel if setup.is_once else min(unit, counts.numel - unit)
        kind = "gathered parameters" if setup.is_once else "prefetch"
        found.append(MemoryUsage(kind, "device", setup.param_nbytes * ahead))
    live = setup.param_nbytes * unit if setup.stage == 3 and not setup.is_once else 0
    bucket = unit if setup.stage == 3 else max(unit, setup.merged_numel)
    in_flight = min(NUM_GRADIENT_BUFFERS * bucket, trainable) if setup.stage >= 2 and not setup.is_once else 0
    found.append(MemoryUsage("buckets", "device", live + setup.reduced_nbytes * in_flight))
    if setup.has_secondary and setup.stage == 3 and setup.num_nodes > 1:
        found.append(
            MemoryUsage("secondary partition", "device", setup.param_nbytes * counts.numel / setup.ranks_per_node)
        )
    of_mode = {kind: nbytes for kind, nbytes in _of_mode(counts, share, setup).items() if kind != "parameters"}
    found += [MemoryUsage(kind, "device", nbytes) for kind, nbytes in of_mode.items()]
    return [*found, *_file_buffers(counts, share, setup)]


def _of_mode(counts: Counts, share: Share, setup: TrainingSetup) -> dict[str, float]:
    """What the mode holds on the device; nothing at a stage for which it is not."""
    if setup.stage not in MODES[setup.mode].stages:
        return {}
    numels = counts.numel, share.trainable, share.node_numel, share.node_trainable
    return MODES[setup.mode].memory(MemoryShape(*numels, setup.param_nbytes, setup.sums_on_shards))


def _file_buffers(counts: Counts, share: Share, setup: TrainingSetup) -> list[MemoryUsage]:
    """Staging buffers in host memory, for files of parameters and of states."""
    files, found = setup.files, []
    numel = setup.param_nbytes * share.numel
    if setup.stage == 3 and setup.tier.parameters == "nvme" and counts.numel > files.numel_in_memory * setup.world_size:
        found.append(min(2 * setup.param_nbytes * files.buffer_numel, numel))
    if setup.offloads_states and setup.tier.states == "nvme":
        trainable = counts.num_trained
        bucket = min(max(counts.largest_unit, setup.merged_numel if setup.stage < 3 else 0), trainable)
        sub_group = min(files.sub_group_numel, bucket / setup.world_size)
        nbytes = setup.state_nbytes + setup.files.unused_nbytes + (0 if setup.delays_update else setup.gradient_nbytes)
        found.append(nbytes * min(sub_group * files.num_sub_groups, trainable / setup.world_size))
    return [_offloadable("NVMe buffers", "host", nbytes, setup) for nbytes in found]


def _activations(shape: Activations, setup: TrainingSetup) -> list[MemoryUsage]:
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
