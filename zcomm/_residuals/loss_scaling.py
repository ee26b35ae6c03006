"""By what a script multiplies its loss, and so its gradients: what residuals, kept over steps, must be rescaled by.

A collective cannot see the scale: gradients twice as large are no sign of one. So the scaler is given, or it is found:
the one ``torch.amp.GradScaler`` of this process that has scaled a loss. Who multiplies a loss by hand gives an object
with ``get_scale()``.

Called before every exchange with a residual, in the order of exchanges, which is the same on every rank.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from zcomm.errors import ConfigError


class Scaler(Protocol):
    """A ``torch.amp.GradScaler``, or anything with its ``get_scale()``."""

    def get_scale(self) -> float:
        """By what the loss of the next backward is multiplied."""


ScalerWish = Scaler | Literal["auto"] | None


def kind_of(scaler: object) -> str:
    """What ranks must agree on: the scales themselves are theirs to keep alike."""
    return scaler if isinstance(scaler, str) else type(scaler).__name__


class LossScaling:
    """The scale of the gradients of one model.

    Args:
        scaler: The scaler; "auto": the GradScaler that is in use, if one is; None: losses are not scaled.
        forget: Called if a scaler is found after exchanges have been made without one: what they have left is in units
            that nobody knows.

    Raises:
        ConfigError: ``scaler`` has no ``get_scale()``.
    """

    def __init__(self, scaler: ScalerWish, forget: Callable[[], None]) -> None:
        if scaler not in ("auto", None) and not callable(getattr(scaler, "get_scale", None)):
            raise ConfigError(
                f"scaler must be 'auto', None, or a torch.amp.GradScaler (or have its get_scale()): got {scaler!r}"
            )
        self._is_found = isinstance(scaler, str)
        self._scaler: Callable[[], Scaler | None] = (lambda: None) if isinstance(scaler, str) else (lambda: scaler)
        self._forget, self._num_exchanges = forget, 0

    def now(self) -> float | Tensor:
        """The scale of the next exchange; on a GPU a tensor of one element, which no host waits for.

        Raises:
            ConfigError: There are several GradScalers that have scaled a loss, and none was given.

        Cost: a walk over all Python objects at the first exchange, and while there is no scaler at the second, fourth,
        eighth and so on, for those that are made later.
        """
        scaler = self._scaler()
        if self._is_found and scaler is None:
            scaler = self._look()
        if scaler is None:
            return 1.0
        if isinstance(scaler, torch.amp.GradScaler) and isinstance(scaler._scale, Tensor):
            return float(scaler._scale) if scaler._scale.device.type == "cpu" else scaler._scale
        return float(scaler.get_scale())

    @property
    def falls_at_overflow(self) -> bool:
        """Whether a smaller scale says that the last step was skipped: as a GradScaler's, unless set by hand."""
        return isinstance(self._scaler(), torch.amp.GradScaler)

    def _look(self) -> Scaler | None:
        self._num_exchanges += 1
        if self._num_exchanges & (self._num_exchanges - 1):
            return None
        found = [one for one in gc.get_objects() if issubclass(type(one), torch.amp.GradScaler) and _is_used(one)]
        if len(found) > 1:
            raise ConfigError(
                f"{len(found)} GradScalers are in use, and a residual must be rescaled when its gradients' scale "
                "changes: pass scaler= to install_ddp() or install_fsdp2(), of each model its own"
            )
        if not found:
            return None
        self._scaler = weakref.ref(found[0])
        if self._num_exchanges > 1:
            self._forget()
        return cast("Scaler", found[0])


def _is_used(scaler: Any) -> bool:
    """Whether it has scaled a loss: its scale is a tensor from then on."""
    return bool(scaler.is_enabled()) and scaler._scale is not None
