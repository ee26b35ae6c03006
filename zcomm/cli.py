"""The command ``zcomm``, also ``python -m zcomm``. Its subcommand ``env`` prints the report for a bug report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from zcomm import report

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, default ``sys.argv[1:]``, and return its exit status."""
    parser = argparse.ArgumentParser(prog="zcomm", description="Quantized, hierarchical collectives for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    environment = commands.add_parser(
        "env", help="print what is available here and why something is not: please add it to a bug report"
    )
    environment.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    facts = report.collect()
    text = json.dumps(facts, indent=2) if options.json else report.table(facts)
    sys.stdout.write(text + "\n")
    return 0
