"""One rank makes a call that the others do not make, or omits one: the random cases, and one case on one rank.

python -m tests.zero.alone --draws 200 --seed 1      prints a line per case; exit code 0 if each raised a named error
python -m tests.zero.alone --draws 200 --seed 1 --first 40 --number 20      some of them
    --backend nccl      in a job of NCCL alone, whose data goes over the emulated NCCL
    --beside-another    while a second optimizer uses the same process groups
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import zcomm
import zero
from tests.nccl_job import nccl_alone
from tests.ranks import close_pools, ranks_over, run_ranks
from tests.variables import variables
from zcomm import DivergedError
from zero import ZeroOptimizer, utils
from zero._checkpoint import save_model_file

AFTER_S, WITHIN_S = 2.0, 10.0
"""ZCOMM_DIVERGED_AFTER_S in these cases, and the time after it within which every rank must have raised."""


class Training(NamedTuple):
    model: nn.Module
    optimizer: ZeroOptimizer
    folder: Path
    rank: int

    def backward(self) -> None:
        self.model(torch.full((4, 16), 0.1 * (self.rank + 1))).sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> nn.Parameter:
        return next(self.model.parameters())


def _gathered(t: Training, modifier_rank: int | None = None) -> None:
    with zero.GatheredParameters(list(t.model.parameters()), modifier_rank=modifier_rank):
        pass


def _saves_in_a_thread(t: Training) -> None:
    def save() -> None:
        with suppress(DivergedError):  # the main thread has it, too
            zero.save_checkpoint(t.optimizer, t.folder, "thread")

    thread = threading.Thread(target=save)
    thread.start()
    while t.optimizer.topology.on_host.log.snapshot()[1] == {} and thread.is_alive():
        time.sleep(0.001)


def _fails_in_forward(t: Training) -> None:
    handle = list(t.model.children())[1].register_forward_pre_hook(_raise)
    with suppress(MemoryError):
        t.backward()
    handle.remove()
    t.optimizer.zero_grad()


def _raise(*_: Any) -> None:
    raise MemoryError("made up")


def _closes(t: Training) -> None:
    t.optimizer.close()


Call = Callable[[Training], object]
BEFORE: dict[str, tuple[Call, tuple[int, ...]]] = {
    "model.state_dict": (lambda t: t.model.state_dict(), (3,)),
    "model.load_state_dict": (lambda t: t.model.load_state_dict({}, strict=False), (1, 2, 3)),
    "optimizer.load_state_dict": (lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()), (1, 2, 3)),
    "GatheredParameters": (_gathered, (1, 2, 3)),
    "GatheredParameters(modifier_rank=0)": (lambda t: _gathered(t, 0), (1, 2, 3)),
    "safe_get_full_fp32_param": (lambda t: utils.safe_get_full_fp32_param(t.weight), (1, 2, 3)),
    "safe_get_full_optimizer_state": (
        lambda t: utils.safe_get_full_optimizer_state(t.weight, "momentum_buffer"), (1, 2, 3),
    ),
    "safe_set_full_fp32_param": (lambda t: utils.safe_set_full_fp32_param(t.weight, torch.ones(16, 16)), (1, 2, 3)),
    "save_checkpoint": (lambda t: zero.save_checkpoint(t.optimizer, t.folder, "alone"), (1, 2, 3)),
    "save_checkpoint(async_op=True)": (
        lambda t: zero.save_checkpoint(t.optimizer, t.folder, "alone", async_op=True), (1, 2, 3),
    ),
    "save_checkpoint in a thread": (_saves_in_a_thread, (1, 2, 3)),
    "save_model_file": (lambda t: save_model_file(t.optimizer, t.folder / "model.bin"), (1, 2, 3)),
    "load_checkpoint": (lambda t: zero.load_checkpoint(t.optimizer, t.folder, "all"), (1, 2, 3)),
    "a batch more": (lambda t: t.step(), (1, 2, 3)),
    "an evaluation": (lambda t: t.model(torch.ones(4, 16)), (3,)),
    "a forward that fails": (_fails_in_forward, (3,)),
    "step without backward": (lambda t: t.optimizer.step(), (1, 2)),
    "all_reduce": (lambda t: zcomm.all_reduce(torch.ones(300), group=t.optimizer.topology), (1, 2, 3)),
    "all_gather_single": (
        lambda t: zcomm.all_gather_single(
            torch.empty(8 * t.optimizer.topology.world_size), torch.ones(8), t.optimizer.topology, format="int8"
        ), (1, 2, 3),
    ),
    "barrier": (lambda _: dist.barrier(), (1, 2, 3)),
    "close": (_closes, (1, 2, 3)),
}  # fmt: skip
"""Calls that one rank makes between two steps, and the stages at which they are collective."""
BETWEEN: dict[str, tuple[Call, tuple[int, ...]]] = {
    "clip_grad_norm_": (lambda t: t.optimizer.clip_grad_norm_(1.0), (1, 2, 3)),
    "safe_get_full_grad": (lambda t: utils.safe_get_full_grad(t.weight), (1, 2, 3)),
    "safe_get_local_grad": (lambda t: utils.safe_get_local_grad(t.weight), (1, 2, 3)),
    "safe_set_full_grad": (lambda t: utils.safe_set_full_grad(t.weight, torch.ones(16, 16)), (1, 2, 3)),
    "a second backward": (lambda t: t.backward(), (1, 2, 3)),
}
"""Calls that one rank makes between backward and step."""
DIFFERENT: dict[str, tuple[Call, Call]] = {
    "load_checkpoint(load_optimizer_states=False)": (
        lambda t: zero.load_checkpoint(t.optimizer, t.folder, "all"),
        lambda t: zero.load_checkpoint(t.optimizer, t.folder, "all", load_optimizer_states=False),
    ),
    "clip_grad_norm_(norm_type=inf)": (
        lambda t: t.optimizer.clip_grad_norm_(1.0),
        lambda t: t.optimizer.clip_grad_norm_(1.0, float("inf")),
    ),
    "safe_get_full_fp32_param of another": (
        lambda t: utils.safe_get_full_fp32_param(t.weight),
        lambda t: utils.safe_get_full_fp32_param(list(t.model.parameters())[2]),
    ),
}
"""The call of the other ranks, and the different call of one rank."""
NO_ERROR = ("barrier", "close")
"""Calls that raise no error on the rank itself: it waits in another call, or has left."""


class Draw(NamedTuple):
    world_size: int
    stage: int
    name: str
    odd: int
    """The rank that makes a different call."""
    num_steps: int
    """Before it."""


def draws(seed: int, count: int) -> Iterator[Draw]:
    """The first ``count`` cases of the sequence that ``seed`` defines."""
    draw = random.Random(seed)
    cases = [(name, stage) for table in (BEFORE, BETWEEN) for name, (_, stages) in table.items() for stage in stages]
    cases += [(name, stage) for name in DIFFERENT for stage in (1, 2, 3)]
    for _ in range(count):
        name, stage = draw.choice(cases)
        world_size = draw.choice((2, 4))
        yield Draw(world_size, stage, name, draw.randrange(world_size), draw.randrange(1, 4))


def training(rank: int, stage: int, folder: str) -> Training:
    """Four equal layers, so that no exchange is recognized as wrong by its size."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    options = {"stage3_param_persistence_threshold": 0}
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, stage=stage, **options)
    return Training(model, optimizer, Path(folder), rank)


@contextmanager
def job_of(backend: str) -> Iterator[None]:
    """Make this rank's job one of NCCL alone if ``backend`` is "nccl"."""
    with nccl_alone() if backend == "nccl" else nullcontext():
        yield


def run_draw(rank: int, draw: Draw, folder: str, backend: str = "torch") -> None:
    """Run one case on one rank: raise AssertionError unless the rank gets the named error in time."""
    with variables(ZCOMM_DIVERGED_AFTER_S=str(AFTER_S)), job_of(backend):
        t = training(rank, draw.stage, folder)
        zero.save_checkpoint(t.optimizer, folder, "all")
        if draw.num_steps % 2:  # a new optimizer: its first save or load makes a process group
            t.optimizer.close()
            t = training(rank, draw.stage, folder)
        assert t.optimizer.topology.backend == backend
        for _ in range(draw.num_steps):
            t.step()
        start, error = time.monotonic(), None
        try:
            _differ(t, draw)
        except (DivergedError, zero.CheckpointError) as raised:  # of loading otherwise
            error = raised
        seconds = time.monotonic() - start
        if draw.name == "barrier" and rank != draw.odd:
            dist.barrier()
        if draw.name in NO_ERROR and rank == draw.odd:
            assert error is None, error
        else:
            assert error is not None, f"{draw}: nothing was raised in {seconds:.1f} s"
            text = str(error)
            assert "alone.py:" in text or "every rank must" in text, text
            assert f"rank {draw.odd}" in text, text
        (Path(folder) / f"seconds-{rank}").write_text(f"{seconds:.2f}")
        assert seconds < AFTER_S + WITHIN_S, f"{draw}: after {seconds:.1f} s"
        dist.barrier()
        with suppress(Exception):
            t.optimizer.close()


def run_beside_another(rank: int, draw: Draw, folder: str, backend: str = "torch") -> None:
    """Run one case while another optimizer keeps the process groups: they are not closed with the one of the case."""
    with job_of(backend):
        other = training(rank, 1 + draw.num_steps % 3, folder)
        other.step()
        run_draw(rank, draw, folder, backend)
        dist.barrier()
        with suppress(DivergedError):
            other.step()
        other.optimizer.close()


def _differ(t: Training, draw: Draw) -> None:
    """Make the different call, then run the same calls on all ranks; the last one needs them all."""
    is_odd = t.rank == draw.odd
    if draw.name in BEFORE and is_odd:
        BEFORE[draw.name][0](t)
        if draw.name in NO_ERROR:
            return
    t.backward()
    if draw.name in BETWEEN and is_odd:
        BETWEEN[draw.name][0](t)
    if draw.name in DIFFERENT:
        DIFFERENT[draw.name][is_odd](t)
    t.optimizer.step()
    t.optimizer.zero_grad()
    t.step()
    _gathered(t)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case to run")
    parser.add_argument("--number", type=int, help="how many cases to run; default: all that follow")
    parser.add_argument("--backend", choices=("torch", "nccl"), default="torch")
    parser.add_argument("--beside-another", action="store_true")
    options = parser.parse_args()
    with ranks_over(options.backend):
        return _run_all(options)


def _run_all(options: argparse.Namespace) -> int:
    num_wrong, longest_s = 0, 0.0
    run = run_beside_another if options.beside_another else run_draw
    last = options.draws if options.number is None else options.first + options.number
    cases = list(enumerate(draws(options.seed, options.draws)))[options.first : last]
    for index, draw in cases:
        outcome = "named"
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(draw.world_size, run, draw, folder, options.backend)
            except AssertionError as error:
                outcome, num_wrong = f"WRONG: {error}", num_wrong + 1
            seconds = max((float(file.read_text()) for file in Path(folder).glob("seconds-*")), default=0.0)
        longest_s = max(longest_s, seconds)
        sys.stdout.write(f"{index} {draw} {seconds:.1f} s {outcome}\n")
        sys.stdout.flush()
    close_pools()
    sys.stdout.write(f"{len(cases)} draws, {num_wrong} wrong, the longest {longest_s:.1f} s\n")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
