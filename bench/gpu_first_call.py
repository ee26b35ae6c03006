"""Time the first calls of a process: imports, compilation and tuning, with cold and with warm caches.

    python bench/gpu_first_call.py
    python bench/gpu_first_call.py --device cpu --numel 4096

For each kernel backend two processes run one after the other with the same cache folders, which are empty for the first
(``cold``); compiled kernels and tuning results are cached there. Columns, in seconds: ``torch`` and ``zcomm``: their
imports; ``device``: the first tensor on the device; ``first``: the first quantize and decode of each format, including
compilation and tuning; ``next``: the second ones, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

CHILD = "GPU_FIRST_CALL_OF"
FORMATS = ("int8", "int4")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--numel", type=int, default=2**24, help="enough for the Triton kernels to be tuned")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, kernels: str) -> dict[str, Any]:
    """Measure in this process, which must not have imported torch yet."""
    times = [time.perf_counter()]

    def lap() -> float:
        times.append(time.perf_counter())
        return times[-1] - times[-2]

    torch = import_module("torch")
    row: dict[str, Any] = {"torch_s": lap()}
    cases = import_module("gpu_kernels_cases")
    row["zcomm_s"] = lap()
    if reason := cases.reason_against(kernels):
        return {"unavailable": reason}
    device, module = torch.device(arguments.device), cases.kernels_of(kernels)
    torch.zeros(1, device=device).item()
    row["device_s"] = lap()
    for name in arguments.formats:
        data = cases.Data(name, torch.bfloat16, arguments.numel, device, 1)
        seconds = []
        for _ in range(2):
            data.out[-1].item()  # wait for the device
            lap()
            data.fill(module)
            for case in cases.make_cases(data):
                case.call(module)
            data.out[-1].item()
            seconds.append(lap())
        row |= {f"{name}_first_s": seconds[0], f"{name}_next_ms": 1e3 * seconds[1]}
    return row


def in_a_process(kernels: str, folder: Path) -> dict[str, Any]:
    """Run :func:`measure` in a process with caches in ``folder``; return its row."""
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "XDG_CACHE_HOME": str(folder)}
    environment = {**os.environ, **caches, CHILD: kernels}
    done = subprocess.run([sys.executable, *sys.argv], stdout=subprocess.PIPE, env=environment, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": f"the process ended with {done.returncode} and printed {lines[-1:] or 'nothing'}"}
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def main() -> int:
    """Start the processes, or run as one of them; return 1 if one fails."""
    arguments, is_wrong = parse_arguments(), False
    if CHILD in os.environ:
        print(json.dumps(measure(arguments, os.environ[CHILD])))
        return 0
    for kernels in ("native",) if arguments.device == "cpu" else ("triton", "cuda"):
        with tempfile.TemporaryDirectory() as folder:
            for disk in ("cold", "kept"):
                row = in_a_process(kernels, Path(folder))
                is_wrong |= "error" in row
                shown = {"kernels": kernels, "disk": disk, **row, "num_wrong": int("error" in row)}
                print(json.dumps(shown) if arguments.json else shown, flush=True)
                if "unavailable" in row:
                    break
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
