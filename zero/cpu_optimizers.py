"""Optimizers for parameters in host memory: Adam, AdamW, Adagrad, Lion and SGD by native kernels, at memory speed.

Each is a torch optimizer on its own; ZeRO steps its shards with :meth:`CPUOptimizer.step_tensor_`, which reads 16-bit
gradients as they are and writes the 16-bit parameter in the same pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import ConfigError
from zcomm.philox import Draw
from zero.flat_step import DTYPE_NUMBERS, Arrays, Factors, Rule, step_
from zero.tiers.at_rest import is_at_rest

__all__ = ["CPUSGD", "CPUAdagrad", "CPUAdam", "CPULion", "CPUOptimizer"]


class CPUOptimizer(Optimizer, ABC):
    """A torch optimizer over contiguous CPU parameters in float32, bfloat16 or float16.

    It may be built over parameters on a GPU, for :class:`zero.ZeroOptimizer`, which steps masters in host memory.

    16-bit parameters have a float32 master in their state (``"master"``), which is what is trained; the parameter is
    its rounding. Moments are float32, or with ``fp32_optimizer_states=False`` bfloat16, rounded stochastically: by
    numbers that depend on the parameter's position in ``param_groups``, the step and the element, so that a restarted
    run has the same bits.

    Cost: one pass over parameter, gradient and state; AdamW moves 28 bytes a float32 parameter.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    """State names of the rule's moments, in its order."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, fp32_optimizer_states: bool, maximize: bool
    ) -> None:
        _check_range("lr", defaults["lr"], 0.0, math.inf)
        _check_range("weight_decay", defaults["weight_decay"], 0.0, math.inf)
        self.moment_dtype = torch.float32 if fp32_optimizer_states else torch.bfloat16
        super().__init__(params, {**defaults, "maximize": maximize})

    @abstractmethod
    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:
        """The rule and the numbers of step ``step`` (from 1) of a parameter group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ConfigError: A parameter that is not dense, contiguous, in float32, bfloat16 or float16.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            is_flat = param.layout == torch.strided and (param.is_contiguous() or is_at_rest(param))
            if param.is_meta or not is_flat:
                self._refuse(f"a contiguous tensor with values: device={param.device}, shape={tuple(param.shape)}")
            if param.dtype not in DTYPE_NUMBERS:
                self._refuse(f"float32, bfloat16 or float16: dtype={param.dtype}")

    def _refuse(self, problem: str) -> None:
        raise ConfigError(f"a parameter of {type(self).__name__} must be {problem}; use torch.optim for others")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient, in float32, bfloat16 or float16.

        Raises:
            ConfigError: A sparse gradient, or a parameter that is not on the CPU; nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [(p, p.grad, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for param, grad, _ in grads:
            if param.device.type != "cpu":
                self._refuse(f"on the CPU: device={param.device}")
            if grad.layout != torch.strided or grad.dtype not in DTYPE_NUMBERS:
                raise ConfigError(
                    f"{type(self).__name__} takes dense gradients in float32, bfloat16 or float16: "
                    f"layout={grad.layout}, dtype={grad.dtype}, shape={tuple(param.shape)}"
                )
        for param, grad, group in grads:
            self.step_tensor_(param, grad, group)
        return loss

    @torch.no_grad()
    def step_tensor_(
        self,
        param: Tensor,
        grad: Tensor,
        group: dict[str, Any],
        *,
        grad_factor: float = 1.0,
        out: Tensor | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Move one parameter of ``group`` by its next step.

        Args:
            param: The parameter, a key of ``state``.
            grad: Of the same shape, in float32, bfloat16 or float16.
            group: Its entry of ``param_groups``.
            grad_factor: Multiplies the gradient in the same pass: inverse loss scale times clipping coefficient.
            out: Written with the new parameter, in its own type, in the same pass.
            place: The parameter is a part of another, number such and such in ``param_groups``, from this element on.
                Only the rounding of bfloat16 moments depends on it. Default: its own number, and 0.
        """
        state = self.state[param]
        if not state:
            self._start(state, param, group)
        master = state.get("master", param)
        step = int(state["step"]) + 1
        rule, factors = self.rule_of(group, step)
        factors = replace(factors, grad_factor=-grad_factor if group["maximize"] else grad_factor)
        moments = [state.get(name) for name in self.moments] + [None, None]
        if master is not param and out is None:
            out = param
        arrays = Arrays(master, grad.contiguous(), moments[0], moments[1], state.get("max_exp_avg_sq"), out)
        draw = None
        if self.moment_dtype != torch.float32:
            number, first = (self._position(param), 0) if place is None else place
            draw = Draw(0, tensor=2 * number, step=step, first=first)
        step_(rule, factors, arrays, draw)
        if master is not param and out is not param:
            param.copy_(master)
        state["step"] += 1

    def _start(self, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
        """All of it, or nothing where memory does not suffice."""
        started = {"step": torch.tensor(0.0)}
        for name in self.moment_names(group):
            started[name] = torch.zeros_like(param, dtype=self.moment_dtype)
        if group.get("amsgrad"):
            started["max_exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        if param.dtype != torch.float32:
            started["master"] = param.detach().float()
        state.update(started)

    def moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG002  (SGD's depend on it)
        """The moments that parameters of ``group`` have."""
        return self.moments

    def _position(self, param: Tensor) -> int:
        order = (p for group in self.param_groups for p in group["params"])
        return next(i for i, p in enumerate(order) if p is param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep their own types: torch would round the masters of 16-bit parameters."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        order = (p for group in self.param_groups for p in group["params"])
        for index, param in enumerate(order):
            for name, value in saved.get(index, {}).items():
                if isinstance(value, Tensor) and value.shape == param.shape:
                    dtype = self.moment_dtype if name in self.moments else torch.float32
                    self.state[param][name] = value.detach().to("cpu", dtype, copy=True).contiguous()


class CPUAdam(CPUOptimizer):
    """AdamW; Adam, where weight decay is added to the gradient, with ``adamw_mode=False``.

    Equal to ``torch.optim.AdamW`` within 1e-6 of the parameters' norm after 1,000 float32 steps: bias corrections are
    computed in float64 and enter as a step size and a factor of the square root.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: False: without Adam's correction of its first steps.
        betas: Decay rates of the moments.
        eps: Added to the root.
        weight_decay: Decoupled, or with ``adamw_mode=False`` L2.
        amsgrad: Divide by the root of the largest second moment so far.
        adamw_mode: See above.
        fp32_optimizer_states: False: moments in bfloat16, 8 bytes a parameter less to move and 4 less to keep.
        maximize: Step up.

    Raises:
        ConfigError: A number out of its range, or a parameter that is not as :class:`CPUOptimizer` needs it.
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
        _check_betas(betas)
        _check_range("eps", eps, 0.0, math.inf)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "bias_correction": bias_correction, "adamw_mode": adamw_mode,
        }  # fmt: skip
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states, maximize=maximize)

    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:
        """See :class:`CPUOptimizer`."""
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
    """Adagrad, as ``torch.optim.Adagrad``.

    Raises:
        ConfigError: A number out of its range, or a parameter that is not as :class:`CPUOptimizer` needs it.
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
        _check_range("eps", eps, 0.0, math.inf)
        _check_range("lr_decay", lr_decay, 0.0, math.inf)
        _check_range("initial_accumulator_value", initial_accumulator_value, 0.0, math.inf)
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }  # fmt: skip
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states, maximize=maximize)

    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:
        """See :class:`CPUOptimizer`."""
        rate = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
        return Rule.ADAGRAD, Factors(rate=rate, weight_decay=group["weight_decay"], eps=group["eps"])

    def _start(self, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
        super()._start(state, param, group)
        state["sum"].fill_(group["initial_accumulator_value"])


class CPULion(CPUOptimizer):
    """Lion of "Symbolic Discovery of Optimization Algorithms" (2023): the sign of an interpolated momentum.

    Raises:
        ConfigError: A number out of its range, or a parameter that is not as :class:`CPUOptimizer` needs it.
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
        _check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states, maximize=maximize)

    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:  # noqa: ARG002
        """See :class:`CPUOptimizer`."""
        lr = float(group["lr"])
        beta1, beta2 = group["betas"]
        keep = 1 - lr * group["weight_decay"]
        return Rule.LION, Factors(rate=lr, keep=keep, beta1=beta1, mix1=1 - beta1, beta2=beta2, mix2=1 - beta2)


class CPUSGD(CPUOptimizer):
    """SGD with momentum, as ``torch.optim.SGD``.

    Raises:
        ConfigError: A number out of its range, or a parameter that is not as :class:`CPUOptimizer` needs it.
    """

    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        fp32_optimizer_states: bool = True,
        maximize: bool = False,
    ) -> None:
        _check_range("momentum", momentum, 0.0, math.inf)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(
                f"nesterov needs a momentum above 0 and no dampening: momentum={momentum}, dampening={dampening}"
            )
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
        }  # fmt: skip
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states, maximize=maximize)

    def moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See :class:`CPUOptimizer`."""
        return self.moments if group["momentum"] else ()

    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:
        """See :class:`CPUOptimizer`; the first gradient enters the momentum whole."""
        mix = 1.0 if step == 1 else 1 - group["dampening"]
        factors = Factors(
            rate=float(group["lr"]),
            weight_decay=group["weight_decay"],
            beta1=group["momentum"],
            mix1=mix,
            nesterov=group["nesterov"],
        )
        return Rule.SGD, factors


def _check_range(name: str, value: Any, least: float, most: float) -> None:
    if not least <= float(value) < most:
        raise ConfigError(f"{name} must be in [{least}, {most}): {name}={value}")


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2:
        raise ConfigError(f"betas must be two numbers: betas={betas}")
    for beta in betas:
        _check_range("betas", beta, 0.0, 1.0)
