"""The records and the table of ``bench/convergence.py``, and the errors it measures, without ranks."""

# covers bench/comparison/__init__.py bench/comparison/records.py

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the modules, which import each other as scripts of one folder."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from side_by_side import errors, records, report

    class Modules:
        pass

    Modules.errors, Modules.records, Modules.report = errors, records, report
    return Modules


def _finished(parts: Any, name: str, seed: int, loss: float) -> Any:
    key = parts.records.Key("tiny", name, seed, 100)
    weights = [(20, {"weights": 0.002, "rounding": 0.0017}), (100, {"weights": 0.0024, "rounding": 0.0016})]
    return parts.records.Record(
        key, "command", "versions", "2x2", numel=500, steps_done=100, held_out_losses=[(0, 5.5), (100, loss)],
        inter_nbytes_per_step=700 + 30 * seed, weight_errors=weights, gradient_errors=[(20, 0.1), (100, 0.3)],
        seconds=5.0,
    )  # fmt: skip


def test_differences_are_between_runs_of_the_same_seed(parts: Any) -> None:
    losses = {"bf16-zero3": {1: 2.0, 2: 3.0, 4: 9.0}, "zeropp": {1: 2.01, 2: 3.03, 3: 7.0}, "accurate": {1: 2.5}}
    records = [_finished(parts, name, *of) for name, each in losses.items() for of in each.items()]
    refused = parts.records.Record(parts.records.Key("tiny", "delta-hpz", 1, 100), "c", "v", "2x2", error="Not: yet")
    text = parts.report.table(parts.report.rows_of([refused, *records]))
    rows = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines()}
    assert rows["zeropp"][2] == "+0.0200 ± 0.0100 (2 seeds)", "of +0.01 and +0.03: a deviation of 0.0141, by sqrt(2)"
    assert rows["zeropp"][:2] == ["3", "4.0133 ± 1.5221"], "a deviation of 2.6363, by sqrt(3)"
    assert rows["bf16-zero3"][2] == "baseline"
    assert rows["accurate"][1:3] == ["2.5000", "+0.5000 (one seed)"]
    assert rows["zeropp"][3:] == ["0.760", "0.2000", "0.00200", "0.00240", "0.00160", "1.20", "50"]
    assert rows["delta-hpz"][:2] == ["0", "Not: yet"]
    assert list(rows)[2:] == ["bf16-zero3", "zeropp", "accurate", "delta-hpz"]


def test_muon_has_a_baseline_of_its_own_and_nodes_apart_have_no_errors(parts: Any) -> None:
    losses = {"bf16-zero3": 2.0, "bf16-zero3-muon": 1.0, "delta-hpz-muon": 1.25, "diloco-10": 2.5}
    records = [_finished(parts, name, 1, loss) for name, loss in losses.items()]
    records[-1].weight_errors, records[-1].gradient_errors = [], []
    text = parts.report.table(parts.report.rows_of(records))
    rows = {line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]] for line in text.splitlines()}
    assert [rows[name][2] for name in losses] == ["baseline", "baseline", "+0.2500 (one seed)", "+0.5000 (one seed)"]
    assert rows["diloco-10"][4:] == ["-", "-", "-", "-", "-", "50"]


def test_records_are_the_same_from_their_files_and_failures_are_not_finished(parts: Any, tmp_path: Path) -> None:
    record = _finished(parts, "zeropp", 2, 1.5)
    record.write(tmp_path)
    again = parts.records.Record.read(record.key, tmp_path)
    assert again.is_finished
    assert again.key == record.key
    assert again.held_out_losses == [[0, 5.5], [100, 1.5]]
    again.error = "OSError: no"
    assert not again.is_finished
    other = parts.records.Key("tiny", "zeropp", 2, 100, outlier_at=20)
    assert parts.records.Record.read(other, tmp_path) is None
    assert len(parts.records.Record.all_in(tmp_path)) == 1


class _OffBy:
    """An engine whose gradients and weights are wrong by known factors."""

    def __init__(self, model: nn.Module, exact: dict[str, Tensor], factor: float) -> None:
        self.model = model
        self._exact, self._factor = exact, factor

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        name = next(name for name, own in self.model.named_parameters() if own is param)
        return self._exact[name] * self._factor if name != "1.bias" else None

    def master(self, param: nn.Parameter) -> Tensor:
        return param.detach() * self._factor


def test_errors_are_relative_to_what_is_exact(parts: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with parts.errors.read_by_forward(model) as seen:
        model(torch.ones(2, 4))
        with torch.no_grad():
            model[0].weight.mul_(2)
        model(torch.ones(2, 4))
    assert torch.equal(seen["0.weight"] * 2, model[0].weight.detach())  # the first forward's
    assert set(seen) == {name for name, _ in model.named_parameters()}
    exact = {name: torch.full_like(param, 2.0) for name, param in model.named_parameters()}
    engine = _OffBy(model, exact, 1.5)
    missing, numel = 1, sum(x.numel() for x in exact.values())
    squares = (numel - missing) * 1.0**2 + missing * 2.0**2  # a gradient that is not there counts as zero
    assert parts.errors.gradient_error(engine, exact) == pytest.approx(math.sqrt(squares / (numel * 2.0**2)))
    with torch.no_grad():
        model[0].weight.div_(2)
    errors = parts.errors.weight_errors(engine, seen)
    assert errors["weights"] == pytest.approx(0.5 / 1.5, rel=1e-6)
    assert errors["rounding"] == 0  # what was seen is float32, as the masters are
