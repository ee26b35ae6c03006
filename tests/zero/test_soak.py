"""Soak: many steps of a tiny model with every feature on leave memory, descriptors, threads and files as they were.

Here 36 steps; ``python -m pytest tests/zero/test_soak.py -m long`` takes 10,000, or as many as ZERO_SOAK_STEPS says.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import zero
from tests.ranks import run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import full_values
from zero.bit_ledger import hash_bits

WORLD_SIZE, NUM_LOOKS, SHORT = 2, 12, 36
LONG = int(os.environ.get("ZERO_SOAK_STEPS", "10000"))
MOST_GROWTH_NBYTES = 4 * 2**20
"""Of resident memory from the middle to the end: allocators and caches, not what a step would leave each time."""


class Seen(NamedTuple):
    """What a process has."""

    resident: int
    descriptors: int
    threads: int
    files: int


def _look(folder: Path) -> Seen:
    gc.collect()
    dist.barrier()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    files = sum(path.is_file() for path in folder.rglob("*"))
    seen = Seen(resident, len(os.listdir("/proc/self/fd")), threading.active_count(), files)  # noqa: PTH208
    dist.barrier()
    return seen


def _config(folder: Path) -> dict[str, Any]:
    return {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
        },
        "zcomm": {"bit_ledger": str(folder / "ledger"), "ranks_per_node": 1},
    }


def _same_on_all_ranks(model: torch.nn.Module) -> bool:
    mine = [hash_bits(value) for value in full_values(model).values()]
    of_ranks: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(of_ranks, mine)
    return all(other == mine for other in of_ranks)


def _check_soak(rank: int, path: str, steps: int) -> None:
    folder, seen = Path(path), list[Seen]()
    model = new_model(has_unused=True, has_frozen=True)
    adam = zero.CPUAdam(groups_of(model), lr=1e-3)
    engine = zero.initialize(model=model, optimizer=adam, config=_config(folder)).engine
    every = steps // NUM_LOOKS
    for step in range(steps):
        for micro in range(2):
            engine.backward(loss_of(engine, *batch(step % 50, micro, rank)))
            engine.step()
        if step % every == every - 1:
            saving = engine.save_checkpoint(folder / "saved", f"last{step // every % 2}", async_op=True)
            engine.backward(loss_of(engine, *batch(0, 0, rank)))  # while it is written
            engine.zero_grad()
            saving.wait()
            seen.append(_look(folder))
    assert _same_on_all_ranks(model)
    engine.destroy()
    later = seen[NUM_LOOKS // 2 :]
    assert engine.global_steps == steps
    assert len({one[1:] for one in later}) == 1, later
    growth = later[-1].resident - later[0].resident
    assert growth < MOST_GROWTH_NBYTES, [one.resident >> 10 for one in seen]
    (folder / f"growth{rank}").write_text(f"{steps} steps, rank {rank}: {growth >> 10} KiB more resident\n")


def _run(folder: Path, steps: int) -> list[str]:
    run_ranks(WORLD_SIZE, _check_soak, str(folder), steps)
    return [(folder / f"growth{rank}").read_text() for rank in range(WORLD_SIZE)]


def test_a_short_run_leaves_nothing_behind(tmp_path: Path) -> None:
    assert len(_run(tmp_path, SHORT)) == WORLD_SIZE


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_ten_thousand_steps_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.TIMEOUT_S", 6 * 3600)
    for line in _run(tmp_path, LONG):
        print(line, end="")  # noqa: T201
