"""The plot of ``zcomm bench --plot``: bus bandwidth by size, a panel for each collective, a line for each format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PANEL_INCHES = (5.0, 3.6)


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw ``rows`` into the file ``path``; its suffix chooses the image format."""
    from matplotlib.figure import Figure

    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    columns = max(len(collectives), 1)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1]), layout="constrained")
    for index, collective in enumerate(collectives):
        panel = figure.add_subplot(1, columns, index + 1)
        mine = [row for row in rows if row["collective"] == collective]
        for label in dict.fromkeys(_label(row) for row in mine):
            points = [(row["nbytes"], row["busbw_gbps"]) for row in mine if _label(row) == label]
            style = "k--" if label == "torch" else "o-"
            panel.plot(*zip(*points, strict=True), style, label=label, markersize=3)
        panel.set(title=collective, xlabel="size of the full tensor (bytes)", xscale="log", yscale="log")
        panel.set_ylabel("bus bandwidth (GB/s)")
        panel.grid(visible=True, which="major", alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _label(row: dict[str, Any]) -> str:
    if row["format"] == "torch":
        return "torch"
    return f"{row['format']}, {row['hops']} hop{'s' if row['hops'] != 1 else ''}"
