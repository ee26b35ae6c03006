"""Which level each group of tensors takes, decided at the ends of steps from what all ranks have agreed on.

    level of a group = the least of     what its role allows (:mod:`zcomm.adaptive.roles`)
                                        the schedule: the parameters' dtype, then 8 bits, then all levels
                                        the back-off of everything: 0 after a jump, one more after every quiet time
                                        gradients: the budget, and the back-off of the group after its error has jumped

Nothing here communicates, draws or reads a clock, so ranks that are given equal numbers decide alike, and a policy
that is restored goes on as if it had never been saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zcomm.adaptive.ladder import Ladder
from zcomm.adaptive.roles import Role
from zcomm.adaptive.settings import AdaptivePrecision
from zcomm.adaptive.signals import Measured, Running, Signals

__all__ = ["Policy", "Tracked", "Verdict"]

NORM = "gradient norm"
GRADIENT_JUMP, RESIDUAL_JUMP, ERROR_JUMP = 8.0, 4.0, 2.0
"""A norm of so many times its running mean, or one that is not finite, is a jump; an error, of its tensors alone."""
LOSS_JUMP = 8.0
"""A loss above its running mean by so many of its mean deviations, or one that is not finite, is a jump."""
TINY = 1e-30
GAIN_OF_ROTATION = 0.9
"""A rotation is taken where it leaves at most so much of the error."""


class Tracked(NamedTuple):
    """Tensors that travel together."""

    names: tuple[str, ...]
    role: Role


@dataclass(slots=True)
class _Group:
    tracked: Tracked
    within_budget: int
    """The level that the last measurement allows."""
    is_rotated: bool = False
    limit: int | None = None
    """The level that its error allows, since it has jumped."""
    num_quiet: int = 0
    error: Running = field(default_factory=Running)
    last: Measured | None = None


class _Jump(NamedTuple):
    name: str
    text: str
    is_first: bool
    """Whether the value before did not jump: the next ones in a row are not told."""
    is_finite: bool


class Verdict(NamedTuple):
    """What follows from a step's signals."""

    action: str
    """``"take"``, ``"skip"`` or ``"clip"`` the step."""
    max_norm: float
    """What to clip to."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """What has come back."""


class Policy:
    """The levels of all groups, from one step to the next.

    Args:
        settings: How.
        groups: What travels together; the same on every rank.
        gradients: The levels of gradients; None: they are left as they are.
        weights: The levels of weights, likewise. With neither, jumps are told and outliers handled all the same.
    """

    def __init__(
        self, settings: AdaptivePrecision, groups: Sequence[Tracked], gradients: Ladder | None, weights: Ladder | None
    ) -> None:
        self.settings, self.gradients, self.weights = settings, gradients, weights
        # Until errors are measured, a budget allows 8 bits.
        first = 0 if gradients is None else gradients.last
        if gradients is not None and settings.max_relative_error is not None:
            first = gradients.eight_bits
        self._groups = [_Group(group, first) for group in groups]
        self.step = 0
        """Steps that have ended."""
        self.limit: int | None = None
        """The level that everything may have, since something has jumped."""
        self._num_quiet = 0
        self._running = {name: Running() for name in (NORM, "loss", "norm of the residuals")}

    @property
    def measures(self) -> bool:
        """Whether the running step is to be measured: the first is, and one in every interval."""
        return self.step % self.settings.sample_interval == 0

    @property
    def _has_levels(self) -> bool:
        return self.gradients is not None or self.weights is not None

    def gradient_formats(self, group: int) -> tuple[str, ...]:
        """The formats of every hop of a group's reductions."""
        assert self.gradients is not None, "a policy without gradients"
        one = self._groups[group]
        return self.gradients.hops(self._gradient_level(one, self.gradients), is_rotated=one.is_rotated)

    def weight_format(self, group: int) -> str:
        """The format of a group's gathers."""
        assert self.weights is not None, "a policy without weights"
        return self.weights.hops(self._level(self._groups[group], self.weights))[0]

    def _level(self, group: _Group, ladder: Ladder) -> int:
        by_role = {Role.EXACT: 0, Role.CAREFUL: ladder.eight_bits, Role.MATRIX: ladder.last}[group.tracked.role]
        limit = ladder.last if self.limit is None else self.limit
        return min(by_role, limit, self._scheduled(ladder))

    def _gradient_level(self, group: _Group, ladder: Ladder) -> int:
        limit = ladder.last if group.limit is None else group.limit
        return min(self._level(group, ladder), limit, group.within_budget)

    def _scheduled(self, ladder: Ladder) -> int:
        if self.step < self.settings.bf16_steps:
            return 0
        if self.step < self.settings.bf16_steps + self.settings.int8_steps:
            return ladder.eight_bits
        return ladder.last

    def end_step(self, signals: Signals) -> Verdict:
        """Decide on the step that ends, and on the levels of the next."""
        notes = tuple(self._come_back())
        mean_norm = self._running[NORM].mean
        jumps = tuple(self._jumps(signals))
        action = self._action(jumps, mean_norm)
        warnings: list[str] = []
        if jumps:
            self.limit, self._num_quiet = (0 if self._has_levels else None), 0
            texts = [jump.text for jump in jumps if jump.is_first]
            if texts:
                warnings.append(self._told(texts, action, mean_norm))
        warnings += self._take_errors(signals.measured)
        self.step += 1
        return Verdict(action, mean_norm, tuple(warnings), notes)

    def _jumps(self, signals: Signals) -> Iterator[_Jump]:
        watched = (
            (NORM, signals.grad_norm, GRADIENT_JUMP),
            ("loss", signals.loss, LOSS_JUMP),
            ("norm of the residuals", signals.residual_norm, RESIDUAL_JUMP),
        )
        for name, value, times in watched:
            if value is None:
                continue
            running = self._running[name]
            jumps = running.strays(value, times) if name == "loss" else running.exceeds(value, times)
            text, is_first = f"{name} {value:.4g}{_compared(name, value, running)}", running.num_jumps == 0
            if running.add(value, jumps=jumps):
                text, is_first = f"{name} {value:.4g}, as in the steps before: from here on it is no outlier", True
            if jumps:
                yield _Jump(name, text, is_first, math.isfinite(value))

    def _action(self, jumps: Sequence[_Jump], mean_norm: float) -> str:
        if not any(jump.name == NORM for jump in jumps) or self.settings.outlier == "keep":
            return "take"
        # What is not finite cannot be scaled, and before the first steps there is nothing to scale to.
        is_scalable = any(jump.name == NORM and jump.is_finite for jump in jumps) and mean_norm > 0
        return self.settings.outlier if is_scalable else "skip"

    def _told(self, texts: Sequence[str], action: str, mean_norm: float) -> str:
        done = {"take": "", "skip": "the step is skipped; ", "clip": f"gradients are clipped to {mean_norm:.4g}; "}
        what = f"exchanges back off to the parameters' dtype for {self.settings.quiet_steps} quiet steps"
        return f"step {self.step}: {'; '.join(texts)}: {done[action]}{what if self._has_levels else 'formats stay'}"

    def _come_back(self) -> Iterator[str]:
        """One level for everything that has been quiet for long enough."""
        if self.limit is not None:
            self._num_quiet += 1
            if self._num_quiet > self.settings.quiet_steps:
                self.limit, self._num_quiet = self._raised(self.limit), 0
                yield f"step {self.step}: quiet for {self.settings.quiet_steps} steps: exchanges are " + (
                    "as before the jump" if self.limit is None else "a level less exact again"
                )
        for group in self._groups:
            if group.limit is not None:
                group.num_quiet += 1
                if group.num_quiet > self.settings.quiet_steps:
                    group.limit, group.num_quiet = self._raised(group.limit), 0

    def _raised(self, limit: int) -> int | None:
        last = max(0 if ladder is None else ladder.last for ladder in (self.gradients, self.weights))
        return limit + 1 if limit + 1 < last else None

    def _take_errors(self, measured: Mapping[int, Measured]) -> Iterator[str]:
        """Follow the errors of gradients: the budget's level of every group, a level less where they have jumped."""
        ladder = self.gradients
        jumped: list[str] = []
        for index, errors in sorted(measured.items()):
            assert ladder is not None, "errors were measured of gradients that are left as they are"
            group = self._groups[index]
            group.last = errors
            self._keep_budget(group, ladder, errors)
            value = ladder.error(ladder.last, errors.errors)
            jumps = group.error.exceeds(value, ERROR_JUMP)
            group.error.add(value, jumps=jumps)
            if jumps:
                group.limit, group.num_quiet = max(self._gradient_level(group, ladder) - 1, 0), 0
                jumped.append(f"{group.tracked.names[0]!r} ({value:.3g}, {value / (group.error.mean or 1):.1f} times)")
        if jumped:
            yield (
                f"step {self.step}: the error of gradients exceeds its running mean in {len(jumped)} groups, first "
                f"{jumped[0]}: their exchanges back off by a level for {self.settings.quiet_steps} quiet steps"
            )

    def _keep_budget(self, group: _Group, ladder: Ladder, measured: Measured) -> None:
        budget = self.settings.max_relative_error
        if budget is None:
            return
        group.within_budget, group.is_rotated = 0, False
        for level in range(ladder.last, 0, -1):
            plain = ladder.error(level, measured.errors)
            rotated = ladder.error(level, measured.errors, is_rotated=True)
            if min(plain, rotated) <= budget:
                group.within_budget = level
                group.is_rotated = rotated < GAIN_OF_ROTATION * plain or plain > budget
                return

    def describe(self) -> str:
        """A line for each group: its first tensor, role, formats now, and what was measured last."""
        lines = []
        for index, group in enumerate(self._groups):
            parts = [f"{group.tracked.names[0]} (+{len(group.tracked.names) - 1}): {group.tracked.role.value}"]
            if self.gradients is not None:
                parts.append("gradients " + " -> ".join(self.gradient_formats(index)))
            if self.weights is not None:
                parts.append(f"weights {self.weight_format(index)}")
            if group.last is not None:
                shown = ", ".join(f"{name} {error:.3g}" for name, error in group.last.errors.items())
                parts.append(f"errors {shown}, kurtosis {group.last.kurtosis:.3g}")
            lines.append("; ".join(parts))
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on: numbers and names."""
        groups = [
            {
                "names": list(group.tracked.names),
                "within_budget": group.within_budget,
                "is_rotated": group.is_rotated,
                "limit": group.limit,
                "num_quiet": group.num_quiet,
                "error": group.error.state_dict(),
            }
            for group in self._groups
        ]
        running = {name: running.state_dict() for name, running in self._running.items()}
        facts = {"step": self.step, "limit": self.limit, "num_quiet": self._num_quiet}
        return {**facts, "running": running, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; a group that was another takes over from its first tensor's."""
        self.step, self._num_quiet = int(state["step"]), int(state["num_quiet"])
        self.limit = state["limit"]
        for name, running in self._running.items():
            running.load_state_dict(state["running"][name])
        saved = {name: one for one in state["groups"] for name in one["names"]}
        for group in self._groups:
            one = saved.get(group.tracked.names[0])
            if one is not None:
                last = 0 if self.gradients is None else self.gradients.last
                group.within_budget, group.is_rotated = min(one["within_budget"], last), bool(one["is_rotated"])
                group.limit, group.num_quiet = one["limit"], int(one["num_quiet"])
                group.error.load_state_dict(one["error"])


def _compared(name: str, value: float, running: Running) -> str:
    """How far ``value`` is from what it was."""
    if not math.isfinite(value) or not running.is_settled:
        return ""
    if name == "loss":
        num_deviations = (value - running.mean) / max(running.deviation, TINY)
        return f" is above its running mean {running.mean:.4g} by {num_deviations:.3g} deviations"
    return f" is {value / running.mean:.4g} times its running mean {running.mean:.4g}"
