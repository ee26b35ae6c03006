"""The plot of convergence.py: held-out loss against steps, and against bytes between nodes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from side_by_side.report import Row

__all__ = ["draw"]


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Plot a line for each configuration, the mean over its seeds, without the evaluation of random weights."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    by_steps, by_bytes = figure.subplots(1, 2, sharey=True)
    for row in rows:
        if not row.finished:
            continue
        steps = [step for step, _ in row.finished[0].held_out_losses][1:]
        of_seeds = [[loss for _, loss in record.held_out_losses][1:] for record in row.finished]
        losses = [statistics.fmean(at) for at in zip(*of_seeds, strict=True)]
        sent = [nbytes / 1e6 for nbytes in row.finished[0].inter_nbytes][1:]
        by_steps.plot(steps, losses, label=row.name, linewidth=1)
        by_bytes.plot(sent, losses, label=row.name, linewidth=1)
    by_steps.set(xlabel="step", ylabel="held-out loss (nats/byte)", title=title)
    by_bytes.set(xlabel="sent between nodes (MB)", xscale="log", title="the same by bytes between nodes")
    by_bytes.legend(fontsize="small")
    for panel in (by_steps, by_bytes):
        panel.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
