"""CPU optimizers: Adam, AdamW, Adagrad and Lion for parameters in host memory, by native kernels at memory bandwidth.

Each is a torch optimizer on its own. ZeRO steps its shards with ``CPUOptimizer.step_tensor_``, which reads 16-bit
gradients as they are and writes the 16-bit parameter in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zcomm import ConfigError
from zero._optim.cpu_optimizer_base import CPUOptimizer, Factors, Rule, check_betas, check_ranges


class CPUAdam(CPUOptimizer):
    """AdamW; Adam, where weight decay is added to the gradient, with ``adamw_mode=False``.

    Equal to ``torch.optim.AdamW`` within 1e-6 of the parameters' norm after 1,000 float32 steps: bias corrections are
    computed in float64 and enter as a step size and a factor of the square root.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Correct the bias of the moments in the first steps.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled, or with ``adamw_mode=False`` L2.
        amsgrad: Divide by the root of the largest second moment so far.
        adamw_mode: Decouple weight decay (AdamW).
        fp32_optimizer_states: False: moments are bfloat16, which saves 8 bytes of traffic and 4 of memory for each
            parameter. The maximum of amsgrad stays float32.
        maximize: Maximize the objective.

    Raises:
        ConfigError: A number is out of range, or a parameter is unsupported; see :class:`CPUOptimizer`.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        maximize: bool = False,
    ) -> None:
        check_betas(betas)
        check_ranges(eps=eps)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "bias_correction": bias_correction, "adamw_mode": adamw_mode,
        }  # fmt: skip
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states, maximize=maximize)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Add options that groups saved by torch's Adam or AdamW do not have."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("bias_correction", True)
            group.setdefault("maximize", False)
            group.setdefault("adamw_mode", group.get("decoupled_weight_decay", self.defaults["adamw_mode"]))

    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:
        lr, decay = float(group["lr"]), group["weight_decay"]
        beta1, beta2 = group["betas"]
        corrects = group["bias_correction"]
        factors = Factors(
            rate=lr / (1 - beta1**step) if corrects else lr,
            weight_decay=decay,
            keep=1 - lr * decay,
            mix1=1 - beta1,
            beta2=beta2,
            mix2=1 - beta2,
            eps=group["eps"],
            inverse_root=1 / math.sqrt(1 - beta2**step) if corrects else 1.0,
        )
        return (Rule.ADAMW if group["adamw_mode"] else Rule.ADAM), factors


class CPUAdagrad(CPUOptimizer):
    """Adagrad, as ``torch.optim.Adagrad``, also with sparse gradients, which are made dense for the step.

    Raises:
        ConfigError: A number is out of range, or a parameter is unsupported; see :class:`CPUOptimizer`.
    """

    moments = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        fp32_optimizer_states: bool = True,
        maximize: bool = False,
    ) -> None:
        check_ranges(eps=eps, lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value)
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }  # fmt: skip
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states, maximize=maximize)

    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:
        rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return Rule.ADAGRAD, Factors(rate=rate, weight_decay=group["weight_decay"], eps=group["eps"])

    def dense_of(self, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Zeros in place of rows that a sparse gradient lacks: they change nothing."""
        if grad.layout != torch.sparse_coo:
            return grad
        if group["weight_decay"] or not group["eps"]:  # these change all rows: by decay, or 0 / 0
            raise ConfigError(
                f"{type(self).__name__} takes sparse gradients with weight_decay=0 and eps above 0: "
                f"weight_decay={group['weight_decay']}, eps={group['eps']}"
            )
        return grad.to_dense()

    def _start(self, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
        super()._start(state, param, group)
        start = torch.full_like(param, group["initial_accumulator_value"], dtype=torch.float32)
        state["sum"] = start.to(self.moment_dtype)


class CPULion(CPUOptimizer):
    """Lion of "Symbolic Discovery of Optimization Algorithms" (2023): the sign of an interpolated momentum.

    Raises:
        ConfigError: A number is out of range, or a parameter is unsupported; see :class:`CPUOptimizer`.
    """

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        maximize: bool = False,
    ) -> None:
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states, maximize=maximize)

    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:  # noqa: ARG002
        lr = float(group["lr"])
        beta1, beta2 = group["betas"]
        keep = 1 - lr * group["weight_decay"]
        return Rule.LION, Factors(rate=lr, keep=keep, beta1=beta1, mix1=1 - beta1, beta2=beta2, mix2=1 - beta2)
