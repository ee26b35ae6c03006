"""One piece of a buffer with the state kept between its exchanges: its byte counts and its residual."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zcomm._formats.recipes import Wires
from zcomm._residuals.grad_scaler import UserLossScale
from zcomm._residuals.residual import Residual
from zcomm.install.pieces import FormatPiece
from zcomm.install.report import PieceTotals


@dataclass(frozen=True, slots=True)
class PieceExchange:
    """An exchange that is repeated every step."""

    piece: FormatPiece
    tally: PieceTotals
    residual: Residual | None = None
    """Error feedback: the next exchange adds what this one has lost."""

    @property
    def wires(self) -> Wires:
        """The formats, which all parameters of the piece share."""
        return self.piece.choices[0].wires

    def start(self, scaling: UserLossScale) -> Residual | None:
        """Return the residual for the next exchange, after committing what the previous one has lost.

        The commit waits here, and not behind the previous exchange, because only now it is known whether the gradient
        scaler has skipped that step. What was sent in a skipped step is not applied, so its loss must not be added.
        """
        if self.residual is None:
            return None
        scale = scaling.current_scale()
        if not self.residual.is_committed:
            self.residual.commit(unless=self.residual.exceeds(scale) if scaling.falls_at_overflow else False)
        self.residual.set_loss_scale(scale)
        return self.residual

    def measure(self, exact: Tensor, compressed: Tensor) -> None:
        """Add the errors of this piece of ``compressed`` rows to the report."""
        self.tally.measure(self.piece.take(exact), self.piece.take(compressed), self.piece.sizes)
