"""LAMB: Adam with a step of each tensor in proportion to its norm, for large batches.

Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv:1904.00962), with the limits of the trust
ratio and the place of the bias correction that DeepSpeed's FusedLamb has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import ConfigError

__all__ = ["Lamb"]


class Lamb(Optimizer):
    """LAMB over whole tensors: under :class:`zero.ZeroOptimizer` each is updated by one rank.

    Args:
        params: Parameters or groups.
        lr: Learning rate, from 0.
        betas: Decay of the two moments, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Added to the update, times the parameter.
        bias_correction: Whether the step has Adam's bias correction.
        min_coeff: The least trust ratio, the norm of a tensor over that of its update.
        max_coeff: The largest.

    Raises:
        ConfigError: A value is out of range.
    """

    zero_updates = "tensors"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas) and 0 <= min_coeff <= max_coeff):
            raise ConfigError(
                "Lamb needs lr and eps from 0, betas in [0, 1) and min_coeff at most max_coeff: "
                f"{lr=}, {eps=}, {betas=}, {min_coeff=}, {max_coeff=}"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"bias_correction": bias_correction, "min_coeff": min_coeff, "max_coeff": max_coeff}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad.to(param.dtype), group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        state["step"] += 1
        first, second = state["exp_avg"].lerp_(grad, 1 - beta1), state["exp_avg_sq"]
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = first / second.sqrt().add_(group["eps"])
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        step_size = group["lr"]
        if group["bias_correction"]:
            step_size = step_size * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        own, moved = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        ratio = (own / moved).clamp_(group["min_coeff"], group["max_coeff"])  # on the device: the host does not wait
        ratio = torch.where((own > 0) & (moved > 0), ratio, torch.ones_like(ratio))
        param.sub_(update.mul_(ratio * step_size))
