"""Soak: many steps of a small model in one process leave memory, descriptors, threads, groups and files as they were.

Here 36 steps of two modes a day. ``python -m pytest tests/zero/test_soak.py -m long -s -k stage-1`` takes 10,000 of
one, or as many as ZERO_SOAK_STEPS says, and prints its row of bench/results/soak.md.
"""

# covers zero/optimizer.py

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.rotation import of_the_day
from tests.zero.models import batch
from tests.zero.soak import MODES, Sample, sample, slope, soak, what_grew

SHORT, LONG = 36, int(os.environ.get("ZERO_SOAK_STEPS", "10000"))
EVERY_SHORT, EVERY = 3, 100
"""Steps between two saves, each followed by a sample."""
NUM_SAMPLES = 95
"""The number of samples of a long run, from the step on at which resources must stay constant."""
ID = dict(zip(MODES, (name.replace(" ", "-").replace(",", "") for name in MODES), strict=True))


def _run(name: str, folder: Path, num_steps: int, every: int) -> None:
    run_ranks(MODES[name].num_ranks, soak, name, str(folder), num_steps, every)


@pytest.mark.slow
@pytest.mark.parametrize("name", of_the_day(list(MODES), 2), ids=ID.get)
def test_a_short_run_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    _run(name, tmp_path, SHORT, EVERY_SHORT)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODES, ids=ID.get)
def test_ten_thousand_steps_leave_nothing_behind(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.TIMEOUT_S", 3600)
    try:
        _run(name, tmp_path, LONG, EVERY)
    finally:
        print(f"\n| {name} | {LONG:,} | {(tmp_path / 'row').read_text()} |")  # noqa: T201


class Leak(NamedTuple):
    """Takes one more resource of a kind; ``undo`` frees it."""

    leak: Callable[[list[Any], Path], None]
    undo: Callable[[Any], None]


def _start(kept: list[Any]) -> None:
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, daemon=True).start()


def _map(kept: list[Any]) -> None:
    """Use new pages: in a process that has run for long, small objects fit into memory that others have freed."""
    kept.append(mmap.mmap(-1, 1024 * EVERY))
    kept[-1].write(bytes([1]) * len(kept[-1]))


LEAKS = {
    "descriptors": Leak(lambda kept, folder: kept.append((folder / "one").open("w")), lambda file: file.close()),
    "threads": Leak(lambda kept, _: _start(kept), threading.Event.set),
    "groups": Leak(lambda kept, _: kept.append(dist.new_group([0])), dist.destroy_process_group),
    "files": Leak(lambda kept, folder: kept.append((folder / str(len(kept))).write_text("")), id),
    "resident": Leak(lambda kept, _: _map(kept), mmap.mmap.close),
}
"""The leak of memory is a kilobyte per step."""


def _check_leak(rank: int, name: str, path: str) -> None:
    """Take as many samples as a long run does, without its steps; one resource leaks between two of them."""
    kept: list[Any] = []
    samples = []
    for number in range(NUM_SAMPLES):
        LEAKS[name].leak(kept, Path(path))
        samples.append(sample(number * EVERY, Path(path)))
    for one in kept:
        LEAKS[name].undo(one)
    assert name in [text.partition(":")[0] for text in what_grew(samples)], samples[-1]


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found(name: str, tmp_path: Path) -> None:
    run_ranks(1, _check_leak, name, str(tmp_path))


def _check_leak_in_training(rank: int, path: str) -> None:
    kept: list[bytes] = []

    def keeping(*args: int) -> Any:
        kept.append(bytes(512))
        return batch(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.zero.soak.batch", keeping)  # called for each of two micro-batches
        with pytest.raises(AssertionError, match=r"resident: \d{3,4} bytes a step"):
            soak(rank, "stage 1", path, 3000, EVERY)


@pytest.mark.long
def test_a_kilobyte_a_step_is_found_in_training(tmp_path: Path) -> None:
    run_ranks(2, _check_leak_in_training, str(tmp_path))


def _samples(resident: Callable[[int], float]) -> list[Sample]:
    return [Sample(step, int(resident(step)), 40, 3, 2, 2, 20) for step in range(500, 10001, 100)]


def test_memory_that_is_taken_once_is_no_leak_and_little_at_every_step_is_one() -> None:
    assert what_grew(_samples(lambda step: 3e8 + 2**21 * (step > 4000) + 30000 * (step % 700 == 0))) == []
    assert what_grew(_samples(lambda step: 3e8 + 2**21 * (step > 4000) + 1024 * step)) == [
        "resident: 1024 bytes a step"
    ]
    assert slope(_samples(lambda step: 3e8 - 10 * step)) == -10
