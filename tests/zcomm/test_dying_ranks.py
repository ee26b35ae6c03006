"""A rank that dies or stops in a collective: the others get an error within the process group's timeout, no hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT_S = 3
RANK = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist, zcomm
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method="file://" + store, rank=rank, world_size=3, timeout=timedelta(seconds={timeout})
)
shard, full = torch.ones(300_000), torch.empty(900_000)
zcomm.all_gather_single(full, shard, format="int8")
print("ready", flush=True)
if rank == 2:
    time.sleep(600)  # until the test kills or stops it
try:
    {call}
except Exception as error:
    print(type(error).__name__, flush=True)
else:
    print("no error", flush=True)
finally:
    sys.stdout.flush()
    import os; os._exit(0)  # destroying the group would wait for the rank that is gone
"""
CALLS = {
    "all_gather": 'zcomm.all_gather_single(full, shard, format="int8")',
    "all_gather in place": "zcomm.all_gather_single(full, shard)",
    "reduce_scatter": 'zcomm.reduce_scatter_single(shard, full, format="int4")',
    "async": "zcomm.all_gather_single(full, shard, async_op=True).wait()",
}


def _start(rank: int, store: Path, call: str) -> subprocess.Popen[str]:
    code = RANK.format(timeout=TIMEOUT_S, call=call)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(rank), str(store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("all_gather", signal.SIGKILL),
        ("all_gather in place", signal.SIGSTOP),
        ("reduce_scatter", signal.SIGSTOP),
        ("async", signal.SIGKILL),
    ],
)
def test_the_others_get_an_error(name: str, sent: signal.Signals, tmp_path: Path) -> None:
    ranks = [_start(rank, tmp_path / "store", CALLS[name]) for rank in range(3)]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        ranks[2].send_signal(sent)
        begin = time.monotonic()
        for process in ranks[:2]:
            printed = process.communicate(timeout=5 * TIMEOUT_S)[0]
            assert "Error" in printed, printed
        assert time.monotonic() - begin < 4 * TIMEOUT_S
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
