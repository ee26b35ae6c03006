"""The tables of a comparison, from its records: Markdown, a table for each precision, batch and network."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from comparison.records import Run, System

__all__ = ["PEER", "Key", "markdown", "rows_of"]

PEER = "fsdp2 reshard=True"
LOOPBACK = "loopback"
LOSS_TOLERANCE = {"float32": 5e-5, "bfloat16": 5e-2}
"""Absolute, beside :data:`PEER` after the same steps: four decimals; in 16 bits so much that training is wrong."""
HEADERS = (
    "system", "step, ms", "lowest to highest", "tokens/s", "against FSDP2", "network's share", "computation's share",
    "wire, MB a node", "M between nodes", "RSS, MiB", "model states, MiB", "loss", "remark",
)  # fmt: skip

Key = str
"""Precision, batch and network of a run, with blanks between."""


def rows_of(key: Key, runs: dict[Key, Run], memory: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a system: medians over its turns; what was not measured is absent."""
    run, (dtype, batch, _) = runs[key], key.split()
    loopback, of_memory = runs.get(f"{dtype} {batch} {LOOPBACK}", Run()), memory.get(f"{dtype} {batch}", {})
    step = _last_common_step(run)
    rows = []
    for name, system in run.systems.items():
        row: dict[str, Any] = {"system": name, "remark": _remark(name, system, run, dtype, step)}
        rows.append(row)
        if system.error or not system.seconds:
            continue
        seconds = statistics.median(system.seconds)
        row |= {
            "step_ms": 1e3 * seconds,
            "step_range_ms": (1e3 * min(system.seconds), 1e3 * max(system.seconds)),
            "tokens_per_s": run.tokens * system.accumulation / seconds,
            "wire_mb": statistics.median(system.wire_nbytes) / 1e6,
            "loss": system.losses.get(step),
        }
        if system.units is not None:
            row["units"] = system.units
        if (peer := run.systems.get(PEER)) is not None and peer.seconds:
            row["vs_fsdp2"] = system.accumulation / peer.accumulation * _median_ratio(peer.seconds, system.seconds)
        fast = loopback.systems.get(name, System())
        if fast.seconds and loopback is not run:
            row["network_share"] = 1 - statistics.median(fast.seconds) / seconds
        alone = run.systems.get("alone" if system.accumulation == 1 else f"alone x{system.accumulation}", System())
        if alone.seconds:
            row["compute_share"] = _median_ratio(alone.seconds, system.seconds)
        row |= {name: value for name, value in of_memory.get(name, {}).items() if name in ("peak_mib", "states_mib")}
    return rows


def markdown(runs: dict[Key, Run], memory: dict[str, dict[str, Any]], context: dict[str, Any]) -> str:
    """The whole report."""
    lines = ["# The same training under each system", "", *(f"{name}: {text}  " for name, text in context.items()), ""]
    lines += [
        "Medians over turns that the systems take one after the other, in another order each round. Network's share:",
        "1 - step on loopback / step here. Computation's share: step of the same rank alone, nothing sent, over the",
        "step. Wire: what a node's interface sent in a step (on loopback all of them). M: bytes between nodes in units",
        "of the bfloat16 model. RSS and model states: the largest over the ranks, each system in ranks of its own.", "",
    ]  # fmt: skip
    for key, run in runs.items():
        lines += [f"## {key.replace(' ', ', ')}", "", f"{run.numel:,} parameters, {run.tokens} tokens a batch.", ""]
        rows = rows_of(key, runs, memory)
        peer = next((row for row in rows if row["system"] == PEER and "network_share" in row), None)
        if peer is not None:
            lines += [f"FSDP2 waits for the network {peer['network_share']:.1%} of its step.", ""]
        computing = next(
            (row["compute_share"] for row in rows if row["system"] == PEER and "compute_share" in row), None
        )
        if computing is not None:
            lines += [f"FSDP2 communicates for {1 - computing:.1%} of its step: all but the step alone.", ""]
        lines += [_line(HEADERS), "|---" * len(HEADERS) + "|", *(_line(_cells(row)) for row in rows), ""]
    return "\n".join(lines)


def _last_common_step(run: Run) -> str | None:
    """The last step after which all systems with the same data have a loss."""
    steps = [set(s.losses) for s in run.systems.values() if not s.error and s.accumulation == 1 and s.losses]
    return max(set.intersection(*steps), key=int, default=None) if steps else None


def _remark(name: str, system: System, run: Run, dtype: str, step: str | None) -> str:
    if system.error:
        return system.error
    peer = run.systems.get(PEER, System())
    if name.startswith("alone") or system.accumulation > 1 or step not in peer.losses or step not in system.losses:
        return ""
    difference = system.losses[step] - peer.losses[step]
    if abs(difference) <= LOSS_TOLERANCE[dtype]:
        return ""
    decimals = "does not agree to 4 decimals" if dtype == "float32" else "is far"
    return f"loss {decimals}: {difference:+.5f} beside FSDP2's after step {step}"


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Of turns of the same rounds; of the medians where one has more turns."""
    if len(above) != len(below):
        return statistics.median(above) / statistics.median(below)
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _cells(row: dict[str, Any]) -> list[str]:
    def shown(key: str, spec: str) -> str:
        return "" if row.get(key) is None else format(row[key], spec)

    low_high = row.get("step_range_ms")
    spread = "" if low_high is None else f"{low_high[0]:,.1f} to {low_high[1]:,.1f}"
    return [
        row["system"], shown("step_ms", ",.1f"), spread,
        shown("tokens_per_s", ",.0f"), shown("vs_fsdp2", ".2f"), shown("network_share", ".1%"),
        shown("compute_share", ".1%"), shown("wire_mb", ".2f"), shown("units", ".3f"), shown("peak_mib", ",.0f"),
        shown("states_mib", ",.1f"), shown("loss", ".5f"), row["remark"].replace("|", "/"),
    ]  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
