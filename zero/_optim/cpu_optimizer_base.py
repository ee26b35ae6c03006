"""The base class of the CPU optimizers: states and their dtypes, and the native step of one tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import ConfigError, StateError
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels
from zero._optim.updaters import Updater
from zero._sharding.released import is_released
from zero._storage.poison import is_placeholder

DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Rule(IntEnum):
    """The update rule of a step."""

    ADAM = 0
    ADAMW = 1
    ADAGRAD = 2
    LION = 3
    TRAFFIC = 4
    """Adam's memory traffic with almost no arithmetic: an upper bound for benchmarks."""


@dataclass(frozen=True)
class Factors:
    """The numbers of one step, rounded to float32 when used; the C++ header says which rule uses which."""

    rate: float
    grad_factor: float = 1.0
    """Multiplies the gradient first: the inverse loss scale, the clipping coefficient, -1 to maximize."""
    weight_decay: float = 0.0
    """Added to the gradient, times the parameter."""
    keep: float = 1.0
    """Multiplies the parameter first: 1 - learning rate x weight decay."""
    beta1: float = 0.0
    mix1: float = 0.0
    beta2: float = 0.0
    mix2: float = 0.0
    eps: float = 0.0
    inverse_root: float = 1.0


@dataclass(frozen=True)
class Arrays:
    """What a step reads and writes: CPU tensors, contiguous, for equally many elements."""

    param: Tensor
    """float32; written."""
    grad: Tensor
    """float32, bfloat16 or float16."""
    moment1: Tensor | None = None
    """float32 or bfloat16; written."""
    moment2: Tensor | None = None
    """As ``moment1``; written."""
    largest: Tensor | None = None
    """float32, amsgrad's; written."""
    out: Tensor | None = None
    """float32, bfloat16 or float16: also gets the new parameter, rounded to nearest even."""


def step_(rule: Rule, factors: Factors, arrays: Arrays, draw: Draw | None = None) -> None:
    """Update ``arrays`` by one step, on as many threads as torch has, without the GIL.

    The same bits for every number of threads and instruction set. Moments in bfloat16 are rounded
    stochastically by ``draw``, and ``moment2`` under the next tensor number.

    Raises:
        BackendUnavailableError: The native kernels are not built.
    """
    f = factors
    numbers = (f.grad_factor, f.weight_decay, f.keep, f.rate, f.beta1, f.mix1, f.beta2, f.mix2, f.eps, f.inverse_root)
    moment_dtype = torch.float32 if arrays.moment1 is None else arrays.moment1.dtype
    out_dtype = torch.float32 if arrays.out is None else arrays.out.dtype
    kernels.native().optimizer_step(
        rule, numbers, arrays.param.numel(), arrays.param.data_ptr(),
        (arrays.grad.data_ptr(), DTYPE_NUMBERS[arrays.grad.dtype]), _address(arrays.moment1), _address(arrays.moment2),
        DTYPE_NUMBERS[moment_dtype], _address(arrays.largest), (_address(arrays.out), DTYPE_NUMBERS[out_dtype]),
        None if draw is None else (draw.seed, draw.tensor, draw.step, draw.hop, draw.rank, draw.first),
        torch.get_num_threads(),
    )  # fmt: skip
    # The kernel writes through raw pointers: without this autograd would accept stale saved tensors in backward.
    for written in (arrays.param, arrays.moment1, arrays.moment2, arrays.largest, arrays.out):
        if written is not None:
            torch.autograd.graph.increment_version(written)


def _address(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()


class FusedUpdater(Updater):
    """Updates each tensor in one pass, by ``CPUOptimizer.step_tensor_``."""

    is_fused = True
    optimizer: CPUOptimizer

    def __init__(self, optimizer: CPUOptimizer) -> None:
        super().__init__(optimizer)
        self.moments, self.moment_dtype = optimizer.moments, optimizer.moment_dtype
        self.stands_for = optimizer.stands_for

    def share(self) -> None:
        given = self.optimizer.given() if self.optimizer.given is not None else None
        if given is not None:
            given.param_groups, given.state = self.optimizer.param_groups, self.optimizer.state

    def check_placement(self, device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
        name = type(self.optimizer).__name__
        if device.type != "cpu":
            raise ConfigError(
                f"zero.{name} updates host memory only, and masters are on {device}: offload them all "
                '(offload_optimizer={"device": "cpu"}, ratio 1), or use an optimizer of torch.optim'
            )
        if torch.float64 in dtypes:
            raise ConfigError(
                f"zero.{name} updates in float32: parameters are float64; use an optimizer of torch.optim"
            )

    def prepare(self, master: Tensor, grad: Tensor | None, factor: float) -> list[Tensor]:  # noqa: ARG002
        return []

    def finish(
        self,
        master: Tensor,
        grad: Tensor | None,
        group: dict[str, Any],
        *,
        factor: float,
        out: Tensor | None,
        place: tuple[int, int] | None = None,
    ) -> None:
        if grad is None:
            super().finish(master, grad, group, factor=factor, out=out)
        else:
            self.optimizer.step_tensor_(master, grad, group, grad_factor=factor, out=out, place=place)


class CPUOptimizer(Optimizer, ABC):
    """A torch optimizer over contiguous CPU parameters in float32, bfloat16 or float16.

    It may be constructed over parameters on a GPU for :class:`zero.ZeroOptimizer`, which steps masters in host memory.

    A 16-bit parameter has a float32 master in its state (``"master"``), which is trained; the parameter is its
    rounding. Moments are float32 or bfloat16. bfloat16 moments are rounded stochastically, by random numbers that
    depend on the parameter's position in ``param_groups``, the step and the element: a restarted run has the same bits.

    Cost: one pass over parameter, gradient and state; AdamW moves 28 bytes a float32 parameter.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    """State names of the rule's moments, in its order."""
    zero_updater_class: ClassVar[type[Updater]] = FusedUpdater
    stands_for: str = ""
    """The optimizer that the user gave, if this one replaces it."""
    given: ref[Optimizer] | None = None
    """That optimizer, while the user has it."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], *, fp32_optimizer_states: bool, maximize: bool
    ) -> None:
        check_ranges(lr=defaults["lr"], weight_decay=defaults["weight_decay"])
        self.moment_dtype = torch.float32 if fp32_optimizer_states else torch.bfloat16
        super().__init__(params, {**defaults, "maximize": maximize})

    @abstractmethod
    def rule_of(self, group: dict[str, Any], step: int) -> tuple[Rule, Factors]:
        """The rule and the numbers of step ``step`` (from 1) of a parameter group."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ConfigError: A parameter is not dense and contiguous, or not float32, bfloat16 or float16.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            is_flat = param.layout == torch.strided and (
                is_released(param) or param.is_contiguous() or is_placeholder(param)
            )
            if param.is_meta or not is_flat:
                self._refuse(f"a contiguous tensor with values: device={param.device}, shape={tuple(param.shape)}")
            if param.dtype not in DTYPE_NUMBERS:
                self._refuse(f"float32, bfloat16 or float16: dtype={param.dtype}")

    def _refuse(self, problem: str) -> None:
        raise ConfigError(f"a parameter of {type(self).__name__} must be {problem}; use torch.optim for others")

    def dense_of(self, grad: Tensor, group: dict[str, Any]) -> Tensor:  # noqa: ARG002  (rules need it)
        """``grad``, or a dense one in place of a sparse one that gives the same step."""
        return grad

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, in float32, bfloat16 or float16.

        Raises:
            ConfigError: A sparse gradient that the rule does not take, or a parameter that is not on the CPU; nothing
                has been changed.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        grads = [
            (p, self.dense_of(p.grad, group), group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
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
        """Update one parameter of ``group`` by its next step.

        Args:
            param: The parameter, a key of ``state``.
            grad: Of the same shape, in float32, bfloat16 or float16.
            group: Its entry of ``param_groups``.
            grad_factor: Multiplies the gradient in the same pass: inverse loss scale times clipping coefficient.
            out: Also gets the new parameter, in its own dtype, in the same pass.
            place: ``(number, first)`` if the parameter is a part of parameter ``number`` in ``param_groups``, from
                element ``first`` on. Only the rounding of bfloat16 moments depends on it. Default: its own number, 0.
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
        if self.moment_dtype == torch.bfloat16:
            if place is None:
                order = (p for group in self.param_groups for p in group["params"])
                place = next(i for i, p in enumerate(order) if p is param), 0
            draw = Draw(0, tensor=2 * place[0], step=step, first=place[1])
        step_(rule, factors, arrays, draw)
        if master is not param and out is not param:
            param.copy_(master)
        state["step"] += 1

    def _start(self, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
        moments = {n: torch.zeros(param.shape, dtype=self.moment_dtype, device=param.device) for n in self.moments}
        # Allocated completely before ``state`` changes: if memory runs out, a retried step must not find half a state.
        started = {"step": torch.tensor(0.0), **moments}
        if group.get("amsgrad"):
            started["max_exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        if param.dtype != torch.float32:
            started["master"] = param.detach().float()
        state.update(started)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep their dtypes: torch would round the masters of 16-bit parameters."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        order = (p for group in self.param_groups for p in group["params"])
        for index, param in enumerate(order):
            for name, value in saved.get(index, {}).items():
                if isinstance(value, Tensor) and name in self.moments:
                    if value.numel() != param.numel():
                        raise StateError(
                            f"{name!r} of parameter {index} must have as many elements as the parameter: "
                            f"got {value.numel()}, expected {param.numel()} (int8 moments are no longer supported)"
                        )
                    self.state[param][name] = value.detach().to("cpu", self.moment_dtype, copy=True).contiguous()
                elif isinstance(value, Tensor) and value.shape == param.shape:
                    self.state[param][name] = value.detach().to("cpu", torch.float32, copy=True).contiguous()


def check_ranges(most: float = math.inf, **values: Any) -> None:
    """Raise ConfigError unless all ``values`` are in ``[0, most)``."""
    for name, value in values.items():
        if not 0.0 <= float(value) < most:
            raise ConfigError(f"{name} must be in [0.0, {most}): {name}={value}")


def check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2:
        raise ConfigError(f"betas must be two numbers: betas={betas}")
    for beta in betas:
        check_ranges(1.0, betas=beta)
