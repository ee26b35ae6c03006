"""The command line tool ``zero``.

zero config explain FILE    the effective settings, where each came from, what is inactive and why
zero config schema          the JSON schema, for editors
zero config table           the table of all keys, as in docs/configuration.md
zero export CKPT OUTPUT     the weights of a checkpoint as safetensors
zero publish FOLDER         what is published in a folder: --inspect, --verify, --materialize OUT
zero estimate PARAMETERS    the memory of each rank, by kind, for every stage and tier
zero plan                   what fits on a cluster, the time of a step, and the fastest configuration
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from zcomm import ConfigError
from zero._checkpoint import CheckpointError, export_checkpoint
from zero._checkpoint.plain_weights import MAX_SHARD_NBYTES
from zero._config import explain, json_schema, markdown_table, read_source
from zero._publish import PublicationError
from zero._publish.command import add_publish
from zero._publish.command import run as run_publish
from zero.plan.command import add_plan, finite, named_model
from zero.plan.command import run as run_plan
from zero.plan.estimate import estimate
from zero.plan.formulas import Activations, Counts

__all__ = ["main"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FACTORS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (default: ``sys.argv[1:]``) and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        sys.stdout.write(_answer(options))
    except (ConfigError, CheckpointError, PublicationError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _answer(options: argparse.Namespace) -> str:
    if options.command == "export":
        return _export(options)
    if options.command == "publish":
        return run_publish(options)
    if options.command == "plan":
        return run_plan(options)
    if options.command == "estimate":
        return _estimate(options)
    if options.what == "schema":
        return json.dumps(json_schema(), indent=2) + "\n"
    if options.what == "table":
        return markdown_table()
    return explain(read_source(options.file), world_size=options.world_size, shows_all=options.all)


def _export(options: argparse.Namespace) -> str:
    paths = export_checkpoint(
        options.checkpoint,
        options.output,
        tag=options.tag,
        dtype=DTYPES[options.dtype] if options.dtype else None,
        model_parallel_rank=options.model_parallel_rank,
        max_shard_nbytes=options.max_shard_size,
    )
    return "".join(f"{path}\n" for path in paths)


def _size(text: str) -> int:
    """``500MB`` in bytes."""
    number = text.upper().removesuffix("B")
    factor = FACTORS.get(number[-1:], 1)
    try:
        nbytes = int(float(number.rstrip("KMGT")) * factor)
    except (ValueError, OverflowError):  # infinity
        nbytes = 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"a size must be a number of bytes, or like 500MB or 5GB: {text!r}")
    return nbytes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zero", description="ZeRO for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    config = commands.add_parser("config", help="about configurations in DeepSpeed's JSON")
    whats = config.add_subparsers(dest="what", required=True, metavar="WHAT")
    explaining = whats.add_parser("explain", help="the effective settings of a file, and where each came from")
    explaining.add_argument("file", metavar="FILE")
    explaining.add_argument("--world-size", type=int, metavar="N", help="solve the batch sizes for N ranks")
    explaining.add_argument("--all", action="store_true", help="also keys at their defaults that have no effect")
    whats.add_parser("schema", help="the JSON schema, for editors")
    whats.add_parser("table", help="all keys as a Markdown table")
    exporting = commands.add_parser("export", help="the weights of a checkpoint as safetensors, for transformers")
    exporting.add_argument("checkpoint", metavar="CKPT", help="the folder of checkpoints, or of one of them")
    exporting.add_argument("output", metavar="OUTPUT", help="a file whose name ends with .safetensors")
    exporting.add_argument("--tag", metavar="TAG", help="which checkpoint; default: the latest")
    exporting.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights; default: that of the model")
    whose = "whose part of the model, if it was saved beside model-parallel ranks"
    exporting.add_argument("--model-parallel-rank", type=int, metavar="N", help=whose)
    size = "largest file, 5GB if absent; more are written, with an index, if one would be larger"
    exporting.add_argument("--max-shard-size", type=_size, default=MAX_SHARD_NBYTES, metavar="SIZE", help=size)
    add_publish(commands.add_parser("publish", help="what a zero.Publisher has written to a folder"))
    _add_estimate(commands.add_parser("estimate", help="the memory of each rank, for every stage and tier"))
    add_plan(commands.add_parser("plan", help="what fits on a cluster, what a step takes, the fastest configuration"))
    return parser


def _parameters(text: str) -> int | str:
    """``7e9``, or the name of a model."""
    try:
        return int(finite(text))
    except ValueError:
        return text


def _add_estimate(parser: argparse.ArgumentParser) -> None:
    whose = "of the model, for example 7e9; or the model, as zero plan --model takes it"
    parser.add_argument("parameters", type=_parameters, metavar="PARAMETERS", help=whose)
    parser.add_argument("--config", metavar="FILE", help="DeepSpeed's JSON")
    parser.add_argument("--nodes", type=int, default=1, metavar="N")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="data-parallel ranks on each node")
    parser.add_argument("--largest-layer", type=finite, metavar="N", help="parameters (default: of all, over --layers)")
    parser.add_argument("--layers", type=int, default=1, metavar="N")
    shape = parser.add_argument_group("activations of a transformer")
    shape.add_argument("--hidden", type=int, metavar="N", help="width; without it activations are left out")
    shape.add_argument("--batch", type=int, default=1, metavar="N", help="sequences a rank and backward")
    shape.add_argument("--sequence", type=int, default=1024, metavar="N", help="tokens each")
    shape.add_argument("--checkpointing", action="store_true", help="activation checkpoints")
    shape.add_argument("--model-parallel", type=int, default=1, metavar="N", help="ranks they are partitioned over")


def _estimate(options: argparse.Namespace) -> str:
    given, layers = options.parameters, options.layers
    if isinstance(given, str):
        model = named_model(given)
        numel, layers = model.numel, model.num_layers
        largest = max(unit.numel for unit in model.units)
    else:
        numel, largest = given, int(given / max(layers, 1))
    if numel < 1 or layers < 1:
        raise ConfigError(f"there must be parameters and layers: parameters={numel}, layers={layers}")
    counts = Counts(numel=numel, largest_unit=int(options.largest_layer or largest))
    shape = None
    if options.hidden is not None:
        shape = Activations(
            hidden=options.hidden,
            num_layers=layers,
            batch=options.batch,
            sequence=options.sequence,
            is_checkpointed=options.checkpointing,
            model_parallel=options.model_parallel,
        )
    found = estimate(counts, options.config, options.nodes, options.ranks, activations=shape, prints=False)
    return str(found)
