"""Seconds and bytes until a held-out loss, for systems that train to other losses in as many steps.

    python bench/convergence.py --model main --steps 500 --seeds 3 --only fp32-ddp bf16-zero3 ...        losses
    python bench/compare.py --batch main --networks 1gbit 100mbit --output bench/results/compare_main ...  times
    python bench/to_loss.py                                                                 the table of both

What a run has learned after a step does not depend on the network. So the steps to the loss are taken from training
runs, over their seeds; the time of a step and the bytes of a node's interface from interleaved steps on the emulated
network. Between two evaluations the loss is taken for a straight line. Synchronous systems without quantization have
the losses of one of them: `bf16-zero3` stands for all with 16-bit parameters, `fp32-ddp` for DDP. ± is the standard
error over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from comparison.records import Run, Store
from side_by_side.records import Record

RESULTS = Path(__file__).parent / "results"
MODEL, STEPS, BATCH = "main", 500, "main"
CURVES = {
    "ddp": "fp32-ddp",
    "ddp bf16 gradients": "fp32-ddp",
    "ddp powersgd 4": "ddp-powersgd-4",
    "ddp powersgd 16": "ddp-powersgd-16",
    "diloco x10": "diloco-10",
    "diloco x50": "diloco-50",
    **dict.fromkeys(
        (
            "zero redundancy", "fsdp2 reshard=False", "fsdp2 reshard=True", "hsdp reshard=False", "hsdp reshard=True",
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
HEADER = ["system", "losses of", "seeds", "steps", "ms a step", "seconds", "MB a node"]


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
    found: list[tuple[float, list[str]]] = []
    for name, system in run.systems.items():
        of_seeds = [record for record in records if record.key.configuration == CURVES.get(name)]
        if system.error or not system.seconds or not of_seeds:
            why = system.error or ("no losses" if system.seconds else "not measured")
            found.append((float("inf"), [name, CURVES.get(name, "-"), str(len(of_seeds)), why, "", "", ""]))
            continue
        # A step of what accumulates is several optimizer steps: DiLoCo's until its next exchange.
        seconds = statistics.median(system.seconds) / system.accumulation
        nbytes = statistics.median(system.wire_nbytes) / system.accumulation
        steps = [steps_to(record, target) for record in of_seeds]
        reached = [step for step in steps if step is not None]
        cells = [name, CURVES[name], str(len(steps))]
        if len(reached) < len(steps):
            lowest = statistics.fmean(min(loss for _, loss in record.held_out_losses) for record in of_seeds)
            cells += [f"not in {STEPS}: {lowest:.3f}", f"{1e3 * seconds:,.0f}", "", ""]
            found.append((float("inf"), cells))
            continue
        cells += [_with_error(reached, 1.0, ".0f"), f"{1e3 * seconds:,.0f}"]
        cells += [_with_error(reached, seconds, ",.0f"), _with_error(reached, nbytes / 1e6, ",.0f")]
        found.append((statistics.fmean(reached) * seconds, cells))
    return [cells for _, cells in sorted(found, key=lambda row: row[0])]


def page(store: Store, records: list[Record], target: float) -> str:
    """The tables of all networks, as Markdown."""
    text = (__doc__ or "").partition("\n\n")
    lines = [f"# Seconds and bytes to a held-out loss of {target:g}", "", *text[2].strip().splitlines(), ""]
    lines += [f"{name}: {value}  " for name, value in store.values["context"].items()]
    for key in store.values["runs"]:
        dtype, batch, network = key.split()
        if batch == BATCH:
            rows = [HEADER, ["---"] * len(HEADER), *rows_of(store.run(key), records, target)]
            lines += ["", f"## {network}, {dtype}", "", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join([*lines, ""])


def _with_error(steps: list[float], factor: float, spec: str) -> str:
    values = [factor * step for step in steps]
    mean = f"{statistics.fmean(values):{spec}}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:{spec}}"


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
        if record.is_finished and (record.key.model, record.key.steps) == (MODEL, STEPS)
    ]
    text = page(Store(arguments.compared), records, arguments.loss)
    arguments.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
