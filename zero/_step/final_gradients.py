"""Final gradients: from reduced gradients to the ``.grad`` of masters; agreement on overflow, unscaling, clipping.

After every backward that reduces, each master has its part of the reduced gradient as ``.grad``, because
``torch.amp.GradScaler`` reads it between backward and step. A shard shows only its own part of an overflow, so the
ranks agree on it, and every rank shows the result in the gradient of one more tensor in its first parameter group, the
overflow flag: NaN, or a number next to 0, which also tells whether a GradScaler has unscaled. Without the flag
GradScaler would skip a step on some ranks alone, and the next collective would be a deadlock. No step updates the flag.

Gradients carry a factor that is not applied yet: a number on the host (unscaling), times a scalar that may be on a GPU
(clipping). The host waits for the second only if gradients are in host memory and are updated there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zcomm import StateError, control
from zcomm._kernels.message_flags import check_all_flags
from zero._gradients.reducer import GradientConsumer
from zero._optim.loss_scale import nonfinite_flag
from zero._optim.masters import MasterPiece
from zero._ranks.model_parallel import ModelParallel
from zero._runtime.runtime import Runtime
from zero._sharding.released import ReducedGradient


@dataclass(frozen=True, slots=True)
class GradFactor:
    """A factor in float64. Immutable, so an earlier one can be kept and restored."""

    number: float = 1.0
    coefficient: Tensor | None = None
    """A float64 scalar, on any device; None: 1."""

    def times(self, number: float) -> GradFactor:
        return replace(self, number=self.number * number)

    def times_coefficient(self, coefficient: Tensor) -> GradFactor:
        wide = coefficient.double()
        return replace(self, coefficient=wide if self.coefficient is None else self.coefficient * wide)

    @property
    def is_one(self) -> bool:
        """Whether the host knows that it is 1."""
        return self.number == 1 and self.coefficient is None

    def item(self) -> float:
        """The factor as a number; the host waits for a coefficient that is on a GPU."""
        return self.number if self.coefficient is None else self.number * self.coefficient.item()

    def scaled(self, value: Tensor) -> Tensor:
        return value * self.number if self.coefficient is None else value * self.number * self.coefficient

    def multiply_(self, values: Tensor) -> None:
        """Multiply ``values`` in place, rounded once. The host waits only if the coefficient is on another device."""
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
"""The flag's gradient without an overflow: too small to change a norm."""


class FinalGradients(GradientConsumer):
    """The gradients of one optimizer between backward and step: the reducer's consumer."""

    def __init__(
        self, runtime: Runtime, pieces: list[MasterPiece], model_parallel: ModelParallel, *, rounds_means: bool
    ) -> None:
        self.runtime, self._pieces, self.rounds_means = runtime, pieces, rounds_means
        self._model_parallel = model_parallel
        self.factor = GradFactor()
        """Not applied yet: unscales and clips the gradients."""
        self.flag = torch.zeros(1, device=runtime.buckets[0].device)
        """The overflow flag."""
        self._overflow: Tensor | None = None
        self.is_applied = False
        """Whether an update is running, which applies the factor itself."""
        for piece in pieces:
            piece.master.grad_dtype = None  # gradients may be 16-bit, masters float32
        runtime.reducer.consumer = self

    def last_backward_starts(self) -> None:
        self.runtime.state_files.read_ahead()

    def reduced(self) -> None:
        """Called after a backward that reduced."""
        self._overflow, self.runtime.reducer.has_cleared = None, False
        self._assign_grads()
        if self.runtime.reducer.ends_step:
            self._show_overflow(self._agreed_overflow())
        else:  # more micro-batches are expected, so the ranks do not agree yet: see scaler_steps()
            self.flag.grad = torch.full_like(self.flag, NO_OVERFLOW)

    def backward_ended(self) -> None:
        """Tensor-parallel ranks, whose backwards end together, agree on overflow: ``unscale_()`` may read it next."""
        parts = self._model_parallel
        if self._overflow is not None and parts.world_size > 1 and not parts.has_stages:
            self._overflow = parts.any_beside(self._overflow)
            self._show_overflow(self._overflow)

    def scaler_steps(self) -> None:
        """Agree on overflow where the ranks have not: a GradScaler looks at the gradients of each rank alone.

        Data ranks agree if the data ended before the boundary of a step, the ranks of a model always.

        Raises:
            StateError: On every rank: ``unscale_()`` was called before, and has looked at each rank's own part alone.
        """
        self._agree_over_data()
        if self._model_parallel.world_size > 1:
            self._agree_over_model()

    def _agree_over_model(self) -> None:
        shown = None if self.flag.grad is None else self.flag.grad.item()
        overflowed = self._overflow is not None and bool(self._overflow)
        is_unscaled = shown is not None and shown != NO_OVERFLOW and not math.isnan(shown)
        of_ranks = self._model_parallel.gather(2.0 * is_unscaled + overflowed)
        if not any(one % 2 for one in of_ranks):
            return
        if 2.0 in of_ranks:
            raise StateError(
                "scaler.unscale_(optimizer) was called before ranks with other layers have agreed on overflow, and one "
                "has an overflow: with pipeline stages leave unscale_() to scaler.step(optimizer)"
            )
        if not overflowed:
            self._overflow = torch.ones((), dtype=torch.bool, device=self.flag.device)
            self._show_overflow(self._overflow)

    def _agree_over_data(self) -> None:
        if self._overflow is not None or not any(grads.agreed for grads in self.runtime.reducer.all):
            return
        # A scale of 1 leaves it as it was: then only the deadlock watch finds ranks that differ.
        if self.flag.grad is not None and self.flag.grad.item() != NO_OVERFLOW:
            raise StateError(
                "scaler.unscale_(optimizer) was called before the boundary of a step, where the ranks have not agreed "
                "on overflow yet: set optimizer.is_boundary = True before the last backward, or leave unscale_() to "
                "scaler.step(optimizer)"
            )
        self._show_overflow(self._agreed_overflow())

    def step_ended(self) -> None:
        """A step was applied or skipped."""
        if not self.runtime.stage.shards_states:  # stage 0: ``.grad`` is the gradient itself, which a user may read
            self.settle()
        self.clear()

    def _show_overflow(self, overflow: Tensor) -> None:
        self.flag.grad = torch.full_like(self.flag, NO_OVERFLOW).masked_fill_(overflow, float("nan"))

    def edited(self, own: Tensor) -> None:
        """This rank's part of a reduced gradient was set to ``own``; the rest is not checked again if it was finite."""
        if self._overflow is None or bool(self._overflow):
            self.reduced()
            return
        self._overflow = control.any_(nonfinite_flag([own], self.flag.device), self.runtime.topology)
        self._show_overflow(self._overflow)

    def check_settable(self, name: str) -> None:
        """Raise StateError if a GradScaler has unscaled the gradients, but perhaps not the one set for ``name``."""
        shown = None if self.flag.grad is None else self.flag.grad.item()
        if shown is not None and shown != NO_OVERFLOW and not math.isnan(shown):
            raise StateError(
                f"param.grad of {name!r} was set by hand, and a GradScaler has unscaled the gradients before or after, "
                "which cannot be known: leave unscale_() to scaler.step(optimizer), set the gradient by "
                "zero.utils.safe_set_full_grad(param, value), or let the configuration scale the loss (fp16)"
            )

    def has_overflow(self) -> bool:
        """Whether the reduced gradient has a NaN or an infinity on any rank; the host waits for the device.

        Collective if not agreed on yet, or if a user has changed gradients since.
        """
        reducer = self.runtime.reducer
        if any(reducer.shown.edits()) or (reducer.has_cleared and self._overflow is not None and bool(self._overflow)):
            self._overflow = None
        return bool(self._agreed_overflow())

    def _agreed_overflow(self) -> Tensor:
        """The same as a bool scalar on the device; the host waits for it only if gradients are in files."""
        if self._overflow is None:
            reducer, files = self.runtime.reducer, self.runtime.state_files.gradients
            in_memory = (reducer.results(grads) for grads in reducer.all if not grads.store.is_in_file)
            mine = nonfinite_flag([r for r in in_memory if r is not None], self.flag.device)
            files.agree()
            if files.is_nonfinite():
                mine.fill_(True)
            self._overflow = control.any_(mine, self.runtime.topology)
        return self._overflow

    def apply(self) -> None:
        """Multiply every gradient of this rank by the factor. Collective."""
        if self.factor.is_one:
            return
        self.settle()
        self.runtime.state_files.gradients.agree()

    def settle(self) -> None:
        """As :meth:`apply`, on this rank alone: errors of files are raised by the next collective call."""
        if self.factor.is_one:
            return
        if self.is_applied:  # it would count twice
            raise StateError("a gradient cannot be set while step() updates with it: set it before step()")
        for grads in self.runtime.reducer.all:
            self.runtime.reducer.change(grads, self.factor.multiply_)
        self.factor = GradFactor()

    def settled(self, rows: Tensor) -> Tensor:
        if self.factor.is_one:
            return rows
        rows = rows.clone()
        self.factor.multiply_(rows)
        return rows

    def prepare_update(self, *, widens: bool) -> None:
        """Give masters their gradients for the update, and the flag none.

        Args:
            widens: Cast gradients to the masters' dtype; False: as they are stored.
        """
        self._check_all_used()
        self.flag.grad = None
        self._assign_grads()
        if not widens:
            return
        widened: dict[int, Tensor] = {}
        for piece in self._pieces:
            grad = piece.master.grad
            if grad is not None and grad.dtype != piece.master.dtype:
                result = self.runtime.reducer.results(self.runtime.reducer.by_bucket[piece.bucket.index])
                assert result is not None, "a gradient without a result"
                wide = widened.setdefault(id(result), result.to(piece.master.dtype))
                piece.master.grad = piece.of(wide)

    def clear(self) -> None:
        """Drop the gradients: the step is over. Also checks its messages' flags for errors."""
        self._overflow, self.flag.grad = None, None
        for piece in self._pieces:
            piece.master.grad = None
        check_all_flags()

    def discard(self) -> None:
        """The same, and reset the factor."""
        self.clear()
        self.factor = GradFactor()

    def _assign_grads(self) -> None:
        """Give each master its part of the reduced gradient; parameters that no rank used get none.

        A gradient in a file is represented by a stand-in.
        """
        with torch._C.DisableTorchFunctionSubclass():
            results: dict[int, Tensor | None] = {}
            for piece in self._pieces:
                number, reducer = piece.bucket.index, self.runtime.reducer
                grads = reducer.by_bucket[number]
                if not grads.used[piece.slot] or piece.param.grad is None:
                    piece.master.grad = None
                    continue
                if grads.store.is_in_file:
                    master, name = piece.master, piece.bucket.layout.slots[piece.slot].name
                    master.grad = ReducedGradient.of(name, master, master.dtype, place="in files of every rank")
                    continue
                if number not in results:
                    results[number] = reducer.results(grads)
                result = results[number]
                assert result is not None, "a used parameter without a gradient"
                piece.master.grad = piece.of(result)

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


class GradScalerHook:
    """``_step_supports_amp_scaling``: GradScaler.step() reads it before it reads gradients, so they are reduced here.

    Without the flush it would check gradients of ``no_sync`` that are not reduced yet. False: GradScaler unscales.
    """

    def __get__(self, optimizer: Any, owner: type) -> bool:
        runtime: Runtime | None = getattr(optimizer, "_runtime", None)
        if runtime is not None and not runtime.is_closed:
            runtime.reducer.flush()
            runtime.reducer.consumer.scaler_steps()
        return False
