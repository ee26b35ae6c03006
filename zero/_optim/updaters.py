"""Who runs an update: the step of a torch optimizer on all tensors, or one of zero's own in one pass over each tensor.

              torch's                                                        zero's
    prepare   multiplies the gradient; the tensor goes into the next step()  nothing
    finish    copies the new value to the parameter                          the whole update

An optimizer's class names its updater by the attribute ``zero_updater_class``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero._optim.several import optimizers_of


class Updater:
    """How ``optimizer`` updates tensors in memory: by its own ``step()``."""

    is_fused = False
    """Whether :meth:`finish` does it all."""
    moments: tuple[str, ...] = ()
    """The states that it is known to keep for each element."""
    moment_dtype: torch.dtype | None = None
    """Their dtype, if it is chosen."""
    stands_for = ""
    """The optimizer that the user gave, if this one replaces it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def share(self) -> None:
        """Give the optimizer that this one replaces the same groups and states: schedulers built on it write to them.

        Call it whenever they were replaced, as by a load.
        """

    def check_placement(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        """Raise ConfigError unless masters on ``device`` of parameters in ``dtypes`` can be updated."""

    def prepare(self, master: Tensor, grad: Tensor | None, factor: float) -> list[Tensor]:
        """Set the gradient that ``step()`` reads; returns the tensors that must be in its next call."""
        if grad is not None:
            master.grad = widened(grad, master, factor)
        return [master]

    def finish(
        self,
        master: Tensor,
        grad: Tensor | None,  # noqa: ARG002  (the fused one's)
        group: dict[str, Any],  # noqa: ARG002
        *,
        factor: float,  # noqa: ARG002
        out: Tensor | None,
        place: tuple[int, int] | None = None,  # noqa: ARG002
    ) -> None:
        """After ``step()``: write the new value to ``out``, in its dtype, if there is one.

        ``place``: see :meth:`zero._optim.cpu_optimizer_base.CPUOptimizer.step_tensor_`.
        """
        if out is not None:
            out.copy_(master)


def widened(grad: Tensor, master: Tensor, factor: float) -> Tensor:
    """``grad`` times ``factor`` in the dtype of ``master``; ``grad`` itself if that changes nothing."""
    wide = grad.to(master.dtype)
    return wide if factor == 1 else wide * factor


def updater_of(optimizer: Optimizer) -> Updater:
    """Return the updater of ``optimizer``."""
    kind: type[Updater] = getattr(type(optimizer), "zero_updater_class", Updater)
    return kind(optimizer)


def updaters_of_groups(optimizer: Optimizer) -> list[Updater]:
    """Return the updater of each parameter group of ``optimizer``."""
    return [updater for one in optimizers_of(optimizer) for updater in [updater_of(one)] * len(one.param_groups)]
