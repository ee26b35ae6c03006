"""The end of a process: threads end before the interpreter does, and what is left open can still be closed."""

# covers zcomm/_base/daemon_threads.py

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def last_words():  # registered before zcomm ends its threads at exit, so it runs after that
    if mode == "a collective in an exit handler":
        works = [start() for _ in range(3)]
        for work in works:
            work.wait()
        works[0].completes_within(0)
        print("said")


atexit.register(last_words)
import zcomm

rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world_size=2, rank=rank)
topology, shard = zcomm.Topology(ranks_per_node=2), torch.ones(300_000)


def start():
    return zcomm.all_gather_single(torch.empty(600_000), shard, topology, async_op=True)


if mode == "dropped":
    for _ in range(20):
        start()
elif mode == "kept":
    works = [start() for _ in range(5)]
    [work.is_completed() for work in works]
elif mode == "a collective in an exit handler":
    start().wait()
elif mode == "dropped and destroyed":
    for _ in range(20):
        start()
    dist.destroy_process_group()
else:
    start().wait()
    dist.destroy_process_group()
    topology.close()
    topology.close()
print("the end")
"""


@pytest.mark.parametrize(
    "mode", [
        "dropped", "kept", "dropped and destroyed", "destroyed before it is closed", "a collective in an exit handler",
    ],
)  # fmt: skip
def test_a_process_ends_without_an_abort(mode: str, tmp_path: Path) -> None:
    """A thread inside of torch while the interpreter is torn down would end it by SIGABRT."""
    words = [sys.executable, "-c", SCRIPT]
    started = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path / "store"), mode],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            output, errors = process.communicate(timeout=120)
            said = "said\n" if mode == "a collective in an exit handler" else ""
            assert (process.returncode, output) == (0, "the end\n" + said), errors
    finally:
        for process in started:
            process.kill()
            process.communicate()
