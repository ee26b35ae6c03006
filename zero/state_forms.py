"""Whether what an optimizer keeps for each parameter can be divided over ranks, and saved: tried out on made-up ones.

Optimizers with states in 8 bit keep those of small tensors in full: the trial is larger than their thresholds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import ConfigError
from zero.checkpoints.tensor_file import is_storable
from zero.optimizer_copies import over_groups

__all__ = ["check_states"]

NUMEL = 2**16


def check_states(optimizer: Optimizer, device: torch.device) -> None:
    """Raise ConfigError if ``optimizer`` keeps anything else than numbers, and tensors with one value for each element.

    Cost: a step on 65,536 elements for each kind of parameter group.
    """
    kinds = {
        repr([(k, v) for k, v in group.items() if k not in ("params", "lr")]): group for group in optimizer.param_groups
    }
    for group in kinds.values():
        for name, value in _states_of(optimizer, group, device).items():
            if not _is_dividable(value):
                of = f" of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else ""
                raise ConfigError(
                    f"{type(optimizer).__name__} keeps {name!r} of a parameter of {NUMEL} elements as a "
                    f"{type(value).__name__}{of}, which can neither be divided over ranks nor saved: states are "
                    "numbers, and plain tensors with one value for each element. For narrower moments use zero.CPUAdam "
                    "with offload_optimizer and fp32_optimizer_states=False"
                )


def _states_of(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    param = torch.linspace(-1, 1, NUMEL, device=device)
    param.grad = param.clone()
    trial = over_groups(optimizer, [{**group, "params": [param]}])
    with torch.no_grad():
        trial.step()
    return dict(trial.state[param])


def _is_dividable(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_storable(value) and (value.numel() == 1 or value.shape == (NUMEL,))
    return value is None or isinstance(value, (int, float))
