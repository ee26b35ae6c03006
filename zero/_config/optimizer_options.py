"""The options of ``optimizer.params`` and ``scheduler.params``: their types and ranges, whatever class takes them.

Which of them a class takes says its signature; what is not in these tables is left to that class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero._config.keys import ConfigKey, Definition

Pair = tuple[float, float]
Rate = float | tuple[float, ...]
"""A number, or one for each parameter group."""


def _of(section: str, kind: Any, names: str, **facts: Any) -> dict[str, Definition]:
    return {name: Definition(f"{section}.{name}", kind, None, ConfigKey(doc="-", **facts)) for name in names.split()}


def _optimizer(kind: Any, names: str, **facts: Any) -> dict[str, Definition]:
    return _of("optimizer.params", kind, names, **facts)


def _scheduler(kind: Any, names: str, **facts: Any) -> dict[str, Definition]:
    return _of("scheduler.params", kind, names, **facts)


OPTIMIZER_OPTIONS: Mapping[str, Definition] = {
    **_optimizer(float, "lr weight_decay momentum lr_decay initial_accumulator_value momentum_decay", minimum=0),
    **_optimizer(float, "alpha lambd t0 rho dampening beta2_decay d"),
    **_optimizer(float | tuple[float | None, float], "eps"),  # Adafactor has two
    **_optimizer(Pair, "betas etas step_sizes"),
    **_optimizer(bool, "amsgrad nesterov maximize centered capturable differentiable fused foreach"),
    **_optimizer(bool, "decoupled_weight_decay bias_correction adam_w_mode adamw_mode torch_adam"),
    **_optimizer(bool, "fp32_optimizer_states"),
}
SCHEDULER_OPTIONS: Mapping[str, Definition] = {
    **_scheduler(Rate, "warmup_min_lr lr_range_test_min_lr cycle_min_lr cycle_max_lr"),
    **_scheduler(Rate | None, "warmup_max_lr"),
    **_scheduler(float, "warmup_min_ratio cos_min_ratio lr_range_test_step_rate decay_lr_rate decay_mom_rate"),
    **_scheduler(float, "cycle_min_mom cycle_max_mom"),
    **_scheduler(int, "warmup_num_steps decay_step_size cycle_first_stair_count", minimum=0),
    **_scheduler(int | None, "cycle_second_stair_count", minimum=0),
    **_scheduler(int, "total_num_steps lr_range_test_step_size cycle_first_step_size", minimum=1),
    **_scheduler(int | None, "cycle_second_step_size", minimum=1),
    **_scheduler(int, "last_batch_iteration", minimum=-1),
    **_scheduler(bool, "lr_range_test_staircase cycle_momentum"),
    **_scheduler(str, "warmup_type"),
}

SAME = {
    "Adam": "fusedadam cpuadam deepspeedcpuadam superoffloadcpuadam adam8bit",
    "AdamW": "fusedadamw adamwtorch adamwtorchfused adamwhf adamwapexfused adamw8bit pagedadamw cpuadamw",
    "Lion": "fusedlion cpulion deepspeedcpulion lion8bit",
    "Adagrad": "cpuadagrad deepspeedcpuadagrad",
    "SGD": "fusedsgd momentum nesterov",
}
"""Optimizers of other libraries and front ends, by the one of ours that computes the same: in lower case, without
underscores."""
UNSUPPORTED = {
    "the norm of a whole tensor": "lamb fusedlamb onebitlamb lars",
    "a whole matrix": "muon",
    "gradients that are compressed by the optimizer": "onebitadam zerooneadam",
}
"""DeepSpeed's other optimizers, by what they need."""


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def same_optimizer(name: str) -> str:
    """The optimizer here that ``name`` means; empty if none does."""
    return next((ours for ours, names in SAME.items() if _plain(name) in names.split()), "")


def unsupported_optimizer(name: str) -> str:
    """What the optimizer ``name`` needs and is not there; empty if it is not known."""
    return next((needs for needs, names in UNSUPPORTED.items() if _plain(name) in names.split()), "")
