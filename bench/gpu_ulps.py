"""Rates of the kernels that code changes in ulps on a GPU, compared with int4's and with a copy of the same bytes.

    python bench/gpu_ulps.py                            bfloat16 arrays of 64 and 256 MiB
    python bench/gpu_ulps.py --device cpu --sizes-mib 1 the same with the native kernels, on the CPU

The old values are normal. To the share ``changed`` of them a number from a Laplace distribution of ``scale`` is added,
in ulps and rounded, so some of these stay as they are. ``bits`` are those of the message an element. ``int4`` codes the
difference of the same arrays, whose message has 4.125 bits. All rates are GB/s of the new values: bytes of the array,
whatever else is read or written; ``/copy`` compares with the time of a copy of the array. The rest is as in
gpu_kernels.py. ``#wrong`` counts bytes that differ from the CPU's message, and elements that do not come back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from gpu_budget import is_spent
from gpu_kernels_cases import kernels_of, reason_against
from gpu_kernels_timer import Timer
from torch import Tensor

from zcomm._bench.harness import BenchReport, Column
from zcomm._formats.formats import get_format
from zcomm._formats.message import layout_of
from zcomm._kernels import ulps, ulps_on_cuda

CHANGES = ((0.003, 1.0), (0.05, 1.0), (0.5, 1.0), (1.0, 2.0), (1.0, 6.0))
"""Share of the elements that change, and the scale of the change: fine-tuning to pretraining at a high rate."""
COLUMNS = [
    Column("operation", "operation"),
    Column("changed", "changed", "g"),
    Column("scale", "scale", "g"),
    Column("size", "     size(B)", "d"),
    Column("bits", " bits", ".2f"),
    Column("p50_us", "   p50(us)", ".1f", is_measurement=True),
    Column("gbps", "    GB/s", ".1f", is_measurement=True),
    Column("over_copy", "   /copy", ".3f", is_measurement=True),
    Column("over_int4", "   /int4", ".3f", is_measurement=True),
    Column("unavailable", "unavailable"),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes-mib", nargs="+", type=float, default=(64.0, 256.0), metavar="MIB")
    parser.add_argument("--rounds", type=int, default=11, help="times that each call is timed")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    return parser.parse_args()


def changed_values(numel: int, share: float, scale: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """New and old bfloat16 values [numel]."""
    generator = torch.Generator(device).manual_seed(numel)
    old = torch.randn(numel, device=device, generator=generator).to(torch.bfloat16)
    uniform = torch.rand(numel, device=device, generator=generator) - 0.5
    steps = -scale * uniform.sign() * torch.log1p(-2 * uniform.abs())
    steps[torch.rand(numel, device=device, generator=generator) >= share] = 0.0
    steps = steps.clamp(-1e4, 1e4).round().to(torch.int32)
    bits = old.view(torch.int16).to(torch.int32)
    sign = bits & 0x8000
    return ((bits & 0x7FFF) + steps).clamp(0, 0x7F7F).add(sign).to(torch.int16).view(torch.bfloat16), old


class Calls(NamedTuple):
    """What is timed, and its results."""

    encode: Callable[[], object]
    decode: Callable[[], object]
    message: Tensor
    values: Tensor
    """[numel]; decode() replaces the old values by the new ones, and each further call changes them again."""


def calls_of(new: Tensor, old: Tensor) -> Calls:
    """The coder of the arrays' device."""
    message = torch.zeros(ulps.max_message_nbytes(new.numel()), dtype=torch.uint8, device=new.device)
    values, is_valid = old.clone(), torch.ones(1, dtype=torch.int32, device=new.device)
    if not new.is_cuda:
        return Calls(lambda: ulps.encode(new, old, message), lambda: ulps.decode(message, values), message, values)
    return Calls(
        lambda: ulps_on_cuda.encode(new, old, message),
        lambda: ulps_on_cuda.decode(message, values, is_valid),
        message, values,
    )  # fmt: skip


def count_wrong(calls: Calls, new: Tensor, old: Tensor) -> tuple[int, int]:
    """Encode and decode once. Return how many bytes and elements are wrong, and the message's length."""
    calls.encode()
    calls.decode()
    expected = torch.zeros(calls.message.numel(), dtype=torch.uint8)
    nbytes = ulps.encode(new.cpu(), old.cpu(), expected)
    got = calls.message[:nbytes].cpu()
    wrong = int((got != expected[:nbytes]).sum()) + int((calls.values.view(torch.int16) != new.view(torch.int16)).sum())
    return wrong, nbytes


def int4_calls(new: Tensor, old: Tensor) -> dict[str, Callable[[], object]]:
    """Quantize the difference of the arrays, and decode it."""
    module = kernels_of("cuda" if new.is_cuda else "native")
    change, out = new - old, torch.zeros_like(new)
    layout = layout_of("bench", get_format("int4"), new.dtype, 1, new.numel())
    message = layout.new(1, new.device)
    module.quantize(change, layout, message, 0, 0, None)
    return {
        "int4 encode": lambda: module.quantize(change, layout, message, 0, 0, None),
        "int4 decode": lambda: module.decode(message, layout, out, 0, 0),
    }


def run_change(
    arguments: argparse.Namespace, numel: int, change: tuple[float, float], timer: Timer, report: BenchReport
) -> None:
    """Measure one size and distribution; print its two rows."""
    new, old = changed_values(numel, *change, torch.device(arguments.device))
    calls, target = calls_of(new, old), torch.empty_like(new)
    wrong, nbytes = count_wrong(calls, new, old)
    timed = {"encode": calls.encode, "decode": calls.decode, "copy": lambda: target.copy_(new), **int4_calls(new, old)}
    times = timer.times(timed, rounds=arguments.rounds)
    for operation in ("encode", "decode"):
        seconds = times[operation].p50
        row = {
            "operation": operation, "changed": change[0], "scale": change[1], "size": new.nbytes,
            "bits": 8 * nbytes / numel, "p50_us": 1e6 * seconds, "gbps": new.nbytes / seconds / 1e9,
            "over_copy": times["copy"].p50 / seconds, "over_int4": times[f"int4 {operation}"].p50 / seconds,
        }  # fmt: skip
        report.row(row, num_wrong=wrong)


def main() -> int:
    """Measure everything; return 1 if a result is wrong."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    report = BenchReport(COLUMNS, as_json=arguments.json)
    report.start("gpu_ulps", device=arguments.device, rounds=arguments.rounds)
    if reason := reason_against("cuda" if device.type == "cuda" else "native"):
        report.row({"operation": "encode", "unavailable": reason}, num_wrong=0)
        return report.finish()
    timer, skipped = Timer(device), []
    for size_mib in arguments.sizes_mib:
        for change in CHANGES:
            if is_spent():
                skipped.append(f"{size_mib:g} MiB {change}")
            else:
                run_change(arguments, max(int(size_mib * 2**20) // 2048, 1) * 1024, change, timer, report)
    if skipped:
        report.note(f"not measured, for lack of time: {', '.join(skipped)}")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
