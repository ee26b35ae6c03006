"""Combines a configuration and keyword arguments into the settings of ZeroOptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from zcomm import ConfigError, Topology
from zcomm._transport.backend_choice import BackendWish, KernelsName
from zero._activations.activation_settings import ActivationSettings
from zero._config.key_support import check_available, settings_of, unused_notes
from zero._config.keys import own_keys
from zero._config.legacy import MOVED
from zero._config.offload_sections import activations_of, tiers_of
from zero._config.parse import Configuration, Source, parse, read_source
from zero._config.sections import Config, Zcomm
from zero._config.settings import DEFAULT_STAGE, ZeroSettings, setting_name
from zero._config.value_types import shown
from zero._config.zero_section import ZeroOptimization
from zero._sharding.stages import STAGES

DTYPES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
CAST_FORMATS = {torch.float32: "none", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What was requested of ZeroOptimizer, by a configuration, by keywords, or by both (keywords win)."""

    settings: ZeroSettings
    configuration: Configuration
    optimizer_options: dict[str, Any]
    """Keywords that are no keys: for the optimizer class."""
    notes: tuple[str, ...]
    """Logged once, by the first rank."""
    whole_groups: tuple[bool, ...] = ()
    """Which parameter groups are updated as whole tensors: found when the optimizer is tried."""

    @property
    def activations(self) -> ActivationSettings:
        return activations_of(self.configuration.values)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that parameters are cast to; None: they keep theirs."""
        return _dtype_of(self.configuration.values)

    @property
    def buffer_dtype(self) -> torch.dtype | None:
        """The dtype that buffers are cast to; None: they keep theirs."""
        name = self.configuration.values.data_types.buffer_dtype
        return None if name is None else to_dtype(name)


def _dtype_of(config: Config) -> torch.dtype | None:
    return torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None


def _check_param_dtype(config: Config) -> None:
    name = config.data_types.param_dtype
    if name is not None and to_dtype(name) != (_dtype_of(config) or torch.float32):
        raise ConfigError(f"data_types.param_dtype must be that of fp16 or bf16, whichever is enabled: got {name!r}")


def resolve_config(config: Source | Configuration | None, options: Mapping[str, Any]) -> ResolvedConfig:
    """Split ``options`` into our keys, which override ``config``, and those of the optimizer class.

    Raises:
        ConfigError: See :func:`zero._config.parse.parse`.
        NotAvailableError: A key requests what this version does not have.
    """
    names = {field.name for field in fields(ZeroSettings)}
    given = {name: value for name, value in options.items() if name in names}
    ours = {name: getattr(ZeroSettings(**given), name) for name in given}  # checked and converted
    overlay: dict[str, Any] = {}
    others = {name: value for name, value in options.items() if name not in names}
    optimizer_options = {name: value for name, value in others.items() if not _place(overlay, name, value)}
    has_config = config is not None
    stage = ours.get("stage", DEFAULT_STAGE)
    if (not has_config or "stage" in ours) and not isinstance(config, Configuration) and stage in STAGES:
        _place(overlay, "stage", stage)  # or keys that depend on the stage would be checked against its default
    if not isinstance(config, Configuration):
        config = parse(overlay, "keyword") if config is None else read_source(config, overlay)
    elif overlay:
        raise ConfigError(f"keywords cannot override a configuration that has been read already: {', '.join(overlay)}")
    check_available(config)
    _check_param_dtype(config.values)
    activations_of(config.values)  # raises here, before anything is built
    found = _settings_of(config, has_config=has_config) | ours
    tiers = tiers_of(config.values, stage=found.get("stage", DEFAULT_STAGE))
    settings = ZeroSettings(**({"tiers": tiers} | found))
    notes = (*config.notes, *unused_notes(config))
    return ResolvedConfig(settings=settings, configuration=config, optimizer_options=optimizer_options, notes=notes)


def to_dtype(name: str) -> torch.dtype:
    """The dtype named ``"bf16"``, ``"float32"``, ..."""
    dtype: torch.dtype = getattr(torch, DTYPES.get(name, name))
    return dtype


@cache
def _names(cls: type) -> frozenset[str]:
    return frozenset(name for key, definition in own_keys(cls).items() for name in (key, *definition.key.aliases))


def _place(overlay: dict[str, Any], name: str, value: Any) -> bool:
    """Add a keyword to ``overlay``; False: it is no key at the top level, in zero_optimization or in zcomm."""
    if name in _names(Config):
        overlay[name] = {**_section(overlay, name), **value} if isinstance(value, Mapping) else value
    elif name in _names(ZeroOptimization) or name in MOVED:
        _section(overlay, "zero_optimization")[name] = value
    elif name in _names(Zcomm):
        _section(overlay, "zcomm")[name] = value
    else:
        return False
    return True


def _section(overlay: dict[str, Any], name: str) -> dict[str, Any]:
    """The section ``name`` of ``overlay``, added if it is missing."""
    section = overlay.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name} must be an object: {name}={shown(section)}")
    return section


def _settings_of(configuration: Configuration, *, has_config: bool) -> dict[str, Any]:
    """The fields of ZeroSettings that ``configuration`` sets. Without one, stage keeps ZeroOptimizer's own default."""
    found = {}
    for setting in settings_of(configuration):
        field = setting_name(setting.definition.path)
        if field and (setting.is_given or (has_config and field == "stage")):
            found[field] = setting.value
    config = configuration.values
    if config.communication_data_type is not None and not config.zero_optimization.zero_quantized_gradients:
        found.setdefault("gradient_format", CAST_FORMATS[to_dtype(config.communication_data_type)])
    if config.data_types.grad_accum_dtype is not None:
        found["gradient_dtype"] = to_dtype(config.data_types.grad_accum_dtype)
    return found


def choose_topology(
    topology: Topology | None,
    ranks_per_node: int | None,
    group: dist.ProcessGroup | None,
    plan: ResolvedConfig | None = None,
) -> Topology:
    """The topology that is given, or a new one, with the backend and kernels of ``plan``; collective if it is new."""
    if topology is not None:
        if ranks_per_node is not None or group is not None:
            raise ConfigError(
                "topology= already has a group and ranks per node: pass either topology= or group= and ranks_per_node="
            )
        return topology
    backend: BackendWish = "auto"
    kernels: KernelsName = "auto"
    if plan is not None:
        backend, kernels = plan.settings.backend, plan.settings.kernels
        if ranks_per_node is None:
            ranks_per_node = plan.configuration.values.zcomm.ranks_per_node
    if ranks_per_node is not None:
        return Topology(ranks_per_node=ranks_per_node, group=group, backend=backend, kernels=kernels)
    return Topology.from_env(group, backend=backend, kernels=kernels)
