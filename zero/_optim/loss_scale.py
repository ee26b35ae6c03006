"""Static and dynamic loss scaling: the loss is multiplied so that small float16 gradients do not vanish.

The dynamic rule is DeepSpeed's. A step is good if no gradient overflowed on any rank:

    overflow, hysteresis left > 1    the scale stays, the hysteresis left falls by 1
    overflow, hysteresis left = 1    the scale halves, not below the minimum; at the minimum already: an error
    good step                        after each ``window`` good steps in a row since the last overflow (or the start)
                                     the next good step doubles the scale and restores the hysteresis;
                                     consecutive_hysteresis: every good step restores it

Source: DeepSpeed's configuration documentation (fp16) and "Mixed Precision Training" (arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zcomm import ConfigError, StateError
from zero._config.key_support import is_float16
from zero._config.sections import Config


def not_scaled(scale: float) -> StateError:
    """The error for gradients of a loss that was not multiplied by ``scale``."""
    return StateError(
        f"gradients must be of the scaled loss, loss_scale={scale:g}: call engine.backward(loss), or "
        "optimizer.scale(loss).backward()"
    )


class StaticLossScale:
    """A constant scale; a step that overflows is still skipped.

    Args:
        scale: Greater than 0; a power of two loses nothing.
    """

    def __init__(self, scale: float) -> None:
        if not 0 < scale < float("inf"):
            raise ConfigError(f"loss_scale must be greater than 0 and finite: loss_scale={scale}")
        self.scale = scale

    def update(self, *, overflowed: bool) -> None:
        """Do nothing: the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the scale is a setting. A checkpoint may have been saved with another one, bf16 with 1."""


class DynamicLossScale:
    """A scale that falls when gradients overflow and rises while they do not.

    Args:
        initial_scale_power: The first scale is 2 to this power.
        window: Consecutive good steps before the scale doubles.
        hysteresis: Overflows before the scale halves.
        consecutive_hysteresis: A good step restores the hysteresis.
        min_scale: The scale does not fall below it.
    """

    def __init__(
        self,
        *,
        initial_scale_power: int = 16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        if window < 1 or hysteresis < 1 or not 0 < min_scale < float("inf"):
            raise ConfigError(
                "loss_scale_window and hysteresis must be at least 1, min_loss_scale greater than 0: "
                f"loss_scale_window={window}, hysteresis={hysteresis}, min_loss_scale={min_scale}"
            )
        self.scale = 2.0**initial_scale_power
        self.window, self._hysteresis, self.min_scale = window, hysteresis, min_scale
        self._is_consecutive = consecutive_hysteresis
        self._hysteresis_left = hysteresis
        self._num_good = 0

    def update(self, *, overflowed: bool) -> None:
        """Apply the rule after one step.

        Raises:
            StateError: Gradients overflowed at the smallest scale.
        """
        if overflowed:
            self._num_good = 0
            if self._hysteresis_left > 1:
                self._hysteresis_left -= 1
                return
            if self.scale <= self.min_scale:
                raise StateError(
                    f"gradients overflow at the smallest loss scale, min_loss_scale={self.min_scale:g}: the model or "
                    "its input has values that float16 cannot hold; use bf16, a smaller learning rate, or a lower "
                    "min_loss_scale"
                )
            self.scale = max(self.scale / 2, self.min_scale)
            return
        if self._is_consecutive:
            self._hysteresis_left = self._hysteresis
        if self._num_good and self._num_good % self.window == 0:
            self._hysteresis_left = self._hysteresis
            self.scale *= 2
        self._num_good += 1

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "hysteresis_left": self._hysteresis_left, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._hysteresis_left, self._num_good = int(state["hysteresis_left"]), int(state["num_good"])


LossScale = StaticLossScale | DynamicLossScale


def nonfinite_flag(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether any element is a NaN or an infinity, a bool scalar on ``device``. One pass; the host does not wait."""
    extremes: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():  # a NaN makes both of them NaN
            extremes.setdefault((tensor.device, tensor.dtype), []).extend(torch.aminmax(tensor))
    if not extremes:
        return torch.zeros((), dtype=torch.bool, device=device)
    # isfinite() is four kernels on a GPU: not for each tensor.
    finite = [torch.stack(values).isfinite().all().to(device, non_blocking=True) for values in extremes.values()]
    return torch.stack(finite).all().logical_not()


def is_nonfinite(tensors: Sequence[Tensor]) -> bool:
    """Whether any element is a NaN or an infinity; ``tensors`` are on one device, and the host waits for it."""
    return bool(tensors) and bool(nonfinite_flag(tensors, tensors[0].device))


def loss_scale_of(config: Config) -> LossScale | None:
    """The configured loss scale; None: gradients are not scaled and steps are never skipped."""
    if is_float16(config):
        if config.fp16.loss_scale:
            return StaticLossScale(config.fp16.loss_scale)
        return DynamicLossScale(
            initial_scale_power=config.fp16.initial_scale_power,
            window=config.fp16.loss_scale_window,
            hysteresis=config.fp16.hysteresis,
            consecutive_hysteresis=config.fp16.consecutive_hysteresis,
            min_scale=config.fp16.min_loss_scale,
        )
    return StaticLossScale(1.0) if config.bf16.enabled and config.bf16.check_grad_overflow else None
