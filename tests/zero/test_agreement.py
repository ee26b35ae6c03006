"""An error of one rank is raised on every rank: alone, nested, and while another is handled."""

# covers zero/_ranks/rank_errors.py

from __future__ import annotations

import gc
import weakref

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


class _Large:
    """Stands for tensors that a failed call has held."""


def _check_freed(rank: int, failing: int) -> None:
    gc.disable()
    try:
        held: list[weakref.ref[_Large]] = []

        def fail() -> None:
            large = _Large()
            held.append(weakref.ref(large))
            if rank < failing:
                raise StateError(f"of rank 0, which has {large}")

        with pytest.raises(StateError, match="of rank 0"):
            on_every_rank(fail, None)
        assert [each() for each in held] == [None] * len(held), "kept by a cycle of error, traceback and frame"
    finally:
        gc.enable()


@pytest.mark.parametrize("failing", [1, 2])
def test_what_a_failed_call_has_held_is_freed_without_the_collector(failing: int) -> None:
    run_ranks(2, _check_freed, failing)
