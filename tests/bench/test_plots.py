"""The plots of bench/, drawn again from committed results: few curves, labels at them, one colour for each system."""

# covers bench/plot_style.py bench/comparison/figure.py bench/side_by_side/plot.py

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.end_to_end.job import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import plot_style
    from comparison import figure, records
    from side_by_side import plot, report
    from side_by_side.records import Record

RESULTS = ROOT / "bench" / "results"
RED = "#d62728"


def _of_comparison(path: Path) -> Figure:
    store = records.Store(path)
    return figure.figure_of({key: store.run(key) for key in store.values["runs"]})


def _of_convergence(model: str = "tiny", steps: int = 1500) -> Figure:
    every = Record.all_in(RESULTS / "convergence")
    alike = [one for one in every if (one.key.model, one.key.steps, one.key.outlier_at) == (model, steps, None)]
    return plot.figure_of(report.rows_of(alike), title=f"{model}-{steps}")


def test_few_curves_with_labels_and_the_same_colours() -> None:
    colours: dict[str, str] = {}
    panels = [
        panel
        for each in (
            *map(_of_comparison, sorted(RESULTS.glob("compare*.json"))),
            _of_convergence(),
            _of_convergence("main", 500),
        )
        for panel in each.axes
    ]
    assert len(panels) >= 8
    for panel in panels:
        curves, texts = panel.get_lines(), panel.texts
        assert 2 <= len(curves) <= plot_style.MAX_CURVES == 6
        assert panel.get_legend() is None
        assert sorted(text.get_text() for text in texts) == sorted(str(curve.get_label()) for curve in curves)
        assert len({(curve.get_color(), curve.get_linestyle()) for curve in curves}) == len(curves)
        for curve in curves:
            assert colours.setdefault(str(curve.get_label()), curve.get_color()) == curve.get_color()
        heights = sorted(text.get_position()[1] for text in texts)
        assert all(above - below > 0.05 for below, above in itertools.pairwise(heights))
        last = {str(curve.get_label()): curve.get_ydata()[-1] for curve in curves}
        assert [last[text.get_text()] for text in texts] == sorted(last.values()), "labels in the order of the curves"
    assert {colours[name] for name in colours if name.startswith("delta-hpz")} == {RED}
    assert plot_style.OTHER not in colours.values()


def test_ranks_alone_are_not_drawn(tmp_path: Path) -> None:
    run = records.Run(tokens=64, systems={"alone": records.System(seconds=[1.0], wire_nbytes=[0.0])})
    figure.draw({"bfloat16 users loopback": run}, tmp_path / "alone.png")
    assert list(tmp_path.iterdir()) == []


def test_the_second_panel_shows_paired_differences() -> None:
    panel = _of_convergence().axes[1]
    last = {str(curve.get_label()): curve.get_ydata()[-1] for curve in panel.get_lines()}
    assert last["bf16-zero3"] == 0
    assert last["zeropp-paper"] == pytest.approx(0.0325, abs=5e-5), "of tiny-1500.md"
