"""Soak: many steps of a tiny model with every feature on leave memory, descriptors, threads and files as they were.

Here 36 steps of each configuration; ``python -m pytest tests/zero/test_soak.py -m long -s`` takes 10,000, or as many as
ZERO_SOAK_STEPS says. With ZERO_SOAK_FOLDER=FOLDER and ZERO_SOAK_SECONDS a call takes no longer than that, and the next
one goes on from the checkpoint, in new processes; FOLDER/CONFIGURATION/slices.jsonl then says how each slice went.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import zero
from tests.ranks import run_ranks
from tests.zero.models import batch, groups_of, loss_of, new_model
from tests.zero.training import full_values

NUM_LOOKS, SHORT = 12, 36
LONG = int(os.environ.get("ZERO_SOAK_STEPS", "10000"))
SECONDS = float(os.environ.get("ZERO_SOAK_SECONDS", "1e9"))
EVERY, FEWEST_LOOKS = 25, 6
"""Of a long run: steps between two looks, and looks of a slice."""
MOST_GROWTH_NBYTES = 4 * 2**20
"""Of resident memory from the middle to the end: allocators and caches, not what a step would leave each time."""

PLUS = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "ZeRO++": {"ranks": 2, "ranks_per_node": 1, "zero": PLUS},
    "hpZ": {"ranks": 4, "ranks_per_node": 2, "zero": {**PLUS, "zero_hpz_partition_size": 2}},
    "delta hpZ": {"ranks": 4, "ranks_per_node": 2, "zero": {"stage": 3}, "mode": "delta_hpz"},
}


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


def _config(folder: Path, name: str) -> dict[str, Any]:
    chosen = CONFIGS[name]
    zcomm = {"bit_ledger": str(folder / "ledger"), "ranks_per_node": chosen["ranks_per_node"]}
    if "mode" in chosen:
        zcomm["mode"] = chosen["mode"]
    return {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            **chosen["zero"],
            "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
        },
        "zcomm": zcomm,
    }


def _digest(model: torch.nn.Module) -> str:
    """Of all parameters, whole: the same on all ranks."""
    mine = hashlib.sha256(b"".join(value.double().numpy().tobytes() for value in full_values(model).values()))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine.hexdigest())
    assert len(set(of_ranks)) == 1, of_ranks
    return str(of_ranks[0])


def _is_late(deadline: float) -> bool:
    """Whether it is, on any rank."""
    late = torch.tensor([int(time.monotonic() > deadline)])
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return bool(late)


def _check_soak(rank: int, path: str, name: str, steps: int, seconds: float) -> None:
    folder, seen, begun = Path(path), list[Seen](), time.monotonic()
    model = new_model(has_unused=True, has_frozen=True)
    adam = zero.CPUAdam(groups_of(model), lr=1e-3)
    engine = zero.initialize(model=model, optimizer=adam, config=_config(folder, name)).engine
    if (folder / "saved").exists():
        engine.load_checkpoint(folder / "saved")
    first, every, is_over = engine.global_steps, SHORT // NUM_LOOKS if steps == SHORT else EVERY, False
    while engine.global_steps < steps and not is_over:
        step = engine.global_steps
        for micro in range(2):
            engine.backward(loss_of(engine, *batch(step % 50, micro, rank)))
            engine.step()
        if step % every == every - 1:
            saving = engine.save_checkpoint(folder / "saved", f"last{step // every % 2}", async_op=True)
            engine.backward(loss_of(engine, *batch(0, 0, rank)))  # while it is written
            engine.zero_grad()
            saving.wait()
            seen.append(_look(folder))
            is_over = len(seen) >= FEWEST_LOOKS and _is_late(begun + seconds)
    digest, done = _digest(model), engine.global_steps
    engine.destroy()
    later = seen[len(seen) // 2 :]
    assert later, f"no step was left to do after {first} of {steps}: remove {folder} to begin anew"
    assert len({one[1:] for one in later}) == 1, later
    growth = later[-1].resident - later[0].resident
    assert growth < MOST_GROWTH_NBYTES, [one.resident >> 10 for one in seen]
    if rank == 0:
        told = {"steps": [first, done], "seconds": round(time.monotonic() - begun), "growth_kib": growth >> 10,
                **later[-1]._asdict(), "parameters": digest[:16]}  # fmt: skip
        with (folder / "slices.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")


def _run(folder: Path, name: str, steps: int, seconds: float = 1e9) -> dict[str, Any]:
    """What the last slice has told."""
    run_ranks(CONFIGS[name]["ranks"], _check_soak, str(folder), name, steps, seconds)
    return dict(json.loads((folder / "slices.jsonl").read_text().splitlines()[-1]))


@pytest.mark.parametrize("name", ["ZeRO++", pytest.param("hpZ", marks=pytest.mark.slow), "delta hpZ"])
def test_a_short_run_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    assert _run(tmp_path, name, SHORT)["steps"] == [0, SHORT]


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", CONFIGS)
def test_ten_thousand_steps_leave_nothing_behind(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.TIMEOUT_S", 6 * 3600)
    folder = Path(os.environ.get("ZERO_SOAK_FOLDER", tmp_path)) / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    told = _run(folder, name, LONG, SECONDS)
    print(f"{name}: {told}")  # noqa: T201
    if told["steps"][1] < LONG:
        pytest.skip(f"{told['steps'][1]} of {LONG} steps: run it again for the rest")
