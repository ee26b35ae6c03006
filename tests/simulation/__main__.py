"""Simulate jobs with seeds until the time is up.

    python -m tests.simulation --minutes 10 [--seed S] [--level protocols|training|checkpoints] [--count N]
    python -m tests.simulation --seed S --count 1 --trace        # replay one seed, and print its events

A failing seed is replayed, reduced until everything left is needed to make it fail, and printed as a test.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime, timezone
from itertools import count

import torch

from tests.simulation.scenarios import draw, minimised, run


def main() -> int:
    """Returns 1 if a seed failed."""
    parser = argparse.ArgumentParser(description="Simulate jobs in orders that seeds decide.")
    today = int(datetime.now(timezone.utc).strftime("%Y%m%d")) * 1_000_000
    parser.add_argument("--seed", type=int, default=today, help="the first; default: today, in UTC, times a million")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--count", type=int, default=sys.maxsize, help="at most so many seeds")
    parser.add_argument("--level", choices=("protocols", "training", "checkpoints"), default="protocols")
    parser.add_argument("--first", action="store_true", help="stop at the first seed that fails, and do not reduce it")
    parser.add_argument("--trace", action="store_true", help="print the events of each run")
    parser.add_argument("--replay", action="store_true", help="run each seed twice and compare its events")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    began, num_run, num_events, failed = time.monotonic(), 0, 0, []
    for seed in count(chosen.seed):
        if num_run == chosen.count or time.monotonic() - began > 60 * chosen.minutes:
            break
        scenario, trace = draw(chosen.level, seed), [] if chosen.trace else None
        result = run(scenario, trace)
        num_run, num_events = num_run + 1, num_events + result.num_events
        if trace is not None:
            print("\n".join(trace), flush=True)
        problem = result.problem
        if chosen.replay and not problem and (again := run(scenario)) != result:
            problem = f"a replay differs: {result}, then {again}"
        if problem:
            failed.append(seed)
            print(f"FAILED seed {seed}: {problem}\n  {scenario}", flush=True)
            if chosen.first:
                break
            least = minimised(scenario, lambda one: bool(run(one).problem))
            print(f"  as a test:\n    assert not run({least}).problem", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{chosen.level}: {num_run} schedules from seed {chosen.seed} in {seconds:.0f} s, "
        f"{3600 * num_run / seconds:,.0f} an hour, {num_events:,} events; {len(failed)} failed {failed[:20]}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
