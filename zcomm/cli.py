"""The command ``zcomm``, also ``python -m zcomm``.

zcomm env      print what is available on this machine, for a bug report
zcomm bench    measure collectives and check their results
zcomm probe    measure links and kernels, and write the fastest formats to the file that format="auto" reads
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from zcomm import report

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, default ``sys.argv[1:]``, and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    if options.command == "env":
        facts = report.collect()
        sys.stdout.write((json.dumps(facts, indent=2) if options.json else report.table(facts)) + "\n")
        return 0
    from zcomm._bench.command import run

    return run(options, words)


def _parser() -> argparse.ArgumentParser:
    from zcomm._bench.options import add_arguments, add_probe_arguments

    parser = argparse.ArgumentParser(prog="zcomm", description="Quantized, hierarchical collectives for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    environment = commands.add_parser(
        "env", help="print what is available here, and why something is not; please add it to bug reports"
    )
    environment.add_argument("--json", action="store_true", help="as JSON")
    add_arguments(commands.add_parser("bench", help="measure and check collectives, next to torch.distributed's own"))
    add_probe_arguments(
        commands.add_parser("probe", help='measure links and kernels, and find the fastest formats for format="auto"')
    )
    return parser
