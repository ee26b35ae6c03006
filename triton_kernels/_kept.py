"""Cache of tuning results in files: the tiles and warps that were fastest, so that the next process does not measure.

One file per kernel, constants, dtypes, GPU, Triton version and kernel source, named by a hash of all these, in
``$TRITON_CACHE_DIR/zcomm_tuned``, or ``zcomm/tuned`` in the user's cache folder. Invariants:

    J1  A file is replaced atomically: of processes that write at the same time one result remains.
    J2  A file that is damaged, describes another launch, or names no candidate counts as missing: the launch is
        measured again, and the file overwritten.
    J3  A folder that cannot be written costs time, but is not an error.

Triton's own ``autotune(cache_results=True)`` (3.6, 3.7) does not distinguish GPUs of one architecture, and raises on a
damaged file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["Choice", "TunedChoices", "folder"]

Choice = tuple[int, int]
"""Elements and warps per program."""


def folder() -> Path:
    """The folder of the files, from the current environment."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return Path(chosen) / "zcomm_tuned"
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or os.path.expanduser("~/.cache")) / "zcomm" / "tuned"  # noqa: PTH111  (Path.home() may raise)


class TunedChoices:
    """Choices by launch: a cache in memory in front of the files."""

    def __init__(self, candidates: Sequence[Choice]) -> None:
        self._candidates = frozenset(candidates)
        self._found: dict[Hashable, Choice] = {}

    def recall(self, launch: Hashable) -> Choice | None:
        """The choice for ``launch`` in memory, if there is one."""
        return self._found.get(launch)

    def load(self, launch: Hashable, description: str) -> Choice | None:
        """The choice for ``launch`` from its file; ``description`` has everything that the choice depends on."""
        try:
            kept = json.loads(_path(description).read_text())
            choice = (kept["tile"], kept["warps"]) if kept["of"] == description else None
            if choice not in self._candidates:
                return None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        self._found[launch] = choice
        return choice

    def keep(self, launch: Hashable, description: str, choice: Choice) -> None:
        """Store ``choice`` in memory, and in a file for other processes."""
        self._found[launch] = choice
        with suppress(OSError):
            _replace(_path(description), json.dumps({"of": description, "tile": choice[0], "warps": choice[1]}))


def _path(description: str) -> Path:
    return folder() / f"{hashlib.sha256(description.encode()).hexdigest()}.json"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: another process would read a half-written file (J1). Not synced: a lost file is only
    # measured again.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise
