"""Stragglers: one rank sleeps at some place of its step for longer than the bound, and no error may follow."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import zero
from tests.ranks import close_pools, ranks_over, run_ranks
from tests.variables import variables
from zcomm._transport.work import Steps
from zero import ZeroOptimizer, utils
from zero._checkpoint.dcp import FolderWriter

BOUND_S = 3.0
"""ZCOMM_DIVERGED_AFTER_S when run as a command."""
SHORTEST_S, LONGEST_S = 4.0, 20.0

IN_EVERY_STEP = (
    "before forward",
    "in the forward of a layer",
    "between micro-batches",
    "before backward",
    "in the backward of a layer",
    "before clip_grad_norm_",
    "before step",
    "in the optimizer's own step",
    "before zero_grad",
)
IN_SOME_STEPS = (
    "before state_dict",
    "in a hook of state_dict",
    "before load_state_dict",
    "in a hook of load_state_dict",
    "before GatheredParameters",
    "inside GatheredParameters",
    "before safe_get_full_fp32_param",
    "before an evaluation",
    "before save_checkpoint",
    "in save_checkpoint, in a user's state_dict",
    "in the thread of an asynchronous save",
    "before the wait for it",
    "before load_checkpoint",
    "in load_checkpoint, in a user's load_state_dict",
    "before torch.distributed.barrier",
    "in the thread that drives collectives",
    "in a thread that the main thread waits for",
)
PLACES = ("before construction", *IN_EVERY_STEP, *IN_SOME_STEPS)


class Case(NamedTuple):
    """One kind of job."""

    world_size: int
    stage: int
    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.world_size} ranks, stage {self.stage}{self.name}"


PLUS = {"ranks_per_node": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}
IN_A_THREAD = {
    "offload_optimizer": {"device": "cpu"},
    "zero_force_ds_cpu_optimizer": False,
    "delayed_update": True,
    "delay_start": 0,
}
CASES = [
    *(Case(ranks, stage, "", {}) for ranks in (2, 4) for stage in (1, 2, 3)),
    Case(4, 3, ", hpZ on 2 x 2", PLUS | {"zero_hpz_partition_size": 2}),
    Case(2, 3, ", delayed update", IN_A_THREAD),
    Case(2, 3, ", over NCCL", {"backend": "nccl"}),
]


class Sleep(NamedTuple):
    """One delay of one rank."""

    step: int
    place: str
    rank: int
    seconds: float


def sleeps(seed: int, world_size: int, num_steps: int, places: int, shortest_s: float, longest_s: float) -> list[Sleep]:
    """Draw a step for each of ``places`` different places; "before construction" is before step 0."""
    draw = random.Random(seed)
    chosen = draw.sample(PLACES, places)
    steps = sorted(draw.sample(range(1, num_steps), places))
    return [
        Sleep(0 if place == PLACES[0] else step, place, draw.randrange(world_size), draw.uniform(shortest_s, longest_s))
        for step, place in zip(steps, chosen, strict=True)
    ]


class Pauses:
    """Sleeps where planned for this rank, and records how many ranks had reported by the end that they wait."""

    def __init__(self, rank: int, planned: list[Sleep], folder: Path) -> None:
        self.left = {sleep.place: sleep for sleep in planned if sleep.rank == rank}
        """The remaining sleeps, by place."""
        self._folder, self._rank = folder, rank
        self.watch: Any = None
        self.step = 0

    def __call__(self, place: str) -> None:
        assert place in PLACES, place
        if place in self.left and self.step >= self.left[place].step:
            seconds = self.left.pop(place).seconds
            time.sleep(seconds)
            num_waiting = None if self.watch is None else self.watch._store.add(self.watch._key("waiting"), 0)
            with (self._folder / f"slept-{self._rank}").open("a") as file:
                file.write(json.dumps([self.step, place, self._rank, round(seconds, 1), num_waiting]) + "\n")


class Kept:
    """A user's object in a checkpoint, which is slow to save and load."""

    def __init__(self, pause: Pauses) -> None:
        self._pause = pause

    def state_dict(self) -> dict[str, int]:
        self._pause("in save_checkpoint, in a user's state_dict")
        return {"one": 1}

    def load_state_dict(self, _: dict[str, int]) -> None:
        self._pause("in load_checkpoint, in a user's load_state_dict")


class Job:
    """One rank's training, with pauses."""

    def __init__(self, pause: Pauses, case: Case, folder: Path) -> None:
        class Late(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                pause("in the optimizer's own step")
                return super().step(closure)

        torch.manual_seed(0)
        self.pause, self.folder, self.kept = pause, folder / "saved", Kept(pause)
        self.model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        layers = list(self.model.children())
        layers[2].register_forward_pre_hook(lambda *_: pause("in the forward of a layer"))
        layers[1].register_full_backward_hook(lambda *_: pause("in the backward of a layer"))
        layers[1].register_state_dict_pre_hook(lambda *_: pause("in a hook of state_dict"))
        layers[1].register_load_state_dict_pre_hook(lambda *_: pause("in a hook of load_state_dict"))
        pause("before construction")
        self.optimizer = ZeroOptimizer(self.model, Late, lr=0.01, momentum=0.9, stage=case.stage, **case.options)
        self.rank = dist.get_rank()

    def step(self) -> None:
        pause, optimizer = self.pause, self.optimizer
        x = torch.full((4, 16), 0.1 * (self.rank + 1))
        pause("before forward")
        with optimizer.no_sync():
            self.model(x).square().mean().backward()
        pause("between micro-batches")
        loss = self.model(x).square().mean()
        pause("before backward")
        loss.backward()
        pause("before clip_grad_norm_")
        optimizer.clip_grad_norm_(1.0)
        pause("before step")
        optimizer.step()
        pause("before zero_grad")
        optimizer.zero_grad()

    def calls(self) -> None:
        """All other collective calls."""
        pause, optimizer, model = self.pause, self.optimizer, self.model
        pause("before state_dict")
        state = model.state_dict()
        pause("before load_state_dict")
        model.load_state_dict(state)
        pause("before GatheredParameters")
        with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            pause("inside GatheredParameters")
        pause("before safe_get_full_fp32_param")
        utils.safe_get_full_fp32_param(next(model.parameters()))
        pause("before an evaluation")
        with torch.no_grad():
            model(torch.ones(4, 16))
        pause("before save_checkpoint")
        saving = zero.save_checkpoint(optimizer, self.folder, "a", stateful={"kept": self.kept}, async_op=True)
        self.step()
        pause("before the wait for it")
        saving.wait()
        pause("before load_checkpoint")
        zero.load_checkpoint(optimizer, self.folder, "a", stateful={"kept": self.kept})
        pause("before torch.distributed.barrier")
        dist.barrier()
        self._in_threads()

    def _in_threads(self) -> None:
        def steps() -> Steps:
            self.pause("in the thread that drives collectives")
            yield None

        self.optimizer.topology.queue.submit(steps())
        self.step()
        thread = threading.Thread(target=self.pause, args=("in a thread that the main thread waits for",))
        thread.start()
        thread.join()


@contextmanager
def _late_writes(pause: Pauses) -> Iterator[None]:
    write = FolderWriter.write_data

    def late(self: FolderWriter, *args: Any) -> Any:
        pause("in the thread of an asynchronous save")
        return write(self, *args)

    FolderWriter.write_data = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        FolderWriter.write_data = write  # type: ignore[method-assign]


def run_case(case: Case, planned: list[Sleep], num_steps: int, bound_s: float, path: str) -> None:
    """Run :func:`run_slow` on all ranks."""
    with ranks_over(case.options.get("backend", "torch")):
        run_ranks(case.world_size, run_slow, case, planned, num_steps, bound_s, path)


def run_slow(rank: int, case: Case, planned: list[Sleep], num_steps: int, bound_s: float, path: str) -> None:
    """On one rank: raise unless every step succeeds, every sleep has happened, and no deadlock was suspected."""
    folder, shortest_s = Path(path), min(sleep.seconds for sleep in planned)
    pause, eventful = Pauses(rank, planned, folder), {sleep.step for sleep in planned}
    with variables(ZCOMM_DIVERGED_AFTER_S=str(bound_s)), _late_writes(pause):
        job = Job(pause, case, folder)
        pause.watch = watch = job.optimizer.topology.watch
        found, usual = watch.num_deadlocks, watch.period_s
        watch.period_s = min(usual, shortest_s / 10)
        for pause.step in range(num_steps):
            job.step()
            if pause.step in eventful:
                job.calls()
        assert not pause.left, f"not slept: {pause.left}"
        assert watch.num_deadlocks == found, "a slow rank was taken for one that differs"
        watch.period_s = usual
        job.optimizer.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10000, help="of all cases together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    each, num_wrong, total = -(-options.steps // len(CASES)), 0, 0
    for number, case in enumerate(CASES):
        planned = sleeps(options.seed + number, case.world_size, each, len(PLACES), SHORTEST_S, LONGEST_S)
        start, outcome = time.monotonic(), "no error"
        with tempfile.TemporaryDirectory() as path:
            try:
                run_case(case, planned, each, BOUND_S, path)
            except AssertionError as error:
                outcome, num_wrong = f"WRONG: {error}", num_wrong + 1
            lines = [line for file in sorted(Path(path).glob("slept-*")) for line in file.read_text().splitlines()]
        total += len(lines)
        sys.stdout.write("".join(f"{case} {line}\n" for line in lines))
        sys.stdout.write(f"{case}: {each} steps, {len(lines)} sleeps, {time.monotonic() - start:.0f} s: {outcome}\n")
        sys.stdout.flush()
    close_pools()
    sys.stdout.write(f"{each * len(CASES)} steps, {total} sleeps, {num_wrong} wrong\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
