"""Train a model on one GPU with masters and moments there, and in host memory: rate, memory, and overlap of copies.

    python bench/gpu_offload.py --num-layers 24 --hidden-size 2048        1.2 G parameters
    python bench/gpu_offload.py --largest                                 as many as fit into the free memory
    python bench/gpu_offload.py --device cpu --num-layers 2 --hidden-size 64 --seq-length 32      the same code, no GPU

``zero.CPUAdam`` updates on the host, or torch's AdamW if the native module is not built. Parameters and gradients stay
on the GPU in bfloat16. TFLOP/s counts 6 operations per parameter and token, and attention's, over the full step. On a
GPU one more step is traced: ``hidden`` is the share of the copy time between host and GPU during which a kernel ran.
``#wrong``: the loss after the same steps differs from that with the states on the GPU. ``--largest`` measures
offloading only, as nothing else would fit: its loss has to be a number.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpt_model import GPT, GPTConfig, choose_matmul_dtype
from gpu_trace import Event, count_launches, traced
from torch import Tensor
from torch.optim import AdamW

import zero
from zcomm._bench.harness import BenchReport, Column
from zcomm._kernels.kernels import native_unavailable_reason
from zero import ZeroOptimizer

HOST_NBYTES, DEVICE_NBYTES = 18, 8
"""Bytes per parameter at most: masters, moments, gradients, copies; parameters, gradients, initial float32."""
MEMORY_SHARE = 0.6
LOSS_TOLERANCE = 0.01
"""Relative. The optimizers round differently, and parameters are bfloat16."""
HEAD_WIDTH = 128
Interval = tuple[float, float]
COLUMNS = [
    Column("parameters", " parameters", "d"),
    Column("optimizer", "optimizer"),
    Column("states", "states"),
    Column("p50_ms", "p50(ms)", ".1f", is_measurement=True),
    Column("tokens_per_s", "tokens/s", ".0f", is_measurement=True),
    Column("tflops", "TFLOP/s", ".1f", is_measurement=True),
    Column("peak_gib", "peak(GiB)", ".1f", is_measurement=True),
    Column("copies_ms", "copies(ms)", ".1f", is_measurement=True),
    Column("hidden", "hidden", ".2f", is_measurement=True),
    Column("kernels", "kernels", "d"),
    Column("losses", "losses"),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--num-layers", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=2048, help=f"a multiple of {HEAD_WIDTH}, or less than it")
    parser.add_argument(
        "--largest", action="store_true", help="as many layers of width 4096 as fit into the free memory"
    )
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one warm-up step")
    parser.add_argument("--trace", type=Path, help="write the trace here, for chrome://tracing or Perfetto")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device: --device cpu runs the same code on the CPU")
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1: steps={arguments.steps}")
    return arguments


def layer_numel(width: int) -> int:
    """Approximate number of parameters of one block."""
    return 12 * width * width


def largest_num_layers(width: int, device: str) -> int:
    """Number of blocks that fit into ``MEMORY_SHARE`` of the free memory, on the host and on the GPU."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    numel = MEMORY_SHARE * available / HOST_NBYTES
    if device == "cuda":
        numel = min(numel, MEMORY_SHARE * torch.cuda.mem_get_info()[0] / DEVICE_NBYTES)
    return max(1, int(numel / layer_numel(width)))


def covered(interval: Interval, others: Sequence[Interval]) -> float:
    """How much of ``interval`` the disjoint ``others`` cover."""
    start, end = interval
    return sum(max(0.0, min(end, other_end) - max(start, other_start)) for other_start, other_end in others)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of ``intervals``, disjoint and in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def share_hidden(events: Iterable[Event]) -> tuple[float, float]:
    """Seconds of copies between host and GPU, and the share of them in which a kernel ran."""
    copies, kernels = [], []
    for event in events:
        if not event.is_copy:
            kernels.append((event.start, event.end))
        elif event.name.startswith("Memcpy") and "DtoD" not in event.name:
            copies.append((event.start, event.end))
    of_copies, of_kernels = merged(copies), merged(kernels)
    total = sum(end - start for start, end in of_copies)
    return total * 1e-6, sum(covered(copy, of_kernels) for copy in of_copies) / total if total else 0.0


def build(
    arguments: argparse.Namespace, device: torch.device, report: BenchReport, *, offloads: bool
) -> tuple[GPT, ZeroOptimizer]:
    """The model on the device, and the optimizer with its states there or in host memory."""
    num_layers, width = arguments.num_layers, arguments.hidden_size
    if arguments.largest:
        width = 4096
        num_layers = largest_num_layers(width, arguments.device)
    start, heads = time.monotonic(), max(1, width // HEAD_WIDTH)
    dtype = choose_matmul_dtype(torch.bfloat16, device)
    torch.manual_seed(1)
    with device:
        model = GPT(GPTConfig(num_layers, width, heads, arguments.seq_length, dtype)).bfloat16()
    chosen: Any = zero.CPUAdam if offloads and not native_unavailable_reason() else AdamW
    options: dict[str, Any] = {}
    if offloads:
        options = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
        options["zero_force_ds_cpu_optimizer"] = chosen is zero.CPUAdam
    optimizer = ZeroOptimizer(model, chosen, stage=2, lr=1e-4, weight_decay=0.1, **options)
    report.note(f"{num_layers} layers of {width}, made in {time.monotonic() - start:.1f} s")
    return model, optimizer


def rates(arguments: argparse.Namespace, device: torch.device, step: Callable[[], None], model: GPT) -> dict[str, Any]:
    """Time the steps."""
    seconds = []
    for index in range(arguments.steps + 1):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index:
            seconds.append(time.perf_counter() - start)
    median, num_tokens = statistics.median(seconds), arguments.batch_size * arguments.seq_length
    numel, config = sum(p.numel() for p in model.parameters()), model.config
    of_attention = 6 * config.num_layers * config.seq_length * config.hidden_size  # causal attention: half of 12
    tflops = num_tokens * (6 * numel + of_attention) / median / 1e12
    rate = {"p50_ms": 1e3 * median, "tokens_per_s": num_tokens / median, "tflops": tflops}
    return {"parameters": numel, **rate}


def of_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Return the columns of a traced step."""
    if (launches := count_launches(events)) is None:
        return {}
    seconds, share = share_hidden(events)
    return {"copies_ms": 1e3 * seconds, "hidden": share, "kernels": launches.kernels}


def train(
    arguments: argparse.Namespace, device: torch.device, report: BenchReport, *, offloads: bool
) -> tuple[dict[str, Any], float]:
    """Build, time and, if it offloads, trace; return the row and the loss after the last timed step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, optimizer = build(arguments, device, report, offloads=offloads)
    generator = torch.Generator().manual_seed(1)
    shape = arguments.batch_size, arguments.seq_length + 1
    tokens = torch.randint(0, 256, shape, generator=generator).to(device)
    losses: list[Tensor] = []

    def step() -> None:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    row = rates(arguments, device, step, model)
    first, last = losses[0].item(), losses[-1].item()
    name = "AdamW" if native_unavailable_reason() or not offloads else "CPUAdam"
    row |= {"optimizer": name, "states": "host" if offloads else "device", "losses": f"{first:.4f} to {last:.4f}"}
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if offloads:
        row |= of_trace(traced(step, device, arguments.trace))
    optimizer.close()
    return row, last


def main() -> int:
    """Train with the states on the device, then in host memory; return 1 if the losses differ."""
    arguments = parse_arguments()
    device, report = torch.device(arguments.device), BenchReport(COLUMNS, as_json=arguments.json)
    report.start("gpu_offload", device=device.type, steps=arguments.steps)
    expected = None
    if not arguments.largest:
        row, expected = train(arguments, device, report, offloads=False)
        report.row(row, num_wrong=0)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    row, last = train(arguments, device, report, offloads=True)
    is_right = math.isfinite(last) if expected is None else abs(last - expected) <= LOSS_TOLERANCE * expected
    report.row(row, num_wrong=int(not is_right))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
