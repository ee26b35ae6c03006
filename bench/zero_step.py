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
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

import zcomm
from zcomm import Topology
from zcomm.bench.harness import Column, Report, Timing, interleave
from zcomm.bench.ranks_setup import process_group, relaunch_under_torchrun
from zero import ZeroOptimizer

LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}  # relative; after tens of steps, not after one
COLUMNS = [
    Column("case", "case".rjust(20)),
    Column("p50_ms", "p50(ms)", ".1f", is_measurement=True),
    Column("tokens_per_s", "tokens/s", ",.0f", is_measurement=True),
    Column("vs_fsdp2", "vs fsdp2", ".3f", is_measurement=True),
    Column("loss", "loss", ".5f"),
]
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
    num_steps: int = 0
    loss: float = float("nan")

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step; returns this rank's loss."""
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
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


def run_rounds(
    arguments: argparse.Namespace, cases: list[Case], device: torch.device, topology: Topology
) -> dict[str, Timing]:
    """Let the cases take turns; each keeps its last loss, averaged over the ranks."""

    def one_round(case: Case) -> None:
        for _ in range(arguments.steps):
            loss = case.step(*_batch(arguments, case.num_steps, topology.rank, device))
        mean = loss.float().reshape(1)
        zcomm.all_reduce(mean, "avg", group=topology)  # so the time is that of the slowest rank
        case.loss = mean.item()

    calls = {case.name: partial(one_round, case) for case in cases}
    return interleave(calls, rounds=arguments.rounds, warmup=arguments.warmup_rounds)


def _batch(arguments: argparse.Namespace, step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 1_000 + rank)
    shape = (arguments.batch_size, arguments.seq_length + 1)
    tokens = torch.randint(0, 256, shape, generator=generator).square() // 256  # skewed, so that there is much to learn
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


def report(arguments: argparse.Namespace, cases: list[Case], timings: dict[str, Timing], world_size: int) -> int:
    """Print one row a case, compared with its FSDP2 baseline; returns the exit status."""
    table = Report(COLUMNS, as_json=arguments.json)
    settings = {"backend": dist.get_backend(), "world_size": world_size, "dtype": arguments.dtype}
    table.start("zero_step", **settings)
    numel = sum(p.numel() for p in cases[0].model.parameters())
    table.note(
        f"parameters {numel:,}  batch {arguments.batch_size} x {arguments.seq_length} per rank  "
        f"rounds {arguments.rounds} x {arguments.steps} steps, interleaved"
    )
    loss_of = {case.name: case.loss for case in cases}
    tokens = world_size * arguments.batch_size * arguments.seq_length * arguments.steps
    for case in cases:
        baseline, timing = BASELINE_OF.get(case.name, case.name), timings[case.name]
        ratios = [b / t for b, t in zip(timings[baseline].seconds, timing.seconds, strict=True)]
        is_close = abs(case.loss - loss_of[baseline]) <= LOSS_TOLERANCE[arguments.dtype] * abs(loss_of[baseline])
        values = {
            "case": case.name,
            "p50_ms": 1e3 * timing.p50 / arguments.steps,
            "tokens_per_s": tokens / timing.p50,
            "vs_fsdp2": statistics.median(ratios),
            "loss": case.loss,
        }
        table.row(values, num_wrong=int(not is_close))
    return table.finish()


def main() -> int:
    """Run the benchmark; 1 if a loss is wrong."""
    arguments = parse_arguments()
    relaunch_under_torchrun(arguments.num_ranks)
    with process_group() as device:
        topology = Topology.from_env()
        cases = build_cases(arguments, device)
        timings = run_rounds(arguments, cases, device, topology)
        status = report(arguments, cases, timings, topology.world_size) if topology.rank == 0 else 0
        for case in cases:
            if isinstance(case.optimizer, ZeroOptimizer):
                case.optimizer.close()
        topology.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
