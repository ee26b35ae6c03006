"""The plot of convergence.py: held-out loss against bytes between nodes, and how far it is from the baseline's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from plot_style import label_curves, style_of

from side_by_side.configurations import BASELINE
from side_by_side.report import Row

__all__ = ["draw", "figure_of"]

RECIPES = (
    BASELINE,
    "zeropp",
    "accurate",
    "smallest",
    "delta-hpz-exact",
    "delta-hpz-exact-0.15",
    "zeropp-x4",
    "bf16-zero3-x4",
)
"""What the second row of panels shows, if there is more than the first can: formats of ZeRO++, exact changes."""
PANEL_INCHES = (6.5, 4.0)


def figure_of(rows: Sequence[Row], *, title: str) -> Figure:
    """Make two panels, or four if there are recipes: at most six curves in each, means over seeds.

    The evaluation of random weights is left out. Without the baseline the second panel shows the loss by steps.
    """
    finished = [row for row in rows if row.finished]
    baseline = next((row for row in finished if row.name == BASELINE), None)
    main = [row for row in finished if row.name not in RECIPES or row.name in RECIPES[:2]]
    recipes = [row for row in finished if row.name in RECIPES]
    groups = [main, recipes] if {row.name for row in recipes} - set(RECIPES[:2]) else [main]
    width, height = PANEL_INCHES
    figure = Figure(figsize=(2 * width, height * len(groups)), layout="constrained")
    for index, group in enumerate(groups):
        by_bytes = figure.add_subplot(len(groups), 2, 2 * index + 1)
        by_steps = figure.add_subplot(len(groups), 2, 2 * index + 2)
        for row in group:
            steps = [step for step, _ in row.finished[0].held_out_losses][1:]
            sent = [nbytes / 1e6 for nbytes in row.finished[0].inter_nbytes][1:]
            losses = _means([_losses(record.held_out_losses) for record in row.finished])
            by_bytes.plot(sent, losses, label=row.name, linewidth=1.2, **style_of(row.name))
            shown = losses if baseline is None else _paired(row, baseline)
            by_steps.plot(steps, shown, label=row.name, linewidth=1.2, **style_of(row.name))
        by_bytes.set(xlabel="sent between nodes (MB)", xscale="log", ylabel="held-out loss (nats/byte)", title=title)
        ylabel = "held-out loss (nats/byte)" if baseline is None else f"held-out loss minus that of {BASELINE}"
        by_steps.set(xlabel="step", ylabel=ylabel, title=f"{title}, {_seeds(group)}")
        for panel in (by_bytes, by_steps):
            panel.grid(visible=True, alpha=0.3)
            label_curves(panel)
    return figure


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Write :func:`figure_of` to the file ``path``."""
    figure_of(rows, title=title).savefig(path, dpi=120)


def _losses(held_out: Sequence[tuple[int, float]]) -> list[float]:
    return [loss for _, loss in held_out][1:]


def _means(of_seeds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(at) for at in zip(*of_seeds, strict=True)]


def _paired(row: Row, baseline: Row) -> list[float]:
    """The mean over seeds of the differences of two runs of one seed, at each evaluation."""
    others = {record.key.seed: _losses(record.held_out_losses) for record in baseline.finished}
    return _means([
        [own - other for own, other in zip(_losses(record.held_out_losses), others[record.key.seed], strict=True)]
        for record in row.finished
        if record.key.seed in others
    ])  # fmt: skip


def _seeds(rows: Sequence[Row]) -> str:
    counts = sorted({len(row.finished) for row in rows})
    return "one seed" if counts == [1] else f"mean over {' to '.join(map(str, counts))} seeds"
