"""Predict a table of bench/compare.py before it is measured, and compare the two afterwards.

    python bench/compare.py --batch users --hidden-size 512 --networks loopback --systems alone 'alone x4' \\
        --no-memory --rounds 5 --output runs/alone
    python bench/predict.py --alone runs/alone.json --output bench/results/predictions       then commit, then measure
    python bench/predict.py --measured FILE.json [--output bench/results/predictions_measured]

Known before: the step of the same ranks alone (the fastest round, as other load only adds), and an older comparison
of the same model with another batch (``--calibration``). On loopback a system's step is that of the ranks alone, and
what the system added to it with the other batch, since what is sent does not depend on the batch. On a network the
planner's bytes add as in ``bench/plan_validation.py --own-steps`` (bench/plan_measured.py); of peers that the planner
does not know, the bytes that interfaces counted in the older comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from comparison.records import Run, Store
from comparison.tables import LOOPBACK, best_peer, rows_of
from contenders.catalogue import ENTRIES
from plan_measured import TOLERANCE, alone, cluster_of, median, model_of, moved_of, of_own_step

RESULTS = Path(__file__).parent / "results"
NETWORKS = (LOOPBACK, "1gbit", "200mbit", "100mbit", "10mbit")
SIZES = ("batch_size", "seq_length")
"""What may differ from the older comparison."""


def predict(known: Store, before: Store, networks: Sequence[str] = NETWORKS) -> dict[str, Any]:
    """Return the seconds of a step by run and system, with what they follow from.

    Args:
        known: The ranks alone on loopback, with one batch.
        before: A comparison of the same model with one other batch, on loopback.
        networks: As in compare.py.

    Raises:
        ValueError: The models differ, or a measurement is missing.
    """
    ((key, _),) = known.values["runs"].items()
    dtype, batch, _ = key.split()
    ((other, old_shape),) = before.values["shape"].items()
    shape = known.values["shape"][batch]
    if {name: n for name, n in shape.items() if name not in SIZES} != {
        name: n for name, n in old_shape.items() if name not in SIZES
    }:
        raise ValueError(f"the older comparison must be of the same model: {old_shape}, not {shape}")
    own, old = known.run(key), before.run(f"{dtype} {other} {LOOPBACK}")
    fastest = {name: min(system.seconds) for name, system in own.systems.items()}
    added = {name: step - base for name, (step, base) in _steps(old).items()}
    found: dict[str, dict[str, float]] = {f"{dtype} {batch} {network}": {} for network in networks}
    for name, more in added.items():
        count = old.systems[name].accumulation
        computing = fastest.get("alone" if count == 1 else f"alone x{count}")
        if computing is None:
            raise ValueError(f"{known.path} must have the ranks alone after {count} micro-batches")
        for network in networks:
            nbytes = 0.0 if network == LOOPBACK else _node_nbytes(name, shape, dtype, network, before)
            cluster = cluster_of(None, shape, "1gbit" if network == LOOPBACK else network)
            times, hidden = of_own_step(name, computing + more, computing, nbytes, cluster)
            found[f"{dtype} {batch} {network}"][name] = times.step - hidden
    return {"shape": {batch: shape}, "alone_s": fastest, "added_s": added, "step_s": found}


def _steps(run: Run) -> dict[str, tuple[float, float]]:
    """The step of each system, and that of the ranks alone."""
    found = {}
    for name, system in run.systems.items():
        step, base = median(run, name), alone(run, system.accumulation)
        if not name.startswith("alone") and step is not None and base is not None and not system.error:
            found[name] = step, base
    return found


def _node_nbytes(name: str, shape: dict[str, int], dtype: str, network: str, before: Store) -> float:
    """Bytes of a node: by the planner's formulas, else as counted on another network."""
    precision = getattr(torch, dtype)
    cluster = cluster_of(None, shape, network)
    moved = moved_of(name, model_of(shape, precision), cluster, precision)
    if moved is not None:
        return moved[0].sent.inter * cluster.ranks_per_node
    runs = [before.run(key) for key in before.values["runs"] if not key.endswith(LOOPBACK)]
    counted = [run.systems[name].wire_nbytes for run in runs if name in run.systems]
    if not counted:
        raise ValueError(f"{before.path} must have the bytes of {name!r} on a network")
    return statistics.median(counted[0])


def page(predicted: dict[str, Any]) -> str:
    """Return the predictions as Markdown."""
    runs = predicted["step_s"]
    keys = list(runs)
    batch, sizes = next(iter(predicted["shape"].items()))
    alone_ms = ", ".join(f"`{name}` {1e3 * step:,.0f} ms" for name, step in predicted["alone_s"].items())
    lines = [
        f"# Predictions for the batch `{batch}` of bench/compare.py", "",
        "**Predicted, not measured**: committed before the table that they are for. `bench/predict.py` has the",
        "command, and what the predictions follow from.", "",
        f"batch: {', '.join(f'{name} {n}' for name, n in sizes.items())}  ",
        f"alone, fastest round: {alone_ms}  ",
        *(f"{name}: {text}  " for name, text in predicted["context"].items()), "",
        "Milliseconds of a step:", "",
        "| system | " + " | ".join(key.replace(" ", ", ") for key in keys) + " |", "|---" * (len(keys) + 1) + "|",
    ]  # fmt: skip
    lines += [
        f"| {name} | " + " | ".join(f"{1e3 * runs[key][name]:,.0f}" for key in keys) + " |" for name in runs[keys[0]]
    ]
    return "\n".join(lines) + "\n"


def compared(predicted: dict[str, Any], measured: Store) -> str:
    """Return predicted beside measured steps as Markdown, with the share of rows within :data:`TOLERANCE`.

    Raises:
        ValueError: No row was measured, or another model or batch.
    """
    for batch, shape in predicted["shape"].items():
        if (found := measured.values["shape"].get(batch)) != shape:
            raise ValueError(f"{measured.path} must have the batch {batch!r} with {shape}: got {found}")
    rows = [
        (key, name, step, taken)
        for key, systems in predicted["step_s"].items()
        for name, step in systems.items()
        if (taken := median(measured.run(key), name)) is not None
    ]
    if not rows:
        raise ValueError(f"{measured.path} has no step that was predicted: {', '.join(predicted['step_s'])}")
    near = sum(abs(step / taken - 1) <= TOLERANCE for *_, step, taken in rows)
    lines = [
        "# Predictions beside what was measured afterwards", "",
        f"{near} of {len(rows)} rows within {TOLERANCE:.0%}: {near / len(rows):.1%}. Milliseconds of a step.", "",
        "| run | system | predicted | measured | difference |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for key, name, step, taken in rows:
        lines.append(f"| {key} | {name} | {1e3 * step:,.0f} | {1e3 * taken:,.0f} | {100 * (step / taken - 1):+.0f} % |")
    return "\n".join([*lines, *_ratios(predicted["step_s"], measured)]) + "\n"


def _ratios(step_s: dict[str, dict[str, float]], measured: Store) -> list[str]:
    """The lines of a table of this library's speeds over those of the peer that was the fastest."""
    rows = []
    for key, steps in step_s.items():
        run = measured.run(key)
        for row in rows_of(key, {key: run}, {}):
            name, peer = row["system"], best_peer(run, row["accumulation"])
            if name in steps and peer in steps and "vs_best" in row and ENTRIES[name].module == "zero_optimizer":
                rows.append((key, name, peer, steps[peer] / steps[name], row["vs_best"]))
    near = sum(abs(guess / ratio - 1) <= TOLERANCE for *_, guess, ratio in rows)
    body = [f"| {key} | {name} | {peer} | {guess:.2f} | {ratio:.2f} |" for key, name, peer, guess, ratio in rows]
    return [
        "", "## Speeds over the best peer's", "",
        f"{near} of {len(rows)} ratios of this library's systems to the best peer within {TOLERANCE:.0%}.", "",
        "| run | system | best peer | predicted | measured |", "|---|---|---|---|---|", *body,
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the predictions, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--alone", type=Path, metavar="FILE", help="JSON of compare.py: the ranks alone, with the batch")
    what.add_argument("--measured", type=Path, metavar="FILE", help="JSON of compare.py: compare predictions with it")
    parser.add_argument("--calibration", type=Path, metavar="FILE", default=RESULTS / "compare_13m.json")
    parser.add_argument("--predictions", type=Path, metavar="FILE", default=RESULTS / "predictions.json")
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--output", type=Path, help="path of the results, without a suffix")
    options = parser.parse_args(arguments)
    if options.alone is not None:
        known, before = Store(options.alone), Store(options.calibration)
        context = {name: known.values["context"][name] for name in ("machine", "versions")}
        context["calibration"] = f"{options.calibration.name}, {before.values['context']['machine']}"
        predicted = {"context": context} | predict(known, before, options.networks)
        text = page(predicted)
        if options.output is not None:
            options.output.with_suffix(".json").write_text(json.dumps(predicted, indent=1) + "\n", encoding="utf-8")
    else:
        text = compared(json.loads(options.predictions.read_text(encoding="utf-8")), Store(options.measured))
    if options.output is not None:
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
