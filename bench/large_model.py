"""Train a GPT that is larger than memory, with parameters and optimizer states on NVMe.

    python bench/large_model.py                      4.1 billion parameters on one rank; needs 66 GB of disk
    python bench/large_model.py --bf16-moments       the same; 49 GB
    python bench/large_model.py --size 1.3b          1.3 billion; 21 GB
    python bench/large_model.py --size 24x1024 --num-ranks 2 --states cpu        layers x hidden size

Trains on real text and evaluates the held-out loss after each step. A progress bar shows what the step waits for; at
the end a table shows memory, bytes and what plain AdamW would need. Files are in a folder under --folder, removed at
the end.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from large_model_plan import Cost, Needs, check_space, numel_of, shape_of
from large_model_watch import Watch
from text_data import held_out_windows, load_text, training_batch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zcomm
import zero
from zcomm import Topology
from zcomm._bench.launch import process_group, relaunch_under_torchrun
from zero._storage.transfer_counters import moved

ALLOCATOR = {
    # One arena: each thread of autograd would have its arena, in which freed blocks stay resident.
    "MALLOC_ARENA_MAX": "1",
    # Larger blocks are mapped separately and returned to the system when they are freed. Otherwise glibc raises the
    # threshold to the largest block ever freed, up to 32 MiB, and such blocks stay in the heap.
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="4b", help="1m, 10m, 50m, 125m, 350m, 1.3b, 4b or LAYERSxHIDDEN")
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step over all ranks")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--held-out", type=int, default=4, help="number of windows of held-out text")
    parser.add_argument("--lr", type=float, help="default: 0.001 / hidden size, which suits the first steps")
    parser.add_argument(
        "--parameters", choices=["nvme", "cpu", "none"], default="nvme", help="where parameters are stored"
    )
    parser.add_argument(
        "--states", choices=["nvme", "cpu", "none"], default="nvme", help="where masters and moments are stored"
    )
    parser.add_argument("--bf16-moments", action="store_true", help="store moments in bfloat16")
    parser.add_argument("--sub-group", type=int, default=2**23, help="elements updated at a time")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder on a fast disk")
    parser.add_argument("--data", type=Path, help="a file or folder (default: Python's standard library)")
    parser.add_argument("--max-memory-gib", type=float, help="fail if the ranks take more together")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class CheckpointedGPT(GPT):
    """The model with activation checkpointing: backward recomputes each block."""

    def run_block(self, block: torch.nn.Module, x: Tensor) -> Tensor:
        """Checkpoint the block if gradients are needed."""
        return checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)


def configuration(arguments: argparse.Namespace, folder: Path, config: GPTConfig) -> dict[str, Any]:
    """The DeepSpeed configuration of the run."""
    matrix = 4 * config.hidden_size**2  # the largest of a block
    return {
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "data_types": {"grad_accum_dtype": "bf16"},
        # One copy of each sub-group instead of two halves the disk space; after a failed step, training cannot go on.
        "zcomm": {"keep_previous_states": False},
        "zero_optimization": {
            "stage": 3,
            # One layer is gathered at a time, and one is prefetched.
            "stage3_max_live_parameters": matrix,
            "stage3_prefetch_bucket_size": matrix,
            "sub_group_size": arguments.sub_group,
            "offload_param": {"device": arguments.parameters, "nvme_path": str(folder), "max_in_cpu": 0},
            "offload_optimizer": {
                "device": arguments.states,
                "nvme_path": str(folder),
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
    }


class Run:
    """The model, its optimizer and its cost."""

    def __init__(
        self, arguments: argparse.Namespace, config: GPTConfig, folder: Path, topology: Topology, watch: Watch
    ) -> None:
        """Build the sharded model; no rank ever has the full one."""
        self._topology, self._watch, self.cost = topology, watch, Cost(numel_of(config))
        torch.manual_seed(arguments.seed)
        document = configuration(arguments, folder, config)
        remote_device = {"none": None}.get(arguments.parameters, arguments.parameters)
        with zero.Init(dtype=torch.bfloat16, remote_device=remote_device, config_dict_or_path=document):
            self.model = CheckpointedGPT(config)
        found = sum(param.numel() for param in self.model.parameters())
        assert found == self.cost.numel, f"{found} parameters, {self.cost.numel} by the formula"
        self.optimizer = zero.ZeroOptimizer(
            self.model, zero.CPUAdam, config=document, topology=topology, betas=(0.9, 0.95),
            lr=arguments.lr or 0.001 / config.hidden_size, weight_decay=0.1, adamw_mode=True,
            fp32_optimizer_states=not arguments.bf16_moments,
        )  # fmt: skip
        self.optimizer.time_exchanges(watch.waiting_for)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Run one training step on this rank's part of the batch."""
        start_s = time.perf_counter()
        with self._watch.waiting_for("compute, forward"):
            loss = self.model(tokens, targets)
        with self._watch.waiting_for("compute, backward"):
            loss.backward()
        with self._watch.waiting_for("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.cost.losses.append(self._mean(loss))
        self.cost.step_seconds.append(time.perf_counter() - start_s)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss over the ranks' equal parts of the held-out windows."""
        self.model.eval()
        with self._watch.waiting_for("compute, held-out loss"):
            self.cost.held_out.append(self._mean(self.model(tokens, targets)))
        self.model.train()
        return self.cost.held_out[-1]

    def _mean(self, loss: Tensor) -> float:
        mean = loss.detach().float().reshape(1)
        zcomm.all_reduce(mean, "avg", group=self._topology)
        return mean.item()


def train(arguments: argparse.Namespace, config: GPTConfig, folder: Path, topology: Topology) -> Watch:
    """Train and print the table."""
    text = load_text(arguments.data, max_bytes=8_000_000, seq_length=arguments.seq_length)
    held_out = _rows(held_out_windows(text, num_windows=arguments.held_out, seq_length=config.seq_length), topology)
    with moved() as bytes_moved, Watch(topology, arguments.steps) as watch:
        run = Run(arguments, config, folder, topology, watch)
        run.evaluate(*held_out)
        for step in range(arguments.steps):
            batch = training_batch(
                text, step=step, seed=arguments.seed, batch_size=arguments.batch_size, seq_length=config.seq_length
            )
            run.step(*_rows(batch, topology))
            watch.step(run.evaluate(*held_out))
    run.cost.count(bytes_moved, topology.world_size)
    if topology.rank == 0:
        print(f"# {run.optimizer.effective}")
        print(run.cost.table(watch.peak.rss, watch.peak.pss, watch.seconds))
        print("# peak GiB while waiting for: " + _by_phase(watch))
    run.optimizer.close()
    return watch


def _by_phase(watch: Watch) -> str:
    return ", ".join(f"{phase} {nbytes / 2**30:.2f}" for phase, nbytes in watch.peak.by_phase.items())


def _rows(tensors: tuple[Tensor, Tensor], topology: Topology) -> tuple[Tensor, Tensor]:
    """This rank's equal part of the rows of each."""
    rows = tensors[0].shape[0] // topology.world_size
    part = slice(topology.rank * rows, (topology.rank + 1) * rows)
    return tensors[0][part], tensors[1][part]


def main() -> None:
    """Check the space, train, report."""
    arguments = parse_arguments()
    for name in ("batch_size", "held_out"):
        if getattr(arguments, name) % arguments.num_ranks:
            raise SystemExit(
                f"--{name.replace('_', '-')} must be a multiple of --num-ranks: {getattr(arguments, name)}"
            )
    config = shape_of(arguments.size, arguments.seq_length)
    if "LOCAL_RANK" not in os.environ:
        needs = Needs.of(numel_of(config), moment_nbytes=4 if arguments.bf16_moments else 8)
        print(f"# {numel_of(config):,} parameters; disk: ", end="")
        print(check_space(arguments.folder, needs.on_disk(arguments.parameters, arguments.states)), flush=True)
        os.environ.update({name: os.environ.get(name, value) for name, value in ALLOCATOR.items()})
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group() as device:
        topology = Topology(ranks_per_node=arguments.num_ranks)
        config = GPTConfig(**{**vars(config), "matmul_dtype": choose_matmul_dtype(torch.bfloat16, device)})
        watch = train(arguments, config, arguments.folder, topology)
        topology.close()
    limit = arguments.max_memory_gib
    if limit is not None and watch.peak.rss > limit * 2**30:
        raise SystemExit(
            f"the ranks took {watch.peak.rss / 2**30:.2f} GiB together, more than --max-memory-gib={limit}"
        )


if __name__ == "__main__":
    main()
