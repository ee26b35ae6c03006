"""A piece of a buffer with what is kept for it from one exchange to the next: its tally, its residual."""

from __future__ import annotations

from dataclasses import dataclass

from zcomm._formats.recipes import Wires
from zcomm._residuals.loss_scaling import LossScaling
from zcomm._residuals.residual import Residual
from zcomm.install.pieces import FormatPiece
from zcomm.install.report import Tally


@dataclass(frozen=True, slots=True)
class Planned:
    """One exchange, as often as it happens."""

    piece: FormatPiece
    tally: Tally
    residual: Residual | None = None
    """By parameter; what an exchange has lost is added to the next one, whatever the optimizer did with the step."""

    @property
    def wires(self) -> Wires:
        """The formats, the same for the whole piece."""
        return self.piece.choices[0].wires

    def begin(self, scaling: LossScaling) -> Residual | None:
        """Before an exchange, when the one before has ended: what that has lost counts from now on.

        Unless the scaler has skipped its step, with what was sent.
        """
        if self.residual is None:
            return None
        scale = scaling.now()
        if not self.residual.is_committed:
            self.residual.commit(unless=self.residual.exceeds(scale) if scaling.falls_at_overflow else False)
        self.residual.set_loss_scale(scale)
        return self.residual
