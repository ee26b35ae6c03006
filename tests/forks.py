"""Runs scripts as torchrun would, but on forks of a process that has already imported torch.

What torchrun itself does is covered where real agents run: test_two_machines.py, test_bench_nodes.py and the first runs
of test_train_gpt.py and test_bench.py.
"""

from __future__ import annotations

import gc
import os
import random
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.ranks import forkserver


def run_on_forks(
    num_ranks: int, runs: Sequence[Sequence[str]], *, cwd: Path, timeout_s: float = 450, **variables: str
) -> str:
    """Run scripts one after the other on the same ranks, each as ``torchrun SCRIPT ARGUMENTS`` would.

    Args:
        num_ranks: Of one machine.
        runs: Of each run the script's path and its arguments; ``-m`` and a module's name instead of a path.
        cwd: Where they run.
        timeout_s: For all runs together.
        variables: More of the environment.

    Returns:
        What the ranks printed on both streams, one rank after the other. A rank that fails is an AssertionError with
        all of that, and a warning that is printed fails, too.
    """
    environment = {
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", **variables,
    }  # fmt: skip
    ports = _free_ports(len(runs))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(num_ranks)]
        processes: list[Any] = []
        for rank, output in enumerate(outputs):
            of_rank = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            work = (of_rank, [list(run) for run in runs], ports, cwd, output)
            processes.append(forkserver().Process(target=_serve, args=work, daemon=True))
            processes[-1].start()
        codes = _end_of(processes, timeout_s)
        printed = "\n".join(output.read_text() for output in outputs if output.exists())
    assert codes == [0] * num_ranks, f"exit codes {codes}\n{printed[-6000:]}"
    assert "Warning" not in printed, printed[-6000:]
    return printed


def _end_of(processes: list[Any], timeout_s: float) -> list[int | None]:
    """Wait until all have ended, one has failed or the time is up; kill those still running; return the exit codes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(p.exitcode is None for p in processes):
        if any(p.exitcode for p in processes):
            time.sleep(1)  # let the others say what they have to
            break
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def _free_ports(count: int) -> list[int]:
    """Return free ports below the ephemeral range: those must still be free when later runs use them."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def _serve(environment: dict[str, str], runs: list[list[str]], ports: list[int], cwd: Path, output: Path) -> None:
    gc.freeze()  # as in tests/ranks.py
    with output.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.chdir(cwd)
    path = list(sys.path)
    for run, port in zip(runs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        try:
            if run[0] == "-m":
                sys.argv[:] = run[1:]
                runpy.run_module(run[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv[:] = run
                sys.path[:] = [str(Path(run[0]).parent), *path]
                runpy.run_path(run[0], run_name="__main__")
        except SystemExit as exit_:
            if exit_.code:
                raise
        sys.stdout.flush()
