"""The command line of ``zcomm bench`` and ``zcomm probe``, with the option names of nccl-tests."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import torch

from zcomm._bench.emulated_nodes import INTERFACE, unavailable_reason
from zcomm._bench.interface import sent_nbytes
from zcomm._collectives.auto_format import AUTO
from zcomm._formats.formats import get_format
from zcomm._transport.backend_choice import nccl_unavailable_reason
from zcomm.errors import BackendUnavailableError, ConfigError

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "secondary_gather")
DTYPES = ("float32", "bfloat16", "float16", "float64")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _parse_size(text: str) -> int:
    """Parse ``1K``, ``16M``, ``1G`` or ``1000`` to bytes."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a number of bytes, optionally with K, M or G: {text!r}")
    return int(match[1]) * UNITS[match[2].upper()]


def _one_of(*choices: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in choices]:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}: {unknown[0]!r}")
        return chosen

    return parse


def _wires(text: str) -> list[str]:
    """Parse ``int8,int8+int4,...``; with a plus for (inside the node, between nodes) of a reduction."""
    wires = [wire.strip() for wire in text.split(",") if wire.strip()]
    for wire in wires:
        try:
            for part in wire.split("+", 1) if wire != AUTO else ():
                get_format(part)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return wires


def _candidates(text: str) -> list[str]:
    """Parse the candidates of a probe, among which ``format="auto"`` chooses."""
    wires = _wires(text)
    if unfit := [wire for wire in wires if wire == AUTO or "stochastic" in wire]:
        raise argparse.ArgumentTypeError(f'candidates of format="auto" must round to nearest: {unfit[0]!r}')
    return wires


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a number of at least 1: {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of ``zcomm bench``."""
    add = parser.add_argument
    _add_sizes(parser, smallest="1K", iters=20)
    add("-o", "--op", choices=("sum", "avg"), default="sum", help="of reductions (sum)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="compare results with exact ones (1)")
    add("--collectives", type=_one_of(*COLLECTIVES), default=",".join(COLLECTIVES), metavar="LIST",
        help="comma separated; all: " + ",".join(COLLECTIVES))  # fmt: skip
    add("--formats", type=_wires, default="none,int8,int4", metavar="LIST",
        help="wire formats, also int8/64:asym:hadamard:stochastic (block, zero points, rotation, rounding by chance); "
        "int8+int4: inside nodes int8, between them int4; auto (none,int8,int4)")  # fmt: skip
    add("--hops", type=_one_of("1", "2"), default="1,2", metavar="LIST", help="1, 2 or both (1,2)")
    add("--backend", choices=("torch", "nccl"), default="torch", help="what moves the bytes (torch)")
    add("--interface", metavar="NAME", help="count the bytes that this network interface sends, too")
    add("--plot", metavar="FILE.png", help="bus bandwidth by size, a panel for each collective")
    add_launch_arguments(parser)


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of ``zcomm probe``."""
    add = parser.add_argument
    _add_sizes(parser, smallest="4K", iters=11)
    add("--formats", type=_candidates, metavar="LIST",
        help="candidates: auto will choose none that is not here; by default 8 bits, for sums also int4 and nf4, alone "
        "or between nodes")  # fmt: skip
    add("--output", metavar="FILE", help='default: where format="auto" looks, $ZCOMM_PROBE or in ~/.cache/zcomm')
    add_launch_arguments(parser)


def _add_sizes(parser: argparse.ArgumentParser, *, smallest: str, iters: int) -> None:
    add = parser.add_argument
    add("-b", "--minbytes", type=_parse_size, default=smallest, metavar="SIZE", help=f"smallest tensor ({smallest})")
    add("-e", "--maxbytes", type=_parse_size, default="16M", metavar="SIZE", help="largest; at most what fits (16M)")
    add("-f", "--stepfactor", type=_positive, default=4, metavar="N", help="from size to size (4)")
    add("-i", "--stepbytes", type=_parse_size, metavar="SIZE", help="instead: add this from size to size")
    add("-d", "--datatype", dest="dtype", choices=DTYPES, default="bfloat16", help="of the tensors (bfloat16)")
    add("-n", "--iters", type=_positive, default=iters, metavar="N", help=f"timed calls of each case ({iters})")
    add("-w", "--warmup_iters", "--warmup-iters", dest="warmup", type=_positive, default=1, metavar="N",
        help="calls before (1)")  # fmt: skip
    add("--json", action="store_true", help="rows as JSON lines")


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of ranks, nodes and the device of tensors; bench and probe share them."""
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="of the tensors: GPUs, under NCCL, or memory, under gloo (auto: GPUs if there are any)")  # fmt: skip
    add("--num-ranks", "--num_ranks", type=_positive, metavar="N", help="without torchrun: one a GPU, or 4")
    add("--ranks-per-node", "--ranks_per_node", type=_positive, metavar="N",
        help="so many consecutive ranks stand in for a node; as torchrun has it, on one machine 2")  # fmt: skip
    add("--emulate-nodes", "--emulate_nodes", type=_positive, metavar="N",
        help="run as on N machines: network namespaces of this one, needs root")  # fmt: skip
    add("--rate", metavar="RATE", help="with --emulate-nodes: what each can send, as tc writes it: 200mbit")


def check_launch(arguments: argparse.Namespace) -> None:
    """Raise ConfigError or BackendUnavailableError if the launch options cannot work on this machine."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError(
            "--device cuda needs a GPU, but torch.cuda.is_available() is False: use --device cpu"
        )
    if arguments.rate is not None and arguments.emulate_nodes is None:
        raise ConfigError(f"--rate needs --emulate-nodes: got --rate {arguments.rate} alone")
    if arguments.emulate_nodes is None:
        return
    if arguments.num_ranks is not None:
        raise ConfigError("--num-ranks cannot be combined with --emulate-nodes: use --ranks-per-node")
    if (reason := unavailable_reason()) is not None:
        raise BackendUnavailableError(reason)


def check_bench(arguments: argparse.Namespace) -> None:
    """Raise ConfigError or BackendUnavailableError if ``zcomm bench`` cannot do what the options say."""
    if arguments.backend == "nccl":
        no_gpu = "it takes tensors on GPUs, but torch.cuda.is_available() is False"
        reason = nccl_unavailable_reason() if torch.cuda.is_available() else no_gpu
        reason = "it takes tensors on GPUs, got --device cpu" if arguments.device == "cpu" else reason
        if reason:
            raise BackendUnavailableError(
                f"--backend nccl, zcomm's own communicator, cannot be used: {reason}; --backend torch runs on "
                "torch.distributed's process groups, with NCCL where there are GPUs"
            )
    if arguments.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install matplotlib")
        if not Path(arguments.plot).resolve().parent.is_dir():
            raise ConfigError(f"--plot must name a file in a folder that exists: --plot {arguments.plot}")
    if arguments.emulate_nodes is not None:
        arguments.interface = INTERFACE
    elif arguments.interface is not None:
        sent_nbytes(arguments.interface)


def sizes_of(arguments: argparse.Namespace) -> list[int]:
    """Return the sizes in bytes, ascending; raises ConfigError."""
    size, last = arguments.minbytes, arguments.maxbytes
    if size > last:
        raise ConfigError(f"--minbytes must be at most --maxbytes: --minbytes {size} --maxbytes {last}")
    if arguments.stepbytes is None and arguments.stepfactor == 1:
        last = size
    sizes: list[int] = []
    while size <= last:
        sizes.append(size)
        size = size + arguments.stepbytes if arguments.stepbytes else size * max(arguments.stepfactor, 2)
    return sizes
