"""``zcomm bench`` on a rank: check every collective, size and format, then time them interleaved with torch's own call.

size(B)    bytes of the full tensor, uncompressed     sent(B)   bytes that one rank sends, by zcomm.traffic()
algbw      size / p50                                 inter(B)  bytes that one node sends to others, by zcomm.traffic()
busbw      algbw x (N - 1) / N, twice for all_reduce  wire(B)   bytes that one node sends, by the interface's counter
/torch     p50 of torch's own call over p50           relerr    relative error against exact float64 sums
/none      speedup over the same exchange uncompressed over as many hops (for auto: over two hops, if there are two);
           the median of the ratios within each round
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import zcomm
from zcomm import Topology, control
from zcomm._bench import torch_calls
from zcomm._bench.checking import Verdict, check
from zcomm._bench.data import Tiles
from zcomm._bench.harness import BenchReport, Column, Timing, slowest_of_ranks
from zcomm._bench.interface import sent_nbytes
from zcomm._bench.workloads import REDUCTIONS, Workload, WorkloadFormats, auto_wire, wire_of
from zcomm._collectives.auto_format import AUTO
from zcomm._formats.formats import FORMATS
from zcomm._kernels import native_calls

PANEL_INCHES = (5.0, 3.6)


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw ``rows`` into the file ``path``; its suffix chooses the image format."""
    from matplotlib.figure import Figure

    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    columns = max(len(collectives), 1)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1]), layout="constrained")
    for index, collective in enumerate(collectives):
        panel = figure.add_subplot(1, columns, index + 1)
        mine = [row for row in rows if row["collective"] == collective]
        for label in dict.fromkeys(_label(row) for row in mine):
            points = [(row["nbytes"], row["busbw_gbps"]) for row in mine if _label(row) == label]
            style = "k--" if label == "torch" else "o-"
            panel.plot(*zip(*points, strict=True), style, label=label, markersize=3)
        panel.set(title=collective, xlabel="size of the full tensor (bytes)", xscale="log", yscale="log")
        panel.set_ylabel("bus bandwidth (GB/s)")
        panel.grid(visible=True, which="major", alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _label(row: dict[str, Any]) -> str:
    if row["format"] == "torch":
        return "torch"
    return f"{row['format']}, {row['hops']} hop{'s' if row['hops'] != 1 else ''}"


COLUMNS = [
    Column("nbytes", "      size(B)"),
    Column("count", "      count"),
    Column("dtype", "   dtype"),
    Column("collective", "      collective"),
    Column("format", "    format"),
    Column("hops", "hops"),
    Column("op", "  op"),
    Column("sent_nbytes", "   sent(B)"),
    Column("inter_nbytes", "  inter(B)"),
    Column("wire_nbytes", "   wire(B)"),
    Column("p50_us", "  p50(us)", ".1f", is_measurement=True),
    Column("p99_us", "  p99(us)", ".1f", is_measurement=True),
    Column("algbw_gbps", "algbw(GB/s)", ".3f", is_measurement=True),
    Column("busbw_gbps", "busbw(GB/s)", ".3f", is_measurement=True),
    Column("over_torch", "/torch", ".2f", is_measurement=True),
    Column("over_none", " /none", ".3f", is_measurement=True),
    Column("relative_error", "relerr", ".1e"),
]


class Case:
    """One row: a call, its check, and the bytes that it sent."""

    def __init__(self, workload: Workload, wire: WorkloadFormats | None) -> None:
        """``wire`` None: torch's own call."""
        self.workload, self.wire = workload, wire
        self.verdict = Verdict(0, 0.0)
        self.sent: dict[str, int] = {}

    @property
    def name(self) -> str:
        """The case's name, unique within its workload."""
        return "torch" if self.wire is None else f"{self.wire}, {self.wire.num_hops}"

    def call(self) -> None:
        """Call the collective once."""
        if self.wire is None:
            self.workload.call_torch()
        else:
            self.workload.call_zcomm(self.wire)

    def measure(self, options: argparse.Namespace) -> None:
        """Call once, check the result, count the bytes sent."""
        self.workload.poison()
        before = sent_nbytes(options.interface) if options.interface else 0
        torch_calls.barrier()  # or another rank of this node would send before this one has read the counter
        with zcomm.traffic() as sent:
            self.call()
        torch_calls.barrier()  # or the counter would miss bytes that other ranks have yet to send
        after = sent_nbytes(options.interface) if options.interface else 0
        t = self.workload.topology
        mine = torch.tensor([sent.bytes(link="inter"), sent.bytes(), after - before], dtype=torch.float64)
        of_node = control.gather_float64(mine, t)[: t.ranks_per_node]
        if self.wire is not None:
            self.sent = {"sent_nbytes": int(of_node[0, 1]), "inter_nbytes": int(of_node[:, 0].sum())}
        if options.interface:
            self.sent["wire_nbytes"] = int(of_node[0, 2])
        if options.check:
            self.verdict = check(self.workload, self.wire)

    def row(self, timings: Mapping[str, Timing]) -> dict[str, Any]:
        """Return the row's values, given the times of all cases."""
        work, timing = self.workload, timings[self.name]
        factor = (2 if work.collective == "all_reduce" else 1) * (work.num_ranks - 1) / work.num_ranks
        algbw = work.nbytes / timing.p50 / 1e9
        return {
            "nbytes": work.nbytes, "count": work.numel, "dtype": str(work.dtype).removeprefix("torch."),
            "collective": work.collective, "format": "torch" if self.wire is None else str(self.wire),
            "hops": "-" if self.wire is None else self.wire.num_hops,
            "op": work.op if work.collective in REDUCTIONS else "-", **self.sent,
            "p50_us": timing.p50 * 1e6, "p99_us": timing.p99 * 1e6, "algbw_gbps": algbw, "busbw_gbps": algbw * factor,
            "over_torch": timings["torch"].p50 / timing.p50, "relative_error": self.verdict.relative_error,
        }  # fmt: skip


def run(options: argparse.Namespace, topology: Topology, device: torch.device) -> int:
    """Run all cases and return the exit status. Collective; the first rank prints."""
    report = BenchReport(COLUMNS, as_json=options.json) if topology.rank == 0 else None
    if report is not None:
        report.start(
            "collectives", backend=topology.backend, device=device.type,
            world_size=topology.world_size, nodes=topology.num_nodes,
            ranks_per_node=topology.ranks_per_node, iters=options.iters, warmup=options.warmup,
            kernels=native_calls.unavailable_reason() or "native",
        )  # fmt: skip
    status = report.status if report is not None else lambda _: None
    rows: list[dict[str, Any]] = []
    tiles = Tiles(getattr(torch, options.dtype), device)
    for collective in options.collectives:
        if collective == "secondary_gather" and topology.ranks_per_node == 1:
            continue
        for nbytes in options.sizes:
            workload = Workload(collective, nbytes, tiles, topology, options.op)
            for row, num_wrong in _measured(workload, options, status):
                rows += [] if num_wrong else [row]
                if report is not None:
                    report.row(row, num_wrong=num_wrong)
    if report is None:
        return 0
    if options.plot is not None:
        draw(rows, options.plot)
        report.note(f"plot : {options.plot}")
    return report.finish()


def _measured(
    workload: Workload, options: argparse.Namespace, status: Callable[[str], None]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the rows of one size. Their calls are interleaved, so all rows are known at the same time."""
    cases = [Case(workload, None), *(Case(workload, wire) for wire in _wires(workload, options))]
    title = f"{workload.collective}, {workload.nbytes} bytes"
    for case in cases:
        status(f"{title}: checking {case.name}")
        case.measure(options)
    num_calls = len(cases) * (options.warmup + options.iters)
    calls = iter(range(1, num_calls + 1))

    def reset() -> None:
        status(f"{title}: timed call {next(calls)} of {num_calls}")
        workload.reset()

    timings = slowest_of_ranks(
        {case.name: case.call for case in cases}, workload.topology, rounds=options.iters, warmup=options.warmup,
        reset=reset,
    )  # fmt: skip
    for case in cases:
        yield case.row(timings) | _speedup_over_none(case, timings), case.verdict.num_wrong


def _speedup_over_none(case: Case, timings: Mapping[str, Timing]) -> dict[str, float]:
    """The column ``/none``, if ``none`` is among the formats."""
    wire = case.wire
    if wire is None:
        return {}
    hops = [2, 1] if wire.is_auto else [wire.num_hops]
    none = [timings[name] for name in (f"none, {h}" for h in hops) if name in timings]
    return {"over_none": timings[case.name].faster_than(none[0])} if none else {}


def _wires(workload: Workload, options: argparse.Namespace) -> list[WorkloadFormats]:
    if workload.collective == "secondary_gather":
        return [WorkloadFormats(FORMATS["none"], FORMATS["none"], 1)]
    hops = [1, 2] if workload.topology.has_two_hops else [1]
    texts = [text for text in options.formats if text != AUTO]
    wires = [wire_of(text, h) for text in texts for h in hops if str(h) in options.hops]
    if AUTO in options.formats:
        wires.append(auto_wire(workload))
    return [wire for wire in wires if wire is not None]
