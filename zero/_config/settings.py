"""The settings of ZeroOptimizer, and which of them take effect on a given topology."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache

import torch

from zcomm import ConfigError, Topology, TopologyError, get_format
from zcomm._collectives.auto_format import AUTO
from zcomm._kernels.grid import check_error
from zcomm._residuals.residual import check_damping
from zcomm._transport.backend_choice import BackendName, BackendWish, KernelsName  # noqa: F401  (inherited fields)
from zero._config.keys import key, own_keys
from zero._config.setting_keys import EXACT, REDUCE_OPS, StageSettings, WireSettings
from zero._config.value_types import check_document, nearest, read_value
from zero._sharding.layout import ALIGN
from zero._sharding.prefetch_plan import Limits
from zero._sharding.stages import Stage, get_stage
from zero._storage.tier_settings import ON_DEVICE, Tiers

DEFAULT_STAGE = 1
"""The stage without a configuration."""
MIN_SHARD_NUMEL = 2048
"""The least elements that a rank sends in an exchange of stage 3; fewer would not make it faster."""
UNQUANTIZED = ("none", "bf16", "fp16")
"""The cast formats."""


@dataclass(frozen=True, kw_only=True)
class ZeroSettings(StageSettings, WireSettings):
    """The settings of ZeroOptimizer: the keys of docs/configuration.md that decide what is sharded, sent and kept.

    Names are those of the keys, without ``zero_``. Values are checked and converted as in a configuration.
    """

    stage: int = key(DEFAULT_STAGE, "what is sharded", choices=(0, 1, 2, 3))
    quantized_weights: bool = key(False, "zero_quantized_weights")
    quantized_gradients: bool = key(False, "zero_quantized_gradients")
    quantized_nontrainable_weights: bool = key(False, "zero_quantized_nontrainable_weights")
    hpz_partition_size: int = key(1, "zero_hpz_partition_size", minimum=1)
    gradient_accumulation_steps: int = key(1, "backwards per step", minimum=1)
    """If it is set, stages 0 and 1 reduce once a step, at the last (``no_sync()`` does so, too)."""
    gradient_allreduce_op: str = key("mean", "gradients are the mean over the ranks, or their sum", choices=REDUCE_OPS)
    gradient_dtype: torch.dtype | None = None
    """The dtype that gradients accumulate in; default float32 (float64 for float64 parameters)."""
    tiers: Tiers = ON_DEVICE
    """Where states and parameters are stored: the sections ``offload_optimizer``, ``offload_param`` and ``aio``."""

    def with_formats(self, weights: str | None, gradients: str | tuple[str, str] | None) -> ZeroSettings:
        """The same settings with these formats in place of ``"auto"``."""
        return replace(
            self,
            weight_format=weights if self.weight_format == AUTO else self.weight_format,
            gradient_format=gradients if self.gradient_format == AUTO else self.gradient_format,
        )

    def _check_auto(self) -> None:
        """Refuse "auto" where a mode has default formats of its own, and the probe times none of its exchanges."""
        for name in ("weight_format", "gradient_format"):
            if getattr(self, name) == AUTO and (self.mode == "delta_hpz" or (self.mode and name == "weight_format")):
                raise ConfigError(
                    f"{name}='auto' is not combined with mode={self.mode!r}: name a format, or leave it out"
                )

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        given = {name: getattr(self, name) for name in own_keys(ZeroSettings)}
        check_document({name: value for name, value in given.items() if value is not None})
        for name, definition in own_keys(ZeroSettings).items():
            if given[name] is not None or definition.default is not None:
                value = read_value(definition.kind, definition.key, given[name], name)
                object.__setattr__(self, name, value)  # frozen
        self._check_auto()
        check_error("gradient_error", self.gradient_error)
        check_damping(self.residual_beta, self.residual_reset_interval, prefix="residual_")
        allowed = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
        if self.gradient_dtype not in allowed:
            raise ConfigError(f"gradient_dtype must be a floating dtype: gradient_dtype={self.gradient_dtype!r}")


@cache
def setting_name(path: str) -> str:
    """The setting that a key at the top, of ``zero_optimization`` or of ``zcomm`` sets; empty if none."""
    section, _, key_name = path.rpartition(".")
    names = {field.name for field in fields(ZeroSettings)} if section in ("", "zero_optimization", "zcomm") else ()
    return next((name for name in (key_name, key_name.removeprefix("zero_")) if name in names), "")


def nearest_setting(name: str, others: Iterable[str] = ()) -> str:
    """`` (did you mean 'x'?)`` if ``name`` is close to a setting or to one of ``others``, else nothing."""
    return nearest(name, [*others, *(field.name for field in fields(ZeroSettings))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """The settings that take effect on this model and topology. ``str()`` of it is logged once."""

    stage: Stage
    weight_format: str
    gradient_formats: tuple[str, str] | None
    """The formats of the intra-node and the inter-node hop; None: the dtype of each bucket's parameters."""
    has_secondary: bool
    """Whether gathers after a step's first stay inside the node (hpZ)."""
    secondary_location: str
    """Where the secondary partition is stored, if there is one."""
    mode: str | None = None
    """The mode in effect."""
    mode_text: str = ""
    """What it does."""
    gradient_error: float = 0.0
    """Not 0: gradients are sent between nodes with this relative error, entropy-coded."""
    change_format: str | None = None
    """The format of parameters' deltas, in modes that send those, or "exact"; None: parameters are sent."""
    align: int
    """Elements that parameters and shards are aligned to."""
    topology: str
    backend: BackendName
    """What carries weights and gradients."""
    kernels: KernelsName
    """What encodes and decodes weights and gradients; "auto": what ``ZCOMM_KERNELS`` says."""
    merged_numel: int
    """Elements up to which small units share a bucket, and so an exchange; 0 at stage 3, where none do."""
    limits: Limits
    """Limits of stage 3: elements to prefetch, to hold, and to keep for reuse."""
    details: tuple[str, ...] = ()
    """Where parameters, states and inputs of checkpointed functions are stored, if that is not the device."""
    adjusted: tuple[str, ...] = ()
    """What was requested and is done differently."""
    inactive: tuple[str, ...] = ()
    """What was requested and has no effect, with the reason."""

    def with_notes(self, *, details: tuple[str, ...] = (), inactive: tuple[str, ...] = ()) -> Effective:
        """The same with more notes."""
        return replace(self, details=self.details + details, inactive=self.inactive + inactive)

    @property
    def sends_exact_changes(self) -> bool:
        """Whether replicas have the bits of the rounded masters."""
        return self.change_format == EXACT

    @property
    def is_inexact(self) -> bool:
        """Whether forward reads values that must not be saved: quantized weights, or sums of quantized deltas."""
        return self.weight_format != "none" or not (self.change_format is None or self.sends_exact_changes)

    def __str__(self) -> str:
        grads = "parameter dtype" if self.gradient_formats is None else " -> ".join(self.gradient_formats)
        if self.gradient_formats is not None and self.gradient_error:
            grads = f"{self.gradient_formats[0]} -> entropy-coded, error {self.gradient_error:g}"
        text = (
            f"ZeRO stage {self.stage.number} on {self.topology}: weights as {self.weight_format}, gradients as "
            f"{grads}, secondary partition (hpZ) {f'on, {self.secondary_location}' if self.has_secondary else 'off'}"
        )
        text += f", {self.mode_text}" if self.mode_text else ""
        text += f"; backend {self.backend}, kernels {self.kernels}"
        notes = [*self.details, *self.adjusted, *(f"inactive: {reason}" for reason in self.inactive)]
        return "; ".join([text, *notes])


def resolve(settings: ZeroSettings, topology: Topology) -> Effective:
    """Decide which of ``settings`` take effect. The same on every rank."""
    stage, inactive = get_stage(settings.stage), []
    if AUTO in (settings.weight_format, settings.gradient_format):
        inactive.append("formats 'auto' (a plan has no ranks, so no probe has measured their links)")
        settings = settings.with_formats(None, None)
    weights = settings.weight_format or ("int8" if settings.quantized_weights else "none")
    chosen = settings.gradient_format or ("int4" if settings.quantized_gradients else None)
    gradients = (chosen, chosen) if isinstance(chosen, str) else chosen
    is_quantized = gradients is not None and any(name not in UNQUANTIZED for name in gradients)
    if not stage.shards_states and (weights != "none" or is_quantized):
        inactive.append("quantized weights and gradients (stage 0 has no sharded exchange; set stage 1, 2 or 3)")
        weights, gradients = "none", None if is_quantized else gradients
    if settings.mode is None and settings.changes == EXACT:
        inactive.append("changes='exact' (without a mode parameters are sent, not their changes)")
    if settings.mode != "delta_hpz" and settings.gradient_error:
        inactive.append(f"gradient_error={settings.gradient_error:g} (set mode='delta_hpz')")
    if settings.mode != "delta_hpz" and (settings.residual_beta != 1 or settings.residual_reset_interval):
        inactive.append("residual_beta, residual_reset_interval (only mode='delta_hpz' keeps residuals)")
    has_secondary = _secondary(settings, topology, stage, inactive)
    align = ALIGN
    for name in (weights, *(gradients or ())):
        block = get_format(name).block
        if block > ALIGN and block % ALIGN:
            raise ConfigError(f"block must divide or be a multiple of {ALIGN}: format={name}, block={block}")
        align = max(align, block)
    limits, adjusted = _limits(settings, topology, stage)
    return Effective(
        stage=stage,
        weight_format=weights,
        gradient_formats=gradients,
        gradient_error=settings.gradient_error if settings.mode == "delta_hpz" else 0.0,
        has_secondary=has_secondary,
        secondary_location="in host memory" if settings.hpz_secondary_device == "cpu" else "on the device",
        align=align,
        topology=f"{topology.num_nodes} x {topology.ranks_per_node} ranks",
        backend=topology.backend,
        kernels=topology.kernels,
        merged_numel=0 if stage.shards_parameters else numel_to_merge(settings, topology.num_nodes),
        limits=limits,
        adjusted=tuple(adjusted),
        inactive=tuple(inactive),
    )


def numel_to_merge(settings: ZeroSettings, num_nodes: int) -> int:
    """Elements up to which small units share an exchange below stage 3, which releases each unit separately.

    Within one node, measured over gloo, fewer exchanges take less processor time. Between nodes the first one should
    start early in backward: a larger one waits for more gradients, and a slow network does not make up for that.
    """
    most = 2**22 if num_nodes == 1 else 2**20
    return min(most, settings.reduce_bucket_size, settings.allgather_bucket_size)


def _limits(settings: ZeroSettings, topology: Topology, stage: Stage) -> tuple[Limits, list[str]]:
    """The limits of the stage-3 schedule, and notes on those that were raised to the minimum."""
    least, adjusted = topology.world_size * MIN_SHARD_NUMEL, []

    def at_least(name: str) -> int:
        value: int = getattr(settings, name)
        if value >= least:
            return value
        if stage.shards_parameters:
            adjusted.append(f"{name}={value} raised to {least} ({MIN_SHARD_NUMEL} elements a rank)")
        return least

    is_ahead = settings.overlap_comm and settings.stage3_prefetch_bucket_size > 0
    limits = Limits(
        prefetch_numel=at_least("stage3_prefetch_bucket_size") if is_ahead else 0,
        live_numel=at_least("stage3_max_live_parameters"),
        reuse_numel=settings.stage3_max_reuse_distance,
    )
    return limits, adjusted


def _secondary(settings: ZeroSettings, topology: Topology, stage: Stage, inactive: list[str]) -> bool:
    size = settings.hpz_partition_size
    if size == 1:
        return False
    if size != topology.ranks_per_node:
        raise TopologyError(
            "hpz_partition_size must be 1 or the number of ranks per node: "
            f"hpz_partition_size={size}, ranks_per_node={topology.ranks_per_node}, world_size={topology.world_size} "
            "(pass ranks_per_node= to let one machine stand in for several nodes)"
        )
    if not stage.shards_parameters:
        inactive.append(f"hpz_partition_size={size} (parameters are full on every rank below stage 3)")
        return False
    if topology.num_nodes == 1:
        inactive.append(f"hpz_partition_size={size} (one node: the primary partition is inside it already)")
        return False
    return True
