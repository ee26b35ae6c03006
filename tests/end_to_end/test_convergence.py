"""``bench/convergence.py`` at miniature size: its measurements, resuming after a stop, and its table."""

# covers bench/contenders/ddp.py bench/contenders/job.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT
from tests.forks import run_on_forks

SCRIPT = str(ROOT / "bench" / "convergence.py")
SHORT = ["--model=test", "--steps=6", "--eval-interval=3", "--seeds=1"]
ADAM = ["fp32-ddp", "bf16-zero3", "zeropp", "delta-hpz"]
MUON = ["bf16-zero3-muon", "delta-hpz-muon"]
WHOLE = [*ADAM, *MUON, "delta-hpz-exact"]
STOPPED = ["delta-hpz", "delta-hpz-muon"]
TIMES = {"command", "seconds"}
"""The columns that differ between two equal runs."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run, the same run in two parts, and one with an outlier."""
    folder = tmp_path_factory.mktemp("convergence")
    once = [SCRIPT, *SHORT, f"--results={folder / 'once'}", f"--checkpoints={folder / 'once_checkpoints'}", "--only"]
    parts = [SCRIPT, *SHORT, f"--results={folder / 'parts'}", f"--checkpoints={folder / 'checkpoints'}", "--minutes=0"]
    in_parts = [[*parts, "--only", *STOPPED] for _ in range(len(STOPPED) + 1)]
    tuned = [*once, "delta-hpz-exact", "--model=test-tuned"]
    run_on_forks(4, [[*once, *WHOLE], *in_parts, [*once, "bf16-zero3", "--outlier-at=4"], tuned], cwd=ROOT)
    return folder


def _run(folder: Path, name: str, suffix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / f"test-6-{name}-seed1{suffix}.json").read_text())
    return values


def test_what_is_measured(folder: Path) -> None:
    ddp, plain, zeropp, delta = (_run(folder / "once", name) for name in ADAM)
    for run in (ddp, plain, zeropp, delta):
        assert not run["error"]
        assert str(folder) not in run["command"], "where it is kept is not what was run"
        assert [step for step, _ in run["held_out_losses"]] == [0, 3, 6]
        losses = [loss for _, loss in run["held_out_losses"]]
        assert 5.3 < losses[0] < 5.8  # the logarithm of 256 is 5.55
        assert losses[-1] < losses[0] - 0.5
    model_nbytes = 2 * plain["numel"]
    # Backward gathers neither embeddings nor the head, which are much of so small a model.
    assert 2.5 * model_nbytes < plain["inter_nbytes_per_step"] < 2.8 * model_nbytes
    assert zeropp["inter_nbytes_per_step"] < 0.27 * 3 * model_nbytes
    assert delta["inter_nbytes_per_step"] < 0.58 * model_nbytes
    of_six = 6 * delta["inter_nbytes_per_step"]  # an evaluation does not change the bytes of later steps
    assert delta["inter_nbytes"][-1] == pytest.approx(of_six, rel=0.01)
    whole, after_evaluation = zeropp["inter_nbytes_per_step"], zeropp["inter_nbytes"][-1] - zeropp["inter_nbytes"][0]
    assert 5 * whole > after_evaluation > 4 * whole  # 2 of 6 steps start with what an evaluation has gathered
    assert max(error for _, error in ddp["gradient_errors"]) < 1e-6
    assert 0.0005 < plain["gradient_errors"][-1][1] < 0.005  # bf16 has 8 bits
    assert 0.05 < zeropp["gradient_errors"][-1][1] < 0.25  # int4 twice
    step, errors = plain["weight_errors"][-1]
    assert step == 6
    assert errors["weights"] == errors["rounding"]
    assert 0.0005 < errors["rounding"] < 2**-8
    assert zeropp["weight_errors"][-1][1]["weights"] > 1.5 * errors["rounding"]


def test_exact_changes_cost_their_entropy_and_tuning_starts_from_a_trained_model(folder: Path) -> None:
    scratch = _run(folder / "once", "delta-hpz-exact")
    tuned = json.loads((folder / "once" / "test-tuned-6-delta-hpz-exact-seed1.json").read_text())
    assert scratch["held_out_losses"][0][1] > 5.3
    assert tuned["held_out_losses"][0][1] < 4
    assert abs(tuned["held_out_losses"][-1][1] - tuned["held_out_losses"][0][1]) < 0.05
    for run, most in ((scratch, 9.0), (tuned, 1.5)):
        assert [step for step, _ in run["change_entropies"]] == [3, 6]
        bits = sum(bits for _, bits in run["change_entropies"]) / 2
        assert 0.1 < bits < most
        of_changes = 8 * run["inter_nbytes_per_step"] / run["numel"] - 4.27  # gradients in 4 bits, with scales
        assert of_changes == pytest.approx(bits, rel=0.1, abs=0.4), "a message of so few elements has a long head"
    text = (folder / "once" / "test-tuned-6.md").read_text()
    assert f"changes have {bits:.3f} bits an element, the mean of 2 steps" in text


def test_muon_trains_at_the_bytes_of_adam(folder: Path) -> None:
    for name in MUON:
        run, adam = _run(folder / "once", name), _run(folder / "once", name.removesuffix("-muon"))
        assert not run["error"]
        assert run["held_out_losses"][0] == adam["held_out_losses"][0]  # the same model on the same text
        assert run["held_out_losses"][-1][1] < run["held_out_losses"][0][1] - 0.5
        assert run["held_out_losses"][-1] != adam["held_out_losses"][-1]
        assert run["inter_nbytes_per_step"] == pytest.approx(adam["inter_nbytes_per_step"], rel=0.02)


def test_a_run_in_parts_is_the_same_run(folder: Path) -> None:
    for name in STOPPED:
        whole, parts = _run(folder / "once", name), _run(folder / "parts", name)
        assert whole["steps_done"] == parts["steps_done"] == 6
        assert set(whole) == set(parts)
        for key in set(whole) - TIMES:
            if key == "inter_nbytes":  # the first step after a resume repeats gathers of the last evaluation
                assert whole[key] == pytest.approx(parts[key], rel=0.2)
            else:
                assert whole[key] == parts[key]
    assert not any((folder / "checkpoints").iterdir())


def test_an_outlier_disturbs_its_step_and_the_later_ones(folder: Path) -> None:
    plain, disturbed = (_run(folder / "once", "bf16-zero3", end)["held_out_losses"] for end in ("", "-outlier4"))
    assert plain[:2] == disturbed[:2]
    assert all(a != b for a, b in zip(plain[2:], disturbed[2:], strict=True))


def test_the_table_has_a_row_for_each(folder: Path) -> None:
    text = (folder / "once" / "test-6.md").read_text()
    rows = {cells[0]: cells for cells in (line.strip("| ").split(" | ") for line in text.splitlines() if "|" in line)}
    assert set(WHOLE) < set(rows)
    assert rows["bf16-zero3"][3] == "baseline"
    difference = _run(folder / "once", "zeropp")["held_out_losses"][-1][1]
    difference -= _run(folder / "once", "bf16-zero3")["held_out_losses"][-1][1]
    mean, _, seeds = rows["zeropp"][3].partition(" ")
    assert float(mean) == pytest.approx(difference, abs=1e-4)
    assert seeds == "(one seed)"
    assert "python bench/convergence.py --model=test" in text
    assert (folder / "once" / "test-6.png").stat().st_size > 10_000
