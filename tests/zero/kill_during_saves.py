"""Kills ranks while they save: test_checkpoint_kills.py starts this as a separate program.

Each trial forks two ranks that save asynchronously as fast as they can, and kills one or both after a random time. The
saved values are all the number of the step, which the client state holds, too.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import zero
from tests.zero.models import new_model


def save_until_killed(rank: int, folder: Path, trial: int) -> None:
    """Odd trials overwrite one tag again and again; even ones save under a new tag each time."""
    init = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    model = new_model()
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, stage=1 + trial % 3)
    step = 0
    while True:
        step += 1
        for _, _, values in optimizer.master_pieces():
            values.fill_(step)
        tag = "again" if trial % 2 else f"step{step}"
        saving = zero.save_checkpoint(optimizer, folder, tag, client_state={"step": step}, async_op=step % 4 != 0)
        if step % 4 == 0:
            saving.wait()
            (folder / f"complete-{rank}").write_text(str(step))


def fork_rank(rank: int, folder: Path, trial: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            save_until_killed(rank, folder, trial)
        finally:
            os._exit(1)
    return pid


def main(root: Path, num_trials: int, seed: int) -> None:
    torch.set_num_threads(1)
    zero.ZeroOptimizer(new_model(), torch.optim.AdamW, stage=1).close()  # imports what the ranks would import each
    chance = random.Random(seed)
    for trial in range(num_trials):
        folder = root / str(trial)
        folder.mkdir()
        pids = [fork_rank(rank, folder, trial) for rank in range(2)]
        while not (folder / "complete-0").exists():
            time.sleep(0.002)
        time.sleep(chance.random() * 0.15)
        victims = [pids, pids[:1], pids[1:]][chance.randrange(3)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        for pid in set(pids) - set(victims):
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
