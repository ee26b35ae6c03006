"""Measure the peak memory of one contender of compare.py; print a JSON line.

    torchrun --nproc-per-node 2 bench/zero_memory.py "fsdp2 reshard=True" --dtype bfloat16

``peak_mib`` is the largest over the ranks of peak resident memory (VmHWM, which includes interpreter and libraries) or,
with CUDA, of allocated device memory. ``base_mib`` is resident memory after torch is imported and the process group
joined, before the contender's modules are. ``states_mib`` is the most that all tensors held at the start of an
optimizer step or at the end of a training step, so without activations: parameters, gradients, states and persistent
buffers. Memory outside of torch's tensors is not in it.
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
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=ENTRIES)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks-per-node", type=int, help="consecutive ranks that stand in for a node")
    parser.add_argument("--nvme-folder", help="folder for offloaded parameters and states")
    add_shape(parser)
    return parser.parse_args()


def resident_mib(key: str) -> float:
    """Return ``VmRSS``, memory resident now, or ``VmHWM``, its peak so far; 0 without /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), 0.0)


def tensors_mib() -> float:
    """Return the memory of all tensors of this process, each storage once."""
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # a released parameter raises when it is used
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if local.device.type != "meta" and local.layout == torch.strided:
                storage = local.untyped_storage()
                found[storage.data_ptr()] = max(found.get(storage.data_ptr(), 0), storage.nbytes())
    return sum(nbytes for address, nbytes in found.items() if address) / 2**20


def join(ranks_per_node: int | None) -> torch.device:
    """Join torchrun's ranks."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo")
    if ranks_per_node is not None:
        of_node = {"LOCAL_WORLD_SIZE": ranks_per_node, "GROUP_RANK": dist.get_rank() // ranks_per_node}
        os.environ.update({name: str(value) for name, value in of_node.items()})
    return device


def main() -> int:
    """Train for a few steps and print the peak."""
    arguments = parse_arguments()
    device, held = join(arguments.ranks_per_node), [0.0]
    base = resident_mib("VmRSS")
    contender = build(arguments.contender, new_setup(arguments, arguments.dtype, device))
    hook = register_optimizer_step_pre_hook(lambda *_: held.append(tensors_mib()))
    for step in range(arguments.steps):
        batches = batch(arguments, step, dist.get_rank(), device, num_batches=contender.accumulation)
        loss = contender.step(*batches)
        held.append(tensors_mib())
    hook.remove()
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else resident_mib("VmHWM")
    figures = torch.tensor([peak, base, max(held), loss.item()], device=device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        peak, base, states, largest_loss = figures.tolist()
        row = {"case": arguments.contender, "peak_mib": peak, "base_mib": base, "states_mib": states}
        row["loss"] = largest_loss
        print(json.dumps(row), flush=True)
    contender.close()
    del contender, loss, batches
    gc.collect()  # else DDP destroys the process group late, while gloo's thread waits for the GIL
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
