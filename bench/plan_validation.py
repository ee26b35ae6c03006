"""Compare ``zero plan`` with published results, in the tables of bench/results/plan.md, or with measurements.

    python bench/plan_validation.py [--output bench/results/plan.md]
    python bench/plan_validation.py --measured compare.json [--probe probe.json | --own-steps] [--output FILE.md]

Inputs are the papers' setups; the two constants of zero.plan.times are the same in every line. A GB is 10^9 bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import plan_measured

from zero.plan import CLUSTERS, Job, Model, Row, largest_model, plan
from zero.plan.cluster import Cluster
from zero.plan.formulas import Counts, ShardTiers, TrainingSetup, usage_of
from zero.plan.model import MODELS
from zero.plan.times import COMPUTE_EFFICIENCY, LINK_EFFICIENCY

RANKS = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {
    ("7.5e9", 1): "120 52.5 35.6 31.4 30.4 30.1", ("7.5e9", 2): "120 41.3 21.6 16.6 15.4 15.1",
    ("7.5e9", 3): "120 30 7.5 1.88 0.47 0.12",
    ("128e9", 1): "2048 896 608 536 518 513", ("128e9", 2): "2048 704 368 284 263 257",
    ("128e9", 3): "2048 512 128 32 8 2",
    ("1e12", 1): "16000 7000 4750 4187 4046 4011", ("1e12", 2): "16000 5500 2875 2218 2054 2013",
    ("1e12", 3): "16000 4000 1000 250 62.5 15.6",
}  # fmt: skip
"""ZeRO, table 1: GB a rank of model states by parameters and stage, for 1 to 1,024 ranks."""
TABLE_2 = {
    (0, 64, 1): "2", (1, 64, 1): "7.6", (2, 64, 1): "14.4", (3, 64, 1): "128", (1, 1024, 16): "121.6",
}  # fmt: skip
"""ZeRO, table 2: billions of parameters in 32 GB by stage, ranks and model-parallel ranks, theoretical."""
ZEROPP = {
    ("18b", 100, 1): (14, 31), ("18b", 100, 2): (26, 46), ("18b", 400, 1): (25, 35), ("18b", 400, 2): (40, 53),
    ("18b", 200, 2): (37, 50), ("18b", 800, 2): (47, 54),
    ("49b", 100, 1): (11, 22), ("49b", 100, 2): (20, 38), ("49b", 400, 1): (23, 36), ("49b", 400, 2): (36, 51),
    ("91b", 100, 1): (11, 22), ("91b", 100, 2): (20, 38), ("91b", 400, 1): (23, 36), ("91b", 400, 2): (36, 51),
    ("138b", 100, 1): (11, 22), ("138b", 100, 2): (20, 38), ("138b", 400, 1): (23, 36), ("138b", 400, 2): (36, 50),
    ("138b", 200, 2): (32, 48), ("138b", 800, 2): (48, 55),
}  # fmt: skip
"""ZeRO++ on 24 DGX-2: TFLOPS a GPU of ZeRO-3 and ZeRO++ by model, Gbit/s of a node and thousands of tokens a GPU."""
DGX2 = {
    "data parallel": (1.4, 1536, (0, "plain", "device")),
    "ZeRO-2": (10, 4096, (2, "plain", "device")),
    "ZeRO-Offload": (13, 4096, (2, "plain", "cpu optimizer")),
    "ZeRO-3": (20, 8192, (3, "plain", "device")),
    "ZeRO-Infinity, CPU": (70, 8192, (3, "plain", "cpu")),
    "ZeRO-Infinity, NVMe": (1000, 25600, (3, "plain", "nvme")),
}
"""ZeRO-Infinity, figure 6a: billions of parameters on one DGX-2; width by its table 1; stage, variant and tier."""
PAGE_TOLERANCE = 0.2
"""Larger differences are explained."""
AS_DEEPSPEED = Job(precision="fp16", narrow_gradients=True)


class Line(NamedTuple):
    """One published number."""

    what: str
    published: str
    planned: float

    @property
    def error(self) -> float:
        """Relative difference."""
        return self.planned / float(self.published) - 1

    @property
    def digit_error(self) -> float:
        """Difference in units of the last published digit."""
        decimals = len(self.published.partition(".")[2])
        return abs(self.planned - float(self.published)) * 10**decimals


def states_gb(numel: float, stage: int, num_ranks: int) -> float:
    """Return GB a rank of parameters, gradients and states, as ZeRO counts them: 2 + 2 + 12 bytes."""
    setup = TrainingSetup(stage=stage, ranks_per_node=num_ranks, gradient_nbytes=2)
    kinds = ("parameters", "gradients", "states")
    return sum(use.nbytes for use in usage_of(Counts(numel=int(numel)), setup) if use.kind in kinds) / 1e9


def table_1() -> Iterator[Line]:
    """Yield every cell."""
    for (numel, stage), row in TABLE_1.items():
        for num_ranks, cell in zip(RANKS, row.split(), strict=True):
            yield Line(f"{numel} at stage {stage} on {num_ranks}", cell, states_gb(float(numel), stage, num_ranks))


def table_2() -> Iterator[Line]:
    """Yield every cell; memory is proportional to the number of parameters."""
    for (stage, num_ranks, model_parallel), cell in TABLE_2.items():
        ranks = num_ranks // model_parallel if model_parallel > 1 else num_ranks
        largest = 32 / states_gb(1e9, stage, ranks) * model_parallel
        yield Line(f"stage {stage} on {num_ranks}, model parallel {model_parallel}", cell, largest)


def zeropp() -> Iterator[Line]:
    """Yield ratios of throughput, ZeRO++ to ZeRO-3."""
    for (name, gbit, thousands), (zero3, zeropp_) in ZEROPP.items():
        cluster = replace(CLUSTERS["24xdgx2"], between_gbit=gbit)
        job = replace(AS_DEEPSPEED, batch=thousands)
        rows = plan(
            Model.of_shape(*MODELS[name]), cluster, job, only=[(3, kind, "device") for kind in ("plain", "ZeRO++")]
        )
        speed = {row.variant: row.tokens_per_s for row in rows}
        what = f"{name.upper()}, {gbit} Gbit/s, {thousands}K tokens: {zero3} -> {zeropp_}"
        yield Line(what, str(zeropp_ / zero3), speed["ZeRO++"] / speed["plain"])


def dgx2() -> Iterator[Line]:
    """Yield the largest models on one DGX-2, in billions of parameters."""
    for name, (published, hidden, choice) in DGX2.items():
        model, _ = largest_model(Model.of_shape(2, hidden), CLUSTERS["dgx2"], AS_DEEPSPEED, only=choice)
        yield Line(name, str(published), model.numel / 1e9)


def spare(lines: Sequence[Line]) -> Iterator[tuple[str, str, float, float]]:
    """Yield what the formulas leave free at the published sizes of :func:`dgx2`, where they differ by over a fifth.

    The run, the fullest place, GB free there, and GB of the place, of a node's ranks together.
    """
    machine = CLUSTERS["dgx2"]
    sizes = {"device": machine.device_gib * machine.ranks_per_node, "host": machine.host_gib, "nvme": machine.nvme_gib}
    for line in lines:
        if line.error <= PAGE_TOLERANCE:
            continue
        published, hidden, choice = DGX2[line.what]
        shape = Model.of_shape(2, hidden)
        ends = shape.numel - 2 * (12 * hidden**2 + 13 * hidden)
        layers = round((published * 1e9 - ends) / (12 * hidden**2 + 13 * hidden))
        (row,) = plan(shape.of_layers(layers), machine, AS_DEEPSPEED, only=[choice])
        used = {place: row.memory.nbytes(place) * machine.ranks_per_node for place in sizes}
        place = max(sizes, key=lambda name: used[name] / sizes[name])
        yield line.what, place, (sizes[place] * 2**30 - used[place]) / 1e9, sizes[place] * 2**30 / 1e9


def offload() -> Iterator[Line]:
    """ZeRO-Offload: the device keeps 2 M of 16 M bytes, 4 M cross the bus a step; 13B fit on one V100 of 32 GB."""
    numel = 10**10
    setup = TrainingSetup(stage=2, tier=ShardTiers(states="host"), gradient_nbytes=2, sent_nbytes=2)
    usage = usage_of(Counts(numel=numel), setup)
    device = sum(use.nbytes for use in usage if use.kind in ("parameters", "gradients") and use.place == "device")
    host = sum(use.nbytes for use in usage if use.place == "host")
    yield Line("bytes a parameter on the device", "2", device / numel)
    yield Line("bytes a parameter on the host", "14", host / numel)
    one = replace(CLUSTERS["dgx2"], ranks_per_node=1)
    model, row = largest_model(Model.of_shape(2, 4096), one, AS_DEEPSPEED, only=(2, "plain", "cpu optimizer"))
    yield Line("largest model on one GPU, billions", "13", model.numel / 1e9)
    moved = row.times.pcie * one.pcie_gbps * 1e9 * LINK_EFFICIENCY / model.numel
    yield Line("bytes a parameter and step over the bus", "4", moved)


def megatron() -> Iterator[Line]:
    """The specification's runs on V100 of 32 GB, GB a rank: 1.5B in fp16 without checkpoints, and 10B."""
    numel = Model.of_shape(48, 1600).numel
    yield Line("48 x 1600: Adam's states without ZeRO", "18", _use(numel, 0, 8, "states"))
    yield Line("48 x 1600 at stage 1 on 8: Adam's states", "2.25", _use(numel, 1, 8, "states"))


def _use(numel: int, stage: int, num_ranks: int, kind: str) -> float:
    setup = TrainingSetup(stage=stage, ranks_per_node=num_ranks, gradient_nbytes=2)
    return sum(use.nbytes for use in usage_of(Counts(numel=numel), setup) if use.kind == kind) / 1e9


class Run(NamedTuple):
    """One of the specification's runs."""

    what: str
    batch: int
    """Sequences of a rank."""
    published: bool | None
    """Whether it fits; None: not published for this batch."""
    planned: bool
    gib: float
    """Planned memory of a rank's device."""


def megatron_fits() -> list[Run]:
    """Compare what fits on the specification's machines, as published and as planned; its runs have a batch of one.

    By the plan the smaller model fits into one V100 at that batch. So the largest planned batch that fits is a row,
    too, and the next batch.
    """
    eight = CLUSTERS["8xv100"]
    small, large = Model.of_shape(48, 1600), Model.of_shape(50, 4096)
    full_activations = replace(AS_DEEPSPEED, is_checkpointed=False)
    largest = max(batch for batch in range(1, 65) if _row(small, eight, replace(full_activations, batch=batch), 0).fits)
    four = replace(eight, num_nodes=4)
    return [
        _run("48 x 1600 on 8 without ZeRO", False, small, eight, full_activations, 0),
        *(
            _run("48 x 1600 on 8 without ZeRO", None, small, eight, replace(full_activations, batch=batch), 0)
            for batch in (largest, largest + 1)
        ),
        _run("48 x 1600 on 8 at stage 1", True, small, eight, full_activations, 1),
        _run("50 x 4096 on 32 without ZeRO", False, large, four, AS_DEEPSPEED, 0),
        _run("50 x 4096 on 32 at stage 2, checkpoints", True, large, four, AS_DEEPSPEED, 2),
    ]


def _run(what: str, published: bool | None, model: Model, cluster: Cluster, job: Job, stage: int) -> Run:  # noqa: FBT001
    row = _row(model, cluster, job, stage)
    return Run(what, job.batch, published, row.fits, row.memory.nbytes() / 2**30)


def _row(model: Model, cluster: Cluster, job: Job, stage: int) -> Row:
    (row,) = plan(model, cluster, job, only=[(stage, "plain", "device")])
    return row


TABLES = {
    "Model states, GB a rank (ZeRO, table 1)": table_1,
    "Largest model in 32 GB, billions (ZeRO, table 2, theoretical)": table_2,
    "Throughput of ZeRO++ over ZeRO-3 (ZeRO++, 384 V100, TFLOPS a GPU)": zeropp,
    "Largest model on one DGX-2, billions, batch 1 (ZeRO-Infinity, figure 6a)": dgx2,
    "ZeRO-Offload, batch 1": offload,
    "Adam's states, GB (the Megatron runs of DeepSpeed's tutorial)": megatron,
}


SPARE_NOTE = """
## Differences of more than 20 %

All of them are largest models, and in all the plan is larger. At the published size the formulas leave memory free:
what these runs used beyond the formulas, if nothing larger fitted. The formulas count a batch of one, and neither
fragmentation, CUDA's own memory, nor a framework's copies and page-locked buffers. The papers give neither batch nor
memory of these runs, so it is not known which of these it was. GB are those of all ranks of a node together.

| | fullest place | GB free at the published size | GB there |
|---|---|---|---|
"""
FITS_NOTE = """
The first row is not reproduced: the planner finds that 48 x 1600 fits without ZeRO at the published batch of 1, and
runs out of memory only at larger batches. It counts neither fragmentation nor the memory of other code on the GPU.
"""


def page() -> str:
    """Return all tables as Markdown."""
    parts = [
        "# `zero plan` beside published figures\n\n`python bench/plan_validation.py`; COMPUTE_EFFICIENCY "
        f"{COMPUTE_EFFICIENCY}, LINK_EFFICIENCY {LINK_EFFICIENCY}, both of `zero/plan/times.py`; nothing is fitted to "
        "a line.\n"
    ]
    worst, free = [], []
    for title, lines in TABLES.items():
        found = list(lines())
        if lines is dgx2:
            free = list(spare(found))
        worst.append(f"| {title} | {len(found)} | {100 * max(abs(line.error) for line in found):.1f} % |\n")
        parts.append(f"\n## {title}\n\n| | published | planned | difference |\n|---|---|---|---|\n")
        for line in found:
            parts.append(
                f"| {line.what} | {float(line.published):.4g} | {line.planned:.4g} | {100 * line.error:+.1f} % |\n"
            )
    parts.append(SPARE_NOTE)
    parts += [f"| {what} | {place} | {left:,.0f} | {size:,.0f} |\n" for what, place, left, size in free]
    parts.append("\n## What fits in 32 GB (the same runs)\n\n| | batch a rank | published | planned | planned, GiB |\n")
    parts.append("|---|---|---|---|---|\n")
    for run in megatron_fits():
        parts.append(f"| {run.what} | {run.batch} | {_word(run.published)} | {_word(run.planned)} | {run.gib:.1f} |\n")
    parts.append(FITS_NOTE)
    parts.insert(1, f"\n| | cells | largest difference |\n|---|---|---|\n{''.join(worst)}")
    return "".join(parts)


def _word(fits: bool | None) -> str:  # noqa: FBT001
    return "" if fits is None else "fits" if fits else "out of memory"


def measured_page(options: argparse.Namespace) -> str:
    """Return the page of the comparison with measurements."""
    return plan_measured.page(options.measured, options.probe, has_own=options.own_steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page; with ``--output`` also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, metavar="FILE", help="compare with this JSON of bench/compare.py")
    parser.add_argument("--probe", type=Path, metavar="FILE", help="file of zcomm probe; created if it does not exist")
    parser.add_argument("--own-steps", action="store_true", help="plan from each system's step on loopback")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    text = page() if options.measured is None else measured_page(options)
    if options.output:
        options.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
