"""Long training runs (soak): samples of a process's resources, which of them must stay constant, and the modes."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zero
from tests.zero.models import VOCAB, batch, groups_of, loss_of
from tests.zero.training import full_values
from zcomm._transport import backend, topology

STEADY_FROM = 500
"""From this step on all resources must stay constant: caches are full, and both tags of the checkpoints exist."""
MOST_NBYTES_A_STEP = 200.0
MOST_NBYTES = 4 * 2**20
"""For a short run, whose slope is not meaningful: the limit of its total growth."""


class Sample(NamedTuple):
    """The resources of one process after ``step`` steps."""

    step: int
    resident: int
    """Bytes of memory."""
    descriptors: int
    threads: int
    """Threads of the operating system, without the kernel's own for io_uring, which come and go."""
    groups: int
    """Process groups that torch.distributed knows."""
    own_groups: int
    """Those of zcomm's live topologies, and the others that it has collective logs of."""
    files: int
    """Files in the folder of the job."""


def sample(step: int, folder: Path) -> Sample:
    """Sample this process between two barriers of all ranks, so that none of them writes files meanwhile."""
    gc.collect()
    dist.barrier()
    seen = Sample(
        step,
        int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        sum(map(_is_ours, Path("/proc/self/task").iterdir())),
        max(len(dist.distributed_c10d._world.pg_map), len(dist.distributed_c10d._world.pg_names)),
        sum(map(_num_groups, list(topology._BY_KEY().values()))) + len(backend._LOGS),
        sum(path.is_file() for path in folder.rglob("*")),
    )
    dist.barrier()
    return seen


def _is_ours(thread: Path) -> bool:
    try:
        return not (thread / "comm").read_text().startswith("iou-")
    except OSError:  # a thread of the kernel that has ended since
        return False


def _num_groups(of: topology.Topology) -> int:
    background = vars(of).get("background")
    return len(of._groups) + (background is not None and background.group is not None)


def slope(samples: Sequence[Sample]) -> float:
    """Growth of resident memory, bytes per step: the median slope over all pairs of samples (Theil and Sen).

    A leak raises every pair, and so the median. What an allocator takes once and keeps raises only the pairs on both
    sides of that moment: at most half of all pairs, and less unless it happens in the very middle.
    """
    pairs = itertools.combinations(samples, 2)
    return median((later.resident - sooner.resident) / (later.step - sooner.step) for sooner, later in pairs)


def what_grew(samples: Sequence[Sample], most_nbytes_a_step: float = MOST_NBYTES_A_STEP) -> list[str]:
    """The resources that did not stay constant over ``samples``, in words; empty if all did."""
    found = []
    for place, name in enumerate(Sample._fields):
        values = {seen[place] for seen in samples}
        if name not in ("step", "resident") and len(values) > 1:
            found.append(f"{name}: {sorted(values)}")
    if (rate := slope(samples)) > most_nbytes_a_step:
        found.append(f"resident: {rate:.0f} bytes a step")
    return found


class Small(nn.Module):
    """Two layers, the second with a frozen bias, and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(VOCAB, 9)
        self.second = nn.Linear(9, VOCAB)
        self.second.bias.requires_grad_(False)
        self.unused = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        of_token = functional.one_hot(tokens, VOCAB).to(self.first.weight.dtype)
        return self.second(self.first(of_token).tanh())


class Mode(NamedTuple):
    zero: dict[str, Any]
    """Section ``zero_optimization`` of the JSON; FOLDER stands for a folder of the job."""
    zcomm: dict[str, Any]
    num_ranks: int = 2
    ranks_per_node: int = 2


FOLDER = "FOLDER"
PLUS = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
NVME = {"device": "nvme", "nvme_path": FOLDER}
IN_FILES = {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME | {"max_in_cpu": 0, "buffer_size": 600}}
MODES = {
    "stage 1": Mode({"stage": 1}, {}),
    "stage 2": Mode({"stage": 2}, {}),
    "stage 3": Mode({"stage": 3}, {}),
    "ZeRO++": Mode(PLUS, {}, ranks_per_node=1),
    "hpZ": Mode(PLUS | {"zero_hpz_partition_size": 2}, {}, num_ranks=4),
    "delta-hpZ": Mode({"stage": 3}, {"mode": "delta_hpz"}, num_ranks=4),
    "NVMe": Mode(IN_FILES, {}),
    "NVMe, delayed": Mode(IN_FILES, {"delayed_update": True}),
}
"""Checkpoints of states in files are never saved asynchronously."""


def config_of(mode: Mode, folder: Path) -> dict[str, Any]:
    """The JSON of ``mode`` in ``folder``: two micro-batches a step, and clipping."""

    def placed(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: placed(value) if isinstance(value, dict) else str(folder / key) if value == FOLDER else value
            for key, value in values.items()
        }

    return {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": placed(mode.zero),
        "zcomm": placed(mode.zcomm) | {"ranks_per_node": mode.ranks_per_node},
    }


def train(rank: int, mode: Mode, folder: Path, num_steps: int, every: int) -> list[Sample]:
    """Train on one rank; sample its resources every ``every`` steps, after a save that overlapped a backward."""
    torch.manual_seed(0)
    model, samples = Small(), []
    (folder / "nvme_path").mkdir(exist_ok=True)
    adam = zero.CPUAdam(groups_of(model), lr=1e-3)
    engine = zero.initialize(model=model, optimizer=adam, config=config_of(mode, folder)).engine
    for step in range(1, num_steps + 1):
        for micro in range(2):
            engine.backward(loss_of(engine, *batch(step % 50, micro, rank)))
            engine.step()
        if step % every == 0:
            saving = engine.save_checkpoint(folder / "saved", f"last{step // every % 2}", async_op=True)
            engine.backward(loss_of(engine, *batch(0, 0, rank)))  # overlaps the save
            engine.zero_grad()
            saving.wait()
            samples.append(sample(step, folder))
            with (folder / f"looks-{rank}.jsonl").open("a") as file:  # kept if the run is killed
                file.write(json.dumps(samples[-1]) + "\n")
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, {name: value.tolist() for name, value in full_values(model).items()})
    engine.destroy()
    assert all(of_rank == values[0] for of_rank in values), "ranks' parameters differ"
    assert engine.global_steps == num_steps
    return samples


class Soak(NamedTuple):
    """The results of a mode's ranks."""

    seconds: int
    samples: list[list[Sample]]
    """By rank."""

    @property
    def row(self) -> str:
        """A row of the table: seconds, resident memory at first and at last, range of slopes, constant counts."""
        first, last = self.samples[0][0], self.samples[0][-1]
        slopes = [slope(of_rank) for of_rank in self.samples]
        mib = [f"{one.resident / 2**20:.2f}" for one in (first, last)]
        seen = [one for of_rank in self.samples for one in of_rank]
        counts = [", ".join(map(str, sorted({one[place] for one in seen}))) for place in range(2, len(Sample._fields))]
        return " | ".join([str(self.seconds), *mib, f"{min(slopes):.1f} to {max(slopes):.1f}", *counts])


def soak(rank: int, name: str, path: str, num_steps: int, every: int) -> None:
    """Train in mode ``name`` on one rank, and raise AssertionError if a resource grew."""
    start = time.monotonic()
    samples = train(rank, MODES[name], Path(path), num_steps, every)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    is_long = num_steps > STEADY_FROM
    steady = [seen for seen in samples if seen.step >= (STEADY_FROM if is_long else num_steps // 2)]
    dist.all_gather_object(of_ranks, steady)
    if rank == 0:
        (Path(path) / "row").write_text(Soak(round(time.monotonic() - start), of_ranks).row)
    assert not (grew := what_grew(steady, MOST_NBYTES_A_STEP if is_long else MOST_NBYTES / num_steps)), grew
