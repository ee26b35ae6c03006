"""The commands ``zcomm bench`` and ``zcomm probe``, as :mod:`zcomm.cli` calls them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from zcomm._bench import collectives, options
from zcomm._bench.launch import Work, on_ranks
from zcomm._bench.probe import check_output, probe
from zcomm._collectives import auto_format
from zcomm.errors import ZcommError


def run(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Run bench or probe and return the exit status. ``command``: the words that ``arguments`` were parsed from."""
    try:
        options.check_launch(arguments)
        arguments.sizes = options.sizes_of(arguments)
        if arguments.command == "bench":
            options.check_bench(arguments)
            work: Work = partial(collectives.run, arguments)
        else:
            arguments.output = Path(arguments.output) if arguments.output else auto_format.probe_path()
            check_output(arguments.output)
            work = partial(probe, arguments)
    except ZcommError as error:
        sys.stderr.write(f"zcomm {arguments.command}: {error}\n")
        return 2
    try:
        return on_ranks(arguments, command, work)
    except KeyboardInterrupt:
        return 130
