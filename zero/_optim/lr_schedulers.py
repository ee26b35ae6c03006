"""The learning-rate schedules of DeepSpeed's JSON, as torch schedulers.

With b the number of ``scheduler.step()`` calls so far minus 1 (so b = -1 in the first optimizer step), w
``warmup_num_steps`` (if less than 2, 2) and T ``total_num_steps``:

    warmup         ramp(b) = log(b + 1) / log(w), or b / w if warmup_type is "linear", for 0 <= b < w; 0 for b = -1
    WarmupLR       min + (max - min) ramp(b), then max
    WarmupDecayLR  min + (max - min) ramp(b), then min + (max - min) max(0, (T - b) / max(1, T - w))
    WarmupCosineLR lr (r + (1 - r) ramp(b)), r = warmup_min_ratio (lr 0 at b = -1), then
                   lr (c + (1 - c) (1 + cos(pi min(1, (b - w + 1) / max(1, T - w)))) / 2), c = cos_min_ratio
    LRRangeTest    min (1 + rate (b + 1) / step_size), the quotient floored if staircase
    OneCycle       up from min to max in first steps, down in second steps, linear or in stairs; then
                   min / (1 + decay_lr_rate (b - first - second + 1) / decay_step_size); beta1 (or momentum) the other
                   way round between cycle_min_mom and cycle_max_mom

``scheduler.step(n)`` sets b to n. Every bound may be a number, or a list with one for each parameter group.
``get_last_lr`` is torch's; a state dict has the position in the schedule alone.
Source: DeepSpeed's documentation of learning-rate schedulers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zcomm import ConfigError
from zero._config.optimizer_options import SCHEDULER_OPTIONS
from zero._config.parse import read_options
from zero._config.value_types import nearest, shown

Rate = float | Sequence[float]


def _for_groups(value: Rate, optimizer: Optimizer, name: str) -> list[float]:
    """One value for each parameter group."""
    num_groups = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * num_groups
    if len(value) != num_groups:
        raise ConfigError(f"{name} must be a number or one for each of {num_groups} parameter groups: {name}={value!r}")
    return [float(v) for v in value]


def _check_steps(name: str, value: int, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}: {name}={shown(value)}")
    return value


class _Ramp:
    """The warmup from 0 to 1."""

    def __init__(self, num_steps: int, kind: str) -> None:
        if kind not in ("log", "linear"):
            raise ConfigError(f"warmup_type must be 'log' or 'linear': warmup_type={kind!r}")
        self.num_steps = max(2, _check_steps("warmup_num_steps", num_steps, least=0))
        self._is_log = kind == "log"

    def __call__(self, batch: int) -> float:
        if batch < 0:
            return 0.0
        return math.log(batch + 1) / math.log(self.num_steps) if self._is_log else batch / self.num_steps


POSITION = ("last_epoch", "_step_count", "_last_lr")
"""The attributes of a scheduler that change from step to step."""


class _BatchScheduler(LRScheduler):
    """Counts steps as DeepSpeed does: ``batch`` is -1 before the first one."""

    @property
    def batch(self) -> int:
        """Steps of the schedule so far, minus 1."""
        return int(self.last_epoch) - 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to this batch, counted as DeepSpeed does: 0 after the first step."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration  # super().step() adds 1
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """The position alone, as DeepSpeed's: the schedule is that of the configuration."""
        return {key: value for key, value in super().state_dict().items() if key in POSITION}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved position; checkpoints of earlier versions have the old schedule beside it."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key in POSITION})


class WarmupLR(_BatchScheduler):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` steps, then constant.

    Args:
        optimizer: Any torch optimizer; a ZeroOptimizer is one.
        warmup_min_lr: Where it starts.
        warmup_max_lr: Where it ends; None: the learning rates of the optimizer's groups.
        warmup_num_steps: Steps in between.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: As torch's ``last_epoch``, -1 to start.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        if warmup_max_lr is None:
            warmup_max_lr = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self._low = _for_groups(warmup_min_lr, optimizer, "warmup_min_lr")
        self._high = _for_groups(warmup_max_lr, optimizer, "warmup_max_lr")
        self._ramp = _Ramp(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        factor = self._ramp(self.batch) if self.batch < self._ramp.num_steps else self._after_warmup()
        return [low + (high - low) * factor for low, high in zip(self._low, self._high, strict=True)]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, then linearly back to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = _check_steps("total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after_warmup(self) -> float:
        return max(0.0, (self._total - self.batch) / max(1, self._total - self._ramp.num_steps))


class WarmupCosineLR(_BatchScheduler):
    """The optimizer's own learning rates times a warmup, then times a half cosine down to ``cos_min_ratio``.

    Args:
        optimizer: Any torch optimizer.
        total_num_steps: Where the cosine ends.
        warmup_min_ratio: Where the warmup starts.
        warmup_num_steps: Steps of the warmup.
        cos_min_ratio: Where the cosine ends, and what stays after it.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: As torch's ``last_epoch``, -1 to start.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = _check_steps("total_num_steps", total_num_steps)
        self._min_ratio, self._last_ratio = warmup_min_ratio, cos_min_ratio
        self._ramp = _Ramp(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        ratio = 0.0
        if 0 <= self.batch < self._ramp.num_steps:
            ratio = self._min_ratio + (1 - self._min_ratio) * self._ramp(self.batch)
        elif self.batch >= 0:
            done = (self.batch - self._ramp.num_steps + 1) / max(1, self._total - self._ramp.num_steps)
            cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
            ratio = max(0.0, self._last_ratio + (1 - self._last_ratio) * cosine)
        return [float(lr) * ratio for lr in self.base_lrs]


class LRRangeTest(_BatchScheduler):
    """Increase the learning rate step by step, to find the largest that trains.

    Args:
        optimizer: Any torch optimizer.
        lr_range_test_min_lr: Where it starts.
        lr_range_test_step_size: Steps in which it grows by ``lr_range_test_step_rate`` of the start.
        lr_range_test_step_rate: Growth in ``lr_range_test_step_size`` steps, as a fraction of the start.
        lr_range_test_staircase: Grow once in ``lr_range_test_step_size`` steps instead of at each.
        last_batch_iteration: As torch's ``last_epoch``, -1 to start.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,  # noqa: FBT001  (DeepSpeed's order)
        last_batch_iteration: int = -1,
    ) -> None:
        self._low = _for_groups(lr_range_test_min_lr, optimizer, "lr_range_test_min_lr")
        self._step_size = _check_steps("lr_range_test_step_size", lr_range_test_step_size)
        self._rate, self._has_stairs = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        steps = (self.batch + 1) / self._step_size
        factor = 1 + self._rate * (math.floor(steps) if self._has_stairs else steps)
        return [low * factor for low in self._low]

    def step(self, batch_iteration: int | None = None) -> None:  # DeepSpeed's name, which lr_kwargs may give
        super().step(batch_iteration)


class OneCycle(_BatchScheduler):
    """One cycle of the learning rate up and down, and of the momentum down and up; then decay.

    Args:
        optimizer: Any torch optimizer; momentum is cycled if its groups have ``betas`` (the first) or ``momentum``.
        cycle_min_lr: Where it starts and returns to.
        cycle_max_lr: The maximum.
        options: ``decay_lr_rate`` 0, ``cycle_first_step_size`` 2000, ``cycle_second_step_size`` (the first's),
            ``cycle_first_stair_count`` 0, ``cycle_second_stair_count`` (the first's), ``decay_step_size`` 0 (no decay),
            ``cycle_momentum`` True, ``cycle_min_mom`` 0.8, ``cycle_max_mom`` 0.9, ``decay_mom_rate`` 0,
            ``last_batch_iteration`` -1.
    """

    DEFAULTS: dict[str, Any] = {  # noqa: RUF012  (read only)
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "last_batch_iteration": -1,
    }

    def __init__(self, optimizer: Optimizer, cycle_min_lr: Rate, cycle_max_lr: Rate, **options: Any) -> None:
        for name in options:
            if name not in self.DEFAULTS:
                raise ConfigError(f"OneCycle has no option {name!r}{nearest(name, self.DEFAULTS)}")
        chosen = {**self.DEFAULTS, **options}
        self._low = _for_groups(cycle_min_lr, optimizer, "cycle_min_lr")
        self._high = _for_groups(cycle_max_lr, optimizer, "cycle_max_lr")
        self._first = _check_steps("cycle_first_step_size", chosen["cycle_first_step_size"])
        second, stairs = chosen["cycle_second_step_size"], chosen["cycle_second_stair_count"]
        self._second = self._first if second is None else _check_steps("cycle_second_step_size", second, least=0)
        self._first_stairs = int(chosen["cycle_first_stair_count"])
        self._second_stairs = self._first_stairs if stairs is None else int(stairs)
        self._decay_step = chosen["decay_step_size"]
        self._decay_lr, self._decay_mom = chosen["decay_lr_rate"], chosen["decay_mom_rate"]
        self._low_mom = _for_groups(chosen["cycle_min_mom"], optimizer, "cycle_min_mom")
        self._high_mom = _for_groups(chosen["cycle_max_mom"], optimizer, "cycle_max_mom")
        self._cycles_momentum = bool(chosen["cycle_momentum"])
        super().__init__(optimizer, chosen["last_batch_iteration"])

    def _height(self) -> float:
        """The position between the bounds, 0 to 1."""
        at = (self.batch + 1) % (self._first + self._second)
        if at <= self._first:
            steps, size, stairs = at, self._first, self._first_stairs
        else:
            steps, size, stairs = self._first + self._second - at, self._second, self._second_stairs
        return math.floor(steps * stairs / size) / stairs if stairs > 0 else steps / size

    def _decay(self, rate: float) -> float:
        """The factor by which decay divides the learning rate and multiplies the momentum; 1 without decay."""
        if not self._decay_step:
            return 1.0
        return 1 + float(rate) * (self.batch - self._first - self._second + 1) / float(self._decay_step)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The learning rate of every group at this batch; sets the momentum beside it."""
        for group, momentum in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group.update({name: momentum for name in ("betas", "momentum") if name in group})
        if self.batch < self._first + self._second:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self._low, self._high, strict=True)]
        return [low / self._decay(self._decay_lr) for low in self._low]

    def step(self, batch_iteration: int | None = None) -> None:  # DeepSpeed's name, which lr_kwargs may give
        super().step(batch_iteration)

    def get_mom(self) -> list[Any] | None:
        """The ``betas`` or the ``momentum`` of every group at this batch; None: they do not cycle."""
        if not self._cycles_momentum:
            return None
        is_cycling, found = self.batch < self._first + self._second, list[Any]()
        for group, low, high in zip(self.optimizer.param_groups, self._low_mom, self._high_mom, strict=True):
            momentum = high - (high - low) * self._height() if is_cycling else high * self._decay(self._decay_mom)
            found.append((momentum, group["betas"][1]) if "betas" in group else momentum)
        return found


SCHEDULERS: dict[str, Callable[..., LRScheduler]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def build_scheduler(kind: str, params: dict[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Build the schedule of the JSON; for ``"auto"`` the class's default is used.

    Raises:
        ConfigError: Unknown schedule or option (the error names the nearest), a missing option, or an invalid value.
    """
    if kind not in SCHEDULERS:
        raise ConfigError(f"scheduler.type must be one of {', '.join(SCHEDULERS)}: got {kind!r}")
    cls = SCHEDULERS[kind]
    accepted = list(inspect.signature(cls).parameters.values())[1:]
    known = [*(p.name for p in accepted), *(OneCycle.DEFAULTS if cls is OneCycle else ())]
    for name in params:
        if name not in known:
            raise ConfigError(f"scheduler.params of {kind} has no {name!r}{nearest(name, known)}")
    given = read_options(SCHEDULER_OPTIONS, params)
    required = [p.name for p in accepted if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    missing = [name for name in required if name not in given]
    if missing:
        raise ConfigError(f"scheduler.params of {kind} must have a value for {', '.join(missing)}")
    return cls(optimizer, **given)
