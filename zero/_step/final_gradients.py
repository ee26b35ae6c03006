"""From reduced gradients to what the inner optimizer updates with: handing over, the agreement on overflow, unscaling.

After every backward that reduces, each master has its part of the reduced gradient as ``.grad``, so that whoever looks
between backward and step finds it: ``torch.amp.GradScaler`` does. A shard sees only its own part of an overflow, so the
ranks agree, and every rank shows the outcome in the gradient of one more tensor of its first parameter group, the
overflow flag: NaN, or next to 0, so that it tells whether a GradScaler has unscaled. No step updates the flag.

What gradients are yet to be multiplied by: a number that the host knows, times one that may be known on a GPU alone.

Unscaling is the first, clipping the second: nobody waits for it, unless the gradients rest in host memory and are
updated there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zcomm import StateError, control
from zcomm._kernels.message_flags import look_at_all
from zero._optim.loss_scale import nonfinite_flag
from zero._optim.masters import MasterPiece
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime
from zero._sharding.released import ReducedGradient


@dataclass(frozen=True, slots=True)
class GradFactor:
    """A factor, in float64. Values are not changed: keep one to go back to it."""

    number: float = 1.0
    coefficient: Tensor | None = None
    """A float64 scalar, on any device; None: 1."""

    def times(self, number: float) -> GradFactor:
        """This one times a number."""
        return replace(self, number=self.number * number)

    def times_coefficient(self, coefficient: Tensor) -> GradFactor:
        """This one times a scalar on a device."""
        wide = coefficient.double()
        return replace(self, coefficient=wide if self.coefficient is None else self.coefficient * wide)

    @property
    def is_one(self) -> bool:
        """Whether it is known to change nothing."""
        return self.number == 1 and self.coefficient is None

    def item(self) -> float:
        """For the host, which waits for a coefficient that is on a GPU."""
        return self.number if self.coefficient is None else self.number * self.coefficient.item()

    def scaled(self, value: Tensor) -> Tensor:
        """A float64 scalar times it."""
        return value * self.number if self.coefficient is None else value * self.number * self.coefficient

    def multiply_(self, values: Tensor) -> None:
        """Overwrite ``values`` by their products, rounded once. Only between devices does the host wait."""
        if self.coefficient is None:
            values.mul_(self.number)
            return
        dtype = torch.promote_types(values.dtype, torch.float32)
        factor = (self.coefficient * self.number).to(dtype)
        if factor.device != values.device:
            factor = factor.to(values.device)
        if dtype == values.dtype:
            values.mul_(factor)
        else:
            torch.mul(values, factor.view(1), out=values)  # in float32: a scalar would be rounded to 16 bit before


NO_OVERFLOW = 2.0**-120
"""What the flag shows: too little to count in a norm."""


class FinalGradients:
    """The gradients of one optimizer between backward and step."""

    def __init__(self, runtime: Runtime, pieces: list[MasterPiece]) -> None:
        self.runtime, self._pieces = runtime, pieces
        self.factor = GradFactor()
        """What the gradients are yet to be multiplied by, to unscale and clip them."""
        self.flag = torch.zeros(1, device=runtime.buckets[0].device)
        """The overflow flag."""
        self._overflow: Tensor | None = None
        for piece in pieces:
            piece.master.grad_dtype = None  # gradients may rest in 16 bit
        reducer = runtime.reducer
        reducer.on_reduced, reducer.on_edit, reducer.check_settable = self._show, self._edited, self._check_settable

    def _show(self) -> None:
        """A backward has reduced."""
        self._overflow, self.runtime.reducer.drops = None, False
        self._hand_out()
        if self.runtime.reducer.ends_step:
            self._show_overflow(self._agreed_overflow())

    def _show_overflow(self, overflow: Tensor) -> None:
        self.flag.grad = torch.full_like(self.flag, NO_OVERFLOW).masked_fill_(overflow, float("nan"))

    def _edited(self, own: Tensor) -> None:
        """This rank's part of a reduced gradient was set to ``own``: what was finite need not be looked at again."""
        if self._overflow is None or bool(self._overflow):
            self._show()
            return
        self._overflow = control.any_(nonfinite_flag([own], self.flag.device), self.runtime.topology)
        self._show_overflow(self._overflow)

    def _check_settable(self, name: str) -> None:
        """Raise StateError if a GradScaler has unscaled the gradients, but not the one that a user gave ``name``."""
        shown = None if self.flag.grad is None else self.flag.grad.item()
        if shown is not None and shown != NO_OVERFLOW and not math.isnan(shown):
            raise StateError(
                f"param.grad of {name!r} was set by hand, and a GradScaler has unscaled the gradients before or after, "
                "which cannot be told: leave unscale_() to scaler.step(optimizer), set the gradient by "
                "zero.utils.safe_set_full_grad(param, value), or let the configuration scale the loss (fp16)"
            )

    def has_overflow(self) -> bool:
        """Whether the reduced gradient has a NaN or an infinity on any rank; the host waits for the device.

        Collective if not agreed on yet, or if a user has changed gradients since.
        """
        reducer = self.runtime.reducer
        if any(reducer.shown.edits()) or (reducer.drops and self._overflow is not None and bool(self._overflow)):
            self._overflow = None
        return bool(self._agreed_overflow())

    def _agreed_overflow(self) -> Tensor:
        """The same as a bool scalar on the device, which nobody waits for unless gradients are in files."""
        if self._overflow is None:
            reducer, files = self.runtime.reducer, self.runtime.gradient_files
            in_memory = (reducer.results(grads) for grads in reducer.all if not grads.is_in_file)
            mine = nonfinite_flag([r for r in in_memory if r is not None], self.flag.device)
            if files is not None:
                on_every_rank(files.raise_error, self.runtime.topology)
                mine |= files.is_nonfinite()
            self._overflow = control.any_(mine, self.runtime.topology)
        return self._overflow

    def apply(self) -> None:
        """Multiply every gradient of this rank by the factor."""
        if self.factor.is_one:
            return
        reducer, files = self.runtime.reducer, self.runtime.gradient_files
        for grads in reducer.all:
            reducer.change(grads, self.factor.multiply_)
        if files is not None:
            on_every_rank(files.raise_error, self.runtime.topology)
        self.factor = GradFactor()

    def hand_over(self, *, widens: bool) -> None:
        """Give the inner optimizer what it updates with, and no gradient for the flag.

        Args:
            widens: Gradients in the masters' dtype; False: as they rest.
        """
        self._check_all_used()
        self.flag.grad = None
        self._hand_out()
        if not widens:
            return
        widened: dict[int, Tensor] = {}
        for piece in self._pieces:
            grad = piece.master.grad
            if grad is not None and grad.dtype != piece.master.dtype:
                result = self.runtime.reducer.results(self.runtime.reducer.by_bucket[piece.bucket.index])
                assert result is not None, "a gradient without a result"
                wide = widened.setdefault(id(result), result.to(piece.master.dtype))
                piece.master.grad = wide[piece.start : piece.start + piece.master.numel()]

    def clear(self) -> None:
        """Forget them: the step is over, and its messages are looked at."""
        self._overflow, self.flag.grad = None, None
        for piece in self._pieces:
            piece.master.grad = None
        look_at_all()

    def forget(self) -> None:
        """The same, and what they are yet to be multiplied by."""
        self.clear()
        self.factor = GradFactor()

    def _hand_out(self) -> None:
        """Each master gets its part of the reduced gradient; parameters that no rank used get none.

        What is in a file only shows that there is one.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for piece in self._pieces:
                grads = self.runtime.reducer.by_bucket[piece.bucket.index]
                if not grads.used[piece.slot] or piece.param.grad is None:
                    piece.master.grad = None
                    continue
                if grads.is_in_file:
                    piece.master.grad = _in_file(piece)
                    continue
                result = self.runtime.reducer.results(grads)
                assert result is not None, "a used parameter without a gradient"
                piece.master.grad = result[piece.start : piece.start + piece.master.numel()]

    def _check_all_used(self) -> None:
        if self.runtime.settings.ignore_unused_parameters:
            return
        unused = [
            slot.name
            for grads in self.runtime.reducer.all
            for slot, used in zip(grads.bucket.layout.slots, grads.used, strict=True)
            if not used
        ]
        if unused:
            raise StateError(
                f"{len(unused)} parameters had no gradient on any rank in this step, first {unused[:3]}: freeze them "
                "with requires_grad_(False), or set ignore_unused_parameters=True"
            )


class BeforeScaler:
    """What ``torch.amp.GradScaler.step()`` asks its optimizer before it looks at gradients: they are made ready then.

    It asks whether the optimizer unscales by itself, and is told that it does not.
    """

    def __get__(self, optimizer: Any, owner: type) -> bool:
        runtime: Runtime | None = getattr(optimizer, "_runtime", None)
        if runtime is not None and not runtime.is_closed:
            runtime.reducer.flush()
        return False


def _in_file(piece: MasterPiece) -> Tensor:
    """What stands for the gradient of ``piece``."""
    name = piece.bucket.layout.slots[piece.slot].name
    return ReducedGradient.of(
        name, piece.master.shape, piece.master.dtype, piece.master.device, place="in files of every rank"
    )
