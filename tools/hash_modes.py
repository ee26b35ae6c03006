"""Hash a short run of every stage, mode, tier and drop-in: refactoring must not change any hash.

    python tools/hash_modes.py --output /tmp/before.txt     on the commit before
    python tools/hash_modes.py --compare /tmp/before.txt    after: prints what differs; exit code 1 if anything does
    python tools/hash_modes.py --only delta                 the modes with "delta" in their name

A line is the mode's name, a sha256 over all that follows, the first digits of what each part comes to, and bytes sent:

    losses     of every micro-batch and rank, as float64; norms, loss scales
    weights    parameters, gathered on every rank, and state_dict(); what collectives return
    states     masters, moments, replicas, residuals; the tensors in the files of a checkpoint
    wire       messages, elements and bytes, by operation, format and link, in the order of ranks
    control    the same of what ranks agree on

Four processes over gloo stand in for 2 nodes of 2 ranks. Public names alone are used: ``zero``, ``zcomm`` and torch.
The bits are those of one machine: torch's own products differ from processor to processor.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hashed_runs import PARTS, RANKS_PER_NODE, TIMEOUT_S, WORLD_SIZE, Hashes, Place, Result, Run, Then, modes

import zcomm

ERROR = "ERROR"


def jobs_of(mode: Run | Then) -> tuple[tuple[int, Run], ...]:
    """The jobs of a mode: numbers of ranks, and functions."""
    return mode.jobs if isinstance(mode, Then) else ((WORLD_SIZE, mode),)


class Where(NamedTuple):
    """The device that all ranks share, and the environment of each."""

    device: torch.device = torch.device("cpu")
    environment: Callable[[int], dict[str, str]] = lambda _rank: {}


def serve(rank: int, world_size: int, where: tuple[torch.device, dict[str, str]], store: str, pipe: Connection) -> None:
    """Run, on a rank, the jobs that arrive through ``pipe``; answer with its results or the text of an error."""
    device, environment = where
    os.environ |= environment
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    given: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        given = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    given |= {"init_method": f"file://{store}", "timeout": timedelta(seconds=TIMEOUT_S)}
    dist.init_process_group(rank=rank, world_size=world_size, **given)
    topology, known = zcomm.Topology(ranks_per_node=RANKS_PER_NODE), modes()
    with suppress(EOFError, OSError):  # the pipe is closed
        while True:
            name, number, folder = pipe.recv()
            hashes, error = Hashes(), None
            try:
                jobs_of(known[name])[number][1](Place(rank, topology, folder, device), hashes)
            except Exception as caught:  # it is what is printed
                error = f"{type(caught).__name__}: {caught}"
            pipe.send((hashes.result(), error))
    topology.close()
    dist.destroy_process_group()


class Ranks:
    """Live processes that run one job after another."""

    def __init__(self, world_size: int, where: Where) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "zcomm", "zero"])
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            of_rank = where.device, where.environment(rank)
            args = rank, world_size, of_rank, f"{self._folder.name}/store", there
            self._processes.append(context.Process(target=serve, args=args, daemon=True))
            self._processes[-1].start()
            there.close()
            self._pipes.append(here)

    def run(self, name: str, number: int, folder: str) -> tuple[list[Any], str | None]:
        """Run a job; return every rank's result and the first error."""
        answers: dict[Any, Any] = {}
        stop = time.monotonic() + TIMEOUT_S
        for pipe in self._pipes:
            pipe.send((name, number, folder))
        while waiting := [pipe for pipe in self._pipes if pipe not in answers]:
            if not (ready := wait(waiting, max(0.0, stop - time.monotonic()))):
                break
            for pipe in ready:
                answers[pipe] = _answer(pipe)
                if answers[pipe][1] is not None:
                    stop = min(stop, time.monotonic() + 10)  # others may wait for this rank
        late = None, f"TimeoutError: no answer in {TIMEOUT_S} s"
        in_order = [answers.get(pipe, late) for pipe in self._pipes]
        errors = sorted((error for _, error in in_order if error), key=lambda text: text.startswith("TimeoutError"))
        text = " ".join(errors[0].replace(folder, "FOLDER").split())[:400] if errors else None
        return [result for result, _ in in_order], text

    def close(self, *, kill: bool = False) -> None:
        """End the processes."""
        for process in self._processes if kill else ():
            process.kill()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _answer(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None, "EOFError: a rank has died"


def line_of(name: str, of_ranks: list[Result]) -> str:
    """The output line of a completed mode."""
    parts = {part: hashlib.sha256("".join(rank.digests[part] for rank in of_ranks).encode()) for part in PARTS}
    whole = hashlib.sha256("".join(digest.hexdigest() for digest in parts.values()).encode()).hexdigest()
    shown = " ".join(f"{part}:{digest.hexdigest()[:8]}" for part, digest in parts.items())
    return f"{name:<42} {whole} {shown} bytes:{sum(rank.num_bytes for rank in of_ranks)}"


class Runner:
    """Runs modes on the ranks that they need, reusing the processes of most modes."""

    def __init__(self, where: Where | None = None) -> None:
        """``where`` the ranks run; None: on the CPU."""
        self._where, self._ranks = where or Where(), dict[int, Ranks]()

    def line(self, name: str, mode: Run | Then) -> str:
        """Run a mode and return its line; a mode that raised has the error instead of a hash."""
        results, error = self.results(name, mode)
        return f"{name:<42} {ERROR} {error}" if error else line_of(name, results)

    def results(self, name: str, mode: Run | Then) -> tuple[list[Result], str]:
        """Run a mode; return the results of all ranks of all its jobs, and the error, if one was raised."""
        results: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            for number, (world_size, _) in enumerate(jobs_of(mode)):
                if world_size not in self._ranks:
                    self._ranks[world_size] = Ranks(world_size, self._where)
                of_ranks, error = self._ranks[world_size].run(name, number, folder)
                if error is not None:
                    self._ranks.pop(world_size).close(kill=True)  # some may be left inside a collective
                    return [], error
                results += of_ranks
        return results, ""

    def close(self) -> None:
        """End all ranks."""
        while self._ranks:
            self._ranks.popitem()[1].close()


def differences(lines: dict[str, str], before: Iterable[str], only: str) -> list[str]:
    """Return the lines that differ from those ``before``."""
    old = {line.split()[0]: line for line in before if line.strip() and only in line.split()[0]}
    found = []
    for name in [*old, *(name for name in lines if name not in old)]:
        was, now = old.get(name, f"{name} is not in the file"), lines.get(name, f"{name} is gone")
        if was.split() != now.split():
            parts = [part for part in now.split()[2:] if ":" in part and part not in was.split()]
            found.append(f"DIFFERS {name}: {' '.join(part.split(':')[0] for part in parts)}\n  - {was}\n  + {now}")
    return found


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="modes with this in their name")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the lines there, too")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print what differs from an --output")
    parser.add_argument("--times", action="store_true", help="print seconds behind each line")
    args = parser.parse_args()
    before = args.compare.read_text().splitlines() if args.compare else None
    lines, runner = {}, Runner()
    for name, mode in modes().items():
        if args.only in name:
            start = time.monotonic()
            lines[name] = runner.line(name, mode)
            print(lines[name] + (f" {time.monotonic() - start:.1f}s" if args.times else ""), flush=True)
    runner.close()
    if args.output:
        args.output.write_text("".join(f"{line}\n" for line in lines.values()))
    found = [] if before is None else differences(lines, before, args.only)
    for text in found:
        print(text)
    if before is not None:
        print(f"{len(lines)} modes, {len(found)} differ")
    return int(bool(found) or any(line.split()[1] == ERROR for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
