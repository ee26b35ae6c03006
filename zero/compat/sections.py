"""``deepspeed.runtime.zero.config`` and its like: single sections of a configuration, by this library's reader."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from zcomm import ConfigError
from zero._config import read_source
from zero._config.batch import solve_batch_sizes
from zero._config.legacy import modernize
from zero._config.parse import Configuration, Source, read_file
from zero.compat.monitors import DeepSpeedMonitorConfig

GRADIENT_CLIPPING = 1.0
PERSISTENCE_THRESHOLD = 100_000
"""DeepSpeed's defaults, which scripts rely on: small parameters can be read outside of forward at stage 3."""


class Defaulted(NamedTuple):
    """A configuration with DeepSpeed's defaults."""

    raw: dict[str, Any]
    notes: list[str]
    """What was left out of it, because DeepSpeed ignores it."""


def with_defaults(config: Source) -> Defaulted:
    """``config``, a dict or the path of a JSON file, with the defaults of DeepSpeed that differ from this library's."""
    if not isinstance(config, (Mapping, str, os.PathLike)):
        raise ConfigError(f"config must be a dict or the path of a JSON file: got {type(config).__name__}")
    given = dict(config) if isinstance(config, Mapping) else read_file(Path(config))
    if given.get("gradient_clipping") in (None, "auto"):
        given["gradient_clipping"] = GRADIENT_CLIPPING
    section = given.get("zero_optimization")
    if isinstance(section, Mapping):
        names = ("stage3_param_persistence_threshold", "param_persistence_threshold")
        if all(section.get(name) in (None, "auto") for name in names):
            others = {key: value for key, value in section.items() if key not in names}
            given["zero_optimization"] = {**others, names[0]: PERSISTENCE_THRESHOLD}
    return Defaulted(given, _leave_out_unread(given))


def _leave_out_unread(given: dict[str, Any]) -> list[str]:
    """Take out of ``given`` what DeepSpeed ignores and this library refuses; what it was, and why it has no effect."""
    unread = [("optimizer", "torch_adam", "it belongs in optimizer.params")]
    unread += [("fp16", key, "fp16 has no dynamic loss scale") for key in _unused_scale_keys(given.get("fp16"))]
    notes = []
    for name, key, reason in unread:
        section = given.get(name)
        if isinstance(section, Mapping) and key in section:
            given[name] = {other: value for other, value in section.items() if other != key}
            notes.append(f"{name}.{key}={section[key]!r} has no effect: {reason}")
    return notes


def _unused_scale_keys(section: Any) -> list[str]:
    """The keys of a dynamic loss scale that have invalid values and no effect: DeepSpeed takes them."""
    given = section if isinstance(section, Mapping) else {}
    found = [name for name in ("loss_scale_window", "min_loss_scale") if _is_not_positive(given.get(name))]
    if not found:
        return []
    values = read_source({"fp16": {key: value for key, value in given.items() if key not in found}}).values.fp16
    return [] if values.enabled and values.loss_scale == 0 else found


def _is_not_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0


def make_folders(configuration: Configuration) -> None:
    """Make the folders ``nvme_path`` that do not exist, as DeepSpeed does; the error of one that cannot be is later."""
    section = configuration.values.zero_optimization
    for offload in (section.offload_optimizer, section.offload_param):
        if offload.device == "nvme" and offload.nvme_path:
            with suppress(OSError):
                Path(offload.nvme_path).mkdir(parents=True, exist_ok=True)


class _Section:
    """The values of a section, by the names of its keys; keys of stage 3 also without ``stage3_``."""

    path: ClassVar[tuple[str, ...]]

    def __init__(self, **given: Any) -> None:
        raw: dict[str, Any] = given
        for name in reversed(self.path):
            raw = {name: raw}
        values: Any = read_source(with_defaults(raw).raw).values
        for name in self.path:
            values = getattr(values, name)
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":
            raise AttributeError(name)
        for spelling in (name, f"stage3_{name}"):
            if hasattr(self._values, spelling):
                value = getattr(self._values, spelling)
                return list(value) if isinstance(value, tuple) else value  # lists, as in the JSON: scripts compare them
        raise AttributeError(f"the section {'.'.join(self.path)} has no key {name}")


class DeepSpeedZeroOffloadParamConfig(_Section):
    """``zero_optimization.offload_param``."""

    path = ("zero_optimization", "offload_param")


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """``zero_optimization.offload_optimizer``."""

    path = ("zero_optimization", "offload_optimizer")

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with the update."""
        return bool(self._values.pipeline_read or self._values.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(_Section):
    """``zero_optimization.leaf_module``."""

    path = ("zero_optimization", "leaf_module")


class ZeroStageEnum(IntEnum):
    """The stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = max_stage = 3


class DeepSpeedZeroConfig(_Section):
    """``zero_optimization``."""

    path = ("zero_optimization",)

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        given = modernize({"zero_optimization": given})[0]["zero_optimization"]
        param, states = given.get("offload_param"), given.get("offload_optimizer")
        self.offload_param = None if param is None else DeepSpeedZeroOffloadParamConfig(**param)
        self.offload_optimizer = None if states is None else DeepSpeedZeroOffloadOptimizerConfig(**states)
        self.leaf_module = DeepSpeedZeroLeafModuleConfig(**given.get("leaf_module", {}))
        if given.get("overlap_comm") in (None, "auto"):
            self.overlap_comm = self.stage == ZeroStageEnum.weights  # DeepSpeed's default: engines here always overlap


class DeepSpeedFP16Config(_Section):
    """``fp16``."""

    path = ("fp16",)

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name in _unused_scale_keys(given):
            setattr(self, name, given[name])


class DeepSpeedBF16Config(_Section):
    """``bf16``."""

    path = ("bf16",)


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16``, also by its old name ``bfloat16``.

    Raises:
        ConfigError: It has both names.
    """
    found = [param_dict[name] for name in ("bf16", "bfloat16") if name in param_dict]
    if len(found) > 1:
        raise ConfigError("bf16 must be given once: the configuration has bfloat16 as well")
    return DeepSpeedBF16Config(**(found[0] if found else {}))


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The largest gradient norm, DeepSpeed's default if none is given."""
    return float(param_dict.get("gradient_clipping", GRADIENT_CLIPPING))


class CompileConfig:
    """The section ``compile``, of which nothing is available."""

    deepcompile = False


class ValuesByName:
    """What a configuration says, by DeepSpeed's attribute names; others are those of the sections' keys."""

    compile_config = CompileConfig()

    def __init__(self, values: Any) -> None:
        vars(self)["_values"] = values

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}={value!r}: a configuration cannot be changed; pass it to deepspeed.initialize")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._values, name)

    @property
    def zero_config(self) -> Any:
        """The section ``zero_optimization``."""
        return self._values.zero_optimization

    @property
    def zero_optimization_stage(self) -> int:
        """The stage."""
        return int(self._values.zero_optimization.stage)

    @property
    def zero_enabled(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage > 0


class DeepSpeedConfig(ValuesByName):
    """A configuration that is read without a model."""

    def __init__(self, config: Source, mpu: Any = None, mesh_device: Any = None) -> None:
        raw = with_defaults(config).raw
        super().__init__(read_source(raw).values)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        sizes = solve_batch_sizes(self._values, world_size if mpu is None else mpu.get_data_parallel_world_size())
        of_sizes = {"train_batch_size": sizes.train, "train_micro_batch_size_per_gpu": sizes.micro}
        vars(self).update(of_sizes, gradient_accumulation_steps=sizes.accumulation, _param_dict=raw)

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        """The sections of monitors."""
        return DeepSpeedMonitorConfig(**self._param_dict)
