"""What the optimizers of :mod:`zero.cpu_optimizers` have in common: states, their formats, and a step of a tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import ConfigError, StateError
from zcomm.philox import Draw
from zero.flat_step import DTYPE_NUMBERS, Arrays, Factors, Rule, step_
from zero.moments import Blocks, Elements, MomentFormat, MomentLayout
from zero.released import is_released
from zero.tiers.at_rest import is_at_rest

__all__ = ["CPUOptimizer", "check_betas", "check_range", "layout_of", "set_moment_format"]


class CPUOptimizer(Optimizer, ABC):
    """A torch optimizer over contiguous CPU parameters in float32, bfloat16 or float16.

    It may be built over parameters on a GPU, for :class:`zero.ZeroOptimizer`, which steps masters in host memory.

    16-bit parameters have a float32 master in their state (``"master"``), which is what is trained; the parameter is
    its rounding. Moments are float32, bfloat16 or int8, the narrow ones rounded stochastically: by numbers that depend
    on the parameter's position in ``param_groups``, the step and the element, so that a restarted run has the same
    bits. int8 moments are in the state as records of blocks of 256 elements, flat, in uint8.

    Cost: one pass over parameter, gradient and state; AdamW moves 28 bytes a float32 parameter.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    """State names of the rule's moments, in its order."""
    squares: ClassVar[tuple[str, ...]] = ()
    """Those of them that are means or sums of squares."""
    stands_for: str = ""
    """The optimizer that was given in its place."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, moments: MomentFormat, maximize: bool
    ) -> None:
        check_range("lr", defaults["lr"], 0.0, math.inf)
        check_range("weight_decay", defaults["weight_decay"], 0.0, math.inf)
        self.moment_format = moments
        super().__init__(params, {**defaults, "maximize": maximize})

    def set_moment_format(self, name: str) -> None:
        """Let moments rest in ``"float32"``, ``"bfloat16"`` or ``"int8"``; before the first step.

        Raises:
            ConfigError: There is no such format.
            StateError: There are moments already.
        """
        chosen = MomentFormat.of(name)
        if self.state and chosen is not self.moment_format:
            raise StateError(
                f"moments are in {self.moment_format.value} already: choose {name!r} before the first step"
            )
        self.moment_format = chosen

    def layout_of(self, moment: str) -> MomentLayout:
        """How a moment rests."""
        return self.moment_format.layout(is_square=moment in self.squares)

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
            is_flat = param.layout == torch.strided and (
                is_released(param) or param.is_contiguous() or is_at_rest(param)
            )
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
                Only the rounding of narrow moments depends on it; of int8 ones a multiple of 256. Default: its own
                number, and 0.
        """
        state = self.state[param]
        if not state:
            self._start(state, param, group)
        master = state.get("master", param)
        step = int(state["step"]) + 1
        rule, factors = self.rule_of(group, step)
        factors = replace(factors, grad_factor=-grad_factor if group["maximize"] else grad_factor)
        moments = [state.get(name) for name in self.moments] + [None]
        if master is not param and out is None:
            out = param
        arrays = Arrays(master, grad.contiguous(), moments[0], moments[1], state.get("max_exp_avg_sq"), out)
        draw = None
        if self.moment_format is not MomentFormat.FLOAT32:
            number, first = (self._position(param), 0) if place is None else place
            draw = Draw(0, tensor=2 * number, step=step, first=first)
        step_(rule, factors, arrays, draw)
        if master is not param and out is not param:
            param.copy_(master)
        state["step"] += 1

    def _start(self, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
        """All of it, or nothing where memory does not suffice."""
        started = {"step": torch.tensor(0.0), **self._new_moments(param)}
        if group.get("amsgrad"):
            started["max_exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        if param.dtype != torch.float32:
            started["master"] = param.detach().float()
        state.update(started)

    def _new_moments(self, param: Tensor) -> dict[str, Tensor]:
        found = {}
        for name in self.moments:
            layout = self.layout_of(name)
            shape = layout.numel(param.numel()) if isinstance(layout, Blocks) else param.shape
            found[name] = torch.zeros(shape, dtype=layout.dtype, device=param.device)
        return found

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
                if isinstance(value, Tensor) and name in self.moments:
                    self.state[param][name] = self._taken_over(name, value.detach().cpu(), param)
                elif isinstance(value, Tensor) and value.shape == param.shape:
                    self.state[param][name] = value.detach().to("cpu", torch.float32, copy=True).contiguous()

    def _taken_over(self, name: str, saved: Tensor, param: Tensor) -> Tensor:
        """A moment that was saved in any format, in this one."""
        layout, was_encoded = self.layout_of(name), saved.dtype == torch.uint8
        if was_encoded and not isinstance(layout, Blocks):
            saved = Blocks(name in self.squares).decode(saved, 0, param.numel()).view(param.shape)
        if isinstance(layout, Blocks) and not was_encoded:
            return layout.encode(saved.flatten())
        return saved.to(layout.dtype, copy=True).contiguous()


def layout_of(inner: Optimizer, state: str, value: Tensor) -> MomentLayout:
    """How ``inner`` keeps a state with values for each element of a parameter, of which ``value`` is one."""
    return (
        inner.layout_of(state) if isinstance(inner, CPUOptimizer) and state in inner.moments else Elements(value.dtype)
    )


def set_moment_format(inner: Optimizer, name: str | None) -> None:
    """As the configuration says; None: it says nothing."""
    if isinstance(inner, CPUOptimizer) and name is not None:
        inner.set_moment_format(name)


def check_range(name: str, value: Any, least: float, most: float) -> None:
    """Refuse ``value`` unless it is in ``[least, most)``."""
    if not least <= float(value) < most:
        raise ConfigError(f"{name} must be in [{least}, {most}): {name}={value}")


def check_betas(betas: tuple[float, float]) -> None:
    """Refuse what is no pair of decay rates."""
    if len(betas) != 2:
        raise ConfigError(f"betas must be two numbers: betas={betas}")
    for beta in betas:
        check_range("betas", beta, 0.0, 1.0)
