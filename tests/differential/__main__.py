"""Compare random training programs with one process.

    python -m tests.differential --seed S [--number N | --count 500]

A program draws a model (tied, shared, unused, frozen, empty and 0-dimensional parameters, users' hooks, both kinds of
activation checkpointing), an order of its blocks that may change, several forwards before a backward, accumulation,
clipping and parameter groups, at every stage, on 1, 2, 3 or 5 ranks. In float64, losses and parameters must equal those
of plain torch within 1e-10. A failing program is reduced until every feature left is needed to make it fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from datetime import datetime, timezone

os.environ.setdefault("ZCOMM_TEST_TIMEOUT_S", "60")
import torch

from tests.differential.programs import draw, features
from tests.differential.run import run, shrink


def main() -> int:
    """Returns 1 if a program failed."""
    parser = argparse.ArgumentParser(description="Run random training programs on ranks and in one process.")
    today = int(datetime.now(timezone.utc).strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="default: today, in UTC")
    parser.add_argument("--number", type=int, help="this program alone")
    parser.add_argument("--start", type=int, default=0, help="number of the first of several")
    parser.add_argument("--count", type=int, default=500, help="how many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further program after this time")
    parser.add_argument("--no-shrink", action="store_true", help="do not reduce failing programs")
    parser.add_argument("--show", action="store_true", help="print programs, run nothing")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    first, count = (chosen.start, chosen.count) if chosen.number is None else (chosen.number, 1)
    outcomes, tried, started = Counter[str](), Counter[str](), time.monotonic()
    for number in range(first, first + count):
        if time.monotonic() - started > chosen.seconds:
            count = number - first
            break
        program = draw(chosen.seed, number)
        if chosen.show:
            print(program)
            continue
        result = run(program)
        outcomes[result.outcome] += 1
        tried.update(features(program))
        if result.outcome == "refused":
            print(f"refused: {program}\n  {result.text}", flush=True)
        if result.outcome == "failed":
            print(f"FAILED: {program}\n{result.text}", flush=True)
            if not chosen.no_shrink:
                smaller = shrink(program, lambda candidate: run(candidate).outcome == "failed")
                print(f"smaller:\n{smaller}\n{run(smaller).text}", flush=True)
    if not chosen.show:
        print(f"seed {chosen.seed}, programs {first} to {first + count - 1}: {dict(outcomes)} ", end="")
        print(f"in {time.monotonic() - started:.0f} s")
        print("tried: " + ", ".join(f"{name} {num}" for name, num in sorted(tried.items())))
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
