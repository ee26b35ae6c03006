"""How the plots of bench/ look: one colour for each system, and labels at the ends of curves instead of a legend."""

from __future__ import annotations

from matplotlib.axes import Axes

__all__ = ["MAX_CURVES", "label_curves", "style_of"]

MAX_CURVES = 6
"""Readers cannot tell more curves of a panel apart."""
COLOURS = {
    "delta-hpz": "#d62728",
    "zeropp-paper": "#8c564b",
    "zero++": "#ff7f0e", "zeropp": "#ff7f0e", "qwz": "#ff7f0e", "qgz": "#ff7f0e",
    "zero stage": "#2ca02c", "bf16-zero3": "#2ca02c", "plain zero": "#2ca02c",
    "fsdp2": "#1f77b4",
    "hsdp": "#17becf",
    "powersgd": "#393b79",
    "diloco": "#8c6d31",
    "deepspeed": "#9467bd",
    "ddp": "#7f7f7f",
    "accurate": "#bcbd22",
    "smallest": "#e377c2",
}  # fmt: skip
"""Colour by a part of the system's name, in lower case; the first that occurs counts."""
OTHER = "#000000"
GAP = 0.055
"""Least distance of two labels, in heights of the panel."""


def style_of(system: str) -> dict[str, str]:
    """Return the style of ``system``: dashed if it accumulates micro-batches, dotted with exact changes or Muon.

    Of both kinds if gradients are coded, too. The larger of two numbers is dashed.
    """
    colour = next((colour for part, colour in COLOURS.items() if part in system.lower()), OTHER)
    dashes = {"x4": "--", "exact": ":", "muon": ":", "0.15": "-.", "16": "--", "50": "--"}
    return {"color": colour, "linestyle": next((dash for end, dash in dashes.items() if system.endswith(end)), "-")}


def label_curves(panel: Axes) -> None:
    """Write each curve's label to the right of the panel, in its colour, with a line from the curve's last point.

    Scales and limits must be set before, as labels are placed by them.
    """
    _ = panel.get_xlim(), panel.get_ylim()  # or the limits would not yet include the curves
    to_panel = panel.transData + panel.transAxes.inverted()
    curves = [line for line in panel.get_lines() if not str(line.get_label()).startswith("_")]
    ends = {line: (float(line.get_xdata()[-1]), float(line.get_ydata()[-1])) for line in curves}
    curves.sort(key=lambda line: to_panel.transform(ends[line])[1])
    heights = _spread([to_panel.transform(ends[line])[1] for line in curves])
    for line, height in zip(curves, heights, strict=True):
        panel.annotate(
            str(line.get_label()), ends[line], xytext=(1.04, height), textcoords="axes fraction",
            color=line.get_color(), fontsize="small", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.5, "relpos": (0, 0.5)},
        )  # fmt: skip


def _spread(heights: list[float]) -> list[float]:
    """Move ascending ``heights`` apart to :data:`GAP`: groups that are too close stay around their mean."""
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _middle(groups[-1]) - _middle(groups[-2]) < GAP * _reach(groups[-2], groups[-1]):
            last = groups.pop()
            groups[-1] += last
    apart = [_middle(group) + GAP * (index - (len(group) - 1) / 2) for group in groups for index in range(len(group))]
    return [max(height, GAP * index) for index, height in enumerate(apart)]  # not below the panel, where the ticks are


def _middle(group: list[float]) -> float:
    return sum(group) / len(group)


def _reach(lower: list[float], upper: list[float]) -> float:
    """Gaps between the middles of two groups that touch."""
    return (len(lower) + len(upper)) / 2
