"""The table in docs/design/schedule.md agrees with what 4 ranks record; released layers use no memory."""

# covers bench/contenders/job.py bench/one_step.py

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from tests.end_to_end.job import ROOT
from tests.ranks import run_ranks, topology

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "bench"))
    import one_step

NUM_RANKS, NUMEL = 4, one_step.WIDTH**2
ITEM_NBYTES = 4


def _printed() -> str:
    page = (ROOT / "docs" / "design" / "schedule.md").read_text()
    (table,) = re.findall(r"<!-- one step: .*?-->\n(.*?)<!-- end of one step -->", page, re.DOTALL)
    return str(table)


def _check_the_recorded_step(rank: int) -> None:
    events, owned = one_step.record(topology(NUM_RANKS))
    quarter = NUMEL // NUM_RANKS
    assert owned == [(rank * quarter, (rank + 1) * quarter)] * one_step.NUM_LAYERS
    owners = [[(r * quarter, (r + 1) * quarter)] for r in range(dist.get_world_size())]
    assert one_step.table(events, owners) == _printed(), "run bench/one_step.py"
    for event in events:
        if event.does == "releases":
            assert event.nbytes[event.layer] == ITEM_NBYTES, "one element stands for the shape"
            assert not event.is_incoming[event.layer]
        if event.does.startswith("uses"):
            assert event.nbytes[event.layer] == NUMEL * ITEM_NBYTES
        assert sum(nbytes > ITEM_NBYTES for nbytes in event.nbytes) <= 1, "one layer is full at a time"
    assert {e.layer for e in events if e.does == "releases"} == set(range(one_step.NUM_LAYERS))
    for first_or_last in (events[0], events[-1]):
        assert set(first_or_last.nbytes) == {ITEM_NBYTES}
        assert not any(first_or_last.is_incoming)


def test_the_table_of_the_page_is_recorded() -> None:
    run_ranks(NUM_RANKS, _check_the_recorded_step)
