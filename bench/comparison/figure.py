"""Plot the results of compare.py: tokens/s against the rate of the network, one line for each system."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from comparison.records import Run
from comparison.tables import LOOPBACK, Key, rows_of

__all__ = ["draw"]

UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
PANEL_INCHES = (7.0, 4.5)


def rate_mbit(network: str) -> float | None:
    """Parse a rate in the notation of tc, ``200mbit``; None for loopback, which has no rate."""
    unit = next((unit for unit in UNITS if network.endswith(unit)), None)
    return None if network == LOOPBACK or unit is None else float(network.removesuffix(unit)) * UNITS[unit]


def draw(runs: dict[Key, Run], path: Path) -> None:
    """Plot a panel for each precision and batch, with loopback to the right of the fastest rate."""
    panels = list(dict.fromkeys(key.rpartition(" ")[0] for key in runs))
    figure = Figure(figsize=(PANEL_INCHES[0] * len(panels), PANEL_INCHES[1]), layout="constrained")
    for index, name in enumerate(panels):
        panel = figure.add_subplot(1, len(panels), index + 1)
        networks = {key.rpartition(" ")[2]: key for key in runs if key.rpartition(" ")[0] == name}
        order = sorted(networks, key=lambda network: rate_mbit(network) or float("inf"))
        lines: dict[str, list[tuple[int, float]]] = {}
        for place, network in enumerate(order):
            for row in rows_of(networks[network], runs, {}):
                if "tokens_per_s" in row:
                    lines.setdefault(row["system"], []).append((place, row["tokens_per_s"]))
        for number, (system, points) in enumerate(lines.items()):
            style = ("o-", "s--", "^:")[number // 10 % 3]  # the colours repeat after ten
            panel.plot(*zip(*points, strict=True), style, label=system, linewidth=1, markersize=3)
        panel.set_xticks(range(len(order)), order)
        panel.set(title=name, xlabel="rate of a node's network", ylabel="tokens/s", yscale="log")
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=120)
