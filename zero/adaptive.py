"""Adaptive precision of one ZeroOptimizer: measures, agrees, asks the policy, and sets the formats of the buckets.

    a bucket is reduced     its errors on this rank's rows, in every format, on steps that measure
    report_loss()           the loss
    step()                  one exchange of these numbers, and the norm --> policy --> formats of the next step

Formats belong to buckets, which hold parameters of one role each, so everything a bucket has takes its level together.
They change at the end of a step only, before the new parameters are published, on all ranks alike.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zcomm import Residual, control
from zcomm.adaptive import Policy, Role, Signals, Tracked
from zcomm.adaptive.signals import Measured
from zcomm.sampling import squares_of
from zero.bucket import Bucket
from zero.loss_scale import DynamicLossScale, LossScale
from zero.runtime import Runtime

__all__ = ["Adaptive"]

logger = logging.getLogger("zero")


class Adaptive:
    """What one optimizer knows and decides; without adaptive precision every call does nothing."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.policy: Policy | None = None
        """Decides; None: formats stay."""
        self.residuals: list[Residual] = []
        """What reductions keep from step to step: watched on steps that measure."""
        self._losses: list[Tensor | float] = []
        self._squares: dict[int, Tensor] = {}
        self._norm: Tensor | None = None
        gradients, weights = runtime.effective.ladders
        settings, keeps_formats = runtime.settings.adaptive, runtime.effective.sums_in_node
        if settings is not None and keeps_formats:
            # A step that is taken commits residuals, and they would bring an outlier back that was clipped.
            settings = replace(settings, outlier="skip" if settings.outlier == "clip" else settings.outlier)
            in_node = (grads.in_node for grads in runtime.reducer.all)
            self.residuals += [sums.residual for sums in in_node if sums is not None and sums.residual is not None]
        if settings is not None and (runtime.effective.is_adaptive or keeps_formats):
            groups = [Tracked(tuple(s.name for s in b.layout.slots), b.role or Role.MATRIX) for b in runtime.buckets]
            self.policy = Policy(settings, groups, gradients, weights)
            runtime.reducer.on_issue = self._measure
            self._apply()

    @property
    def is_on(self) -> bool:
        """Whether formats follow the training."""
        return self.policy is not None

    def report_loss(self, loss: Tensor | float) -> None:
        """The loss of a micro-batch of this rank; no host waits for it."""
        if self.policy is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def report_norm(self, norm: Tensor, norm_type: float) -> None:
        """What a norm of the gradients was, which are clipped now. No host waits for it."""
        if self.policy is not None and norm_type == 2.0:
            self._norm = norm

    @torch.no_grad()
    def _measure(self, bucket: Bucket, full: Tensor) -> None:
        """This rank's rows of its own gradient: the ranks' rows are the whole bucket."""
        policy = self.policy
        if policy is None or policy.gradients is None or not policy.measures or bucket.index in self._squares:
            return
        numel, row = bucket.layout.shard_numel, self._runtime.topology.shard_index("local")
        self._squares[bucket.index] = squares_of(full[row * numel : (row + 1) * numel], policy.gradients.formats)

    def overflowed(self, loss_scale: LossScale) -> None:
        """Gradients overflowed, and the step is skipped. With a dynamic loss scale that is what happens at times."""
        if not isinstance(loss_scale, DynamicLossScale):
            self.end_step(math.inf, math.inf)

    def end_step(self, norm: Tensor | float, max_norm: float) -> tuple[bool, float]:
        """Decide on the step that ends and on the formats of the next. Collective.

        Args:
            norm: Of its gradients, which are then clipped to ``max_norm``.
            max_norm: May be infinite.

        Returns:
            Whether the step is to be taken; and by what its gradients are to be multiplied.
        """
        policy = self.policy
        if policy is None:
            return True, 1.0
        norm = float(norm)  # on a GPU the host waits: the formats of the next step depend on it
        verdict = policy.end_step(self._agreed(policy, norm if self._norm is None else float(self._norm)))
        self._apply()
        if self._runtime.speaks:
            for text in verdict.warnings:
                logger.warning("adaptive precision, %s", text)
            for text in verdict.notes:
                logger.info("adaptive precision, %s", text)
        if verdict.action == "clip":
            return True, min(1.0, verdict.max_norm / min(norm, max_norm))
        return verdict.action == "take", 1.0

    def _agreed(self, policy: Policy, norm: float) -> Signals:
        """The signals, the same on every rank."""
        losses = [float(loss) for loss in self._losses]
        held = self.residuals if policy.measures else []
        mine = [sum(losses), float(len(losses)), sum(residual.norm() ** 2 for residual in held)]
        measured = [bucket for bucket in self._runtime.buckets if policy.measures and bucket.is_trainable]
        num_sums = 0 if policy.gradients is None else 2 + len(policy.gradients.formats)
        nothing = torch.zeros(num_sums, dtype=torch.float64)
        sums = [self._squares.get(bucket.index, nothing).cpu() for bucket in measured]
        row = torch.cat([torch.tensor(mine, dtype=torch.float64), *sums])
        by_rank = control.gather_float64(row, self._runtime.topology).tolist()
        totals = [sum(column) for column in zip(*by_rank, strict=True)]  # in rank order
        loss = totals[0] / totals[1] if totals[1] else None
        found = {}
        for index, bucket in enumerate(measured):
            of_bucket = totals[3 + index * num_sums : 3 + (index + 1) * num_sums]
            if policy.gradients is not None and (errors := _errors(bucket, of_bucket, policy.gradients.formats)):
                found[bucket.index] = errors
        residual_norm = math.sqrt(totals[2]) if held else None
        return Signals(grad_norm=norm, loss=loss, residual_norm=residual_norm, measured=found)

    def _apply(self) -> None:
        policy = self.policy
        if policy is None:
            return
        for bucket in self._runtime.buckets:
            if policy.weights is not None:
                bucket.weight_format = policy.weight_format(bucket.index)
            if policy.gradients is not None:
                intra, inter = policy.gradient_formats(bucket.index)
                bucket.gradient_formats = None if {intra, inter} == {"none"} else (intra, inter)

    def clear(self) -> None:
        """A step has ended, or its gradients are forgotten."""
        self._losses, self._squares, self._norm = [], {}, None

    def state_dict(self) -> dict[str, Any] | None:
        """What later decisions depend on: numbers and names, the same on every rank."""
        return None if self.policy is None else self.policy.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from what :meth:`state_dict` gave; from None, or of another policy, as it is."""
        if self.policy is not None and state is not None:
            self.policy.load_state_dict(state)
            self._apply()


def _errors(bucket: Bucket, sums: list[float], formats: tuple[str, ...]) -> Measured | None:
    """Relative errors from sums of squares; None if the gradient is zero."""
    square, fourth, *errors = sums
    if square == 0:
        return None
    numel = sum(slot.numel for slot in bucket.layout.slots)
    of_formats = {name: math.sqrt(error / square) for name, error in zip(formats, errors, strict=True)}
    return Measured(of_formats, numel * fourth / square**2)
