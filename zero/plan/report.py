"""The output of ``zero plan``: a table, lines of JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from zero.plan.cluster import Cluster
from zero.plan.model import Model
from zero.plan.peers import ONCE
from zero.plan.planner import Row

PLACES = ("device", "host", "nvme")
HEADER = (
    f"{'stage':>5}  {'variant':<15}  {'tier':<14} {'device':>8} {'host':>8} {'nvme':>8} {'within':>8} {'between':>8} "
    f"{'compute':>8} {'links':>8} {'latency':>8} {'other':>8} {'step':>8} {'overlap':>7} {'tokens/s':>10}"
)
PEERS_TITLE = (
    "torch's own ways, by the same formulas over NCCL's rings, in bf16 with AdamW; once: the gradients of all "
    "micro-batches are sent as one sum"
)
UNITS = f"{'':>38} {'GiB':>8} {'GiB':>8} {'GiB':>8} {'GB':>8} {'GB':>8} " + 5 * f"{'s':>8} " + f"{'most':>7}"


def table(rows: Sequence[Row], model: Model, cluster: Cluster, peers: Sequence[Row] = ()) -> str:
    """Return all rows as a table, then ``peers``, then the memory usage and the configuration of the first row."""
    lines = [
        f"{model.numel:,} parameters, {model.num_layers} layers of {model.hidden}, sequences of {model.sequence}, on "
        f"{cluster.num_nodes} nodes x {cluster.ranks_per_node} ranks",
        *_counted_from(model),
        "each rank: bytes in memory, bytes sent in a step; seconds of each part of a step, without overlap; other: "
        "kernels, PCIe, the update on the host, NVMe",
        "",
        HEADER,
        UNITS,
        *(_line(row) for row in rows),
        "",
    ]
    if peers:
        lines += [PEERS_TITLE, *(_line(row) for row in peers), ""]
    best = rows[0]
    if not best.fits:
        lines.append("nothing fits: use more nodes, a smaller batch, or a smaller model (--max-model)")
        return "\n".join(lines) + "\n"
    lines.append(f"fastest: stage {best.stage}, {best.variant}, {best.tier}; memory of each rank:")
    lines += [f"  {use.kind:<22} {use.place:<7} {use.nbytes / 2**30:>9.3f} GiB" for use in best.memory.usage()]
    lines += [f"  {note}" for note in best.memory.notes]
    if best.variant.endswith(ONCE):
        lines += ["", "once: with optimizer.no_sync() around the backwards of all micro-batches but the last of a step"]
    more = "" if "optimizer" in best.config else ', with its optimizer= or an "optimizer" section added'
    lines += ["", f"for zero.initialize{more}:"]
    lines += [json.dumps(best.config, indent=2)]
    return "\n".join(lines) + "\n"


def _counted_from(model: Model) -> list[str]:
    """What was read from the model's configuration, so that the user can check it."""
    used = f"; a token uses {model.active_numel:,} parameters" if model.idle_numel else ""
    return [f"read: {model.read}{used}"] if model.read else []


def _line(row: Row) -> str:
    times, sent = row.times, row.nbytes_sent
    places = " ".join(f"{_gib(row.memory.nbytes(place)):>8}" for place in PLACES)
    other = times.transfers - times.communication
    end = f"{row.tokens_per_s:>10,.0f}" if row.fits else f"  does not fit: {', '.join(row.lacks)}"
    parts = (times.computation, times.communication - times.latency, times.latency, other, times.step)
    return (
        f"{row.stage:>5}  {_name(row):<31} {places} {sent.intra / 1e9:>8.2f} {sent.inter / 1e9:>8.2f} "
        f"{' '.join(f'{part:>8.3f}' for part in parts)} {100 * times.overlap:>5.0f} % {end}"
    )


def _name(row: Row) -> str:
    return f"{row.variant:<15}  {row.tier}" if row.config else row.variant


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f}" if nbytes else "-"


def as_json(rows: Sequence[Row]) -> str:
    """Return each row as a line of JSON, in order; ``config`` of a peer is empty."""
    return "".join(json.dumps(_record(row)) + "\n" for row in rows)


def _record(row: Row) -> dict[str, object]:
    times = row.times
    return {
        "stage": row.stage,
        "variant": row.variant,
        "tier": row.tier,
        "lacks": list(row.lacks),
        "memory_nbytes": {f"{use.kind}, {use.place}": use.nbytes for use in row.memory.usage()},
        "sent_nbytes": {kind: moved.sent._asdict() for kind, moved in row.moved.items()},
        "exchanges": {kind: moved.exchanges._asdict() for kind, moved in row.moved.items()},
        "times_s": {name: getattr(times, name) for name in times.__slots__},
        "step_s": times.step,
        "overlap": times.overlap,
        "tokens_per_s": row.tokens_per_s,
        "config": dict(row.config),
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the parts of a step's time, a bar for each row that fits, into the file ``path``."""
    from matplotlib.figure import Figure

    fits = [row for row in rows if row.fits][::-1]
    figure = Figure(figsize=(8.0, 1.0 + 0.3 * len(fits)), layout="constrained")
    axes = figure.add_subplot()
    names, left = [f"{row.stage}, {row.variant}, {row.tier}" for row in fits], [0.0] * len(fits)
    for kind in ("computation", "within", "between", "latency", "kernels", "pcie", "host", "nvme"):
        widths = [getattr(row.times, kind) for row in fits]
        axes.barh(names, widths, left=left, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("seconds of a step")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
