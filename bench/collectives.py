"""Time and check collectives, compared with torch.distributed's own: the same as ``zcomm bench``.

python bench/collectives.py -b 1K -e 16M -f 4 [--emulate-nodes 2 --rate 200mbit] [--json] [--plot FILE.png]
"""

from __future__ import annotations

import sys

from zcomm.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
