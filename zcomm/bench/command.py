"""What the command line calls: ``zcomm bench`` and ``zcomm probe``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zcomm import auto
from zcomm.bench import collectives, options
from zcomm.bench.interface import check_interface
from zcomm.bench.launch import on_ranks
from zcomm.bench.probe import ProbeOptions, check_output, probe
from zcomm.errors import ZcommError
from zcomm.topology import Topology

__all__ = ["add_bench", "add_probe", "run"]


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``zcomm bench``."""
    options.add_arguments(parser)


def add_probe(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``zcomm probe``."""
    options.add_probe_arguments(parser)


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Run either and return the exit status; ``command`` are the words that ``arguments`` come from."""
    try:
        options.check_launch(arguments)
        work = _bench(arguments) if arguments.command == "bench" else _probe(arguments)
    except ZcommError as error:
        sys.stderr.write(f"zcomm {arguments.command}: {error}\n")
        return 2
    try:
        return on_ranks(arguments, command, work)
    except KeyboardInterrupt:
        return 130


def _bench(arguments: argparse.Namespace) -> Callable[[Topology], int]:
    chosen = options.options_of(arguments)
    if arguments.emulate_nodes is None:
        check_interface(chosen.interface)
    return lambda topology: collectives.run(chosen, topology)


def _probe(arguments: argparse.Namespace) -> Callable[[Topology], int]:
    output = Path(arguments.output) if arguments.output else auto.probe_path()
    check_output(output)
    chosen = ProbeOptions(
        sizes=options.sizes_of(arguments), formats=arguments.formats, dtype=arguments.datatype,
        iters=arguments.iters, warmup=arguments.warmup_iters, output=output, json=arguments.json,
    )  # fmt: skip
    return lambda topology: probe(chosen, topology)
