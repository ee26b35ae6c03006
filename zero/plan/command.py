"""The command ``zero plan``: its options, reading the model and the cluster, measuring this machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from zcomm import ConfigError
from zcomm._collectives.auto_format import probe_path
from zero.plan.cluster import CLUSTERS, Cluster
from zero.plan.model import MODELS, Model
from zero.plan.planner import Job, largest_model, plan, plan_peers
from zero.plan.report import as_json, draw, table

UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""What reading a JSON document with an unexpected structure raises."""
RATES = {
    "device_gib": "GiB of a device", "device_gbps": "GB/s of that memory", "tflops": "TFLOP/s of a device",
    "within_gbps": "GB/s a device sends in its node", "between_gbit": "Gbit/s a node sends to others",
    "host_gib": "GiB of a host", "host_gbps": "GB/s of its memory", "pcie_gbps": "GB/s of a device to its host",
    "within_us": "us of an exchange in the node", "between_us": "us of one between nodes",
    "nvme_gib": "GiB of a node's disks", "nvme_read_gbps": "GB/s they are read", "nvme_write_gbps": "GB/s written",
    "ranks_per_processor": "ranks that share a processor, without a device for each",
}  # fmt: skip


def finite(text: str) -> float:
    """Parse an option's number, such as ``7e9``; argparse reports other texts."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number: {text}")
    return value


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``zero plan``."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help=f"{', '.join(MODELS)}, or the folder or file of a config.json")
    model.add_argument(
        "--parameters", type=finite, metavar="N", help="number of parameters, in --layers equal layers, such as 7e9"
    )
    model.add_argument("--layers", type=int, metavar="N")
    model.add_argument("--hidden", type=int, metavar="N", help="width, instead of --parameters")
    model.add_argument("--vocabulary", type=int, default=50257, metavar="N")
    model.add_argument("--sequence", type=int, default=1024, metavar="N", help="tokens (default 1024)")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--cluster", choices=CLUSTERS, default="8xa100", help="default: one node of 8 A100")
    cluster.add_argument(
        "--probe", action="store_true", help="measure this machine; links as zcomm probe has found them"
    )
    cluster.add_argument("--nodes", type=int, dest="num_nodes", metavar="N")
    cluster.add_argument("--ranks", type=int, dest="ranks_per_node", metavar="N", help="on each node")
    for name, text in RATES.items():
        cluster.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=text)
    job = parser.add_argument_group("step")
    job.add_argument("--batch", type=int, default=1, metavar="N", help="sequences of a rank in a micro-batch")
    job.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-batches in a step")
    job.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    job.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: for the hidden matrices")
    job.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    job.add_argument("--narrow-gradients", action="store_true", help="sum gradients in 16 bits (grad_accum_dtype)")
    parser.add_argument("--max-model", action="store_true", help="find the largest model of such layers that fits")
    parser.add_argument("--json", action="store_true", help="print each row as a line of JSON, peers last")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot the times of a step (needs matplotlib)")


def run(options: argparse.Namespace) -> str:
    """Return the text that the command prints.

    Raises:
        ConfigError: The options describe no valid model, cluster or step.
    """
    cluster = _cluster_of(options)
    job = Job(
        batch=options.batch,
        num_micro=options.accumulation,
        is_checkpointed=not options.no_checkpointing,
        precision=options.precision,
        optimizer=options.optimizer,
        narrow_gradients=options.narrow_gradients,
    )
    model = _model_of(options)
    if options.max_model:
        model, _ = largest_model(model, cluster, job)
    rows, peers = plan(model, cluster, job), plan_peers(model, cluster, job)
    if options.plot is not None:
        draw(rows, options.plot)
    return as_json([*rows, *peers]) if options.json else table(rows, model, cluster, peers)


def named_model(name: str, *, vocabulary: int = 50257, sequence: int | None = None) -> Model:
    """Return the model that ``--model`` names: a key of :data:`MODELS`, or the folder or file of a ``config.json``.

    Raises:
        ConfigError: There is no such model, or its parameters cannot be counted.
    """
    if name in MODELS:
        layers, hidden = MODELS[name]
        return Model.of_shape(layers, hidden, vocabulary=vocabulary, sequence=1024 if sequence is None else sequence)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        return Model.of_config(json.loads(path.read_text()), sequence=sequence)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}: a model must be one of {', '.join(MODELS)}, or the folder or file of a "
            "config.json"
        ) from None
    except ConfigError:
        raise
    except UNREADABLE as error:
        raise ConfigError(f"{path} must be a model's config.json: {error!r}") from error


def _model_of(options: argparse.Namespace) -> Model:
    if options.model is not None:
        return named_model(options.model, vocabulary=options.vocabulary, sequence=options.sequence)
    if options.parameters is not None:
        return Model.of_numel(options.parameters, options.layers or 1, sequence=options.sequence)
    if options.layers is None or options.hidden is None:
        raise ConfigError(
            "a model is needed: give --model NAME, or --layers and --hidden, or --parameters and --layers"
        )
    return Model.of_shape(options.layers, options.hidden, vocabulary=options.vocabulary, sequence=options.sequence)


def _cluster_of(options: argparse.Namespace) -> Cluster:
    names = [field.name for field in fields(Cluster)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return replace(probed() if options.probe else CLUSTERS[options.cluster], **given)


def probed() -> Cluster:
    """Measure this machine: its memory, matrix products and copies; links as ``zcomm probe`` has measured them.

    Cost: about a second.
    """
    host_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    has_gpu = torch.cuda.is_available()
    ranks = torch.cuda.device_count() if has_gpu else 1
    memory = torch.cuda.get_device_properties(0).total_memory if has_gpu else host_nbytes
    device = torch.device("cuda" if has_gpu else "cpu")
    square = torch.ones(4096 if has_gpu else 1024, 4096 if has_gpu else 1024, device=device)
    square = square.bfloat16() if has_gpu else square
    flops = 2 * square.shape[0] ** 3 / _seconds(lambda: square @ square)
    large = torch.ones(2**24, device=device)
    copied = 2 * large.nbytes / _seconds(large.clone)
    found = Cluster(
        ranks_per_node=ranks,
        device_gib=memory / 2**30,
        device_gbps=copied / 1e9,
        tflops=flops / 1e12,
        host_gib=host_nbytes / 2**30,
        host_gbps=copied / 1e9 if not has_gpu else Cluster().host_gbps,
    )
    return replace(found, **_probed_links())


def _seconds(call: Any) -> float:
    """The time of the fastest of six calls."""
    found = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # or only the kernel launch would be timed
        found.append(time.perf_counter() - start)
    return min(found)


def _probed_links() -> dict[str, Any]:
    """The links of the largest topology in the file of ``zcomm probe``; empty without a file."""
    path = probe_path()
    try:
        shapes: dict[str, Any] = json.loads(path.read_text())["topologies"]
        return _links(shapes)
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not a file of `zcomm probe`: {error!r}; delete it or probe again") from error


def _links(shapes: dict[str, Any]) -> dict[str, Any]:
    if not shapes:
        return {}
    name = max(shapes, key=lambda shape: [int(n) for n in shape.split(" ")[0].split("x")])
    nodes, ranks = (int(n) for n in name.split(" ")[0].split("x"))
    links = shapes[name]["links"]
    found: dict[str, Any] = {"num_nodes": nodes, "ranks_per_node": ranks}
    if "within" in links:
        found["within_gbps"] = links["within"]["bandwidth_gbps"]
        found["within_us"] = links["within"]["latency_us"]
    if "between" in links:
        found["between_gbit"] = 8 * links["between"]["bandwidth_gbps"]
        found["between_us"] = links["between"]["latency_us"]
    return found
