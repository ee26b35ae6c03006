"""Rates of the CUDA and Triton kernels on a GPU, compared with a device-to-device copy of the same bytes.

    python bench/gpu_kernels.py                                        every format, 1 MiB to 4 GiB
    python bench/gpu_kernels.py --formats int8 --dtypes bfloat16 float32 --sizes-mib 64 --compare eager compiled
    python bench/gpu_kernels.py --device cpu --sizes-mib 1             the same with the native kernels, on the CPU

All rates are GB/s of bytes read plus bytes written. They are medians over rounds that interleave the kernels, the copy
and the other contenders, timed by CUDA events, each call with cold caches. The size is that of the float array; the
messages are smaller. ``#wrong`` counts bytes or elements that differ from the reference, in the first and the last
65,536 elements. ``eager`` and ``compiled`` are torch's operations on full arrays (torch_forms.py), up to
``--compare-mib``; ``deepspeed`` is DeepSpeed's CUDA quantizer, int8 and int4 in groups of the same size, in fp16 and
bf16.

First the Triton kernels are compiled in ``--jobs`` processes, which takes most of the time. Sizes that exceed the
memory, or the time that gpu_check.py allows, are named and not measured; so are kernels that are unavailable.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from gpu_budget import is_spent
from gpu_kernels_cases import NUM_SUMMED, Case, Data, device_nbytes, kernels_of, make_cases, reason_against
from gpu_kernels_timer import Timer

from zcomm._bench.harness import BenchReport, Column

FORMATS = ("int8", "int4", "nf4", "fp8_e4m3")
DTYPES = ("bfloat16", "float32", "float16")
SIZES_MIB = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
CONTENDERS = ("eager", "compiled", "deepspeed")
PREPARED_MIB = 8.0  # enough elements for the Triton kernels to be tuned, which compiles all their forms
COLUMNS = [
    Column("operation", "          operation"),
    Column("format", "  format"),
    Column("dtype", "   dtype"),
    Column("size", "     size(B)", "d"),
    Column("kernels", "kernels"),
    Column("p50_us", "   p50(us)", ".1f", is_measurement=True),
    Column("gbps", "    GB/s", ".1f", is_measurement=True),
    Column("copy_gbps", "    copy", ".1f", is_measurement=True),
    Column("over_copy", "   /copy", ".3f", is_measurement=True),
    *(Column(name, f"/{name}", ".2f", is_measurement=True) for name in CONTENDERS),
    Column("unavailable", "unavailable"),
]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", nargs="+", choices=("cuda", "triton"), help="default: both")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES[:1], metavar="NAME")
    parser.add_argument("--sizes-mib", nargs="+", type=float, default=SIZES_MIB, metavar="MIB")
    parser.add_argument("--rounds", type=int, default=11, help="times that each call is timed")
    parser.add_argument("--compare", nargs="*", choices=CONTENDERS, default=(), help="other contenders to time")
    parser.add_argument("--compare-mib", type=float, default=256.0, help="the largest size of these contenders")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(16, len(os.sched_getaffinity(0))),
        help="processes that compile; 0: do not compile first",
    )
    parser.add_argument("--prepare", action="store_true", help="only compile the kernels")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or min(arguments.sizes_mib) <= 0:
        parser.error("--rounds and --sizes-mib must be positive")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device: --device cpu runs the same code with the native kernels")
    if arguments.device == "cpu":
        if arguments.kernels:
            parser.error("--kernels must not be set with --device cpu: it has only native kernels")
        arguments.kernels = ["native"]
    return arguments


def prepare(arguments: argparse.Namespace) -> str:
    """Compile the Triton kernels of every format and dtype in parallel processes; return what failed."""
    command = [sys.executable, __file__, "--prepare", "--kernels", "triton", "--sizes-mib", str(PREPARED_MIB)]
    waiting = [[*command, "--formats", f, "--dtypes", d] for f, d in product(arguments.formats, arguments.dtypes)]
    running: list[subprocess.Popen[bytes]] = []
    failed = 0
    # The compiled kernels are kept, but not what is tuned while others use the GPU.
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                running.append(subprocess.Popen(waiting.pop(), stdout=subprocess.DEVNULL, env=environment))
            failed += running.pop(0).wait() != 0
    return f"{failed} of the processes that compile failed" if failed else ""


def warm(arguments: argparse.Namespace) -> int:
    """Call every operation once on a small array."""
    numel = int(PREPARED_MIB * 2**20) // 4 // 1024 * 1024
    for name, dtype in product(arguments.formats, arguments.dtypes):
        data = Data(name, getattr(torch, dtype), numel, torch.device(arguments.device), max(NUM_SUMMED))
        for kernels in map(kernels_of, arguments.kernels):
            data.fill(kernels)
            for case in make_cases(data):
                case.call(kernels)
    return 0


def torch_calls(case: Case, names: list[str]) -> dict[str, Callable[[], object]]:
    """Return torch's forms of ``case``, without those that fail for lack of memory or of a compiler."""
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        call = case.torch_form
        if name == "compiled":
            torch._dynamo.reset()
            call = torch.compile(call, dynamic=False)
        try:
            call()
        except Exception as error:  # a contender that does not run here must not end the benchmark
            print(f"# {name} of {case.operation}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        else:
            calls[name] = call
    return calls


def deepspeed_call(case: Case, data: Data) -> dict[str, Callable[[], object]]:
    """Return DeepSpeed's quantizer on the same array, if it supports the case."""
    is_supported = case.operation == "quantize" and data.x.dtype != torch.float32
    if not is_supported or data.spec.name not in ("int8", "int4") or importlib.util.find_spec("deepspeed") is None:
        return {}
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    module = builders.QuantizerBuilder().load()
    groups, bits = data.x.numel() // data.layout.block, data.layout.codec.bits
    return {"deepspeed": lambda: module.quantize(data.x, groups, bits, module.Symmetric)}


def run_data(
    arguments: argparse.Namespace, data: Data, copied: torch.Tensor, timer: Timer, report: BenchReport
) -> None:
    """Measure one format, dtype and size; print its rows."""
    names = [name for name in arguments.compare if data.x.nbytes <= arguments.compare_mib * 2**20]
    data.fill(kernels_of(arguments.kernels[0]))
    for case in make_cases(data):
        wrong = {}
        for name in arguments.kernels:
            data.out.zero_()
            data.message.zero_()
            case.call(kernels_of(name))
            wrong[name] = case.count_wrong()
        source, target = copied[0, : case.nbytes // 2], copied[1, : case.nbytes // 2]
        others = torch_calls(case, [name for name in names if name != "deepspeed"])
        if "deepspeed" in names:
            others |= deepspeed_call(case, data)
        calls = {name: _bound(case, name) for name in arguments.kernels}
        times = timer.times({**calls, "copy": lambda s=source, t=target: t.copy_(s), **others}, rounds=arguments.rounds)
        for name in arguments.kernels:
            seconds = times[name].p50
            values = {
                "operation": case.operation,
                "format": data.spec.name,
                "dtype": str(data.x.dtype).removeprefix("torch."),
                "size": data.x.nbytes,
                "kernels": name,
                "p50_us": seconds * 1e6,
                "gbps": case.nbytes / seconds / 1e9,
                "copy_gbps": case.nbytes / times["copy"].p50 / 1e9,
                "over_copy": times["copy"].p50 / seconds,
            }
            report.row(values | {other: times[other].p50 / seconds for other in others}, num_wrong=wrong[name])


def _bound(case: Case, name: str) -> Callable[[], object]:
    module = kernels_of(name)
    return lambda: case.call(module)


def run(arguments: argparse.Namespace) -> int:
    """Measure everything, in the order of the sizes; return 1 if a result is wrong."""
    start, device = time.monotonic(), torch.device(arguments.device)
    report = BenchReport(COLUMNS, as_json=arguments.json)
    report.start("gpu_kernels", device=arguments.device, rounds=arguments.rounds)
    reasons = {name: reason_against(name) for name in arguments.kernels or ("cuda", "triton")}
    for name, reason in reasons.items():
        if reason:
            report.row({"kernels": name, "unavailable": reason}, num_wrong=0)
    arguments.kernels = [name for name, reason in reasons.items() if not reason]
    if not arguments.kernels:
        return report.finish()
    if "triton" in arguments.kernels and arguments.jobs:
        if problem := prepare(arguments):
            report.note(problem)
        report.note(f"compiled after {time.monotonic() - start:.0f} s")
    timer, skipped = Timer(device), []
    for size_mib, name, dtype_name in product(arguments.sizes_mib, arguments.formats, arguments.dtypes):
        dtype = getattr(torch, dtype_name)
        numel = max(int(size_mib * 2**20) // dtype.itemsize // 1024, 1) * 1024
        needed = device_nbytes(name, dtype, numel, max(NUM_SUMMED)) + 8 * numel * dtype.itemsize
        is_late = is_spent()
        if is_late or (device.type == "cuda" and needed > torch.cuda.mem_get_info()[0]):
            skipped.append(f"{name} {dtype_name} {size_mib:g} MiB ({'time' if is_late else 'memory'})")
            continue
        data = Data(name, dtype, numel, device, max(NUM_SUMMED))
        largest = data.x.nbytes + max((*NUM_SUMMED, 1)) * data.layout.nbytes
        copied = torch.zeros(2, largest // 2, dtype=torch.uint8, device=device)
        run_data(arguments, data, copied, timer, report)
        del data, copied
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if skipped:
        report.note(f"not measured: {', '.join(skipped)}")
    return report.finish()


def main() -> int:
    """Compile or measure."""
    arguments = parse_arguments()
    return warm(arguments) if arguments.prepare else run(arguments)


if __name__ == "__main__":
    sys.exit(main())
