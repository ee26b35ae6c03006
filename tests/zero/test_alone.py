"""A call that one rank makes alone gives one named error on every rank within seconds; a straggler gives none."""

# covers zero/optimizer.py

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import ranks_over, run_ranks
from tests.rotation import DAY, of_the_day
from tests.zero.alone import Draw, draws, run_beside_another, run_draw
from tests.zero.slow import CASES, PLACES, Case, run_case, sleeps

SEED = DAY


@pytest.mark.parametrize("draw", list(draws(SEED, 8)), ids=lambda draw: f"seed {SEED}, {'-'.join(map(str, draw))}")
def test_a_call_of_one_rank_alone_is_a_named_error_on_all(draw: Draw, tmp_path: Path) -> None:
    run_ranks(draw.world_size, run_draw, draw, str(tmp_path))


@pytest.mark.parametrize("draw", [Draw(2, 1, "save_checkpoint", 1, 1), Draw(2, 3, "load_checkpoint", 0, 1)], ids=str)
def test_so_is_the_first_that_saves_or_loads(draw: Draw, tmp_path: Path) -> None:
    """Their first call makes a process group, for which torch.distributed waits until its timeout."""
    run_ranks(2, run_draw, draw, str(tmp_path))


@pytest.mark.parametrize(
    "draw", [Draw(2, 2, "close", 0, 3), Draw(4, 3, "close", 1, 2), *draws(SEED + 2, 2)], ids=lambda draw: f"{draw}"
)
def test_so_is_one_beside_another_optimizer(draw: Draw, tmp_path: Path) -> None:
    """The process groups are shared: they outlive an optimizer that one rank closes alone."""
    run_ranks(draw.world_size, run_beside_another, draw, str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("draw", list(draws(1, 200)), ids=lambda draw: "-".join(map(str, draw)))
def test_so_is_every_other(draw: Draw, tmp_path: Path) -> None:
    run_ranks(draw.world_size, run_draw, draw, str(tmp_path))


@pytest.mark.parametrize(
    "draw", list(draws(SEED + 1, 4)), ids=lambda draw: f"seed {SEED + 1}, {'-'.join(map(str, draw))}"
)
def test_so_is_one_in_a_job_of_nccl(draw: Draw, tmp_path: Path) -> None:
    with ranks_over("nccl"):
        run_ranks(draw.world_size, run_draw, draw, str(tmp_path), "nccl")


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_a_slow_rank_is_waited_for(case: Case, tmp_path: Path) -> None:
    _run_slow(case, 6, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", of_the_day(CASES, 2), ids=str)
def test_so_it_is_wherever_it_is_late(case: Case, tmp_path: Path) -> None:
    _run_slow(case, len(PLACES), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_so_it_is_in_every_job(case: Case, tmp_path: Path) -> None:
    _run_slow(case, len(PLACES), tmp_path)


def _run_slow(case: Case, num_places: int, folder: Path) -> None:
    """Each sleep is at least twice the bound."""
    planned = sleeps(SEED, case.world_size, 30, num_places, 0.2, 0.4)
    run_case(case, planned, 30, 0.1, str(folder))
    assert sum(len(file.read_text().splitlines()) for file in folder.glob("slept-*")) == num_places
