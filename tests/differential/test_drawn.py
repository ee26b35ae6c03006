"""Twenty random training programs a day equal one process; ``python -m tests.differential`` repeats any of them."""

# covers zcomm/__init__.py

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from tests.conftest import SUMMARY_LINE
from tests.differential.programs import HOOKS, KINDS, Block, Program, draw, features
from tests.differential.run import LIMITS, TOLERANCE, largest_difference, run
from tests.differential.training import plain

SEED = int(os.environ.get("ZERO_PROGRAMS") or datetime.now(timezone.utc).strftime("%Y%m%d"))
COUNT = 20
OUTCOMES: Counter[str] = Counter()


@pytest.mark.parametrize("number", range(COUNT))
def test_equals_one_process(number: int) -> None:
    program = draw(SEED, number)
    result = run(program)
    OUTCOMES[result.outcome] += 1
    assert result.outcome != "failed", f"{program}\n{result.text}"


def test_few_are_refused(record_property: Callable[[str, object], None]) -> None:
    record_property(SUMMARY_LINE, f"random programs (--seed {SEED}): {dict(OUTCOMES)}")
    assert OUTCOMES["refused"] <= COUNT // 10


TIED = (Block(checkpoint="reentrant", has_bias=False), Block(kind="tied", has_bias=False), Block())
ONCE_WRONG = {
    "a gradient comes again while its bucket is exchanged": {"stage": 2, "blocks": TIED[:2], "paths": ((0, 1),)},
    "a rank lacks a layer, and nothing overlaps": {
        "stage": 0, "world_size": 2, "absent": ((1, 0),), "settings": (("overlap_comm", False),),
    },
    "a rank lacks a layer, and there are many buckets": {
        "stage": 1, "world_size": 2, "absent": ((1, 5),), "blocks": (Block(),) * 6, "paths": (tuple(range(6)),),
        "settings": (("reduce_bucket_size", 1),),
    },
    "a gradient comes again, and a rank lacks a layer": {
        "stage": 1, "world_size": 2, "absent": ((1, 2),), "blocks": TIED, "paths": ((0, 1, 2),),
        "settings": (("reduce_bucket_size", 1),),
    },
    "a layer runs twice inside one checkpoint": {
        "stage": 3, "segment": "not reentrant", "paths": ((0, 1, 0),), "blocks": (Block(kind="deep"), Block()),
    },
    "a double backward through a frozen layer inside a checkpoint": {
        "stage": 3, "penalty": True, "blocks": (Block(kind="deep", frozen="all", checkpoint="not reentrant"),),
    },
}  # fmt: skip
"""Programs that once gave wrong values or deadlocked."""


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_was_wrong_once_equals_one_process(name: str) -> None:
    result = run(Program(seed=0, number=0, width=6, **ONCE_WRONG[name]))
    assert result.outcome == "equal", result.text


@pytest.mark.parametrize("defect", ["a rank is lost", "a backward is lost", "gradients are kept"])
def test_the_comparison_finds(defect: str) -> None:
    """Each defect changes the result of the first program with several backwards a step by 10^6 tolerances or more."""
    programs = (draw(0, number) for number in range(200))
    program = next(
        p for p in programs if p.world_size > 1 and min(p.num_backwards) > 1 and p.zero_grad != "never" and not p.clip
    )
    right, wrong = plain(program), plain(program, defect)
    if defect == "a rank is lost":  # the other ranks' losses are unchanged: only the parameters may reveal the defect
        wrong = wrong._replace(losses=right.losses)
    assert largest_difference(wrong, right)[0] > 1e6 * TOLERANCE
    assert largest_difference(right, plain(program))[0] == 0


def test_every_feature_is_drawn() -> None:
    """Every feature occurs at least 20 times in 500 programs, and drawing is deterministic."""
    counted = Counter(name for number in range(500) for name in features(draw(1, number)))
    asked = [f"block: {kind}" for kind in KINDS] + [f"hook: {hook}" for hook in HOOKS]
    asked += [f"stage {stage}" for stage in range(4)] + [f"world {size}" for size in (1, 2, 3, 5)]
    asked += ["checkpoint: reentrant", "checkpoint: not reentrant", "unused block", "block used twice", "absent"]
    asked += [
        "path by step",
        "path by forward",
        "backward: reversed",
        "several forwards",
        "root: empty",
        "root: scalar",
    ]
    asked += [
        "accumulation: counted",
        "accumulation: no_sync",
        "clip: call",
        "clip: configured",
        "tied tokens",
        "groups",
    ]
    assert {name: counted[name] for name in asked if counted[name] < 20} == {}
    assert draw(1, 7) == draw(1, 7) != draw(1, 8)
    assert all(limit.place for limit in LIMITS)
