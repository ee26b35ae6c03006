"""``zero.estimate``: predict the memory usage of training on one rank, by kind, for every stage and tier."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zcomm import ConfigError
from zero._config.parse import Configuration, Source, parse, read_source
from zero._config.resolved import to_dtype
from zero._config.sections import Config
from zero._modes import MODES
from zero._optim.sub_groups import LARGEST_NUMEL
from zero._sharding.layout import BucketLayout
from zero._sharding.units import find_units
from zero._storage.parameter_storage import LEAST_AHEAD_NBYTES
from zero.plan.formulas import (
    RECOMPUTATION,
    Activations,
    Counts,
    MemoryUsage,
    NvmeFiles,
    ShardTiers,
    TrainingSetup,
    usage_of,
)

TIERS = {
    "device": ShardTiers(),
    "cpu optimizer": ShardTiers(states="host"),
    "cpu": ShardTiers(parameters="host", states="host"),
    "nvme optimizer": ShardTiers(states="nvme"),
    "nvme": ShardTiers(parameters="nvme", states="nvme"),
}
PLACES = {"none": "device", "cpu": "host", "nvme": "nvme"}
NUM_MOMENTS = {"sgd": 0, "adagrad": 1, "lion": 1, "rmsprop": 1}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory usage of one rank. ``str()`` gives the table."""

    stage: int
    """The configured stage."""
    tier: str
    """The configured tier, a key of :data:`TIERS`."""
    setup: TrainingSetup
    counts: Counts
    activations: Activations | None

    def usage(self, stage: int | None = None, tier: str | None = None) -> list[MemoryUsage]:
        """Return the bytes of every kind at a stage and tier; default: the configured ones."""
        chosen = TIERS[self.tier if tier is None else tier]
        setup = replace(self.setup, stage=self.stage if stage is None else stage, tier=chosen)
        return usage_of(self.counts, setup, self.activations)

    def nbytes(self, place: str = "device", *, stage: int | None = None, tier: str | None = None) -> float:
        """Return the bytes in ``place``: ``device``, ``host`` or ``nvme``."""
        return sum(usage.nbytes for usage in self.usage(stage, tier) if usage.place == place)

    def pinned_nbytes(self, *, stage: int | None = None, tier: str | None = None) -> float:
        """Return the bytes of ``host`` that are page-locked if CUDA is used."""
        return sum(usage.nbytes for usage in self.usage(stage, tier) if usage.is_pinned)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on differences from the published formulas."""
        summed, held = self.setup.gradient_nbytes, self.setup.param_nbytes
        if summed <= held:
            return ()
        return (
            f"gradients are summed in {summed} bytes each, not in {held} as the ZeRO paper counts them: set "
            "data_types.grad_accum_dtype",
        )

    def __str__(self) -> str:
        setup = self.setup
        lines = [
            f"{self.counts.numel:,} parameters on {setup.num_nodes} nodes x {setup.ranks_per_node} ranks; each rank:",
            "",
            f"{'stage':>5}  {'tier':<15} {'device':>10} {'host':>10} {'nvme':>10} {'page-locked':>12}",
        ]
        for stage in range(4):
            for tier in tiers_of_stage(stage):
                is_chosen = (stage, tier) == (self.stage, self.tier)
                cells = " ".join(f"{_size_text(self.nbytes(p, stage=stage, tier=tier)):>10}" for p in PLACES.values())
                pinned = f"{_size_text(self.pinned_nbytes(stage=stage, tier=tier)):>12}"
                lines.append(f"{stage:>5}  {tier:<15} {cells} {pinned}{'  <- as configured' if is_chosen else ''}")
        lines += ["", f"as configured, stage {self.stage}, {self.tier}:"]
        lines += [
            f"  {u.kind:<22} {u.place:<7} {_size_text(u.nbytes):>10}{'  page-locked' if u.is_pinned else ''}"
            for u in self.usage()
        ]
        lines += [f"  {note}" for note in self.notes]
        if self.activations is not None and self.activations.is_checkpointed:
            lines.append(f"  checkpoints cost {100 * RECOMPUTATION:.0f} % more computation: a second forward")
        return "\n".join(lines) + "\n"


def estimate(
    model: nn.Module | Counts,
    config: Source | Configuration | None = None,
    nodes: int = 1,
    ranks: int = 1,
    *,
    activations: Activations | None = None,
    prints: bool = True,
) -> Estimate:
    """Predict the memory usage of training ``model`` on each rank, by kind, for every stage and tier.

    Args:
        model: A model, which may be on the meta device, or its counts.
        config: A configuration, as for :func:`zero.initialize`. Offload is counted even if it is not available here.
        nodes: Number of machines.
        ranks: Number of data-parallel ranks on each machine.
        activations: The shape of a transformer's activations; the section ``activation_checkpointing`` of the
            configuration is applied to it.
        prints: Whether to write the table to standard output.

    Raises:
        ConfigError: There is less than one node or rank, or the configuration is invalid.

    The estimate does not include fragmentation, CUDA's own memory and temporary memory of kernels. Formulas and their
    sources are in :mod:`zero.plan.formulas`.
    """
    if nodes < 1 or ranks < 1:
        raise ConfigError(f"nodes and ranks must be at least 1: nodes={nodes}, ranks={ranks}")
    if not isinstance(config, Configuration):
        config = parse({}, "default") if config is None else read_source(config)
    values = config.values
    counts = model if isinstance(model, Counts) else count(model, nodes * ranks)
    offload = values.zero_optimization
    tier = ShardTiers(
        parameters=PLACES[offload.offload_param.device] if offload.stage == 3 else "device",
        states=PLACES[offload.offload_optimizer.device] if offload.stage else "device",
    )
    setup = _setup(values, 4 if isinstance(model, Counts) else _param_nbytes(model), counts, nodes, ranks)
    name = next((name for name, known in TIERS.items() if known == tier), None)
    if name is None:
        raise ConfigError(
            "parameters cannot be offloaded to a lower tier than optimizer states: "
            f"offload_param.device={offload.offload_param.device!r}, "
            f"offload_optimizer.device={offload.offload_optimizer.device!r}"
        )
    found = Estimate(offload.stage, name, setup, counts, _with_checkpointing(activations, values))
    if prints:
        sys.stdout.write(str(found))
    return found


def count(model: nn.Module, world_size: int) -> Counts:
    """Count the elements of ``model`` as it is sharded over ``world_size`` ranks, with padding."""
    units = []
    for unit in find_units(model):
        kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for name, param in unit.parameters:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((name, param))
        numels = {True: 0, False: 0}
        for (_, is_trainable), named in kinds.items():
            layout = BucketLayout.of([n for n, _ in named], [tuple(p.shape) for _, p in named], world_size)
            numels[is_trainable] += layout.numel
        units.append(numels)
    trainable = sum(numels[True] for numels in units)
    numel = trainable + sum(numels[False] for numels in units)
    largest = max((sum(numels.values()) for numels in units), default=0)
    return Counts(numel=numel, trainable=trainable, largest_unit=largest)


def _param_nbytes(model: nn.Module) -> int:
    sizes = [param.element_size() for param in model.parameters()]
    return max(set(sizes), key=sizes.count, default=4)


def _setup(config: Config, own_nbytes: int, counts: Counts, nodes: int, ranks: int) -> TrainingSetup:
    zero = config.zero_optimization
    mode = None if nodes == 1 and MODES[config.zcomm.mode].needs_nodes else config.zcomm.mode
    weights = None if config.zcomm.mode else config.zcomm.weight_format  # a mode's is that of deltas
    param_nbytes = 2 if config.fp16.enabled or config.bf16.enabled else own_nbytes
    accumulation_dtype = config.data_types.grad_accum_dtype
    moments = NUM_MOMENTS.get((config.optimizer.type or "adam").lower(), 2)
    width = 8 if own_nbytes == 8 else 4
    gradient_nbytes = width if accumulation_dtype is None else to_dtype(accumulation_dtype).itemsize
    return TrainingSetup(
        stage=zero.stage,
        num_nodes=nodes,
        ranks_per_node=ranks,
        param_nbytes=param_nbytes,
        gradient_nbytes=gradient_nbytes,
        state_nbytes=width * (1 + moments),
        shared_nbytes=width if param_nbytes == width else 0,
        sent_nbytes=gradient_nbytes if _sends_wider(config) else min(param_nbytes, gradient_nbytes),
        reduced_nbytes=min(param_nbytes, gradient_nbytes) if _sends_as_parameters(config, mode) else gradient_nbytes,
        sums_gradients=(config.gradient_accumulation_steps or 1) > 1,
        merged_numel=min(2**20, zero.reduce_bucket_size, zero.allgather_bucket_size),
        has_secondary=zero.zero_hpz_partition_size > 1 and mode is None,
        mode=mode,
        quantizes_weights=mode is None and (zero.zero_quantized_weights or weights not in (None, "none")),
        encodes_frozen=zero.zero_quantized_nontrainable_weights,
        files=_files(config, counts, param_nbytes, nodes * ranks),
        offloaded_share=zero.offload_optimizer.ratio,
        delays_update=config.zcomm.delayed_update and zero.offload_optimizer.device != "none" and zero.stage >= 1,
        pins_memory=zero.offload_optimizer.pin_memory and zero.offload_param.pin_memory,
    )


def _sends_as_parameters(config: Config, mode: str | None) -> bool:
    """Whether gradients are sent in the dtype of the parameters: the default, without a format or a dtype."""
    chosen = config.zero_optimization.zero_quantized_gradients or config.zcomm.gradient_format
    is_plain = not (chosen or MODES[mode].has_own_formats)
    return is_plain and config.communication_data_type is None


def _sends_wider(config: Config) -> bool:
    """Whether gradients are sent in a wider dtype than 16-bit parameters have."""
    return config.communication_data_type is not None and to_dtype(config.communication_data_type).itemsize > 2


def _files(config: Config, counts: Counts, param_nbytes: int, world_size: int) -> NvmeFiles:
    param, states = config.zero_optimization.offload_param, config.zero_optimization.offload_optimizer
    largest = max(-(-counts.largest_unit // world_size), LEAST_AHEAD_NBYTES // param_nbytes)
    return NvmeFiles(
        numel_in_memory=param.max_in_cpu,
        buffer_numel=min(param.buffer_count * param.buffer_size, largest),
        sub_group_numel=min(config.zero_optimization.sub_group_size, LARGEST_NUMEL),
        num_sub_groups=min(states.buffer_count, 1 + states.pipeline_read + states.pipeline_write),
        num_generations=2 if config.zcomm.keep_previous_states else 1,
    )


def _with_checkpointing(shape: Activations | None, config: Config) -> Activations | None:
    chosen, place = config.activation_checkpointing, config.zcomm.activations
    asks = chosen.partition_activations or chosen.cpu_checkpointing or chosen.number_checkpoints or place is not None
    if shape is None or not asks:
        return shape
    return replace(
        shape,
        is_checkpointed=True,
        num_checkpoints=shape.num_checkpoints or chosen.number_checkpoints,
        model_parallel=shape.model_parallel if chosen.partition_activations else 1,
        on_host=place == "cpu" or (place is None and (shape.on_host or chosen.cpu_checkpointing)),
        in_files=place == "nvme",
    )


def tiers_of_stage(stage: int) -> list[str]:
    """Return the tiers that make a difference at ``stage``."""
    if stage == 0:
        return ["device"]
    return [name for name, tier in TIERS.items() if stage == 3 or tier.parameters == "device"]


def _size_text(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}" if nbytes else "-"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
