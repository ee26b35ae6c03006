"""Start a script on several ranks of this machine, which may share its GPU.

    python bench/gpu_ranks.py 4 bench/gpu_collectives.py --ranks-per-node 2

Like torchrun --standalone, but without torch, a rendezvous or name resolution. No rank outlives this process: a rank
that fails ends the others, and SIGKILL of this process ends all. The exit code is that of the first rank that failed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from gpu_check_processes import die_with_parent

POLL_S = 0.05


def run_ranks(num_ranks: int, command: Sequence[str]) -> int:
    """Run ``command`` on every rank; return the first exit code that is not 0, 128 + N for signal N."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [_start(rank, num_ranks, port, command) for rank in range(num_ranks)]
    try:
        while True:
            codes = [rank.poll() for rank in ranks]  # poll all: a failure must not wait for ranks before it
            if failed := [code for code in codes if code]:
                return _code(failed[0])
            if None not in codes:
                return 0
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _start(rank: int, num_ranks: int, port: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **{name: str(value) for name, value in variables.items()}}
    # This process has one thread: preexec_fn is safe.
    return subprocess.Popen(list(command), env=environment, preexec_fn=die_with_parent)  # noqa: PLW1509


def _code(returned: int) -> int:
    return returned if returned >= 0 else 128 - returned


if __name__ == "__main__":
    sys.exit(run_ranks(int(sys.argv[1]), [sys.executable, *sys.argv[2:]]))
