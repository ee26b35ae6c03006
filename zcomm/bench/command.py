"""What the command line calls: ``zcomm bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zcomm.bench import collectives, options
from zcomm.bench.interface import check_interface
from zcomm.bench.launch import on_ranks
from zcomm.errors import ZcommError

__all__ = ["add_bench", "run_bench"]


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``zcomm bench``."""
    options.add_arguments(parser)


def run_bench(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Run it and return the exit status; ``command`` are the words that ``arguments`` come from."""
    try:
        options.check_launch(arguments)
        chosen = options.options_of(arguments)
        if arguments.emulate_nodes is None:
            check_interface(chosen.interface)
    except ZcommError as error:
        sys.stderr.write(f"zcomm bench: {error}\n")
        return 2
    try:
        return on_ranks(arguments, command, lambda topology: collectives.run(chosen, topology))
    except KeyboardInterrupt:
        return 130
