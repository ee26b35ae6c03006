"""``torchrun counted.py script.py ARGS``: as ``-m zero.compat script.py``, and prints the bytes that a rank sent."""

from __future__ import annotations

import sys

import zcomm
from zero.compat.__main__ import main

if __name__ == "__main__":
    with zcomm.traffic() as sent:
        code = main()
    sys.stdout.write(f"\nbytes sent: {sent.bytes()}\n")
    sys.exit(code)
