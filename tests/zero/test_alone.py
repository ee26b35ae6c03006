"""A call that one rank makes alone is one named error on every rank within seconds; a slow rank is none."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from tests.ranks import ranks_over, run_ranks
from tests.zero.alone import Draw, draws, run_draw, run_slow

SEED = date.today().toordinal()


@pytest.mark.parametrize("draw", list(draws(SEED, 8)), ids=lambda draw: f"seed {SEED}, {'-'.join(map(str, draw))}")
def test_a_call_of_one_rank_alone_is_a_named_error_on_all(draw: Draw, tmp_path: Path) -> None:
    run_ranks(draw.world_size, run_draw, draw, str(tmp_path))


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


@pytest.mark.parametrize("stage", [1, 3])
def test_a_slow_rank_is_waited_for(stage: int) -> None:
    run_ranks(2, run_slow, stage, SEED, 30, 0.4)
