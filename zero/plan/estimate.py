"""``zero.estimate``: predict the memory usage of training on one rank, by kind, for every stage and tier."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import nn

from zcomm import ConfigError, Topology
from zero._config.parse import Configuration, Source, parse, read_source
from zero._config.resolved import ResolvedConfig, resolve_config
from zero._config.settings import numel_to_merge
from zero._model.model_layout import layouts_of
from zero._modes import MODES
from zero._optim.muon import Muon, divide_by_role, is_divisible
from zero._optim.sub_groups import LARGEST_NUMEL
from zero._runtime.exchanges import TopologyShape
from zero._sharding.layout import BucketLayout
from zero._sharding.units import by_kind, find_units
from zero._storage.parameter_storage import LEAST_AHEAD_NBYTES
from zero._storage.tier_settings import Tier, Tiers
from zero.plan.formulas import (
    RECOMPUTATION,
    Activations,
    Counts,
    MemoryUsage,
    NvmeFiles,
    ShardTiers,
    Share,
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
PLACES = {Tier.DEVICE: "device", Tier.CPU: "host", Tier.NVME: "nvme"}
NUM_MOMENTS = {"sgd": 0, "adagrad": 1, "lion": 1, "rmsprop": 1}
"""Of optimizers that update elements, and of those that ``"Muon"`` does not get; 2 for others."""
NUM_WHOLE_MOMENTS = {"muon": 1, "lamb": 2, "adafactor": 0}
"""States with a value for each element, of optimizers that update whole tensors."""


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

    def usage(self, stage: int | None = None, tier: str | None = None, *, rank: int | None = None) -> list[MemoryUsage]:
        """Return the bytes of every kind at a stage and tier; default: the configured ones.

        ``rank``: where an optimizer updates whole tensors, ranks differ; default: the one that has most.
        """
        chosen = TIERS[self.tier if tier is None else tier]
        setup = replace(self.setup, stage=self.stage if stage is None else stage, tier=chosen)
        return usage_of(self.counts, setup, self.activations, rank)

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
        config: A configuration, as for :func:`zero.initialize`.
        nodes: Number of machines.
        ranks: Number of data-parallel ranks on each machine.
        activations: The shape of a transformer's activations; the section ``activation_checkpointing`` of the
            configuration is applied to it.
        prints: Whether to write the table to standard output.

    Raises:
        ConfigError: There is less than one node or rank, or the configuration is invalid.
        NotAvailableError: A key asks for something that this version does not support.

    With ``"Muon"``, ``"Lamb"`` or ``"Adafactor"`` as ``optimizer.type`` every rank has the whole tensors that it gets
    at the configured stage. Of counts all parameters are taken for such tensors, and shards for equal.

    The estimate does not include fragmentation, CUDA's own memory and temporary memory of kernels. Formulas and their
    sources are in :mod:`zero.plan.formulas`.
    """
    if nodes < 1 or ranks < 1:
        raise ConfigError(f"nodes and ranks must be at least 1: nodes={nodes}, ranks={ranks}")
    if not isinstance(config, Configuration):
        config = parse({}, "default") if config is None else read_source(config)
    plan = resolve_config(config, {})
    settings, tiers = plan.settings, plan.settings.tiers
    counts = _counts_of(model, plan, nodes, ranks)
    setup = _setup(plan, 4 if isinstance(model, Counts) else _param_nbytes(model), counts, nodes, ranks)
    tier = ShardTiers(parameters=PLACES[tiers.parameters.tier], states=PLACES[tiers.states.tier])
    name = next((name for name, known in TIERS.items() if known == tier), None)
    if name is None:
        raise ConfigError(
            "parameters cannot be offloaded to a lower tier than optimizer states: "
            f"offload_param.device={tiers.parameters.tier.value!r}, "
            f"offload_optimizer.device={tiers.states.tier.value!r}"
        )
    found = Estimate(settings.stage, name, setup, counts, _with_checkpointing(activations, plan))
    if prints:
        sys.stdout.write(str(found))
    return found


def count(model: nn.Module, world_size: int) -> Counts:
    """Count the elements of ``model`` as it is sharded over ``world_size`` ranks, with padding."""
    units = []
    for unit in find_units(model):
        numels = {True: 0, False: 0}
        for (_, is_trainable), named in by_kind(unit.parameters).items():
            layout = BucketLayout.of([n for n, _ in named], [tuple(p.shape) for _, p in named], world_size)
            numels[is_trainable] += layout.numel
        units.append(numels)
    trainable = sum(numels[True] for numels in units)
    numel = trainable + sum(numels[False] for numels in units)
    largest = max((sum(numels.values()) for numels in units), default=0)
    return Counts(numel=numel, trainable=trainable, largest_unit=largest)


def _counts_of(model: nn.Module | Counts, plan: ResolvedConfig, nodes: int, ranks: int) -> Counts:
    """The counts of ``model`` with the optimizer of ``plan``."""
    kind = _optimizer_of(plan)
    if isinstance(model, Counts):
        return replace(model, whole=model.num_trained) if kind in NUM_WHOLE_MOMENTS and not model.whole else model
    counts = count(model, nodes * ranks)
    if kind not in NUM_WHOLE_MOMENTS:
        return counts
    trained = [param for param in model.parameters() if param.requires_grad]
    is_allowed = plan.settings.tiers.states.allows_joint_updates
    whole = {param: is_allowed and is_divisible(Muon, param) for param in divide_by_role(model).matrices}
    if kind != "muon":
        whole = dict.fromkeys(trained, False)
    shape = TopologyShape(nodes, ranks)
    buckets = layouts_of(model, plan.settings, cast(Topology, shape), whole)
    return with_shares(counts, buckets, nodes, ranks)


def with_shares(counts: Counts, buckets: Sequence[tuple[BucketLayout, bool]], nodes: int, ranks: int) -> Counts:
    """``counts`` of the model that these ``buckets`` hold, with whole tensors. Each with whether it is trainable."""
    own = [(layout, layout.slots, is_trainable) for layout, is_trainable in buckets]
    whole = sum(slot.numel for _, slots, _ in own for slot in slots if slot.is_whole)
    found = replace(counts, whole=whole)
    if all(layout.sizes is None for layout, _ in buckets):
        return found
    shares = []
    for rank in range(nodes * ranks):
        row = TopologyShape(nodes, ranks, rank).shard_index("local")
        numels = [(layout.shard_range(row), layout.node_numel(row, nodes), trains) for layout, trains in buckets]
        pieces = [(slots, piece) for layout, slots, _ in own for piece in layout.pieces(row)]
        shares.append(
            Share(
                numel=sum(stop - start for (start, stop), _, _ in numels),
                trainable=sum(stop - start for (start, stop), _, trains in numels if trains),
                whole=sum(piece.stop - piece.start for slots, piece in pieces if slots[piece.slot].is_whole),
                node_numel=sum(numel for _, numel, _ in numels),
                node_trainable=sum(numel for _, numel, trains in numels if trains),
            )
        )
    return replace(found, shares=tuple(shares))


def _optimizer_of(plan: ResolvedConfig) -> str:
    return (plan.configuration.values.optimizer.type or "adam").lower()


def _param_nbytes(model: nn.Module) -> int:
    sizes = [param.element_size() for param in model.parameters()]
    return max(set(sizes), key=sizes.count, default=4)


def _setup(plan: ResolvedConfig, own_nbytes: int, counts: Counts, nodes: int, ranks: int) -> TrainingSetup:
    settings, states = plan.settings, plan.settings.tiers.states
    mode = None if nodes == 1 and MODES[settings.mode].needs_nodes else settings.mode
    weights = None if settings.mode else settings.weight_format  # a mode's is that of deltas
    param_nbytes = own_nbytes if plan.dtype is None else plan.dtype.itemsize
    kind = _optimizer_of(plan)
    moments = NUM_MOMENTS.get(kind, 2)
    width = 8 if own_nbytes == 8 else 4
    gradient_nbytes = width if settings.gradient_dtype is None else settings.gradient_dtype.itemsize
    # Gradients are sent in the dtype of the parameters unless a format says otherwise; "none" is the dtype of sums.
    is_plain = not (settings.quantized_gradients or settings.gradient_format or MODES[mode].has_own_formats)
    return TrainingSetup(
        stage=settings.stage,
        num_nodes=nodes,
        ranks_per_node=ranks,
        param_nbytes=param_nbytes,
        gradient_nbytes=gradient_nbytes,
        state_nbytes=width * (1 + moments),
        whole_state_nbytes=width * (1 + NUM_WHOLE_MOMENTS.get(kind, moments)),
        shared_nbytes=width if param_nbytes == width else 0,
        sent_nbytes=gradient_nbytes if settings.gradient_format == "none" else min(param_nbytes, gradient_nbytes),
        reduced_nbytes=min(param_nbytes, gradient_nbytes) if is_plain else gradient_nbytes,
        sums_gradients=settings.gradient_accumulation_steps > 1,
        merged_numel=numel_to_merge(settings, nodes),
        has_secondary=settings.hpz_partition_size > 1 and mode is None,
        mode=mode,
        quantizes_weights=mode is None and (settings.quantized_weights or weights not in (None, "none")),
        encodes_frozen=settings.quantized_nontrainable_weights,
        files=_files(settings.tiers, counts, param_nbytes, nodes * ranks, width if kind == "muon" else 0),
        offloaded_share=states.ratio,
        delays_update=states.delays_update and states.tier is not Tier.DEVICE,
        pins_memory=settings.tiers.pins_memory,
    )


def _files(tiers: Tiers, counts: Counts, param_nbytes: int, world_size: int, unused_nbytes: int) -> NvmeFiles:
    parameters, states = tiers.parameters, tiers.states
    largest = max(-(-counts.largest_unit // world_size), LEAST_AHEAD_NBYTES // param_nbytes)
    return NvmeFiles(
        numel_in_memory=parameters.max_numel_in_memory,
        buffer_numel=min(parameters.num_buffers * parameters.buffer_numel, largest),
        sub_group_numel=min(states.sub_group_numel, LARGEST_NUMEL),
        num_sub_groups=states.num_buffers if states.reads_ahead or states.writes_behind else 1,
        num_generations=2 if states.keeps_previous else 1,
        unused_nbytes=unused_nbytes,
    )


def _with_checkpointing(shape: Activations | None, plan: ResolvedConfig) -> Activations | None:
    config = plan.configuration.values
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
