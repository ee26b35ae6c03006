"""Simulated ranks: the real code at world sizes that no test can start, and limits of its cost there."""

# covers zcomm/_bench/emulated_nodes.py zcomm/_bench/harness.py zcomm/_bench/interface.py

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HIDDEN, LAYERS = 256, 3
NUMEL = LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + (2 * 256 + 128 + 2) * HIDDEN


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module, which imports others of its folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import simulate

    return simulate


def test_a_step_of_64_ranks(simulate: Any) -> None:
    """The bytes are those of the ZeRO paper's analysis, apart from padding and agreements."""
    row = simulate.simulate(LAYERS, HIDDEN, "stage 3", 64)
    assert row.numel == NUMEL
    assert row.states_nbytes == pytest.approx((2 + 4 + 12) * NUMEL / 64, rel=0.05)
    assert row.sent_nbytes == pytest.approx(3 * 2 * NUMEL * 63 / 64, rel=0.05)


@pytest.mark.parametrize("setup", ["stage 2", "ZeRO++", "delta-hpZ"])
def test_a_step_has_no_loop_over_the_ranks(simulate: Any, setup: str) -> None:
    few, many = (simulate.simulate(1, HIDDEN, setup, world_size) for world_size in (64, 1024))
    assert many.num_exchanges == few.num_exchanges
    assert many.num_kernels == few.num_kernels
    assert many.num_calls < 1.02 * few.num_calls
