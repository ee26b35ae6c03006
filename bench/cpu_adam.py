"""Time an AdamW step in host memory, compared with torch's and with the memory bandwidth.

    python bench/cpu_adam.py [--numel 10M,100M] [--threads 1,2] [--rounds 15] [--json]

All contenders work on the same arrays, interleaved, and start when all threads sleep: the threads of libgomp, which
torch's step uses, spin for milliseconds after their work and would take the cores of the next contender. ``bound`` is a
kernel that reads and writes the same bytes with almost no arithmetic. GB/s: float32 AdamW reads 16 and writes 12 bytes
a parameter. The bfloat16 rows are the step of a bfloat16 model with float32 masters: ``zero`` reads the bfloat16
gradient and writes the bfloat16 parameter in one pass (28 bytes); torch casts the gradient, steps and casts the
parameter (40 bytes); GB/s counts 28 for both. ``moments bf16`` stores the moments in bfloat16 (20 bytes). ``/bound``
and ``/torch`` are speed-ups over the bound and over torch's fused or cast step: medians over the rounds. ``#wrong``
counts elements that differ from torch's fused step by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zcomm._bench.harness import BenchReport, Column, interleave
from zero import CPUAdam
from zero._optim.cpu_optimizer_base import Arrays, Factors, Rule, step_

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    DeepSpeedCPUAdam = None

COLUMNS = [
    Column("numel", "      numel"),
    Column("threads", "threads"),
    Column("params", "  params"),
    Column("contender", "    contender"),
    Column("p50_ms", "  p50(ms)", ".2f", is_measurement=True),
    Column("gbps", "GB/s", ".2f", is_measurement=True),
    Column("over_bound", "/bound", ".3f", is_measurement=True),
    Column("over_torch", "/torch", ".3f", is_measurement=True),
]
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TOLERANCE = 1e-5
SPIN_S = 0.03
"""Longer than libgomp's threads spin after their work, unless OMP_WAIT_POLICY is set."""


class State:
    """The float32 arrays of one parameter, which every contender updates."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.param = torch.nn.Parameter(torch.randn(numel))
        self.grad = torch.randn(numel)
        self.first = torch.randn(numel).mul_(0.1)
        self.second = torch.rand(numel).add_(0.1)

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Make these arrays the state of ``optimizer``."""
        moments = {"exp_avg": self.first, "exp_avg_sq": self.second}
        optimizer.state[self.param] = {"step": torch.tensor(100.0), **moments}


def float32_contenders(state: State) -> dict[str, Callable[[], object]]:
    """Steps on float32 parameters with float32 gradients."""
    mine = CPUAdam([state.param], **OPTIONS)
    fused = torch.optim.AdamW([state.param], fused=True, **OPTIONS)
    foreach = torch.optim.AdamW([state.param], foreach=True, **OPTIONS)
    state.param.grad = state.grad
    contenders: dict[str, Callable[[], object]] = {}
    for name, optimizer in (("zero", mine), ("torch fused", fused), ("torch foreach", foreach)):
        state.give(optimizer)
        contenders[name] = optimizer.step
    arrays = Arrays(state.param.detach(), state.grad, state.first, state.second)
    contenders["bound"] = lambda: step_(Rule.TRAFFIC, Factors(0.0, grad_factor=1e-12), arrays)
    if (peer := deepspeed_contender(state)) is not None:
        contenders["DeepSpeed"] = peer
    return contenders


def deepspeed_contender(state: State) -> Callable[[], object] | None:
    """DeepSpeedCPUAdam, if it is installed and builds."""
    if DeepSpeedCPUAdam is None:
        return None
    try:
        optimizer = DeepSpeedCPUAdam([state.param], adamw_mode=True, **OPTIONS)
    except Exception as error:
        sys.stderr.write(f"DeepSpeedCPUAdam is not measured: {type(error).__name__}: {error}\n")
        return None
    optimizer.state[state.param] = {"step": 100, "exp_avg": state.first, "exp_avg_sq": state.second}
    step: Callable[[], object] = optimizer.step
    return step


def bfloat16_contenders(state: State) -> dict[str, Callable[[], object]]:
    """Steps on float32 masters with bfloat16 gradients, including the write back to the bfloat16 parameter."""
    mine = CPUAdam([state.param], **OPTIONS)
    fused = torch.optim.AdamW([state.param], fused=True, **OPTIONS)
    for optimizer in (mine, fused):
        state.give(optimizer)
    narrow = CPUAdam([state.param], fp32_optimizer_states=False, **OPTIONS)
    narrow.state[state.param] = {
        "step": torch.tensor(100.0), "exp_avg": state.first.bfloat16(), "exp_avg_sq": state.second.bfloat16(),
    }  # fmt: skip
    grad = state.grad.bfloat16()
    out = torch.empty_like(grad)
    cast = torch.empty_like(state.grad)

    def cast_and_step() -> None:
        state.param.grad = cast.copy_(grad)
        fused.step()
        out.copy_(state.param)

    arrays = Arrays(state.param.detach(), grad, state.first, state.second, out=out)
    return {
        "zero": lambda: mine.step_tensor_(state.param, grad, mine.param_groups[0], out=out),
        "moments bf16": lambda: narrow.step_tensor_(state.param, grad, narrow.param_groups[0], out=out),
        "torch casts": cast_and_step,
        "bound": lambda: step_(Rule.TRAFFIC, Factors(0.0, grad_factor=1e-12), arrays),
    }


def count_wrong() -> int:
    """Count wrong elements of a small step; the arrays of the rows are too large to copy."""
    stepped: list[Tensor] = []
    for make in (CPUAdam, lambda params, **options: torch.optim.AdamW(params, fused=True, **options)):
        state = State(100_003)
        optimizer = make([state.param], **OPTIONS)
        state.give(optimizer)
        state.param.grad = state.grad
        optimizer.step()
        stepped.append(state.param.detach())
    return int((stepped[0] - stepped[1]).abs().gt(TOLERANCE * stepped[1].abs().clamp(min=1e-3)).sum())


def bench(report: BenchReport, numel: int, num_threads: int, rounds: int) -> None:
    """Print the rows of one size."""
    torch.set_num_threads(num_threads)
    num_wrong = count_wrong()
    state = State(numel)
    for params, contenders, versus in (
        ("float32", float32_contenders(state), "torch fused"),
        ("bfloat16", bfloat16_contenders(state), "torch casts"),
    ):
        timings = interleave(contenders, rounds=rounds, before_each=lambda: time.sleep(SPIN_S))
        for name, timing in timings.items():
            nbytes = 20 * numel if name == "moments bf16" else 28 * numel
            row = {
                "numel": numel, "threads": num_threads, "params": params, "contender": name,
                "p50_ms": timing.p50 * 1e3, "gbps": nbytes / timing.p50 / 1e9,
                "over_bound": timing.faster_than(timings["bound"]), "over_torch": timing.faster_than(timings[versus]),
            }  # fmt: skip
            report.row(row, num_wrong=num_wrong if name == "zero" else 0)


def _count(text: str) -> int:
    units = {"K": 10**3, "M": 10**6, "G": 10**9}
    unit = units.get(text[-1:].upper(), 1)
    return int(float(text.rstrip("kKmMgG")) * unit)


def main() -> int:
    """Print all rows; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", default="10M,100M", help="parameters, a list (default 10M,100M; 400M needs 13 GB)")
    parser.add_argument("--threads", default="1,2", help="threads of every contender, a list (default 1,2)")
    parser.add_argument("--rounds", type=int, default=15, help="times each contender is timed (default 15)")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    options = parser.parse_args()
    report = BenchReport(COLUMNS, as_json=options.json)
    report.start("cpu_adam", rounds=options.rounds)
    for numel in map(_count, options.numel.split(",")):
        for num_threads in map(int, options.threads.split(",")):
            bench(report, numel, num_threads, options.rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
