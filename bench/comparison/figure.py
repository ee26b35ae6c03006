"""Plot the results of compare.py: tokens/s against the rate of the network, a panel for each precision and batch.

A panel has a curve for each kind of system: of those measured on the most networks, the one that is fastest on the
slowest. The tables have them all. Where no other library was measured, or one kind alone, there is no panel.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from contenders.catalogue import INEXACT
from matplotlib.figure import Figure
from plot_style import label_curves, style_of

from comparison.records import Run
from comparison.tables import Key, rate_mbit, rows_of

__all__ = ["draw", "figure_of"]

PANEL_INCHES = (6.5, 4.2)
KINDS = ("ddp", "fsdp2", "hsdp", "deepspeed", "zero++", "delta-hpz")
"""What the systems' names begin with."""


def fastest_of_kinds(networks: list[list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Return tokens/s on each network of one system of each of :data:`KINDS`; nan where it was not measured.

    ``networks``: their rows, the slowest first. A system that trains to another loss is none of them.
    """
    speeds: dict[str, list[float]] = {}
    for place, rows in enumerate(networks):
        for row in rows:
            if "tokens_per_s" in row and row["system"] not in INEXACT:
                speeds.setdefault(row["system"], [math.nan] * len(networks))[place] = row["tokens_per_s"]

    def rank(name: str) -> tuple[int, float]:
        measured = [speed for speed in speeds[name] if not math.isnan(speed)]
        return len(measured), measured[0]

    of_kinds = [[name for name in speeds if name.startswith(kind)] for kind in KINDS]
    chosen = [max(names, key=rank) for names in of_kinds if names]
    return {name: speeds[name] for name in chosen}


def figure_of(runs: dict[Key, Run]) -> Figure:
    """Make a panel for each precision, batch and number of micro-batches; loopback is right of the fastest rate."""
    panels: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for key in sorted(runs, key=lambda key: rate_mbit(key.rpartition(" ")[2])):
        name, _, network = key.rpartition(" ")
        for row in rows_of(key, runs, {}):
            panels.setdefault((name, row["accumulation"]), {}).setdefault(network, []).append(row)
    panels = {which: networks for which, networks in panels.items() if _has_several(list(networks.values()))}
    figure = Figure(figsize=(PANEL_INCHES[0] * len(panels), PANEL_INCHES[1]), layout="constrained")
    for index, ((name, accumulation), networks) in enumerate(panels.items()):
        panel = figure.add_subplot(1, len(panels), index + 1)
        for system, speeds in fastest_of_kinds(list(networks.values())).items():
            measured = [place for place, speed in enumerate(speeds) if not math.isnan(speed)]
            span = slice(measured[0], measured[-1] + 1)
            panel.plot(
                range(len(networks))[span], speeds[span], marker="o", markersize=3, label=system, **style_of(system)
            )
        title = f"{name}, {'one batch' if accumulation == 1 else f'{accumulation} batches'} a step"
        panel.set_xticks(range(len(networks)), list(networks))
        panel.set(title=title, xlabel="rate of a node's network", ylabel="tokens/s", yscale="log")
        panel.grid(visible=True, alpha=0.3)
        label_curves(panel)
    return figure


def _has_several(networks: list[list[dict[str, Any]]]) -> bool:
    has_peer = any(row["system"].startswith(KINDS[:4]) and "tokens_per_s" in row for row in networks[0])
    return has_peer and len(fastest_of_kinds(networks)) > 1


def draw(runs: dict[Key, Run], path: Path) -> None:
    """Write :func:`figure_of` to the file ``path``, unless no other library was measured."""
    figure = figure_of(runs)
    if figure.axes:
        figure.savefig(path, dpi=120)
