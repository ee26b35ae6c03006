"""Make the tables of a comparison from its records, in Markdown, for each precision, batch and network.

Systems that accumulate batches have a separate table, and are compared with peers that accumulate as many.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

from contenders.catalogue import ENTRIES, INEXACT

from comparison.intervals import CONFIDENCE, FEWEST, interval
from comparison.records import Run, System

__all__ = [
    "INTERVAL", "MAIN", "OVER_HSDP", "Key", "bases", "best_peer", "cells", "markdown", "num_cores", "of_accumulation",
    "rate_mbit", "rates", "rows_of", "table",
]  # fmt: skip

FSDP2, HSDP = "fsdp2 ", "hsdp "
"""How the names of their systems start; the fastest of each is a baseline."""
OURS = ("zero_optimizer", "alone")
"""Modules of contenders that are no peers: this library, and training without communication."""
LOOPBACK = "loopback"
UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
"""Mbit/s of the units of tc."""
FASTEST = "delta-hpz"
"""This library's system that :func:`rates` compares with the best peer."""
LOSS_TOLERANCE = {"float32": 5e-5, "bfloat16": 5e-2}
"""Absolute difference to FSDP2 after the same steps: four decimals; in 16 bits a loss far from right."""
SPREAD, INTERVAL = "lowest to highest", f"{CONFIDENCE:.0%} interval"
"""Titles of two values in a cell."""
CPU, MAIN = "CPU, s", "of main threads, s"
OVER_HSDP = "against HSDP"
COLUMNS = {
    "system": ("system", ""), "step, ms": ("step_ms", ",.1f"), SPREAD: ("step_range_ms", ",.1f"),
    "tokens/s": ("tokens_per_s", ",.0f"), "against FSDP2": ("vs_fsdp2", ".2f"),
    OVER_HSDP: ("vs_hsdp", ".2f"),
    "against the best peer": ("vs_best", ".2f"),
    "network's share": ("network_share", ".1%"),
    "computation's share": ("compute_share", ".1%"), "wire, MB a node": ("wire_mb", ".2f"),
    "M between nodes": ("units", ".3f"), "RSS, MiB": ("peak_mib", ",.0f"), "model states, MiB": ("states_mib", ",.1f"),
    "loss": ("loss", ".5f"), "distance": ("distance", ".2e"), "of another order": ("order_distance", ".2e"),
    CPU: ("cpu_s", ".3f"), MAIN: ("main_s", ".3f"), INTERVAL: ("vs_best_interval", ".2f"), "remark": ("remark", ""),
}  # fmt: skip
"""Title -> key of a row, and format of its value."""
OPTIONAL = (OVER_HSDP, "distance", "of another order", CPU, MAIN, INTERVAL)
"""Titles that are left out of a table without these figures."""
NOTES = """\
Medians over rounds; the systems run interleaved, in another order each round. Network's share: 1 - step on
loopback / step here. Computation's share: step of the same ranks without communication / step here. Wire: bytes
that a node's interface sent in a step (on loopback: all nodes'). M: bytes between nodes in units of the bfloat16
model. RSS and model states: the largest over the ranks, each system in separate ranks. Distance: of the weights
after the last step from those of one process with the batches of all ranks, over how far these have moved; of
another order: of one process that has the sequences of each batch in the opposite order. CPU: processor time of a
step, of all ranks together; no step is shorter than that divided by the number of cores. Of main threads: of it,
that of the threads that run Python, forward and backward; the rest is that of exchanges and other threads.
"Over computing alone or its bytes": the longer of the step of `alone` and of sending the system's own bytes at the
rate, over its step. `alone` sends nothing, and updates all parameters on every rank, in their own dtype. "Cores
busy": CPU over the step and the number of cores; at 1.00 no core ever waits.

Over gloo FSDP2's reduce-scatter is an all-reduce, which sends twice the bytes: over NCCL `fsdp2` would send a
quarter (`reshard=True`) or a third (`reshard=False`) less. HSDP (`hsdp`: FSDP2 on a mesh of nodes x ranks) keeps
a copy of the model in each node, and between nodes sends as many bytes over NCCL as here. Both overlap communication
with computing by streams, which CPUs lack: here they compute and communicate in turn, by default. So tables by rate
end with this library beside the longer of two times, the least over all peers: of `alone`, and of sending that
peer's bytes.

The best peer is the fastest of other libraries' systems that send at least 16 bits a number in every step; those that
train to another loss in as many steps, PowerSGD and DiLoCo, are compared by the time to a loss, with bench/to_loss.py.

The interval is that of "against the best peer", the median of the rounds' ratios, by order statistics.

The last step of a round ends when all that was sent has arrived, also what a next step would hide.
"""

Key = str
"""Precision, batch and network of a run, separated by blanks."""


def rows_of(key: Key, runs: dict[Key, Run], memory: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each system: medians over its rounds; figures not measured are missing."""
    run, (dtype, batch, _) = runs[key], key.split()
    loopback, of_memory = runs.get(f"{dtype} {batch} {LOOPBACK}", Run()), memory.get(f"{dtype} {batch}", {})
    rows = []
    for name, system in run.systems.items():
        count = system.accumulation
        step = _last_common_step(run, count)
        row: dict[str, Any] = {"system": name, "accumulation": count, "remark": _remark(name, system, run, dtype, step)}
        rows.append(row)
        if system.error or not system.seconds:
            continue
        seconds = statistics.median(system.seconds)
        row |= {
            "step_ms": 1e3 * seconds,
            "step_range_ms": (1e3 * min(system.seconds), 1e3 * max(system.seconds)),
            "tokens_per_s": run.tokens * count / seconds,
            "wire_mb": statistics.median(system.wire_nbytes) / 1e6,
            "loss": system.losses.get(step),
        }
        for column, times in (("cpu_s", system.cpu_seconds), ("main_s", system.caller_seconds)):
            row[column] = statistics.median(times) if times else None
        row |= {figure: getattr(system, figure) for figure in ("units", "distance", "order_distance")}
        best, fsdp2, hsdp = (best_peer(run, count, kind) for kind in ("", FSDP2, HSDP))
        for column, peer in (("vs_fsdp2", fsdp2), ("vs_hsdp", hsdp), ("vs_best", best)):
            if peer is not None and (of_peer := run.systems.get(peer, System())).seconds:
                row[column] = _median_ratio(of_peer, system)
        ratios = [] if best in (None, name) else _ratios(run.systems[best], system)
        if len(ratios) >= FEWEST:
            row["vs_best_interval"] = interval(ratios)
        fast = loopback.systems.get(name, System())
        if fast.seconds and loopback is not run:
            row["network_share"] = 1 - statistics.median(fast.seconds) / seconds
        alone = run.systems.get("alone" if count == 1 else f"alone x{count}", System())
        if alone.seconds:
            row["compute_share"] = _median_ratio(alone, system)
        row |= {name: value for name, value in of_memory.get(name, {}).items() if name in ("peak_mib", "states_mib")}
    return rows


def best_peer(run: Run, accumulation: int, kind: str = "") -> str | None:
    """Return the fastest system of another library with that number of micro-batches in a step, and the same loss.

    ``kind``: how its name starts.
    """
    seconds = {
        name: statistics.median(system.seconds)
        for name, system in run.systems.items()
        if system.accumulation == accumulation and system.seconds and not system.error and name.startswith(kind)
        if _is_peer(name)
    }
    return min(seconds, key=lambda name: seconds[name], default=None)


def of_accumulation(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Group the rows by the number of batches in a step, in ascending order."""
    counts = sorted({row["accumulation"] for row in rows})
    return {count: [row for row in rows if row["accumulation"] == count] for count in counts}


def num_cores(context: dict[str, Any]) -> int:
    """Return the number of cores of the machine that a file names."""
    found = re.search(r"(\d+) cores", context["machine"])
    assert found, context
    return int(found[1])


def rates(
    runs: dict[Key, Run], memory: dict[str, dict[str, Any]], dtype: str, batch: str, count: int, cores: int
) -> list[str]:
    """Return the lines of a table of tokens/s at every rate, with :data:`FASTEST` beside the best peer."""
    found = {
        network: {row["system"]: row for row in of_accumulation(rows_of(key, runs, memory)).get(count, [])}
        for key in runs
        for *of_key, network in [key.split()]
        if of_key == [dtype, batch]
    }
    networks = sorted((network for network in found if found[network]), key=rate_mbit, reverse=True)
    body = []
    for name in dict.fromkeys(name for network in networks for name in found[network]):
        rows = [found[network].get(name, {}) for network in networks]
        speeds = [format(row["tokens_per_s"], ",.0f") if "tokens_per_s" in row else "" for row in rows]
        states = next((format(row["states_mib"], ",.1f") for row in rows if "states_mib" in row), "")
        body.append([name, *speeds, states])
    suffixes = ["" if count == 1 else f" x{count}"] + [" muon"] * (count == 1)
    suffix = next((one for one in suffixes if any(FASTEST + one in rows for rows in found.values())), suffixes[0])
    ours, alone = FASTEST + suffix, "alone" + suffix
    of_ours = [found[network].get(ours, {}) for network in networks]
    best = [best_peer(runs[f"{dtype} {batch} {network}"], count) or "" for network in networks]
    ratios = [format(row["vs_best"], ".2f") if "vs_best" in row else "" for row in of_ours]
    if suffix.endswith("muon"):  # alone, which updates all matrices on every rank, is no bound
        alone = ""
    shares = [_over_alone_or_bytes(found[network], ours, alone, network) for network in networks]
    bounds = [_over_bound(found[network], ours, alone, network) for network in networks]
    busy = [format(1e3 * row["cpu_s"] / cores / row["step_ms"], ".2f") if row.get("cpu_s") else "" for row in of_ours]
    last = {
        "best peer": best,
        f"{ours} over the best peer": ratios,
        f"its {INTERVAL}": [" to ".join(f"{end:.2f}" for end in row.get("vs_best_interval", ())) for row in of_ours],
        f"{ours} over a peer that hides all it can": bounds,
        f"{ours} over computing alone or its bytes": shares,
        f"cores busy with {ours}": busy,
    }
    body += [[what, *texts, ""] for what, texts in last.items() if any(texts)]
    head = ["tokens/s", *networks, "model states, MiB"]
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)]


def _over_alone_or_bytes(rows: dict[str, dict[str, Any]], name: str, alone: str, network: str) -> str:
    """The longer of computing alone and sending the bytes of ``name``, over its step."""
    if "step_ms" not in rows.get(name, {}) or "step_ms" not in rows.get(alone, {}):
        return ""
    return format(_bound_ms(rows, name, alone, network) / rows[name]["step_ms"], ".2f")


def _over_bound(rows: dict[str, dict[str, Any]], name: str, alone: str, network: str) -> str:
    """The least that a peer without loss would take if it hid all it could, over the step of ``name``."""
    if "step_ms" not in rows.get(name, {}) or "step_ms" not in rows.get(alone, {}):
        return ""
    bounds = [_bound_ms(rows, peer, alone, network) for peer in rows if "step_ms" in rows[peer] and _is_peer(peer)]
    return format(min(bounds) / rows[name]["step_ms"], ".2f") if bounds else ""


def _bound_ms(rows: dict[str, dict[str, Any]], name: str, alone: str, network: str) -> float:
    """The longer of computing alone and sending the bytes of ``name``."""
    return max(float(rows[alone]["step_ms"]), 8e3 * rows[name]["wire_mb"] / rate_mbit(network))


def _is_peer(name: str) -> bool:
    """Whether it is of another library, and trains to the same loss in as many steps."""
    return ENTRIES[name].module not in OURS and name not in INEXACT and not name.startswith("zcomm ")


def rate_mbit(network: str) -> float:
    """Mbit/s of a network in the notation of tc, ``200mbit``; infinity for loopback, which has no rate."""
    found = [rate * float(network.removesuffix(unit)) for unit, rate in UNITS.items() if network.endswith(unit)]
    return found[0] if found else math.inf


def markdown(runs: dict[Key, Run], memory: dict[str, dict[str, Any]], context: dict[str, Any]) -> str:
    """Return the report."""
    lines = ["# The same training under each system", "", *(f"{name}: {text}  " for name, text in context.items()), ""]
    lines += [*NOTES.splitlines(), ""]
    of_batches = [key.rsplit(maxsplit=1)[0] for key in runs]
    for batch in dict.fromkeys(of_batches):
        if of_batches.count(batch) > 1:
            lines += [f"## {batch.replace(' ', ', ')}, by rate", ""]
            of_batch = [run for key, run in runs.items() if key.rsplit(maxsplit=1)[0] == batch]
            for count in sorted({system.accumulation for run in of_batch for system in run.systems.values()}):
                lines += [*rates(runs, memory, *batch.split(), count, num_cores(context)), ""]
    for key, run in runs.items():
        lines += [f"## {key.replace(' ', ', ')}", "", f"{run.numel:,} parameters, {run.tokens} tokens a batch.", ""]
        rows = rows_of(key, runs, memory)
        peer = next((row for row in rows if row["system"] == best_peer(run, 1, FSDP2)), {})
        if "network_share" in peer:
            lines += [f"FSDP2 waits for the network {peer['network_share']:.1%} of its step.", ""]
        if "compute_share" in peer:
            lines += [
                f"FSDP2 communicates for {1 - peer['compute_share']:.1%} of its step: all but the step alone.",
                "",
            ]
        for count, some in of_accumulation(rows).items():
            titles = [title for title, (figure, _) in COLUMNS.items() if title not in OPTIONAL or _has(some, figure)]
            lines += [bases(run, count), "", *table(some, titles), ""]
    return "\n".join(lines)


def _has(rows: Sequence[dict[str, Any]], figure: str) -> bool:
    return any(row.get(figure) is not None for row in rows)


def table(rows: Sequence[dict[str, Any]], titles: Sequence[str]) -> list[str]:
    """Return the lines of a table with these columns."""
    body = ["| " + " | ".join(cells(row, titles)) + " |" for row in rows]
    return ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|", *body]


def bases(run: Run, count: int) -> str:
    """Name the baselines of a table's ratios."""
    is_inexact = all(name in INEXACT for name, system in run.systems.items() if system.accumulation == count)
    what = "One batch a step." if count == 1 else f"{count} batches a step, accumulated."
    if is_inexact:
        return f"{count} steps between two exchanges."
    fsdp2, hsdp, best = (best_peer(run, count, kind) for kind in (FSDP2, HSDP, ""))
    named = {"FSDP2": fsdp2, "HSDP": hsdp, "Best peer": best}
    shown = {kind: f"`{name}`" if name else "none" for kind, name in named.items() if name or kind != "HSDP"}
    return " ".join([what, *(f"{kind}: {name}." for kind, name in shown.items())])


def _last_common_step(run: Run, accumulation: int) -> str | None:
    """The last step after which all systems with the same data have a loss."""
    some = [s for s in run.systems.values() if not s.error and s.accumulation == accumulation]
    steps = [set(system.losses) for system in some if system.losses]
    return max(set.intersection(*steps), key=int, default=None) if steps else None


def _remark(name: str, system: System, run: Run, dtype: str, step: str | None) -> str:
    if system.error:
        return system.error
    peer = run.systems.get(best_peer(run, system.accumulation, FSDP2) or "", System())
    if name.startswith("alone") or step not in peer.losses or step not in system.losses:
        return ""
    difference = system.losses[step] - peer.losses[step]
    if abs(difference) <= LOSS_TOLERANCE[dtype]:
        return ""
    decimals = "does not agree to 4 decimals" if dtype == "float32" else "is far"
    return f"loss {decimals}: {difference:+.5f} beside FSDP2's after step {step}"


def _median_ratio(above: System, below: System) -> float:
    """The median of the rounds' ratios; if no round has both, the ratio of the medians."""
    return statistics.median(
        _ratios(above, below) or [statistics.median(above.seconds) / statistics.median(below.seconds)]
    )


def _ratios(above: System, below: System) -> list[float]:
    """The ratios of the rounds that both have."""
    of_above = dict(zip(above.numbered, above.seconds, strict=True))
    return [
        of_above[number] / own for number, own in zip(below.numbered, below.seconds, strict=True) if number in of_above
    ]


def cells(row: dict[str, Any], titles: Sequence[str]) -> list[str]:
    """Return the cells of a row under these titles."""
    found = []
    for title in titles:
        key, spec = COLUMNS[title]
        value = row.get(key)
        if value is None:
            found.append("")
        elif title in (SPREAD, INTERVAL):
            found.append(" to ".join(format(bound, spec) for bound in value))
        else:
            found.append(format(value, spec).replace("|", "/"))
    return found
