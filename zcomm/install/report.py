"""What an installation has sent, what that would have been uncompressed, and what was left alone and why.

A tally counts the exchanges of one piece; bytes are by the formulas of :mod:`zcomm.volume`, this rank's own. Numbers
in module names are written as ``*`` where everything else is equal, so that a model of many equal layers is a few rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zcomm._formats.recipes import Recipe
from zcomm._residuals.loss_scaling import LossScaling, ScalerWish
from zcomm._residuals.residual import Residual
from zcomm._transport.topology import Topology
from zcomm.install.carried import Carried
from zcomm.install.choices import FormatChoice
from zcomm.volume import Sent


def described_topology(topology: Topology, *, shadow: bool) -> str:
    """The end of a title."""
    ways = f"{topology.num_nodes} nodes x {topology.ranks_per_node} ranks"
    ways += f", backend {topology.backend}, kernels {topology.kernels}"
    return ways + (", shadow: nothing is changed" if shadow else "")


@dataclass(slots=True)
class Tally:
    """The exchanges of one piece."""

    choices: tuple[FormatChoice, ...]
    format: str
    """What travels and how, such as ``gradients int4,int4 int8``."""
    sent: Sent
    """This rank's bytes of one exchange."""
    plain: Sent
    """The same exchange in the tensors' own dtype."""
    calls: int = 0
    squares: dict[str, list[float]] = field(default_factory=dict)
    """By parameter: the summed squares of errors, and of the exact values; only what was measured."""

    def measure(self, exact: Tensor, compressed: Tensor, sizes: tuple[int, ...]) -> None:
        """Add the errors of this piece [num_rows, numel], whose choices have ``sizes`` columns each."""
        errors = (compressed.double() - exact.double()).square().sum(0)
        references = exact.double().square().sum(0)
        for choice, error, reference in zip(
            self.choices, torch.split(errors, list(sizes)), torch.split(references, list(sizes)), strict=True
        ):
            squares = self.squares.setdefault(choice.name, [0.0, 0.0])
            squares[0] += float(error.sum())
            squares[1] += float(reference.sum())


@dataclass(slots=True)
class ReportRow:
    """Parameters that were treated alike."""

    modules: str
    format: str
    why: str
    """Why not the recipe's format; empty if it is."""
    parameters: int = 0
    elements: int = 0
    sent: float = 0.0
    """This rank's bytes so far, to all other ranks."""
    plain: float = 0.0
    """What that would have been in the tensors' own dtype."""
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def error(self) -> float:
        """Relative error, if it was measured; else NaN."""
        return math.sqrt(self.squares[0] / self.squares[1]) if self.squares[1] else math.nan


@dataclass(frozen=True, slots=True)
class Report:
    """What was sent since the installation, by module."""

    title: str
    rows: tuple[ReportRow, ...]
    sent: Sent
    """This rank's bytes, inside its node and to other nodes."""
    plain: Sent
    """What that would have been in the tensors' own dtypes."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        rows = [
            {
                "modules": row.modules, "format": row.format, "why": row.why, "parameters": row.parameters,
                "elements": row.elements, "sent": row.sent, "plain": row.plain,
                "error": None if math.isnan(row.error) else row.error,
            }
            for row in self.rows
        ]  # fmt: skip
        totals = {"sent": self.sent._asdict(), "plain": self.plain._asdict()}
        return {"title": self.title, "rows": rows, **totals, "notes": list(self.notes)}

    def __str__(self) -> str:
        width = max([len("modules"), *(len(row.modules) for row in self.rows)])
        how = max([len("format"), *(len(row.format) for row in self.rows)])
        lines = [self.title]
        lines.append(
            f"{'modules':<{width}}  {'format':<{how}} {'tensors':>8}{'elements':>14}{'sent':>14}{'as is':>14}"
            f"{'error':>9}  why"
        )
        for row in self.rows:
            error = "-" if math.isnan(row.error) else f"{row.error:.2g}"
            lines.append(
                f"{row.modules:<{width}}  {row.format:<{how}} {row.parameters:>8}{row.elements:>14}{row.sent:>14.0f}"
                f"{row.plain:>14.0f}{error:>9}  {row.why}".rstrip()
            )
        for link, sent, plain in (
            ("inside the node", self.sent.intra, self.plain.intra),
            ("to other nodes", self.sent.inter, self.plain.inter),
        ):
            part = f", {sent / plain:.3f} of it" if plain else ""
            lines.append(f"bytes {link}: {sent} instead of {plain}{part}")
        return "\n".join([*lines, *self.notes])


class InstallationTally:
    """The tallies of one installation, of parameters ``names``, and what it carries from step to step."""

    def __init__(self, names: Iterable[str], recipe: Recipe, scaler: ScalerWish = "auto") -> None:
        self.tallies: list[Tally] = []
        self.carried = Carried(names, recipe)
        self.scaling = LossScaling(scaler, self.carried.reset)
        self.notes: list[str] = []
        """What happened that a user should know."""

    def open(self, choices: tuple[FormatChoice, ...], format: str, sent: Sent, plain: Sent) -> Tally:
        """A tally for a new piece."""
        tally = Tally(choices, format, sent, plain)
        self.tallies.append(tally)
        return tally

    def note(self, text: str) -> None:
        """Put ``text`` into the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def report(self, title: str) -> Report:
        """Everything so far."""
        rows: dict[tuple[str, str, str], ReportRow] = {}
        counted: dict[tuple[str, str, str], set[str]] = {}
        for tally in self.tallies:
            numel = sum(choice.numel for choice in tally.choices)
            for choice in tally.choices:
                modules = re.sub(r"\b\d+\b", "*", choice.module) or "(root)"
                key = (modules, tally.format, choice.reason)
                row = rows.setdefault(key, ReportRow(*key))
                if choice.name not in counted.setdefault(key, set()):
                    counted[key].add(choice.name)
                    row.parameters += 1
                    row.elements += choice.numel
                part = tally.calls * choice.numel / numel
                row.sent += part * sum(tally.sent)
                row.plain += part * sum(tally.plain)
                for index, value in enumerate(tally.squares.get(choice.name, ())):
                    row.squares[index] += value
        held = sum(residual.nbytes for residual in self.carried.residuals)
        notes = (*self.notes, *((f"bytes held in residuals: {held}",) if held else ()))
        return Report(title, tuple(rows.values()), self._total("sent"), self._total("plain"), notes)

    def _total(self, column: str) -> Sent:
        counts: list[tuple[int, Sent]] = [(tally.calls, getattr(tally, column)) for tally in self.tallies]
        return Sent(sum(calls * s.intra for calls, s in counts), sum(calls * s.inter for calls, s in counts))


class Installation:
    """What install_ddp and install_fsdp2 return."""

    def __init__(self, title: str, account: InstallationTally, remove: Callable[[], None]) -> None:
        self._title, self._account, self._remove = title, account, remove
        self.is_installed = True
        """Until :meth:`uninstall`."""

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """What quantization has lost and is still to be added, keyed by parameter; none before the first backward."""
        return tuple(self._account.carried.residuals)

    def state_dict(self) -> dict[str, Any]:
        """What this rank carries from step to step, for a checkpoint: tensors, numbers, strings and tuples.

        Call it between two steps, on every rank; each saves its own. A copy: 1 byte for each element of residuals.
        """
        return self._account.carried.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave on this rank, on all ranks; before the first backward.

        Bit for bit in buffers laid out as those that were saved: always under FSDP2. DDP lays its first buckets out
        anew after one step; from one layout to another residuals are moved by parameter and encoded in int8 again.

        Raises:
            StateError: It is of another rank, or another number of ranks, or of parameters that are not here; or this
                installation has exchanged gradients already.
        """
        self._account.carried.load_state_dict(state)

    def report(self) -> Report:
        """What this rank has sent since the installation; print it. No communication."""
        return self._account.report(self._title)

    def uninstall(self) -> None:
        """Give the model back its own communication, bit for bit. Any number of times.

        Collective: every rank calls it at the same point, between two steps.
        """
        if self.is_installed:
            self.is_installed = False
            self._remove()
