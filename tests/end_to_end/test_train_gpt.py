"""The main job runs as the README says; its bytes and memory are those of the formulas."""

# covers bench/contenders/alone.py

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.job import SCRIPT, TINY, losses, run_script, summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
ALL_SWITCHES = "ZeRO-3 qwZ qgZ hpZ"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("compared")
    return output, run_script(SCRIPT, *TINY, "--compare", f"--output={output}")


def test_it_learns_and_reports(compared: tuple[Path, str]) -> None:
    output, printed = compared
    column = summary(output, ALL_SWITCHES)
    assert 5.3 < column["held-out loss at start"] < 5.8  # the logarithm of 256 is 5.55
    assert column["held-out loss at end"] < column["held-out loss at start"] - 0.2
    assert (output / "loss.png").stat().st_size > 10_000
    for text in ("continuation", "final difference", "2 nodes x 2 ranks", "model states per rank, formula"):
        assert text in printed


def test_a_log_file_has_a_line_for_each_evaluation_and_explains_each_word_once(compared: tuple[Path, str]) -> None:
    _, printed = compared  # neither stream is a terminal
    steps = [line for line in printed.splitlines() if line.startswith("# step ")]
    assert [line.partition(":")[0] for line in steps] == ["# step 3 of 6", "# step 6 of 6"]
    assert all(f" {ALL_SWITCHES}: loss " in line and " plain ZeRO-3: loss " in line for line in steps)
    for word in ("ZeRO", "qwZ", "qgZ", "hpZ", "loss", "M"):
        assert sum(line.startswith(f"# {word}: ") for line in printed.splitlines()) == 1
    assert not any(line.startswith("# delta-hpZ: ") for line in printed.splitlines()), "it is in no run"


def test_zeropp_sends_a_quarter_of_plain_zero3_between_nodes(compared: tuple[Path, str]) -> None:
    output, _ = compared
    plain, formula = summary(output, "plain ZeRO-3"), summary(output, "plain ZeRO-3 bf16, formula")
    # This model is tiny, so padding to whole blocks and the control messages weigh more than in the real job.
    # Moreover, backward does not gather the embeddings and the head again, which the formula ignores.
    for key in ("between nodes, in M", "bytes per step within nodes"):
        assert 0.9 * formula[key] < plain[key] < 0.97 * formula[key]
    assert summary(output, ALL_SWITCHES)["between nodes, in M"] <= 0.27 * formula["between nodes, in M"]


def test_model_states_take_the_memory_of_the_formula(compared: tuple[Path, str]) -> None:
    output, _ = compared
    for run in (ALL_SWITCHES, "plain ZeRO-3"):
        column = summary(output, run)
        assert column["model states per rank"] == pytest.approx(column["model states per rank, formula"], rel=0.05)


def test_the_same_run_twice_gives_the_same_bits(compared: tuple[Path, str], stands_in_for_two: Path) -> None:
    # The run without communication: its contender changes nothing else either.
    assert len(losses(stands_in_for_two, ALL_SWITCHES)) > 2
    assert losses(stands_in_for_two, ALL_SWITCHES) == losses(compared[0], ALL_SWITCHES)
