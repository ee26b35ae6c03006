"""Compare the predictions of ``zero plan`` with the steps that bench/compare.py has measured on this machine.

    computation     step of the same ranks alone, in the same run, after as many micro-batches ("alone", "alone x4")
    own steps       with --own-steps, the system's step on loopback, from the same file, replaces computation, latency,
                    kernels and links inside the node: it has all work of the CPU, including copies to the network.
                    The plan adds the network's time; loopback itself is no row
    bytes           of this library: zero.plan.exchanges. Of peers: zero.plan.peers, over gloo's rings
    rates           between nodes by the network's name, within them and on loopback as `zcomm probe` measured them
    latency         one for each exchange of this library; in a ring R - 1 for a gather, 2 (R - 1) for a reduction
    kernels         bytes that encoding and summing read and write, at the kernels' rate in the probe
    hidden          on networks, as k ranks share a core: (k - 1) / k of the work for messages, while those of other
                    ranks are in flight. This library also computes meanwhile, as it prefetches and sends
                    asynchronously; peers wait on CPUs. Without own steps: zero.plan.times

Rates and latencies are measured with all ranks active, so they include the effect of shared cores; measured rates are
no peaks, so they are divided by LINK_EFFICIENCY. Not planned are peers whose exchanges are not modelled (DeepSpeed,
ZeroRedundancyOptimizer), offloading, and persistent parameters.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparison.records import RANKS_PER_NODE, Run, Store
from comparison.tables import LOOPBACK, rate_mbit
from contenders.catalogue import ENTRIES
from gpt_model import GPT, GPTConfig

from zcomm._formats.formats import get_format
from zcomm._formats.message import layout_of
from zcomm.volume import Exchanged, Sent
from zero._config import resolve_config
from zero._runtime.exchanges import total
from zero.plan import Cluster, Model
from zero.plan.exchanges import Exchanges, MovedBytes, kernel_nbytes, step_moved
from zero.plan.formulas import Activations, Counts, TrainingSetup
from zero.plan.peers import PEERS, Peer, peer_kernel_nbytes, peer_moved
from zero.plan.times import LINK_EFFICIENCY, StepTimes, times_of

__all__ = [
    "TOLERANCE", "Planned", "alone", "cluster_of", "median", "model_of", "moved_of", "of_own_step",
    "page", "planned", "probed", "rate_gbit",
]  # fmt: skip

TOLERANCE = 0.2
NOT_PLANNED = {"offload", "stage3_param_persistence_threshold"}
"""Options of this library's contenders that are not planned."""
TORCH = {
    "ddp": "DDP", "ddp bf16 gradients": "DDP bf16 gradients",
    "ddp x4": "DDP, once", "ddp bf16 gradients x4": "DDP bf16 gradients, once",
    "fsdp2 reshard=True": "FSDP2", "fsdp2 reshard=False": "FSDP2 reshard=False",
    "fsdp2 reshard=False x4": "FSDP2 reshard=False, once",
    "hsdp reshard=True": "HSDP", "hsdp reshard=False": "HSDP reshard=False",
    "hsdp reshard=True x4": "HSDP, once", "hsdp reshard=False x4": "HSDP reshard=False, once",
}  # fmt: skip
"""The planner's peers by the names of contenders."""


class Planned(NamedTuple):
    """The planned and the measured step of one system on one network."""

    key: str
    system: str
    times: StepTimes
    hidden: float
    """Seconds."""
    measured: float
    """Median, in seconds."""

    @property
    def step(self) -> float:
        """Planned seconds of a step."""
        return self.times.computation + self.times.transfers - self.hidden

    @property
    def error(self) -> float:
        """Relative error of the plan."""
        return self.step / self.measured - 1


def rate_gbit(network: str) -> float:
    """Gbit/s of a rate as ``tc`` writes it."""
    if math.isinf(rate := rate_mbit(network)):
        raise ValueError(f"a network is {LOOPBACK}, or a rate like 200mbit: {network!r}")
    return rate / 1e3


def probed(path: Path | None, store: Store) -> dict[str, Any]:
    """Return the results of ``zcomm probe`` on this machine.

    ``path`` is its file. If it does not exist, the links on loopback are measured now and written there.
    """
    nodes, per_node = max(map(_nodes_and_ranks, store.values["shape"].values()))
    shape = f"{nodes}x{per_node} on 1 host"
    with tempfile.TemporaryDirectory() as folder:
        known = path if path is not None and path.exists() else _probe(Path(folder) / "probe.json", nodes, per_node)
        shapes: dict[str, Any] = json.loads(known.read_text(encoding="utf-8"))["topologies"]
    if shape not in shapes:
        raise ValueError(
            f"{path} has no links of {shape!r}, only of {sorted(shapes)}: leave out --probe to measure them"
        )
    if path is not None and not path.exists():
        path.write_text(json.dumps({"version": 1, "topologies": shapes}, indent=1), encoding="utf-8")
    facts: dict[str, Any] = shapes[shape]
    return facts


def _nodes_and_ranks(shape: dict[str, int]) -> tuple[int, int]:
    return shape["nodes"], shape.get("ranks_per_node", RANKS_PER_NODE)


def _probe(path: Path, nodes: int, per_node: int) -> Path:
    shape = [f"--num-ranks={nodes * per_node}", f"--ranks-per-node={per_node}"]
    once = ["--minbytes=4K", "--maxbytes=4K", "--iters=31", "--warmup-iters=3", f"--output={path}"]
    command = [sys.executable, "-m", "zcomm", "probe", *shape, *once]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return path


def cluster_of(facts: dict[str, Any] | None, shape: dict[str, int], network: str) -> Cluster:
    """Return this machine on a network; without ``facts`` only the network's rate is known."""
    nodes, per_node = _nodes_and_ranks(shape)
    ranks_per_core = max(nodes * per_node / (os.cpu_count() or 1), 1)
    one = Cluster(num_nodes=nodes, ranks_per_node=per_node, ranks_per_processor=ranks_per_core)
    if facts is None:
        return replace(one, between_gbit=rate_gbit(network))
    within, between = facts["links"]["within"], facts["links"]["between"]
    loopback_gbit = 8 * between["bandwidth_gbps"] / LINK_EFFICIENCY
    return replace(
        one,
        within_gbps=within["bandwidth_gbps"] / LINK_EFFICIENCY,
        within_us=within["latency_us"],
        between_gbit=loopback_gbit if network == LOOPBACK else min(rate_gbit(network), loopback_gbit),
        between_us=between["latency_us"],
        device_gbps=_kernels_gbps(facts["kernels_gbps"]) / LINK_EFFICIENCY,
        ranks_per_processor=1 if network == LOOPBACK else ranks_per_core,
    )


def _kernels_gbps(rates: dict[str, dict[str, float]]) -> float:
    """Return GB/s that the kernels read and write; the probe's rates count only bfloat16 elements, no messages."""
    numel, seconds, nbytes = 2**20, 0.0, 0.0
    for name, of_kernels in rates.items():
        wire = layout_of("probe", get_format(name), torch.bfloat16, 1, numel).nbytes
        for rate in of_kernels.values():
            seconds += 2 * numel / (rate * 1e9)
            nbytes += 2 * numel + wire
    return nbytes / seconds / 1e9


def model_of(shape: dict[str, int], dtype: torch.dtype) -> Model:
    """Return the model of compare.py."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    with torch.device("meta"):
        module = GPT(GPTConfig(**{name: shape[name] for name in names})).to(dtype)
    layers, hidden, sequence = shape["num_layers"], shape["hidden_size"], shape["seq_length"]
    return Model.of_module(module, num_layers=layers, hidden=hidden, sequence=sequence)


def _of_torch(
    peer: Peer, model: Model, cluster: Cluster, dtype: torch.dtype, num_micro: int
) -> tuple[MovedBytes, float]:
    """Return what gloo's rings move, and the bytes that their kernels read and write.

    All links of a ring are busy at the same time, so the slowest one counts: that between nodes, if it is slower than
    one inside. FSDP2 moves each block, and the others.
    """
    if peer.shards_over != "none":
        peer = peer._replace(param_nbytes=dtype.itemsize, gradient_nbytes=dtype.itemsize)
    counts, shape = Counts(numel=model.numel), (cluster.num_nodes, cluster.ranks_per_node)
    moved = total(list(peer_moved(peer, counts, shape, model.num_layers + 1, num_micro, is_gloo=True).values()))
    kernels, (intra, inter) = peer_kernel_nbytes(peer, counts, shape, num_micro), moved.sent
    if peer.shards_over == "node":
        of_node, of_nodes = moved.exchanges
        return MovedBytes(moved.sent, Exchanged(of_node * (shape[1] - 1), of_nodes * (shape[0] - 1))), kernels
    rounds = (cluster.world_size - 1) * max(moved.exchanges)
    if cluster.between_gbit / 8 < cluster.within_gbps:
        return MovedBytes(Sent(0, inter), Exchanged(0, rounds)), kernels
    return MovedBytes(Sent(intra + inter, 0), Exchanged(rounds, 0)), kernels


def _of_zero(options: dict[str, Any], model: Model, cluster: Cluster, dtype: torch.dtype) -> tuple[MovedBytes, float]:
    """Return what this library moves, and the bytes that its kernels read and write."""
    asked = dict(options)
    num_micro, holds_gradients = asked.pop("accumulation", 1), asked.pop("has_no_sync", False)
    is_kept = asked.get("stage3_max_reuse_distance", 0) > 1  # full until the step, beside one batch or with no_sync
    is_once = holds_gradients or (is_kept and num_micro == 1)
    if asked.pop("stays_in_node", False):
        asked["hpz_partition_size"] = cluster.ranks_per_node
    settings = resolve_config(None, asked | {"gradient_accumulation_steps": num_micro}).settings
    exchanges = Exchanges.of(settings, cluster.num_nodes, cluster.ranks_per_node, dtype)
    moved = step_moved(model, exchanges, num_micro, is_once=is_once).values()
    return total(list(moved)), kernel_nbytes(model, exchanges, num_micro, is_once=is_once)


def planned(store: Store, facts: dict[str, Any] | None) -> Iterator[Planned]:
    """Plan every system that was measured with ``alone``; without ``facts``, on networks, from its step on loopback."""
    for key in store.values["runs"]:
        run, (dtype_name, batch, network) = store.run(key), key.split()
        if facts is None and network == LOOPBACK:
            continue
        shape, dtype = store.values["shape"][batch], getattr(torch, dtype_name)
        cluster, model = cluster_of(facts, shape, network), model_of(shape, dtype)
        loopback = store.run(f"{dtype_name} {batch} {LOOPBACK}")
        for name, system in run.systems.items():
            base = alone(run if facts is not None else loopback, system.accumulation)
            moved = moved_of(name, model, cluster, dtype)
            if base is None or moved is None or system.error or not system.seconds:
                continue
            measured = statistics.median(system.seconds)
            if facts is None:
                own = median(loopback, name)
                if own is not None:
                    nbytes = moved[0].sent.inter * cluster.ranks_per_node
                    yield Planned(key, name, *of_own_step(name, own, base, nbytes, cluster), measured)
                continue
            times = _times(model, cluster, *moved)
            times = replace(times, computation=base)
            yield Planned(key, name, times, times.hidden, measured)


def moved_of(name: str, model: Model, cluster: Cluster, dtype: torch.dtype) -> tuple[MovedBytes, float] | None:
    """Return what the system moves, and the bytes that its kernels read and write; None: it is not planned."""
    entry = ENTRIES[name]
    if name in TORCH:
        return _of_torch(PEERS[TORCH[name]], model, cluster, dtype, entry.options.get("accumulation", 1))
    if entry.module == "zero_optimizer" and not NOT_PLANNED & entry.options.keys():
        return _of_zero(entry.options, model, cluster, dtype)
    return None


def _times(model: Model, cluster: Cluster, moved: MovedBytes, kernels: float) -> StepTimes:
    job = Activations(hidden=model.hidden, num_layers=model.num_layers, batch=1, sequence=model.sequence)
    setup = TrainingSetup(stage=0)  # nothing is offloaded
    return times_of(model, job, setup, cluster, {"all": moved}, kernels_nbytes=kernels, num_micro=1)


def of_own_step(
    name: str, own: float, computing: float, node_nbytes: float, cluster: Cluster
) -> tuple[StepTimes, float]:
    """Return the times of a step that takes ``own`` seconds on loopback, and what is hidden on the network.

    Args:
        name: Of the system.
        own: Seconds.
        computing: Seconds of the same ranks alone.
        node_nbytes: Bytes that a node sends.
        cluster: The network.
    """
    between = node_nbytes / (cluster.between_gbit * 1e9 / 8 * LINK_EFFICIENCY)
    times = StepTimes(
        computation=own, within=0.0, between=between, latency=0.0, kernels=0.0, pcie=0.0, host=0.0, nvme=0.0
    )
    hidden = (1 - 1 / cluster.ranks_per_processor) * max(own - computing, 0.0)
    if (entry := ENTRIES[name]).module == "zero_optimizer":
        sends_after_step = entry.options["stage"] < 3 or entry.options.get("mode") == "delta_hpz"
        hidden += min(computing, own, between / 2 if sends_after_step else between)
    return times, min(hidden, between)


def alone(run: Run, accumulation: int) -> float | None:
    """Return the median step of the ranks alone, after as many micro-batches."""
    return median(run, "alone" if accumulation == 1 else f"alone x{accumulation}")


def median(run: Run, name: str) -> float | None:
    """Return the median step of a system; None if it was not measured."""
    system = run.systems.get(name)
    return statistics.median(system.seconds) if system is not None and system.seconds else None


def page(path: Path, probe: Path | None = None, *, has_own: bool = False) -> str:
    """Return the comparison as Markdown, from the JSON of compare.py and the links that ``zcomm probe`` measured."""
    store = Store(path)
    facts = None if has_own else probed(probe, store)
    rows = list(planned(store, facts))
    if not rows:
        beside = "on a network and on loopback" if has_own else "beside alone"
        raise ValueError(f"{path} has no system that is planned, measured {beside}: run bench/compare.py")
    near = sum(abs(row.error) <= TOLERANCE for row in rows)
    option = "--own-steps" if has_own else "--probe FILE.json"
    lines = [
        "# `zero plan` beside this machine", "",
        *(f"{name}: {text}  " for name, text in store.values["context"].items()), "",
        f"{near} of {len(rows)} rows within {TOLERANCE:.0%}: {near / len(rows):.1%}; {len({row.key for row in rows})} "
        f"runs, {len({row.system for row in rows})} systems. `python bench/plan_validation.py --measured FILE.json",
        f"{option}`; formulas: `bench/plan_measured.py`, `zero/plan/times.py`; no number is fitted to a row, but what "
        "a system hides was decided after a look at such tables (docs/measuring.md).", "",
        _facts_line(facts), "",
        "Milliseconds:", "",
        "| run | system | itself | within | between | latency | kernels | hidden | planned | measured | difference |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        of = row.times
        parts = (of.computation, of.within, of.between, of.latency, of.kernels, row.hidden, row.step, row.measured)
        cells = " | ".join(f"{1e3 * part:,.1f}" for part in parts)
        lines.append(f"| {row.key} | {row.system} | {cells} | {100 * row.error:+.0f} % |")
    return "\n".join(lines) + "\n"


def _facts_line(facts: dict[str, Any] | None) -> str:
    if facts is None:
        return "Itself: the system's own step on loopback. Between: bytes of a node over 0.9 of the network's rate."
    one = cluster_of(facts, {"nodes": 2}, LOOPBACK)  # its links do not depend on the number of nodes
    return (
        f"Links, times LINK_EFFICIENCY: within a node {one.within_gbps:.3f} GB/s a rank, {one.within_us:.0f} us an "
        f"exchange; between nodes on loopback {one.between_gbit:.2f} Gbit/s and {one.between_us:.0f} us; kernels "
        f"{one.device_gbps:.2f} GB/s; all with all ranks active."
    )
