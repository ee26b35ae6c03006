"""``zcomm probe``: measure links and kernels, and choose the fastest formats and hops for each size.

links      latency of an all-gather of 8 bytes; bandwidth in bytes that a rank (within) or a node (between) sends
kernels    GB/s of uncompressed tensor, one thread for each rank, all ranks at once as in a collective
choices    candidates are timed interleaved. The default is ``none`` over two hops. Another number of hops must be
           faster by ``MARGIN``, and a lossy format by ``LOSSY_MARGIN`` than ``none`` over any hops. The choice must
           win all ``NUM_TRIALS`` trials: on a busy machine a single trial of few calls is sometimes wrong
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zcomm import Topology
from zcomm._bench.data import Tiles
from zcomm._bench.harness import BenchReport, Column, Timing, slowest_of_ranks
from zcomm._bench.workloads import Workload, wire_of
from zcomm._collectives.auto_format import VERSION, FormatTable, shape_of
from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageInfo, layout_of
from zcomm._kernels import kernels
from zcomm._transport.backend import Hop, all_gather
from zcomm.errors import ConfigError

Timer = Callable[..., dict[Any, Timing]]
"""Times calls by their keys, over all ranks; ``reset=`` runs before each call, untimed."""
FormatAndHops = tuple[str, int]
"""A format, or two joined by a plus, and the number of hops."""
Times = Mapping[FormatAndHops, float]
MARGIN, LOSSY_MARGIN = 1.1, 1.25
"""Times of the same call differ by a few percent, and rounding costs accuracy: a smaller gain is not worth it."""
NUM_TRIALS = 3
CANDIDATES = {
    "all_gather": ["int8"],
    "reduce_scatter": ["int8", "int8+int4", "int8+nf4", "int4", "nf4"],
    "all_reduce": ["int8", "int8+int4", "int8+nf4"],
    "all_to_all": ["int8"],
}
"""Besides ``none``: 8 bits for values, down to 4 for sums, as ZeRO++ does."""
LINK_NBYTES = 2**22
KERNEL_NUMEL = 2**20
COLUMNS = [
    Column("nbytes", "      size(B)"),
    Column("collective", "      collective"),
    Column("format", "    format"),
    Column("hops", "hops"),
    Column("p50_us", "  p50(us)", ".1f"),
    Column("none_us", " none(us)", ".1f"),
    Column("speedup", "/none", ".2f"),
    Column("runner_up", "            runner-up"),
]


def probe(options: argparse.Namespace, topology: Topology, device: torch.device) -> int:
    """Measure, print, and write the file for ``format="auto"``. Collective; the first rank prints and writes."""
    report = BenchReport(COLUMNS, as_json=options.json) if topology.rank == 0 else None
    shape = shape_of(topology)
    if report is not None:
        report.start("probe", shape=shape, iters=options.iters, dtype=options.dtype)
    tiles = Tiles(getattr(torch, options.dtype), device)
    timed = partial(slowest_of_ranks, topology=topology, rounds=options.iters, warmup=options.warmup)
    facts: dict[str, Any] = {"device": device.type, "dtype": options.dtype, "links": _links(topology, device, timed)}
    facts["kernels_gbps"] = _kernel_rates(options.formats, tiles, timed)
    if report is not None:
        _note_rates(report, facts)
    facts["choices"] = {}
    for collective, candidates in CANDIDATES.items():
        chosen = facts["choices"][collective] = []
        for nbytes in options.sizes:
            row = _fastest(Workload(collective, nbytes, tiles, topology, "sum"), options.formats or candidates, timed)
            chosen.append([nbytes, row["format"], row["hops"]])
            if report is not None:
                report.row(row, num_wrong=0)
    if report is None:
        return 0
    _write(options.output, shape, facts)
    report.note(f'written for format="auto" : {options.output}')
    return 0


def _fastest(workload: Workload, formats: list[str], timed: Timer) -> dict[str, Any]:
    hops = [2, 1] if workload.topology.has_two_hops else [1]
    wires = [wire_of(text, h) for text in ["none", *formats] for h in hops]
    calls = {(str(wire), wire.num_hops): partial(workload.call_zcomm, wire) for wire in wires if wire is not None}
    none = ("none", hops[0])

    def trial(keys: Iterable[FormatAndHops]) -> dict[FormatAndHops, float]:
        timings = timed({key: calls[key] for key in keys}, reset=workload.reset)
        return {key: timing.p50 for key, timing in timings.items()}

    best, p50 = choose_confirmed(trial, calls, default=none)
    others = [key for key in sorted(p50, key=lambda key: p50[key]) if key != best]
    return {
        "nbytes": workload.nbytes, "collective": workload.collective, "format": best[0], "hops": best[1],
        "p50_us": p50[best] * 1e6, "none_us": p50[none] * 1e6, "speedup": p50[none] / p50[best],
        "runner_up": f"{others[0][0]}, {others[0][1]}: {p50[others[0]] * 1e6:.0f} us",
    }  # fmt: skip


def choose_confirmed(
    trial: Callable[[Iterable[FormatAndHops]], Times], candidates: Iterable[FormatAndHops], *, default: FormatAndHops
) -> tuple[FormatAndHops, dict[FormatAndHops, float]]:
    """Return the choice after ``NUM_TRIALS`` trials, and the last times of all ``candidates``.

    ``trial`` times the candidates that it gets. If a later trial does not choose the same again, its choice replaces
    the earlier one.
    """
    p50 = dict(trial(candidates))
    best = choose_fastest(p50, default=default)
    for _ in range(1, NUM_TRIALS):
        if best == default:
            break
        again = trial(dict.fromkeys([*(key for key in p50 if key[0] == "none"), best]))
        best = choose_fastest(again, default=default)
        p50.update(again)
    return best, p50


def choose_fastest(p50: Times, *, default: FormatAndHops) -> FormatAndHops:
    """Choose format and hops by times ``p50``; ``default`` is uncompressed, as without a probe."""
    exact = min((key for key in p50 if key[0] == "none"), key=lambda key: p50[key])
    if p50[exact] * MARGIN > p50[default]:
        exact = default
    best = min(p50, key=lambda key: p50[key])
    return best if p50[best] * LOSSY_MARGIN <= p50[exact] else exact


def _links(topology: Topology, device: torch.device, timed: Timer) -> dict[str, dict[str, float]]:
    """Latency and bandwidth of each link class that the topology has."""
    found = {}
    for name, hop, senders in (("within", topology.intra, 1), ("between", topology.inter, topology.ranks_per_node)):
        if hop.size == 1:
            continue
        calls = {}
        for nbytes in (8, LINK_NBYTES):
            mine = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            calls[nbytes] = partial(_gather, mine.new_zeros(hop.size * nbytes), mine, hop)
        timings = timed(calls, reset=lambda: None)
        sent = (hop.size - 1) * LINK_NBYTES * senders
        found[name] = {"latency_us": timings[8].p50 * 1e6, "bandwidth_gbps": sent / timings[LINK_NBYTES].p50 / 1e9}
    return found


def _gather(output: torch.Tensor, mine: torch.Tensor, hop: Hop) -> None:
    if (pending := all_gather(output, mine, hop, MessageInfo("probe", "none", mine.numel()))) is not None:
        pending.wait()


def _kernel_rates(formats: list[str] | None, tiles: Tiles, timed: Timer) -> dict[str, dict[str, float]]:
    x = tiles.of_rank(0, 0, KERNEL_NUMEL)
    calls = {}
    names = {name for wires in CANDIDATES.values() for wire in formats or wires for name in wire.split("+")}
    for name in sorted(names):
        layout = layout_of("probe", get_format(name), x.dtype, 1, x.numel())
        message, out = layout.new(1, x.device), torch.empty_like(x)
        kernels.quantize(x, layout, message, 0, 0)
        calls[name, "quantize"] = partial(kernels.quantize, x, layout, message, 0, 0)
        calls[name, "decode"] = partial(kernels.decode, message, layout, out, 0, 0)
    timings = timed(calls, reset=lambda: None)
    rates: dict[str, dict[str, float]] = {name: {} for name in sorted(names)}
    for (name, kernel), timing in timings.items():
        rates[name][kernel] = x.nbytes / timing.p50 / 1e9
    return rates


def _note_rates(report: BenchReport, facts: dict[str, Any]) -> None:
    for name, link in facts["links"].items():
        report.note(f"{name} nodes: {link['latency_us']:.0f} us, {link['bandwidth_gbps']:.3f} GB/s")
    for name, rates in facts["kernels_gbps"].items():
        report.note(f"{name}: " + ", ".join(f"{kernel} {rate:.2f} GB/s" for kernel, rate in rates.items()))


def _write(path: Path, shape: str, facts: dict[str, Any]) -> None:
    """Add or replace the table of this shape.

    The new text goes to a temporary file that replaces the old one, so a reader never sees half of it. No fsync: after
    a crash the probe is run again.
    """
    topologies: dict[str, Any] = {}
    if path.exists():
        text = path.read_text(errors="replace")
        FormatTable.parse(str(path), text, shape=shape)
        topologies = json.loads(text)["topologies"]
    topologies[shape] = facts
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, new = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # mode 600
    with os.fdopen(number, "w") as file:
        file.write(json.dumps({"version": VERSION, "topologies": topologies}, indent=1) + "\n")
    if path.exists():  # mkstemp's mode would take access from others
        Path(new).chmod(path.stat().st_mode & 0o777)
    Path(new).replace(path)


def check_output(path: Path, shape: str = "") -> None:
    """Raise ConfigError if ``path`` is a folder or another kind of file, which writing would destroy."""
    if path.is_dir():
        raise ConfigError(f"--output must be a file: {path} is a folder")
    if path.exists():
        FormatTable.parse(str(path), path.read_text(errors="replace"), shape=shape)
