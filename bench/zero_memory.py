"""Peak memory of one contender of zero_step.py, in ranks that import nothing else: a JSON line.

    torchrun --nproc-per-node 2 bench/zero_memory.py "fsdp2 reshard=True" --dtype bfloat16

``peak_mib`` is the largest over the ranks: of resident memory (VmHWM: interpreter, libraries, model, everything since
the process began), or, where there is CUDA, of allocated device memory. ``base_mib`` was resident when torch had been
imported and the process group joined, before the contender's own modules.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from contenders.catalogue import ENTRIES, build
from contenders.job import add_shape, batch, new_setup


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=ENTRIES)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=6)
    add_shape(parser)
    return parser.parse_args()


def resident_mib(key: str) -> float:
    """``VmRSS``, resident now, or ``VmHWM``, its largest value so far; 0 where there is no /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), 0.0)


def join() -> torch.device:
    """Join torchrun's ranks."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo")
    return torch.device("cpu")


def main() -> int:
    """Train for a few steps and print the peak."""
    arguments, device = parse_arguments(), join()
    base = resident_mib("VmRSS")
    contender = build(arguments.contender, new_setup(arguments, arguments.dtype, device))
    for step in range(arguments.steps):
        loss = contender.step(*batch(arguments, step, dist.get_rank(), device))
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else resident_mib("VmHWM")
    figures = torch.tensor([peak, base, loss.item()], device=device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        peak, base, largest_loss = figures.tolist()
        row = {"case": arguments.contender, "peak_mib": peak, "base_mib": base, "loss": largest_loss}
        print(json.dumps(row), flush=True)
    contender.close()
    del contender, loss
    gc.collect()  # DDP would hold the process group, and let it go where gloo's thread waits for the interpreter
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
