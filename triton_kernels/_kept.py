"""The tiles and warps that tuning found fastest, kept in files: the next process does not measure again.

One file for each kernel, its constants and dtypes, GPU, version of Triton and source of the kernel, named by a hash
of all these, in ``$TRITON_CACHE_DIR/zcomm_tuned``, or ``zcomm/tuned`` in the user's cache folder. Invariants:

    T1  A file is replaced whole: processes that write at once leave one of their results.
    T2  What is not such a file, or of something else, or names no candidate is as good as none: it is measured again
        and overwritten.
    T3  A folder that cannot be written costs time, never an error.

Triton's own ``autotune(cache_results=True)`` (3.6, 3.7) does not know one GPU from another of its architecture, and
raises on a damaged file.
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
"""Elements and warps of a program."""


def folder() -> Path:
    """Where choices are kept, by the environment as it is now."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return Path(chosen) / "zcomm_tuned"
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or os.path.expanduser("~/.cache")) / "zcomm" / "tuned"  # noqa: PTH111  (Path.home() may raise)


class TunedChoices:
    """Choices by what they were found for: in memory, and behind it in files."""

    def __init__(self, candidates: Sequence[Choice]) -> None:
        self._candidates = frozenset(candidates)
        self._found: dict[Hashable, Choice] = {}

    def recall(self, launch: Hashable) -> Choice | None:
        """The choice for ``launch`` that this process knows already."""
        return self._found.get(launch)

    def load(self, launch: Hashable, description: str) -> Choice | None:
        """The choice for ``launch`` from its file; ``description`` says all that the choice depends on."""
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
        """Remember ``choice``, here and for other processes."""
        self._found[launch] = choice
        with suppress(OSError):
            _replace(_path(description), json.dumps({"of": description, "tile": choice[0], "warps": choice[1]}))


def _path(description: str) -> Path:
    return folder() / f"{hashlib.sha256(description.encode()).hexdigest()}.json"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise
