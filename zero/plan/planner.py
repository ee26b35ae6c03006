"""The planner: list every configuration of a job on a cluster with its bytes and times, fastest that fits first."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from zcomm import ConfigError
from zcomm.volume import Sent
from zero._config.parse import parse
from zero._config.resolved import resolve_config
from zero.plan.cluster import Cluster
from zero.plan.estimate import TIERS, Estimate, estimate, tiers_of_stage, with_shares
from zero.plan.exchanges import Exchanges, MovedBytes, kernel_nbytes, step_moved
from zero.plan.formulas import Activations, TrainingSetup
from zero.plan.model import Model
from zero.plan.peers import ONCE, PEERS, Peer, PeerMemory, in_rings, memory_of, peer_kernel_nbytes, peer_moved
from zero.plan.times import StepTimes, times_of, whole_update

VARIANTS = ("plain", "ZeRO++", "delta-hpZ")
DEVICES = {"device": "none", "host": "cpu", "nvme": "nvme"}
MAX_LAYERS = 2**22
KEPT_NUMEL = 10**15
"""A ``stage3_max_reuse_distance`` that keeps the parameters of every model full until the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The work of a rank in a step."""

    batch: int = 1
    """Sequences in a micro-batch."""
    num_micro: int = 1
    """Micro-batches in a step."""
    is_checkpointed: bool = True
    """Whether activations are recomputed from checkpoints, one for each layer."""
    precision: str = "bf16"
    """``"bf16"`` or ``"fp16"``."""
    optimizer: str = "adamw"
    """``"adamw"``, or ``"muon"``: Muon for the hidden matrices, and AdamW for the rest."""
    narrow_gradients: bool = False
    """Whether gradients are summed in 16 bits, as DeepSpeed does, and not in 32."""
    nvme_path: str = "/local_nvme"
    """The folder that the configuration names for offload to NVMe."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        if self.batch < 1 or self.num_micro < 1:
            raise ConfigError(
                f"batch and micro-batches must be at least 1: batch={self.batch}, num_micro={self.num_micro}"
            )
        if self.precision not in ("bf16", "fp16"):
            raise ConfigError(f"precision must be bf16 or fp16: precision={self.precision!r}")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer must be adamw or muon: optimizer={self.optimizer!r}")

    def activations(self, model: Model) -> Activations:
        """Return the shape of ``model``'s activations, with a checkpoint for each layer."""
        return Activations(
            hidden=model.hidden,
            num_layers=model.num_layers,
            batch=self.batch,
            sequence=model.sequence,
            is_checkpointed=self.is_checkpointed,
            num_checkpoints=model.num_layers,
        )

    def tokens(self, model: Model, cluster: Cluster) -> int:
        """Return the tokens of all ranks in a step."""
        return self.batch * model.sequence * self.num_micro * cluster.world_size


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration."""

    stage: int
    variant: str
    """One of :data:`VARIANTS`, with ", once" if ``no_sync`` holds gradients back until the last micro-batch; of a peer
    its name."""
    tier: str
    """A key of :data:`zero.plan.estimate.TIERS`."""
    config: Mapping[str, Any]
    """DeepSpeed's JSON, as :func:`zero.initialize` takes it; of a peer empty."""
    memory: Estimate | PeerMemory
    """Bytes of a rank, by kind and place."""
    moved: Mapping[str, MovedBytes]
    """Bytes that a rank sends in a step, and the number of exchanges, by kind."""
    times: StepTimes
    tokens: int
    """Tokens of all ranks in a step."""
    lacks: tuple[str, ...]
    """Which of ``device``, ``host`` and ``nvme`` are too small."""

    @property
    def fits(self) -> bool:
        """Whether device, host and NVMe are large enough."""
        return not self.lacks

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.times.step

    @property
    def nbytes_sent(self) -> Sent:
        """Bytes that a rank sends in a step, of all kinds."""
        sent = [moved.sent for moved in self.moved.values()]
        return Sent(sum(s.intra for s in sent), sum(s.inter for s in sent))


def plan(
    model: Model, cluster: Cluster, job: Job | None = None, *, only: Collection[tuple[int, str, str]] | None = None
) -> list[Row]:
    """Plan every stage, variant and tier. Rows that fit come first; then by tokens per second, then by memory.

    Args:
        model: What is trained.
        cluster: The hardware.
        job: The work of a rank.
        only: Stages, variants and tiers; default: all that the cluster can have.

    Raises:
        ConfigError: A configuration is invalid.

    Cost: about 2 ms for each row, whatever the number of ranks; with Muon the placement of all tensors as well.
    """
    chosen = job or Job()
    choices = [choice for choice in _choices(cluster, chosen) if only is None or choice in only]
    rows = [_row(model, cluster, chosen, *choice) for choice in choices]
    return _ranked(rows)


def plan_peers(model: Model, cluster: Cluster, job: Job | None = None) -> list[Row]:
    """Plan DDP, FSDP2 and HSDP for comparison, in the order of :func:`plan`; none with Muon: it is not modelled there.

    Formulas: :mod:`zero.plan.peers`. Peers that equal another one on this cluster are left out.
    """
    chosen = job or Job()
    rows = [
        _peer_row(model, cluster, chosen, name, peer)
        for name, peer in PEERS.items()
        if chosen.optimizer == "adamw"
        and (cluster.num_nodes > 1 or peer.shards_over != "node")
        and (chosen.num_micro > 1 or not peer.is_once)
    ]
    return _ranked(rows)


def _ranked(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (not row.fits, -row.tokens_per_s, row.memory.nbytes()))


def _peer_row(model: Model, cluster: Cluster, job: Job, name: str, peer: Peer) -> Row:
    counts, activations = model.counts(cluster.world_size), job.activations(model)
    shape, num_units = (cluster.num_nodes, cluster.ranks_per_node), sum(unit.repeats for unit in model.units)
    moved = peer_moved(peer, counts, shape, num_units, job.num_micro)
    kernels = peer_kernel_nbytes(peer, counts, shape, job.num_micro)
    memory = memory_of(peer, counts, shape, activations, job.num_micro)
    setup = TrainingSetup(stage=0)  # nothing is offloaded
    times = times_of(model, activations, setup, cluster, moved, kernels_nbytes=kernels, num_micro=job.num_micro)
    tokens, lacks = job.tokens(model, cluster), _lacks(memory, cluster)
    return Row(peer.stage, name, "device", {}, memory, moved, in_rings(peer, times), tokens, lacks)


def largest_model(
    model: Model, cluster: Cluster, job: Job | None = None, *, only: tuple[int, str, str] | None = None
) -> tuple[Model, Row]:
    """Return the largest model with ``model``'s layers that fits, within half a percent, and its fastest row.

    Args:
        model: A model of equal layers; their number does not matter.
        cluster: The hardware.
        job: The work of a rank.
        only: A stage, variant and tier; default: all of them.

    Raises:
        ConfigError: Not even one layer fits, the model has no equal layers, or the optimizer is Muon, whose tensors
            would be placed for every size.
    """
    chosen = job or Job()
    if chosen.optimizer != "adamw":
        raise ConfigError(f"the largest model is found for optimizer='adamw' only: got {chosen.optimizer!r}")
    choices = list(_choices(cluster, chosen)) if only is None else [only]

    def fitting(num_layers: int) -> tuple[Model, Row] | None:
        larger = model.of_layers(num_layers)
        fits = [row for row in (_row(larger, cluster, chosen, *choice) for choice in choices) if row.fits]
        return (larger, max(fits, key=lambda row: row.tokens_per_s)) if fits else None

    found, low, high = fitting(1), 1, 2
    if found is None:
        raise ConfigError(
            f"not even one layer of {model.hidden} fits: use a smaller batch or more nodes; cluster={cluster}"
        )
    while high <= MAX_LAYERS and (larger := fitting(high)) is not None:
        found, low, high = larger, high, 2 * high
    while high - low > max(low // 200, 1):
        middle = (low + high) // 2
        larger = fitting(middle)
        if larger is None:
            high = middle
        else:
            found, low = larger, middle
    return found


def _choices(cluster: Cluster, job: Job) -> Iterator[tuple[int, str, str]]:
    for stage in range(4):
        for tier in tiers_of_stage(stage):
            for variant in VARIANTS:
                is_delta = variant == "delta-hpZ"
                if variant == "ZeRO++" and (stage == 0 or cluster.world_size == 1):
                    continue
                if is_delta and (stage < 3 or cluster.num_nodes == 1 or TIERS[tier].parameters != "device"):
                    continue
                yield stage, variant, tier
                # Full gradients need the memory that offloading is to save; at stage 1 they are reduced once as it is.
                if job.num_micro > 1 and stage > 1 and tier == "device" and cluster.world_size > 1:
                    yield stage, variant + ONCE, tier


def config_of(cluster: Cluster, job: Job, stage: int, variant: str, tier: str) -> dict[str, Any]:
    """Return the JSON configuration of one stage, variant and tier."""
    section: dict[str, Any] = {"stage": stage}
    is_once, variant = variant.endswith(ONCE), variant.removesuffix(ONCE)
    if is_once and stage == 3:
        section["stage3_max_reuse_distance"] = KEPT_NUMEL
    if variant == "ZeRO++":
        section |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
        if stage == 3 and cluster.num_nodes > 1 and cluster.ranks_per_node > 1:
            section["zero_hpz_partition_size"] = cluster.ranks_per_node
    tiers = TIERS[tier]
    for name, place in (("offload_optimizer", tiers.states), ("offload_param", tiers.parameters)):
        if place != "device":
            section[name] = {"device": DEVICES[place]}
            if place == "nvme":
                section[name]["nvme_path"] = job.nvme_path
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.num_micro,
        job.precision: {"enabled": True},
        "zero_optimization": section,
    }
    if job.optimizer == "muon":
        config["optimizer"] = {"type": "Muon"}
    if job.narrow_gradients:
        config["data_types"] = {"grad_accum_dtype": job.precision}
    if variant == "delta-hpZ":
        config["zcomm"] = {"mode": "delta_hpz"}
    return config


def _row(model: Model, cluster: Cluster, job: Job, stage: int, variant: str, tier: str) -> Row:
    config = config_of(cluster, job, stage, variant, tier)
    configuration = parse(config, "plan")
    settings = resolve_config(configuration, {}).settings
    nodes, per_node = cluster.num_nodes, cluster.ranks_per_node
    shape = job.activations(model)
    if stage == 3:
        model = model.cut(settings.stage3_max_live_parameters)
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float16
    exchanges, counts, update = Exchanges.of(settings, nodes, per_node, dtype), model.counts(cluster.world_size), None
    if job.optimizer == "muon":
        merged = exchanges.effective.merged_numel
        buckets = model.dealt(nodes, per_node, merged, deals=stage > 0 and cluster.world_size > 1)
        counts, update = with_shares(counts, buckets, nodes, per_node), whole_update(buckets, nodes, per_node)
    memory = estimate(counts, configuration, nodes, per_node, activations=shape, prints=False)
    is_once = variant.endswith(ONCE)
    moved = step_moved(model, exchanges, job.num_micro, is_once=is_once)
    kernels = kernel_nbytes(model, exchanges, job.num_micro, is_once=is_once)
    setup = replace(memory.setup, stage=stage, tier=TIERS[tier], is_once=is_once)
    memory = replace(memory, setup=setup)
    times = times_of(
        model, shape, setup, cluster, moved, kernels_nbytes=kernels, num_micro=job.num_micro, update=update
    )
    tokens, lacks = job.tokens(model, cluster), _lacks(memory, cluster)
    return Row(stage, variant, tier, config, memory, moved, times, tokens, lacks)


def _lacks(memory: Estimate | PeerMemory, cluster: Cluster) -> tuple[str, ...]:
    places = {
        "device": cluster.device_gib,
        "host": cluster.host_gib / cluster.ranks_per_node,
        "nvme": cluster.nvme_gib / cluster.ranks_per_node,
    }
    return tuple(place for place, gib in places.items() if math.ceil(memory.nbytes(place)) > gib * 2**30)
