"""The Lion optimizer on any device; torch.optim does not have it. :class:`zero.CPULion` is for host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from zero._optim.cpu_optimizer_base import check_betas, check_ranges


class Lion(Optimizer):
    """Lion of "Symbolic Discovery of Optimization Algorithms" (2023): the sign of an interpolated momentum.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay rates of the interpolation and of the momentum.
        weight_decay: Decoupled weight decay.
        maximize: Maximize the objective.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        check_betas(betas)
        check_ranges(lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step(params, group)
        return loss

    def _step(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        moments = [self.state[param]["exp_avg"] for param in params]
        grads = [param.grad for param in params if param.grad is not None]
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        updates = torch._foreach_mul(moments, beta1)
        torch._foreach_add_(updates, grads, alpha=1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-lr)
        torch._foreach_mul_(moments, beta2)
        torch._foreach_add_(moments, grads, alpha=1 - beta2)
