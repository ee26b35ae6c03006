"""Run a script several times in one process, each time as ``python SCRIPT ARGUMENTS`` would: a start takes seconds.

Usage: in_turn.py SCRIPT ARGUMENTS [-- ARGUMENTS]...
"""

from __future__ import annotations

import itertools
import runpy
import sys


def main() -> None:
    script, *rest = sys.argv[1:]
    for is_separator, arguments in itertools.groupby(rest, lambda word: word == "--"):
        if not is_separator:
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
