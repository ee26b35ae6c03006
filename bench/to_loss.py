"""Seconds and bytes until a held-out loss, for systems that train to other losses in as many steps.

    python bench/convergence.py --model main --steps 500 --seeds 3 --only fp32-ddp bf16-zero3 ...        losses
    python bench/compare.py --batch main --networks 1gbit 100mbit --output bench/results/compare_main ...  times
    python bench/to_loss.py                                                                 the table of both

What a run has learned after a step does not depend on the network. So the steps to the loss are taken from training
runs, over their seeds; the time of a step and the bytes of a node's interface from interleaved steps on the emulated
network. Between two evaluations the loss is taken for a straight line. Of trainings of several lengths, each with its
own schedule of the learning rate, and DiLoCo's outer rates a system has the one that is fastest to the loss.

Synchronous systems without quantization have the losses of one of them: `bf16-zero3` stands for all with 16-bit
parameters, `fp32-ddp`, trained in float32, for those with float32 parameters, whose steps are timed under autocast.
PowerSGD sends whole gradients, as `ddp bf16 two hops`, in the first tenth of its training; the column of a step's time
has that of the steps after them. The time of a step is the median over the rounds, as a system's first steps do some
work that later ones do not. ± is the standard error: of steps and bytes over the seeds, of the seconds over seeds and
rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from comparison.records import Run, Store, System
from contenders.ddp import WHOLE_SHARE
from side_by_side.records import Record

RESULTS = Path(__file__).parent / "results"
MODEL, BATCH = "main", "main"
CURVES = {
    "ddp": "fp32-ddp",
    "ddp bf16 gradients": "fp32-ddp",
    "ddp bf16 two hops": "fp32-ddp",
    "zero redundancy": "fp32-ddp",
    "ddp powersgd 4": "ddp-powersgd-4",
    "ddp powersgd 16": "ddp-powersgd-16",
    "diloco x10": "diloco-10",
    "diloco x50": "diloco-50",
    **dict.fromkeys(
        (
            "fsdp2 reshard=False", "fsdp2 reshard=True", "hsdp reshard=False", "hsdp reshard=True",
            "deepspeed stage 1", "deepspeed stage 2", "deepspeed stage 3", "zero stage 1", "zero stage 2",
            "zero stage 3",
        ),
        "bf16-zero3",
    ),
    "zero++": "zeropp",
    "delta-hpz": "delta-hpz",
    "delta-hpz exact": "delta-hpz-exact",
}  # fmt: skip
"""The configuration of convergence.py whose losses a system of compare.py has."""
WHOLE = "ddp bf16 two hops"
"""What PowerSGD's first steps cost."""
HEADER = ["system", "losses of", "of a training of", "seeds", "steps", "ms a step", "seconds", "MB a node"]
NEVER = float("inf")


def steps_to(record: Record, target: float) -> float | None:
    """The step at which the held-out loss first is ``target``, by straight lines; None: it never is."""
    before = record.held_out_losses[0]
    for step, loss in record.held_out_losses:
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss) if loss < before[1] else 1.0
            return before[0] + share * (step - before[0])
        before = step, loss
    return None


def rows_of(run: Run, records: list[Record], target: float) -> list[list[str]]:
    """A row for each system, the fastest to the loss first."""
    found = [min(_candidates(name, run, records, target), key=lambda row: row[0]) for name in run.systems]
    return [cells for _, cells in sorted(found, key=lambda row: row[0])]


def _candidates(name: str, run: Run, records: list[Record], target: float) -> Iterator[tuple[float, list[str]]]:
    """Seconds to the loss, and the row, of each length of training that the system has, and each of DiLoCo's rates."""
    system, curve = run.systems[name], CURVES.get(name, "-")
    trainings: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        if record.key.configuration.partition("-outer")[0] == curve:
            trainings.setdefault((record.key.configuration, record.key.steps), []).append(record)
    if system.error or not system.seconds or not trainings:
        why = system.error or ("no losses" if system.seconds else "not measured")
        yield NEVER, [name, curve, "", "0", why, "", "", ""]
        return
    for (configuration, length), of_seeds in trainings.items():
        steps = [steps_to(record, target) for record in of_seeds]
        reached = [step for step in steps if step is not None]
        cells = [name, configuration, str(length), str(len(steps))]
        own, timing_error = _cost_of_step(system), _standard_error(_seconds(system)) / system.accumulation
        if len(reached) < len(steps):
            lowest = statistics.fmean(min(loss for _, loss in record.held_out_losses) for record in of_seeds)
            yield NEVER, [*cells, f"never: {lowest:.3f}", f"{1e3 * own[0]:,.0f}", "", ""]
            continue
        whole = WHOLE_SHARE * length if "powersgd" in name else 0.0
        whole_cost = _cost_of_step(run.systems[WHOLE]) if whole else (0.0, 0.0)
        of_seconds, of_bytes = (
            [min(whole, step) * first + max(step - whole, 0) * later for step in reached]
            for first, later in zip(whole_cost, own, strict=True)
        )
        of_whole = _standard_error(run.systems[WHOLE].seconds) if whole else 0.0
        first = statistics.fmean(min(whole, step) for step in reached)
        error = math.hypot(first * of_whole, (statistics.fmean(reached) - first) * timing_error)
        cells += [_with_error(reached, ".0f"), f"{1e3 * own[0]:,.0f}", _with_error(of_seconds, ",.0f", error)]
        yield statistics.fmean(of_seconds), [*cells, _with_error(of_bytes, ",.0f")]


def _cost_of_step(system: System) -> tuple[float, float]:
    """Seconds and MB of an optimizer step; a round of DiLoCo has several, until its next exchange."""
    nbytes = statistics.median(system.wire_nbytes)
    return statistics.median(_seconds(system)) / system.accumulation, nbytes / 1e6 / system.accumulation


def _seconds(system: System) -> list[float]:
    """The times of the rounds, without the first of PowerSGD, which still sends whole gradients."""
    most = 2 * statistics.median(system.wire_nbytes)
    return [seconds for seconds, nbytes in zip(system.seconds, system.wire_nbytes, strict=True) if nbytes < most]


def page(store: Store, records: list[Record], target: float) -> str:
    """The tables of all networks, as Markdown."""
    text = (__doc__ or "").partition("\n\n")
    lines = [f"# Seconds and bytes to a held-out loss of {target:g}", "", *text[2].strip().splitlines(), ""]
    lines += [f"{name}: {value}  " for name, value in store.values["context"].items()]
    for key in store.values["runs"]:
        dtype, batch, network = key.split()
        if batch == BATCH:
            for record in records:
                if record.numel != store.run(key).numel:
                    raise SystemExit(f"{record.key} has {record.numel:,} parameters, {key} {store.run(key).numel:,}")
            rows = [HEADER, ["---"] * len(HEADER), *rows_of(store.run(key), records, target)]
            lines += ["", f"## {network}, {dtype}", "", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join([*lines, ""])


def _with_error(values: list[float], spec: str, another: float = 0.0) -> str:
    """Mean and standard error, together with another error of the mean; the mean alone of one value."""
    mean = f"{statistics.fmean(values):{spec}}"
    return mean if len(values) < 2 else f"{mean} ± {math.hypot(_standard_error(values), another):{spec}}"


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def main() -> int:
    """Print the tables and write them beside the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", type=float, default=1.9)
    parser.add_argument("--compared", type=Path, default=RESULTS / "compare_main.json", help="of compare.py")
    parser.add_argument("--results", type=Path, default=RESULTS / "convergence", help="runs of convergence.py")
    parser.add_argument("--output", type=Path, default=RESULTS / "to_loss.md")
    arguments = parser.parse_args()
    records = [
        record
        for record in Record.all_in(arguments.results)
        if record.is_finished and record.key.model == MODEL and record.key.outlier_at is None
    ]
    text = page(Store(arguments.compared), records, arguments.loss)
    arguments.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
