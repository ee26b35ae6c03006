"""``zero bisect A B``: the first update and parameter at which two runs with a bit ledger have other bits."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcomm import ConfigError
from zero.bit_ledger import MAGIC, PARAMETER, RECORD, file_of

__all__ = ["Parting", "find", "run"]

KINDS = ("gradient", "parameter")
Key = tuple[int, int, int]


class Parting(NamedTuple):
    """Where two runs part."""

    update: int
    """Counted from 1; skipped steps do not count."""
    kind: str
    """"gradient" or "parameter"."""
    parameter: str
    ranks: tuple[int, ...] | None
    """Whose part of it differs; None: the runs are not sharded alike."""
    is_missing: bool
    """One of the runs has no such record: a parameter that was not used, for example."""


class _Run:
    def __init__(self, folder: Path) -> None:
        self.header, first = _read(folder, 0)
        self.names: list[list[Any]] = self.header["parameters"]
        self.of_ranks = [first] + [_read(folder, rank)[1] for rank in range(1, self.header["world_size"])]
        ends = [max((u for u, kind, _ in hashes if kind == PARAMETER), default=0) for hashes in self.of_ranks if hashes]
        self.num_updates = min(ends, default=0)  # an update ends with its parameters; a small model leaves ranks none
        self.whole: dict[Key, int] = defaultdict(int)
        for hashes in self.of_ranks[: 1 if self.header["is_whole"] else None]:
            for key, value in hashes.items():
                self.whole[key] = (self.whole[key] + value) % 2**64


def _read(folder: Path, rank: int) -> tuple[dict[str, Any], dict[Key, int]]:
    path = file_of(folder, rank)
    try:
        line, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise ConfigError(f"there is no ledger {path}: give the folder that bit_ledger named in the run") from None
    try:
        header: dict[str, Any] = json.loads(line)
        is_ledger = header["format"] == MAGIC and {"world_size", "is_whole", "parameters", "stage"} <= header.keys()
    except (ValueError, KeyError, TypeError):
        is_ledger = False
    if not is_ledger:
        raise ConfigError(f"a ledger must begin with its header, of {MAGIC!r}: {path}; write it anew with bit_ledger")
    records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)  # the last may be cut
    hashes: dict[Key, int] = defaultdict(int)
    for update, kind, parameter, _, value in records.tolist():
        hashes[update, kind, parameter] = (hashes[update, kind, parameter] + value) % 2**64
    return header, hashes


def find(a: str | Path, b: str | Path) -> tuple[Parting | None, int]:
    """Where the runs whose ledgers are in the folders ``a`` and ``b`` part, and the updates both have.

    Raises:
        ConfigError: A file is no ledger, or the models have other parameters.
        OSError: A file is missing or cannot be read.
    """
    first, second = _Run(Path(a)), _Run(Path(b))
    if first.names != second.names:
        odd = [
            name
            for name, _ in (*first.names, *second.names)
            if (name in dict(first.names)) != (name in dict(second.names))
        ]
        what = f"first {odd[:3]}" if odd else "of other sizes"
        raise ConfigError(f"runs can be compared whose models have the same trainable parameters: they differ, {what}")
    common = min(first.num_updates, second.num_updates)
    for key in sorted(first.whole.keys() | second.whole.keys()):
        if key[0] <= common and first.whole.get(key) != second.whole.get(key):
            ranks = None
            if len(first.of_ranks) == len(second.of_ranks) and first.header["stage"] == second.header["stage"]:
                both = enumerate(zip(first.of_ranks, second.of_ranks, strict=True))
                ranks = tuple(rank for rank, (one, other) in both if one.get(key) != other.get(key))
            is_missing = key not in first.whole or key not in second.whole
            return Parting(key[0], KINDS[key[1]], first.names[key[2]][0], ranks, is_missing), common
    return None, common


def run(a: str, b: str) -> str:
    """What the command prints."""
    found, common = find(a, b)
    if found is None:
        return f"no bit differs in the {common} updates that both runs have\n"
    where = f"update {found.update}: {found.kind} of {found.parameter!r}"
    if found.is_missing:
        where += " (one of the runs has none)"
    if found.ranks is None:
        return f"{where}\nranks: not told, the runs are sharded in other ways, and sums in another order differ too\n"
    return f"{where}\nranks: {', '.join(map(str, found.ranks))}\n"
