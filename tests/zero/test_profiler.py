"""torch.profiler shows the phases of a step."""

# covers zero/_sharding/phases.py

from __future__ import annotations

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.training import train, zero_optimizer


def _check_ranges(rank: int, stage: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=stage, stage3_param_persistence_threshold=0) as optimizer:
        train(model, optimizer, rank, steps=1)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            train(model, optimizer, rank, steps=2)
    found = {event.key: event for event in trace.key_averages()}
    assert found["Optimizer.step#ZeroOptimizer.step"].count == 2
    assert found["zero.reduce"].count >= 2
    assert found["zero.gather"].count >= (2 * 2 * len(model.blocks) if stage == 3 else 2)
    assert found["zero.gather"].cpu_time_total > 0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_trace_has_the_phases(stage: int) -> None:
    run_ranks(2, _check_ranges, stage)
