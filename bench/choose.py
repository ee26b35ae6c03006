"""Predict what to expect on a cluster of GPUs before anything is rented: a table of named clusters and a plot.

    python bench/choose.py [--output bench/results/choose]      seconds; nothing is measured, and no GPU is needed

Everything is a prediction by the formulas of ``zero plan``, for this library and its peers alike. The x-axis is the
ratio of network time to computing time of FSDP2 (reshard_after_forward, bf16); y is the speed over that of the fastest
peer that fits. The plan adds up the parts of a step; how much of them overlaps depends on the job, so there are two
bounds: nothing is hidden, or all communication up to the time of computing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from plot_style import label_curves, style_of

from zero.plan import CLUSTERS, MODELS, Cluster, Job, Model, Row, plan, plan_peers
from zero.plan.peers import ONCE

BOUNDS = ("nothing hidden", "all hidden")
NODES, SEQUENCE, SITE_US = 8, 4096, 10_000.0
MODELS_SHOWN = ("7b", "13b", "70b")
PLOTTED = "13b"
GPUS = {"A100": "8xa100", "H100": "8xh100"}
LINKS = {"3.2T": 3200.0, "400G": 400.0, "100G": 100.0, "10G sites": 10.0, "1G sites": 1.0}
"""Gbit/s of a node by name."""
SWEPT_GBIT = tuple(0.5 * 2 ** (step / 2) for step in range(26))
MICRO = (1, 4)
Y_TICKS = (0.15, 0.25, 0.5, 1, 2, 4, 8, 16)
OURS = {
    "zero stage 2": (2, "plain", "device"),
    "zero stage 3": (3, "plain", "device"),
    "zero++": (3, "ZeRO++", "device"),
    "delta-hpz": (3, "delta-hpZ", "device"),
}
NOT_DRAWN = "zero stage 2"
"""Its curve would be the seventh of a panel."""
AT_ONCE = "70b", "H100 100G", 4
"""Model, cluster and sequences of a batch for which a batch is compared with as many micro-batches."""
COMMAND = "python bench/choose.py --output bench/results/choose"


class Outlook(NamedTuple):
    """What is predicted for one model, cluster and number of micro-batches."""

    ratio: float
    """Time on links over time of computing, of FSDP2."""
    best: dict[str, str]
    """The fastest peer that fits, by bound."""
    speeds: dict[str, dict[str, float]]
    """Speed over the best peer's, by bound and system; what does not fit is missing."""


def cluster_of(gpu: str, gbit: float, *, is_sites: bool = False) -> Cluster:
    """Return 8 nodes of 8 GPUs; sites are nodes that are far apart."""
    one = replace(CLUSTERS[GPUS[gpu]], num_nodes=NODES, between_gbit=gbit)
    return replace(one, between_us=SITE_US) if is_sites else one


def named_clusters() -> dict[str, Cluster]:
    """Return the clusters of the table by name."""
    return {
        f"{gpu} {link}": cluster_of(gpu, gbit, is_sites=link.endswith("sites"))
        for gpu in GPUS
        for link, gbit in LINKS.items()
    }


def seconds(row: Row, bound: str) -> float:
    """Return the time of a step within a bound."""
    hidden = min(row.times.computation, row.times.transfers) if bound == BOUNDS[1] else 0.0
    return row.times.step - hidden


def outlook(model: Model, cluster: Cluster, num_micro: int, batch: int = 1) -> Outlook:
    """Predict one model, cluster and number of micro-batches of ``batch`` sequences."""
    job = Job(num_micro=num_micro, batch=batch)
    ways = [choice for name in OURS for choice in ways_of(name)]
    peers, rows = plan_peers(model, cluster, job), plan(model, cluster, job, only=ways)
    plain = next(row for row in peers if row.variant == "FSDP2").times
    fitting = {row.variant: row for row in peers if row.fits}
    ours = {(row.stage, row.variant, row.tier): row for row in rows if row.fits}
    best, speeds = {}, {}
    for bound in BOUNDS:
        of_peers = {name: seconds(row, bound) for name, row in fitting.items()}
        best[bound] = min(of_peers, key=lambda name: of_peers[name])
        kinds = {kind: min((t for name, t in of_peers.items() if name.startswith(kind)), default=None)
                 for kind in ("DDP", "FSDP2", "HSDP")}  # fmt: skip
        found = {kind.lower(): of_kind for kind, of_kind in kinds.items() if of_kind is not None}
        fit = {name: [ours[choice] for choice in ways_of(name) if choice in ours] for name in OURS}
        found |= {name: min(seconds(row, bound) for row in rows) for name, rows in fit.items() if rows}
        speeds[bound] = {name: of_peers[best[bound]] / time for name, time in found.items()}
    return Outlook(plain.communication / plain.computation, best, speeds)


def ways_of(name: str) -> list[tuple[int, str, str]]:
    """Stage, variant and tier of a system, also where ``no_sync`` holds its gradients back until the last batch."""
    stage, variant, tier = OURS[name]
    return [(stage, variant, tier), (stage, variant + ONCE, tier)]


def model_of(name: str) -> Model:
    """Return a GPT of :data:`zero.plan.MODELS` with sequences of :data:`SEQUENCE` tokens."""
    return Model.of_shape(*MODELS[name], sequence=SEQUENCE)


def page() -> str:
    """Return the table as Markdown."""
    lines = [
        "# What to expect on GPUs: predictions", "",
        "**Nothing on this page was measured.** All figures are predictions by the formulas of `zero plan`, which were",
        "compared with published runs ([plan.md](plan.md)) and with steps on CPUs ([measured.md](measured.md)).",
        f"`{COMMAND}` makes this page and [the plot](choose.png).", "",
        f"{NODES} nodes of 8 GPUs (80 GiB), bf16, AdamW, one sequence of {SEQUENCE:,} tokens a GPU in a micro-batch,",
        "activation checkpoints. 3.2T, 400G, 100G: bits a second of a node to others, all its NICs together.",
        f"Sites: each node is a site, {SITE_US / 1000:.0f} ms away. Ratio: network time over computing time",
        "of plain FSDP2. The other cells are speeds over that of the best peer that fits into memory, of those with",
        "as many micro-batches (DDP with float32 and bf16 gradients, FSDP2, HSDP, with and without",
        "resharding): first if nothing of the communication is hidden behind computing, then if as much is as can be.",
        "`-`: does not fit. With four micro-batches each system, peers included, reduces every one of them or sends",
        "gradients once a step (`no_sync`, which keeps full gradients, and under `zero stage 3`, `zero++` and",
        "`delta-hpz` full parameters), whichever is faster and fits.",
        "",
        "`zero++` and `delta-hpz` send quantized messages; the others, peers included, send bfloat16, and DDP also",
        "float32. DeepSpeed's ZeRO++ and methods that synchronize less often than every step are not among the peers.",
        "",
        *_at_once(), "",
        "The plot has the same for one model at all rates, without stage 2; dotted lines are the clusters of the table",
        "that are in one place. A curve `ddp`, `fsdp2` or `hsdp` is the fastest of its kind that fits.", "",
    ]  # fmt: skip
    titles = ["model", "cluster", "ratio"]
    for num_micro in MICRO:
        of = "" if num_micro == 1 else f" x{num_micro}"
        titles += [f"best peer{of}", *(f"{name}{of}" for name in OURS)]
    lines += ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name in MODELS_SHOWN:
        for cluster, machine in named_clusters().items():
            found = [outlook(model_of(name), machine, num_micro) for num_micro in MICRO]
            cells = [name.upper(), cluster, f"{found[0].ratio:.2f}", *(cell for one in found for cell in _cells(one))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _at_once() -> list[str]:
    """What a batch of several sequences changes: it needs no accumulation."""
    name, machine, count = AT_ONCE
    model, cluster = model_of(name), named_clusters()[machine]
    row = next(row for row in plan_peers(model, cluster, Job(batch=count)) if row.variant == "FSDP2")
    gib, whole = row.memory.nbytes() / 2**30, outlook(model, cluster, 1, count).speeds[BOUNDS[0]]
    parts = outlook(model, cluster, count).speeds[BOUNDS[0]]
    return [
        "Where several sequences fit at once, a batch of them sends less than as many micro-batches, most of all under",
        f"FSDP2. {name.upper()} on {machine}, {count} sequences at once, of which FSDP2 needs {gib:.1f} GiB: `zero++`",
        f"has {whole['zero++']:.2f} times its speed and `delta-hpz` {whole['delta-hpz']:.2f}; with {count} "
        f"micro-batches `zero++` has {parts['zero++']:.2f}.",
    ]


def _cells(found: Outlook) -> list[str]:
    peers = dict.fromkeys(found.best.values())  # without repetition
    speeds = [[found.speeds[bound].get(name) for bound in BOUNDS] for name in OURS]
    return [" / ".join(peers), *(" / ".join("-" if s is None else f"{s:.2f}" for s in of) for of in speeds)]


def figure_of() -> Figure:
    """Draw a panel for each number of micro-batches and bound, for :data:`PLOTTED` on A100 at all rates."""
    figure = Figure(figsize=(13.0, 9.0), layout="constrained")
    figure.suptitle(
        f"Predictions, not measurements: {PLOTTED.upper()} on {NODES} nodes of 8 A100, {SEQUENCE:,} tokens a GPU"
    )
    model = model_of(PLOTTED)
    # On sites latency counts, which the curves, of one place, do not have at the same ratio.
    in_one_place = {name: cluster for name, cluster in named_clusters().items() if not name.endswith("sites")}
    marks = {name: outlook(model, cluster, 1).ratio for name, cluster in in_one_place.items()}
    for index, num_micro in enumerate(MICRO):
        swept = [outlook(model, cluster_of("A100", gbit), num_micro) for gbit in SWEPT_GBIT]
        for place, bound in enumerate(BOUNDS):
            panel = figure.add_subplot(len(MICRO), len(BOUNDS), 1 + index * len(BOUNDS) + place)
            _draw(panel, swept, bound, marks)
            batches = "one batch a step" if num_micro == 1 else f"{num_micro} batches a step, accumulated"
            panel.set_title(f"{batches}; {bound}", loc="left", fontsize="medium")
            label_curves(panel)
    return figure


def _draw(panel: Any, swept: Sequence[Outlook], bound: str, marks: dict[str, float]) -> None:
    for system in (name for name in swept[0].speeds[bound] if name != NOT_DRAWN):
        points = sorted((one.ratio, one.speeds[bound][system]) for one in swept)
        panel.plot(*zip(*points, strict=True), label=system, **style_of(system))
    panel.set(xscale="log", yscale="log", xlabel="network time / computing time of FSDP2", ylabel="speed / best peer")
    panel.set_ylim(Y_TICKS[0], Y_TICKS[-1])
    panel.set_yticks(Y_TICKS, [f"{tick:g}" for tick in Y_TICKS])
    panel.minorticks_off()
    panel.grid(visible=True, axis="y", alpha=0.3)
    for name, ratio in marks.items():
        panel.axvline(ratio, color="#999999", linewidth=0.6, linestyle=":", label="_mark")
        panel.text(
            ratio, 0.98, name, transform=panel.get_xaxis_transform(), rotation=90, ha="right", va="top",
            fontsize="x-small", color="#666666",
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="path of the results, without a suffix")
    options = parser.parse_args(arguments)
    text = page()
    if options.output is not None:
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
        figure_of().savefig(options.output.with_suffix(".png"), dpi=120)
    print(text, end="")


if __name__ == "__main__":
    main()
