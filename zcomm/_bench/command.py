"""The commands ``zcomm bench`` and ``zcomm probe``, as :mod:`zcomm.cli` calls them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zcomm._bench import collectives, options
from zcomm._bench.interface import check_interface
from zcomm._bench.launch import Work, on_ranks
from zcomm._bench.probe import ProbeOptions, check_output, probe
from zcomm._collectives import auto_format
from zcomm.errors import ZcommError


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``zcomm bench``."""
    options.add_arguments(parser)


def add_probe(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``zcomm probe``."""
    options.add_probe_arguments(parser)


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Run bench or probe and return the exit status. ``command``: the words that ``arguments`` were parsed from."""
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


def _bench(arguments: argparse.Namespace) -> Work:
    chosen = options.options_of(arguments)
    if arguments.emulate_nodes is None:
        check_interface(chosen.interface)
    return lambda topology, device: collectives.run(chosen, topology, device)


def _probe(arguments: argparse.Namespace) -> Work:
    output = Path(arguments.output) if arguments.output else auto_format.probe_path()
    check_output(output)
    chosen = ProbeOptions(
        sizes=options.sizes_of(arguments), formats=arguments.formats, dtype=arguments.datatype,
        iters=arguments.iters, warmup=arguments.warmup_iters, output=output, json=arguments.json,
    )  # fmt: skip
    return lambda topology, device: probe(chosen, topology, device)
