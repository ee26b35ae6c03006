"""The loss scale of a training script: residuals are kept over steps, and must be rescaled when it changes.

A collective cannot detect the scale: gradients twice as large do not prove one. So the script passes its scaler, or
the one ``torch.amp.GradScaler`` of the process that has scaled a loss is found. A script that scales its loss by hand
passes an object with ``get_scale()``.

Called before every exchange with a residual, in the order of exchanges, which is the same on every rank.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Literal, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zcomm._residuals.residual import Residual
from zcomm.errors import ConfigError


class Scaler(Protocol):
    """A ``torch.amp.GradScaler``, or anything with its ``get_scale()``."""

    def get_scale(self) -> float:
        """The factor of the loss in the next backward."""


ScalerSetting = Scaler | Literal["auto"] | None


def scaler_kind(scaler: object) -> str:
    """The scaler's kind, which ranks compare. The scales themselves are not: the script keeps them equal."""
    return scaler if isinstance(scaler, str) else type(scaler).__name__


class UserLossScale:
    """The loss scale of one model's gradients.

    Args:
        scaler: The scaler; "auto": the GradScaler in use, if there is one; None: losses are not scaled.
        reset_residuals: Called if a scaler is found after exchanges without one, whose residuals have unknown units.

    Raises:
        ConfigError: ``scaler`` has no ``get_scale()``.
    """

    def __init__(self, scaler: ScalerSetting, reset_residuals: Callable[[], None]) -> None:
        if scaler not in ("auto", None) and not callable(getattr(scaler, "get_scale", None)):
            raise ConfigError(
                f"scaler must be 'auto', None, or a torch.amp.GradScaler (or have its get_scale()): got {scaler!r}"
            )
        self._is_found = isinstance(scaler, str)
        self._scaler: Callable[[], Scaler | None] = (lambda: None) if isinstance(scaler, str) else (lambda: scaler)
        self._reset_residuals, self._num_rounds = reset_residuals, 0
        self._exchanged: set[Hashable] = set()
        """What has been exchanged in this round."""
        self._windows: WeakKeyDictionary[Residual, object] = WeakKeyDictionary()
        """What :func:`_window_of` was at the last exchange of each residual."""

    def current_scale(self, of: Hashable) -> float | Tensor:
        """The scale of the next exchange; on a GPU a tensor of one element, so that the host does not wait.

        Args:
            of: What is exchanged, the same in every step: a bucket. Until it comes again all exchanges are one round.

        Raises:
            ConfigError: Several GradScalers have scaled a loss, and none was passed.

        Cost: a walk over all Python objects in the first round; while no scaler is found also in the second, fourth,
        eighth and so on, since a scaler may be created later. On a server it took 50 ms for 340,000 objects.
        """
        scaler = self._scaler()
        if self._is_found and scaler is None:
            scaler = self._find_scaler(of)
        return _scale_of(scaler)

    def begin_exchange(self, residual: Residual, of: Hashable) -> None:
        """Prepare ``residual`` for its next exchange, that of ``of``; see :meth:`current_scale`.

        Exchanges of one window of a GradScaler, from ``update()`` to ``update()``, are committed together, because they
        are skipped together: each adds what the one before has lost, and the next window starts without all of them.
        A script that never calls ``update()`` has one window without end.
        """
        scale, window = self.current_scale(of), _window_of(self._scaler())
        if window is None or window is not self._windows.get(residual):
            self.commit(residual)
        self._windows[residual] = window
        residual.set_loss_scale(scale)

    def commit(self, residual: Residual) -> None:
        """Commit what the last exchanges of ``residual`` have lost, unless the GradScaler has skipped their step.

        What was sent in a skipped step is not applied, so its loss must not be added. To be called after the scaler's
        ``update()``: only a scale that has fallen tells of a skipped step.
        """
        if not residual.is_committed:
            scaler = self._scaler()
            is_skipped = isinstance(scaler, torch.amp.GradScaler) and residual.exceeds(_scale_of(scaler))
            residual.commit(unless=is_skipped)

    def _find_scaler(self, of: Hashable) -> Scaler | None:
        if self._exchanged and of not in self._exchanged:
            self._exchanged.add(of)
            return None
        self._exchanged = {of}
        self._num_rounds += 1
        if self._num_rounds & (self._num_rounds - 1):
            return None
        kinds: list[Any] = [torch.amp.GradScaler]
        for kind in kinds:  # it grows
            kinds += kind.__subclasses__()
        # An object refers to its class, and this walk is in C: one over gc.get_objects() takes three times as long.
        found: list[Any] = [one for one in gc.get_referrers(*kinds) if issubclass(type(one), torch.amp.GradScaler)]
        # In use is one that has scaled a loss: its scale is a tensor from then on.
        found = [one for one in found if one.is_enabled() and one._scale is not None]
        if len(found) > 1:
            raise ConfigError(
                f"{len(found)} GradScalers are in use, and a residual must be rescaled with the scale of its own "
                "gradients: pass scaler= to install_ddp() or install_fsdp2(), for each model its own"
            )
        if not found:
            return None
        self._scaler = weakref.ref(found[0])  # weak: this must not keep the script's scaler alive
        if self._num_rounds > 1:
            self._reset_residuals()
        return cast("Scaler", found[0])


def _window_of(scaler: Scaler | None) -> object:
    """An object that ``update()`` of a GradScaler replaces by another one; None if there is no such scaler."""
    is_scaling = isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
    return getattr(scaler, "_per_optimizer_states", None) if is_scaling else None


def _scale_of(scaler: Scaler | None) -> float | Tensor:
    """The scale of ``scaler``; on a GPU a tensor of one element. 1 without a scaler."""
    if scaler is None:
        return 1.0
    if isinstance(scaler, torch.amp.GradScaler) and isinstance(scaler._scale, Tensor):
        return float(scaler._scale) if scaler._scale.device.type == "cpu" else scaler._scale
    return float(scaler.get_scale())
