"""Types and ranges of the options in ``optimizer.params`` and ``scheduler.params``.

The signature of the optimizer or scheduler decides which of them it accepts; options that are not in these tables are
passed on to it unchecked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from zero._config.keys import ConfigKey, Definition

Pair = tuple[float, float]
Rate = float | tuple[float, ...]
"""A number, or one for each parameter group."""


def _define(section: str, kind: Any, names: str, **facts: Any) -> dict[str, Definition]:
    return {name: Definition(f"{section}.{name}", kind, None, ConfigKey(doc="-", **facts)) for name in names.split()}


_optimizer, _scheduler = partial(_define, "optimizer.params"), partial(_define, "scheduler.params")

OPTIMIZER_OPTIONS: Mapping[str, Definition] = {
    **_optimizer(float, "lr weight_decay momentum lr_decay initial_accumulator_value momentum_decay", minimum=0),
    **_optimizer(float, "alpha lambd t0 rho dampening beta2_decay d"),
    **_optimizer(float | tuple[float | None, float], "eps"),  # Adafactor has two
    **_optimizer(Pair, "betas etas step_sizes"),
    **_optimizer(bool, "amsgrad nesterov maximize centered capturable differentiable fused foreach"),
    **_optimizer(bool, "decoupled_weight_decay bias_correction adam_w_mode torch_adam"),
    **_optimizer(bool, "fp32_optimizer_states"),
    **_optimizer(float, "muon_lr adam_lr min_coeff max_coeff", minimum=0),
    **_optimizer(int, "ns_steps", minimum=1),
    **_optimizer(str, "ns_method"),
}
SCHEDULER_OPTIONS: Mapping[str, Definition] = {
    **_scheduler(Rate, "warmup_min_lr lr_range_test_min_lr cycle_min_lr cycle_max_lr cycle_min_mom cycle_max_mom"),
    **_scheduler(Rate | None, "warmup_max_lr"),
    **_scheduler(float, "warmup_min_ratio cos_min_ratio lr_range_test_step_rate decay_lr_rate decay_mom_rate"),
    **_scheduler(int, "warmup_num_steps decay_step_size cycle_first_stair_count", minimum=0),
    **_scheduler(int | None, "cycle_second_stair_count", minimum=0),
    **_scheduler(int, "total_num_steps lr_range_test_step_size cycle_first_step_size", minimum=1),
    **_scheduler(int | None, "cycle_second_step_size", minimum=1),
    **_scheduler(int, "last_batch_iteration", minimum=-1),
    **_scheduler(bool, "lr_range_test_staircase cycle_momentum"),
    **_scheduler(str, "warmup_type", choices=("log", "linear")),
}

EQUIVALENT = {
    "Adam": "fusedadam cpuadam deepspeedcpuadam superoffloadcpuadam adam8bit",
    "AdamW": "fusedadamw adamwtorch adamwtorchfused adamwhf adamwapexfused adamw8bit pagedadamw cpuadamw",
    "Lamb": "fusedlamb",
    "Lion": "fusedlion cpulion deepspeedcpulion lion8bit",
    "Adagrad": "cpuadagrad deepspeedcpuadagrad",
    "SGD": "fusedsgd momentum nesterov",
}
"""Our optimizers, and the names of equivalent ones in other libraries and front ends, in lower case, no underscores."""
UNSUPPORTED = {
    "the norm of a full tensor, whose class torch does not have": "lars",
    "gradients that are compressed by the optimizer": "onebitadam zerooneadam onebitlamb",
    "the widths of layers, which the library mup knows": "muadam muadamw musgd",
}
"""DeepSpeed's other optimizers, by what they need."""


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def equivalent_optimizer(name: str) -> str:
    """Our optimizer that is equivalent to ``name``; empty if there is none."""
    return next((ours for ours, names in EQUIVALENT.items() if _plain(name) in names.split()), "")


def unsupported_optimizer(name: str) -> str:
    """What the optimizer ``name`` needs and shards do not have; empty if the name is unknown."""
    return next((needs for needs, names in UNSUPPORTED.items() if _plain(name) in names.split()), "")
