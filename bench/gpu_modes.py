"""Run every stage, mode, storage tier and drop-in on ranks that share the GPU, and compare with the same on the CPU.

    python bench/gpu_modes.py                            4 ranks on the GPU, beside 4 on the CPU
    python bench/gpu_modes.py --device cpu --only stage1 the CPU beside itself

The runs are those of tools/hash_modes.py. ``numbers`` are losses, norms, and the norms of weights and of collectives'
results; ``error`` is the largest relative difference from the CPU. Matrix products differ from device to device, so
training may differ by a tolerance; what collectives return has the same bits. ``#wrong``: a difference above that,
another count of numbers, or bytes sent that differ; an error of a rank. Dropout draws other numbers on a GPU: of the
modes with it only counts and bytes are compared. Exact changes send more bytes on a GPU, the room for a message whose
length only the device knows; gradients of a given error are refused there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_budget import is_spent
from gpu_sharing import sharing

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from hash_modes import Runner, Where
from hashed_runs import Result, modes, train, train_drop_in

NARROW_TOLERANCE, FLOAT32_TOLERANCE = 0.05, 1e-4
WITH_ROOM = "exact-changes"
"""Modes that send more on a GPU have names that start with it."""
MOST_ROOM = 1.25
"""How many times as much: a first message has the room of the longest."""
REFUSED = {"delta_hpz-gradient_error": "BackendUnavailableError"}
"""What modes raise on a GPU."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="modes with one of these in their name")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    return parser.parse_args()


def relative_error(got: float, expected: float) -> float:
    """Return the relative difference; that of equal numbers, infinite and NaN ones too, is 0."""
    if got == expected or (math.isnan(got) and math.isnan(expected)):
        return 0.0
    error = abs(got - expected) / abs(expected) if expected else math.inf
    return math.inf if math.isnan(error) else error


def tolerance_of(name: str, mode: Any) -> float:
    """How far the numbers of a mode may differ, relatively."""
    options = mode.keywords if isinstance(mode, partial) else {}
    if "dropout" in options.get("model", ()):
        return math.inf
    is_float32 = name.startswith("collective") or (
        getattr(mode, "func", None) in (train, train_drop_in)
        and "dtype" not in options.get("model", ())
        and "fp16" not in options
    )
    return FLOAT32_TOLERANCE if is_float32 else NARROW_TOLERANCE


def compared(name: str, mode: Any, got: list[Result], expected: list[Result]) -> dict[str, Any]:
    """Return the row of a mode that ended on both devices."""
    counts = [[len(rank.numbers) for rank in of] for of in (got, expected)]
    sent = [sum(rank.num_bytes for rank in of) for of in (got, expected)]
    numbers = ((number for rank in of for number in rank.numbers) for of in (got, expected))
    pairs = list(zip(*numbers, strict=False))
    error = max((relative_error(*pair) for pair in pairs), default=math.inf)
    most = MOST_ROOM if name.startswith(WITH_ROOM) else 1.0
    is_sent = sent[1] <= sent[0] <= most * sent[1]
    is_right = counts[0] == counts[1] and is_sent and error <= tolerance_of(name, mode)
    if name.startswith("collective"):  # a norm would not show what is in the wrong place
        is_right &= all(a.digests["weights"] == b.digests["weights"] for a, b in zip(got, expected, strict=True))
    row = {"mode": name, "numbers": len(pairs), "error": error, "bytes": sent[0], "num_wrong": int(not is_right)}
    return row | ({} if sent[0] == sent[1] else {"bytes_on_cpu": sent[1]})


def main() -> int:
    """Run the modes; return 1 if one is wrong."""
    arguments, num_wrong, num_run, skipped = parse_arguments(), 0, 0, []
    where = Where()
    if arguments.device == "cuda":
        where = Where(torch.device("cuda", 0), partial(sharing, nccl=tuple(torch.cuda.nccl.version())))
    hidden = Where(environment=lambda _rank: {"CUDA_VISIBLE_DEVICES": ""})
    runners = Runner(where), Runner(hidden)
    for name, mode in modes().items():
        if not any(word in name for word in arguments.only):
            continue
        if is_spent():
            skipped.append(name)
            continue
        start = time.monotonic()
        (got, problem), (expected, on_cpu) = (runner.results(name, mode) for runner in runners)
        refusal = REFUSED.get(name) if arguments.device == "cuda" else None
        if refusal and problem.startswith(refusal) and not on_cpu:
            row: dict[str, Any] = {"mode": name, "refused": refusal, "num_wrong": 0}
        elif problem or on_cpu:
            row = {"mode": name, "problem": problem or f"on the CPU: {on_cpu}", "num_wrong": 1}
        else:
            row = compared(name, mode, got, expected)
        num_wrong, num_run = num_wrong + row["num_wrong"], num_run + 1
        row["seconds"] = round(time.monotonic() - start, 2)
        print(json.dumps(row) if arguments.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    for runner in runners:
        runner.close()
    if skipped:
        print(f"# not run, for lack of time: {', '.join(skipped)}")
    return int(num_wrong > 0 or not num_run)


if __name__ == "__main__":
    sys.exit(main())
