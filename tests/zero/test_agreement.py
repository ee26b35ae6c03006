"""An error of one rank is raised on every rank: alone, nested, and while another is handled."""

# covers zero/_ranks/rank_errors.py

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from zcomm import StateError
from zero._ranks.rank_errors import on_every_rank


def _check(rank: int) -> None:
    def fail_on(failing: int) -> int:
        if rank == failing:
            raise StateError(f"of rank {failing}")
        return rank

    assert on_every_rank(lambda: fail_on(9), None) == rank
    with pytest.raises(StateError, match="of rank 1"):
        on_every_rank(lambda: fail_on(1), None)
    with pytest.raises(StateError, match="of rank 0"):  # the ranks have agreed on it once
        on_every_rank(lambda: on_every_rank(lambda: fail_on(0), None), None)

    def recover(failing: int) -> None:
        try:
            on_every_rank(lambda: fail_on(0), None)
        except StateError:
            on_every_rank(lambda: fail_on(failing), None)
            raise

    with pytest.raises(StateError, match="of rank 1"):
        recover(1)
    with pytest.raises(StateError, match="of rank 0"):
        recover(9)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    run_ranks(2, _check)
