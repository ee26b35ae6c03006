"""The report of an installation: bytes sent, bytes without compression, and what stays uncompressed and why.

A :class:`PieceTotals` counts the exchanges of one piece. Bytes are this rank's own, by the formulas of
:mod:`zcomm.volume`. Numbers in module names become ``*``, and rows that are then equal are merged. So a model of many
equal layers has few rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from zcomm._formats.recipes import Recipe
from zcomm._residuals.grad_scaler import ScalerSetting, UserLossScale
from zcomm._residuals.residual import Residual
from zcomm._transport.topology import Topology
from zcomm.install.carried_state import CarriedState
from zcomm.install.choices import FormatChoice
from zcomm.volume import Sent


def topology_text(topology: Topology) -> str:
    """The topology, its backend and its kernels as text, for a report's title."""
    shape = f"{topology.num_nodes} nodes x {topology.ranks_per_node} ranks"
    return f"{shape}, backend {topology.backend}, kernels {topology.kernels}"


def title_of(call: str, recipe: Recipe, over: str, *, shadow: bool) -> str:
    """A report's title; ``over``: what carries the exchanges."""
    return f"{call}, recipe {recipe.name}, {over}{', shadow: nothing is changed' if shadow else ''}"


@dataclass(slots=True)
class PieceTotals:
    """Number, bytes and errors of the exchanges of one piece."""

    choices: tuple[FormatChoice, ...]
    format: str
    """What is sent and in which formats, such as ``gradients int4,int4``."""
    sent: Sent
    """This rank's bytes of one exchange."""
    plain: Sent
    """The same exchange in the tensors' own dtype."""
    calls: int = 0
    squares: dict[str, list[float]] = field(default_factory=dict)
    """By parameter, where shadow mode has measured it: sums of squares of the errors, and of the exact values."""

    def measure(self, exact: Tensor, compressed: Tensor, sizes: tuple[int, ...]) -> None:
        """Add the errors of this piece [num_rows, numel], whose choices have ``sizes`` columns each."""
        errors, references = compressed.double() - exact.double(), exact.double()
        parts = (torch.split(values.square().sum(0), list(sizes)) for values in (errors, references))
        for choice, error, reference in zip(self.choices, *parts, strict=True):
            squares = self.squares.setdefault(choice.name, [0.0, 0.0])
            squares[0] += float(error.sum())
            squares[1] += float(reference.sum())


@dataclass(slots=True)
class ReportRow:
    """Parameters with the same module pattern, format and reason."""

    modules: str
    format: str
    why: str
    """Why the format is not the recipe's; empty if it is."""
    parameters: int = 0
    elements: int = 0
    sent: float = 0.0
    """Bytes that this rank has sent so far, to all other ranks."""
    plain: float = 0.0
    """Bytes of the same exchanges in the tensors' own dtype."""
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def error(self) -> float:
        """Relative error; NaN if it was not measured."""
        return math.sqrt(self.squares[0] / self.squares[1]) if self.squares[1] else math.nan


@dataclass(frozen=True, slots=True)
class Report:
    """What was sent since the installation, by module."""

    title: str
    rows: tuple[ReportRow, ...]
    sent: Sent
    """Bytes that this rank has sent, inside its node and to other nodes."""
    plain: Sent
    """Bytes of the same exchanges in the tensors' own dtypes."""
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict of numbers, strings and lists, ready for JSON."""
        rows = [asdict(row) | {"error": None if math.isnan(row.error) else row.error} for row in self.rows]
        for row in rows:
            del row["squares"]
        totals = {"sent": self.sent._asdict(), "plain": self.plain._asdict()}
        return {"title": self.title, "rows": rows, **totals, "notes": list(self.notes)}

    def __str__(self) -> str:
        width = max([len("modules"), *(len(row.modules) for row in self.rows)])
        how = max([len("format"), *(len(row.format) for row in self.rows)])
        lines = [
            self.title,
            f"{'modules':<{width}}  {'format':<{how}} {'tensors':>8}{'elements':>14}{'sent':>14}{'uncompressed':>14}"
            f"{'error':>9}  why",
        ]
        for row in self.rows:
            error = "-" if math.isnan(row.error) else f"{row.error:.2g}"
            lines.append(
                f"{row.modules:<{width}}  {row.format:<{how}} {row.parameters:>8}{row.elements:>14}{row.sent:>14.0f}"
                f"{row.plain:>14.0f}{error:>9}  {row.why}".rstrip()
            )
        for link, sent, plain in zip(("inside the node", "to other nodes"), self.sent, self.plain, strict=True):
            ratio = f", {sent / plain:.3f} of it" if plain else ""
            lines.append(f"bytes {link}: {sent} instead of {plain}{ratio}")
        return "\n".join([*lines, *self.notes])


class InstallationRecord:
    """The bookkeeping of one installation on parameters ``names``: tallies, notes, and state kept from step to step."""

    def __init__(self, names: Iterable[str], recipe: Recipe, scaler: ScalerSetting = "auto") -> None:
        self._tallies: dict[Any, PieceTotals] = {}
        self.carried = CarriedState(names, recipe)
        self.scaling = UserLossScale(scaler, self.carried.reset)
        self.notes: list[str] = []
        """Events that the user should know of."""

    def new_tally(self, choices: tuple[FormatChoice, ...], format: str, sent: Sent, plain: Sent) -> PieceTotals:
        """Start to count the exchanges of a new piece, or go on with one that comes back."""
        key = choices, format, sent, plain
        if key not in self._tallies:
            self._tallies[key] = PieceTotals(*key)
        return self._tallies[key]

    @property
    def tallies(self) -> list[PieceTotals]:
        """Those of all pieces so far."""
        return list(self._tallies.values())

    def note(self, text: str) -> None:
        """Add ``text`` to the report's notes, unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def report(self, title: str) -> Report:
        """Sum the tallies into a report."""
        rows: dict[tuple[str, str, str], ReportRow] = {}
        counted: dict[tuple[str, str, str], set[str]] = {}
        for tally in self.tallies:
            numel = sum(choice.numel for choice in tally.choices)
            for choice in tally.choices:
                modules = re.sub(r"\b\d+\b", "*", choice.name.rpartition(".")[0]) or "(root)"
                key = (modules, tally.format, choice.reason)
                row = rows.setdefault(key, ReportRow(*key))
                if choice.name not in counted.setdefault(key, set()):
                    counted[key].add(choice.name)
                    row.parameters += 1
                    row.elements += choice.numel
                share = tally.calls * choice.numel / numel
                row.sent += share * sum(tally.sent)
                row.plain += share * sum(tally.plain)
                for index, value in enumerate(tally.squares.get(choice.name, ())):
                    row.squares[index] += value
        residual_nbytes = sum(residual.nbytes for residual in self.carried.residuals)
        notes = (*self.notes, *((f"bytes held in residuals: {residual_nbytes}",) if residual_nbytes else ()))
        return Report(title, tuple(rows.values()), self._total("sent"), self._total("plain"), notes)

    def _total(self, column: str) -> Sent:
        counts: list[tuple[int, Sent]] = [(tally.calls, getattr(tally, column)) for tally in self.tallies]
        return Sent(sum(calls * s.intra for calls, s in counts), sum(calls * s.inter for calls, s in counts))


class Installation:
    """What install_ddp and install_fsdp2 return: report, state for checkpoints, uninstall."""

    def __init__(self, title: str, record: InstallationRecord, remove: Callable[[], None]) -> None:
        self._title, self._record, self._remove = title, record, remove
        self.is_installed = True
        """False after :meth:`uninstall`."""

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """Errors of quantization that the next exchanges add, keyed by parameter; empty before the first backward."""
        return tuple(self._record.carried.residuals)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank keeps from step to step, for a checkpoint.

        The values are tensors, numbers, strings and tuples. Call it between two steps, on every rank; each rank saves
        its own. The state is a copy: 1 byte for each element of the residuals.
        """
        return self._record.carried.state_dict(self._record.scaling)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank. Call it on all ranks, before the first backward.

        Residuals are restored bit for bit if the new buffers have the layout of the saved ones. Under FSDP2 they always
        have. DDP rebuilds its buckets after the first step; residuals are then moved by parameter, and encoded in int8
        again.

        Raises:
            StateError: The state belongs to another rank or world size, or has parameters that this model lacks; or
                this installation has exchanged gradients already.
        """
        self._record.carried.load_state_dict(state)

    def report(self) -> Report:
        """Return what this rank has sent since the installation; ``print`` shows a table. No communication."""
        return self._record.report(self._title)

    def uninstall(self) -> None:
        """Restore the model's own communication, bit for bit. A second call does nothing.

        Collective: every rank calls it at the same point, between two steps.
        """
        if self.is_installed:
            self.is_installed = False
            self._remove()
