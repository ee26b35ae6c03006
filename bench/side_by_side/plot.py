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
    BASELINE, "zeropp", "accurate", "smallest", "delta-hpz-exact", "delta-hpz-exact-0.15", "zeropp-x4", "bf16-zero3-x4",
)  # fmt: skip
"""What the second row of panels shows, if there is more than the first can: formats of ZeRO++, exact changes."""
OTHERS = ("muon", "powersgd", "diloco")
"""Parts of the names of what has rows of its own: another optimizer, and systems that train to another loss."""
PANEL_INCHES = (6.5, 4.0)


def figure_of(rows: Sequence[Row], *, title: str) -> Figure:
    """Make two panels for each kind of rows that there are, with at most six curves in each, means over seeds.

    The evaluation of random weights is left out. Without the baseline the second panel shows the loss by steps.
    """
    finished = [row for row in rows if row.finished]
    baseline = next((row for row in finished if row.name == BASELINE), None)
    groups = _groups(finished)
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
            steps, shown = (steps, losses) if baseline is None else _paired(row, baseline)
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


def _paired(row: Row, baseline: Row) -> tuple[list[int], list[float]]:
    """The mean over seeds of the differences of two runs of one seed, at each step that both have evaluated."""
    others = {record.key.seed: dict(record.held_out_losses) for record in baseline.finished}
    pairs = [(dict(one.held_out_losses), others[one.key.seed]) for one in row.finished if one.key.seed in others]
    steps = [step for step in pairs[0][0] if step and all(step in other for _, other in pairs)]
    return steps, [statistics.fmean(own[step] - other[step] for own, other in pairs) for step in steps]


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one kind, the baseline among them."""
    baseline, apart = [row for row in rows if row.name == BASELINE], [row for row in rows if _kind(row.name)]
    usual = [row for row in rows if not _kind(row.name)]
    main = [row for row in usual if row.name not in RECIPES or row.name in RECIPES[:2]]
    recipes = [row for row in usual if row.name in RECIPES]
    groups = [main] if main else []
    if {row.name for row in recipes} - set(RECIPES[:2]):
        groups.append(recipes)
    for kinds in (OTHERS[:1], OTHERS[1:]):
        if some := [row for row in apart if _kind(row.name) in kinds]:
            groups.append([*baseline, *some])
    return groups


def _kind(name: str) -> str:
    return next((part for part in OTHERS if part in name), "")


def _seeds(rows: Sequence[Row]) -> str:
    counts = sorted({len(row.finished) for row in rows})
    return "one seed" if counts == [1] else f"mean over {' to '.join(map(str, counts))} seeds"
