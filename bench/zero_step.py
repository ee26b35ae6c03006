"""Training throughput of ZeroOptimizer's stages beside FSDP2 (``fully_shard``), on the same model and the same batches.

    python bench/zero_step.py                  2 ranks, float32
    python bench/zero_step.py --num-ranks 4 --dtype bfloat16 --json

All cases live in one process group and take turns: a round is ``--steps`` optimizer steps of each case, so that
whatever else the machine does falls on all of them alike. A row is the median over rounds. Stage 3 is compared with
``reshard_after_forward=True``; stages 1 and 2, which keep parameters whole, with ``False``. ``#wrong`` counts a loss
that differs from FSDP2's by more than ``LOSS_TOLERANCE`` after the same steps; such a row prints no times, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, GPTConfig
from ranks_setup import process_group, relaunch_under_torchrun
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

import zcomm
from zcomm import Topology
from zero import ZeroOptimizer

LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}  # relative; after tens of steps, not after one
BASELINE_OF = {
    "zero stage 1": "fsdp2 reshard=False",
    "zero stage 2": "fsdp2 reshard=False",
    "zero stage 3": "fsdp2 reshard=True",
}


@dataclass
class Case:
    """One way to train the model, and how long its rounds took."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    round_seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step; returns this rank's loss."""
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", "--nproc", type=int, default=2, help="without torchrun")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per step and rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup-rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="of each case in a round")
    parser.add_argument("--json", action="store_true", help="the same rows as JSON lines")
    return parser.parse_args()


def build_cases(arguments: argparse.Namespace, device: torch.device) -> list[Case]:
    """Return every case with the same initial parameters."""
    dtype = getattr(torch, arguments.dtype)
    shape = {name: getattr(arguments, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    config = GPTConfig(**shape, seq_length=arguments.seq_length)

    def new_model() -> GPT:
        torch.manual_seed(1)
        return GPT(config).to(device)

    return [
        *(_zero_case(new_model().to(dtype), stage) for stage in (1, 2, 3)),
        *(_fsdp2_case(new_model(), dtype, reshard_after_forward=reshard) for reshard in (False, True)),
    ]


def _zero_case(model: GPT, stage: int) -> Case:
    optimizer = ZeroOptimizer(model, AdamW, stage=stage, lr=1e-3, fused=True)
    return Case(f"zero stage {stage}", model, optimizer)


def _fsdp2_case(model: GPT, dtype: torch.dtype, *, reshard_after_forward: bool) -> Case:
    device_type = next(model.parameters()).device.type
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(param_dtype=dtype)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Case(f"fsdp2 reshard={reshard_after_forward}", model, AdamW(model.parameters(), lr=1e-3, fused=True))


def run_rounds(arguments: argparse.Namespace, cases: list[Case], device: torch.device, topology: Topology) -> None:
    """Let the cases take turns; afterwards each holds its round times (of the slowest rank) and its last loss."""
    for number in range(arguments.warmup_rounds + arguments.rounds):
        for case in cases[number % len(cases) :] + cases[: number % len(cases)]:  # nobody always goes first
            start_s = time.perf_counter()
            for step in range(arguments.steps):
                loss = case.step(*_batch(arguments, number * arguments.steps + step, topology.rank, device))
            mean = loss.float().reshape(1)
            zcomm.all_reduce(mean, "avg", group=topology)  # every rank has finished the round
            case.loss = mean.item()
            if number >= arguments.warmup_rounds:
                case.round_seconds.append(time.perf_counter() - start_s)


def _batch(arguments: argparse.Namespace, step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 1_000 + rank)
    shape = (arguments.batch_size, arguments.seq_length + 1)
    tokens = torch.randint(0, 256, shape, generator=generator).square() // 256  # skewed, so that there is much to learn
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def rows_of(arguments: argparse.Namespace, cases: list[Case], world_size: int) -> list[dict[str, Any]]:
    """Return one row a case: median step time, rate, ratio to its FSDP2 baseline, and the check of its loss."""
    by_name = {case.name: case for case in cases}
    rows = []
    for case in cases:
        baseline = by_name[BASELINE_OF.get(case.name, case.name)]
        step_s = statistics.median(case.round_seconds) / arguments.steps
        ratios = [b / c for b, c in zip(baseline.round_seconds, case.round_seconds, strict=True)]
        is_wrong = not abs(case.loss - baseline.loss) <= LOSS_TOLERANCE[arguments.dtype] * abs(baseline.loss)
        tokens = world_size * arguments.batch_size * arguments.seq_length
        times = {"p50_ms": 1e3 * step_s, "tokens_per_s": tokens / step_s, "vs_fsdp2": statistics.median(ratios)}
        rows.append({"case": case.name, "loss": case.loss, "wrong": int(is_wrong)} | ({} if is_wrong else times))
    return rows


def print_rows(arguments: argparse.Namespace, rows: list[dict[str, Any]], world_size: int, numel: int) -> None:
    """Print the table, or JSON lines."""
    if arguments.json:
        for row in rows:
            print(json.dumps(row))
        return
    shape = f"layers {arguments.num_layers}  hidden {arguments.hidden_size}  parameters {numel:,}"
    print(
        f"# zero_step  torch {torch.__version__}  backend {dist.get_backend()}  world_size {world_size}\n"
        f"# {shape}  dtype {arguments.dtype}  batch {arguments.batch_size} x {arguments.seq_length} per rank  "
        f"rounds {arguments.rounds} x {arguments.steps} steps, interleaved\n"
        f"#{'case':>21}{'p50(ms)':>12}{'tokens/s':>12}{'vs fsdp2':>12}{'loss':>12}{'#wrong':>8}"
    )
    number: Callable[[Any, str], str] = lambda value, spec: "-" if value is None else format(value, spec)  # noqa: E731
    for row in rows:
        print(
            f"{row['case']:>22}{number(row.get('p50_ms'), '.1f'):>12}{number(row.get('tokens_per_s'), ',.0f'):>12}"
            f"{number(row.get('vs_fsdp2'), '.3f'):>12}{row['loss']:>12.5f}{row['wrong']:>8}"
        )
    num_wrong = sum(row["wrong"] for row in rows)
    print(f"# wrong results : {num_wrong} {'OK' if num_wrong == 0 else 'FAILED'}")


def main() -> int:
    """Run the benchmark; 1 if a loss is wrong."""
    arguments = parse_arguments()
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group() as device:
        topology = Topology.from_env()
        cases = build_cases(arguments, device)
        run_rounds(arguments, cases, device, topology)
        rows = rows_of(arguments, cases, topology.world_size)
        if topology.rank == 0:
            numel = sum(p.numel() for p in cases[0].model.parameters())
            print_rows(arguments, rows, topology.world_size, numel)
        for case in cases:
            if isinstance(case.optimizer, ZeroOptimizer):
                case.optimizer.close()
        topology.close()
    return int(any(row["wrong"] for row in rows) and topology.rank == 0)


if __name__ == "__main__":
    sys.exit(main())
