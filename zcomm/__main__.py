"""``python -m zcomm``: the command ``zcomm``."""

from __future__ import annotations

import sys

from zcomm.cli import main

sys.exit(main())
