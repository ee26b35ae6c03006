"""The settings of ZeroOptimizer, and which of them take effect on a given topology."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch

from zcomm import ConfigError, Topology, TopologyError, get_format
from zcomm._collectives.auto_format import AUTO
from zcomm._residuals.residual import check_damping
from zcomm._transport.backend_choice import BackendName, BackendWish, KernelsName, check_names
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """The settings of ZeroOptimizer, with DeepSpeed's names where its ``zero_optimization`` has them."""

    stage: int = DEFAULT_STAGE
    """What is sharded. 0: nothing; 1: optimizer states; 2: gradients, too; 3: parameters, too."""
    quantized_weights: bool = False
    """qwZ: weights are sent as INT8 blocks of 256. Stages 1, 2, 3."""
    quantized_nontrainable_weights: bool = False
    """Frozen weights are stored and sent as INT8 blocks of 256. Stage 3."""
    quantized_gradients: bool = False
    """qgZ: gradients are sent as INT4 blocks of 128 on both hops. Stages 1, 2, 3."""
    hpz_partition_size: int = 1
    """hpZ: the number of ranks per node; after a step's first gather, gathers stay inside the node. 1: off. Stage 3."""
    hpz_secondary_device: str = "device"
    """Where the secondary partition of hpZ is stored: "device", or "cpu" for host memory."""
    weight_format: str | None = None
    """Wire format of weights; overrides ``quantized_weights``. "auto": the one that ``zcomm probe`` found fastest for
    the largest exchange."""
    gradient_format: str | tuple[str, str] | None = None
    """Wire format of gradients, or one for the intra-node and one for the inter-node hop; overrides
    ``quantized_gradients``. Default: the parameters' dtype. "auto": as with weights."""
    backend: BackendWish = "auto"
    """What carries weights and gradients: "torch", torch's process groups; "nccl", zcomm's communicator over NCCL, for
    parameters on GPUs; "auto": that of a given topology, else "torch" until "nccl" is measured to be faster."""
    kernels: KernelsName = "auto"
    """What encodes and decodes weights and gradients: "native", "triton", "cuda", "reference"; "auto":
    those of a given topology, else what ``ZCOMM_KERNELS`` says."""
    mode: str | None = None
    """"delta_hpz" at stage 3: parameters are gathered inside the node, from replicas that receive the deltas of each
    step. "delta" at stages 1 and 2: full parameters receive these deltas.
    See :mod:`zero._config.delta_hpz_settings`."""
    residual_beta: float = 1.0
    """In (0, 1]: ``mode="delta_hpz"`` multiplies the residual of gradients by it before adding it to the next step's
    gradients. Below 1 old residuals fade (LoCo's damping)."""
    residual_reset_interval: int = 0
    """Steps after which the residual of gradients is reset to zero (LoCo's reset); 0: never."""
    gradient_dtype: torch.dtype | None = None
    """The dtype that gradients accumulate in; default float32 (float64 for float64 parameters)."""
    reduce_bucket_size: int = 500_000_000
    """The most elements of one gradient exchange: a larger layer is split, and below stage 3 small ones share one."""
    allgather_bucket_size: int = 500_000_000
    """The most elements of one weight exchange."""
    overlap_comm: bool = True
    """Overlap exchanges with the computation. The bits are the same either way."""
    gradient_accumulation_steps: int = 1
    """Backwards per step. If it is set, stages 0 and 1 reduce once a step, at the last (``no_sync()`` does so, too)."""
    stage3_prefetch_bucket_size: int = 50_000_000
    """The most elements to prefetch, and never more than the largest layer has; 0: none."""
    stage3_max_live_parameters: int = 1_000_000_000
    """The most elements that are full at a time, beyond what running modules need. A larger module is gathered in
    parts."""
    stage3_max_reuse_distance: int = 1
    """A layer stays full if fewer elements are used before its next use. 1: the last layer of forward; 0: none."""
    stage3_param_persistence_threshold: int = 0
    """Parameters with fewer elements are persistent: they stay full, and are gathered once a step."""
    stage3_model_persistence_threshold: int = 2**63 - 1
    """The most elements of persistent parameters."""
    log_trace_cache_warnings: bool = False
    """Log every change of the order in which layers are used, not only the first."""
    ignore_unused_parameters: bool = True
    """Parameters without a gradient on any rank are not updated; False: ``step()`` raises and names them."""
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
        get_stage(self.stage)
        check_names(self.backend, self.kernels)
        self._check_auto()
        for name in (
            "hpz_partition_size",
            "reduce_bucket_size",
            "allgather_bucket_size",
            "gradient_accumulation_steps",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1: {name}={value!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("stage3_") and (
                isinstance(value, bool) or not isinstance(value, int) or value < 0
            ):
                raise ConfigError(f"{field.name} must be an integer of at least 0: {field.name}={value!r}")
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{field.name} must be True or False: {field.name}={value!r}")
        if self.hpz_secondary_device not in ("device", "cpu"):
            raise ConfigError(
                f"hpz_secondary_device must be 'device' or 'cpu': hpz_secondary_device={self.hpz_secondary_device!r}"
            )
        if isinstance(self.residual_beta, bool) or not isinstance(self.residual_beta, (int, float)):
            raise ConfigError(f"residual_beta must be a number: residual_beta={self.residual_beta!r}")
        check_damping(self.residual_beta, self.residual_reset_interval, prefix="residual_")
        allowed = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)
        if self.gradient_dtype not in allowed:
            raise ConfigError(f"gradient_dtype must be a floating dtype: gradient_dtype={self.gradient_dtype!r}")


def nearest_setting(name: str, others: Iterable[str] = ()) -> str:
    """`` (did you mean 'x'?)`` if ``name`` is close to a setting or to one of ``others``, else nothing."""
    close = difflib.get_close_matches(name, [*others, *(field.name for field in fields(ZeroSettings))], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


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
    change_format: str | None = None
    """The format of parameters' deltas (``mode="delta_hpz"``, ``mode="delta"``); None: parameters are sent."""
    align: int
    """Elements that parameters and shards are aligned to."""
    topology: str
    backend: BackendName
    """What carries weights and gradients."""
    kernels: KernelsName
    """What encodes and decodes weights and gradients; "auto": what ``ZCOMM_KERNELS`` says."""
    limits: Limits
    """Limits of stage 3: elements to prefetch, to hold, and to keep for reuse."""
    details: tuple[str, ...] = ()
    """Where parameters, states and inputs of checkpointed functions are stored, if that is not the device."""
    adjusted: tuple[str, ...] = ()
    """What was requested and is done differently."""
    inactive: tuple[str, ...] = ()
    """What was requested and has no effect, with the reason."""

    @property
    def sums_in_node(self) -> bool:
        """Whether gradients are summed inside the node and cross the network once a step (``mode="delta_hpz"``)."""
        return self.change_format is not None and self.stage.shards_parameters

    def with_notes(self, *, details: tuple[str, ...] = (), inactive: tuple[str, ...] = ()) -> Effective:
        """The same with more notes."""
        return replace(self, details=self.details + details, inactive=self.inactive + inactive)

    def __str__(self) -> str:
        grads = "parameter dtype" if self.gradient_formats is None else " -> ".join(self.gradient_formats)
        text = (
            f"ZeRO stage {self.stage.number} on {self.topology}: weights as {self.weight_format}, gradients as "
            f"{grads}, secondary partition (hpZ) {f'on, {self.secondary_location}' if self.has_secondary else 'off'}"
        )
        if self.sums_in_node:
            text += f", replicas in every node (delta-hpZ), their changes as {self.change_format}"
        elif self.change_format is not None:
            text += f", changes of parameters as {self.change_format}"
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
    gradients = _gradient_formats(settings)
    is_quantized = gradients is not None and any(name not in UNQUANTIZED for name in gradients)
    if not stage.shards_states and (weights != "none" or is_quantized):
        inactive.append("quantized weights and gradients (stage 0 has no sharded exchange; set stage 1, 2 or 3)")
        weights, gradients = "none", None if is_quantized else gradients
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
        has_secondary=has_secondary,
        secondary_location="in host memory" if settings.hpz_secondary_device == "cpu" else "on the device",
        align=align,
        topology=f"{topology.num_nodes} x {topology.ranks_per_node} ranks",
        backend=topology.backend,
        kernels=topology.kernels,
        limits=limits,
        adjusted=tuple(adjusted),
        inactive=tuple(inactive),
    )


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


def _gradient_formats(settings: ZeroSettings) -> tuple[str, str] | None:
    chosen = settings.gradient_format or ("int4" if settings.quantized_gradients else None)
    return (chosen, chosen) if isinstance(chosen, str) else chosen


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
