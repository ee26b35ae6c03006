"""What this process has sent: counted where it is sent, by operation, format and link class.

A message to k ranks counts k times; nothing is counted for a rank's message to itself. Sums over ranks are the caller's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

__all__ = ["Count", "Key", "Traffic", "record", "traffic"]

Link = Literal["intra", "inter"]


class Key(NamedTuple):
    """What a count is of."""

    operation: str
    format: str
    link: str


class Count(NamedTuple):
    """Messages sent, the tensor elements they carry, and their bytes."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0


@dataclass
class Traffic:
    """Counts since import, or inside a ``with zcomm.traffic() as t:`` block."""

    counts: dict[Key, Count] = field(default_factory=dict)
    _before: Mapping[Key, Count] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Traffic:
        self._before, self.counts = dict(_recorded()), {}
        return self

    def __exit__(self, *_: object) -> None:
        self.counts = _difference(_recorded(), self._before)

    def _total(self, column: int, wanted: tuple[str | None, ...]) -> int:
        chosen = (
            count[column]
            for key, count in self.counts.items()
            if all(w is None or w == k for w, k in zip(wanted, key, strict=True))
        )
        return sum(chosen)

    def calls(self, *, operation: str | None = None, format: str | None = None, link: str | None = None) -> int:
        """Messages sent; None counts all."""
        return self._total(0, (operation, format, link))

    def elements(self, *, operation: str | None = None, format: str | None = None, link: str | None = None) -> int:
        """Tensor elements sent."""
        return self._total(1, (operation, format, link))

    def bytes(self, *, operation: str | None = None, format: str | None = None, link: str | None = None) -> int:
        """Bytes sent."""
        return self._total(2, (operation, format, link))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """``{"all_gather|int8|inter": {"calls": ..., "elements": ..., "bytes": ...}}``."""
        return {"|".join(key): count._asdict() for key, count in sorted(self.counts.items())}

    def __iter__(self) -> Iterator[tuple[Key, Count]]:
        return iter(sorted(self.counts.items()))

    def table(self) -> str:
        """One line a key, and the total."""
        lines = [f"{'operation':<16}{'format':<10}{'link':<8}{'messages':>10}{'elements':>16}{'bytes':>16}"]
        lines += [
            f"{k.operation:<16}{k.format:<10}{k.link:<8}{c.calls:>10}{c.elements:>16}{c.bytes:>16}" for k, c in self
        ]
        lines.append(f"{'total':<34}{self.calls():>10}{self.elements():>16}{self.bytes():>16}")
        return "\n".join(lines)

    __str__ = table


@cache
def _recorded() -> defaultdict[Key, Count]:
    """The process's counts: the one place that grows."""
    return defaultdict(Count)


def _difference(after: Mapping[Key, Count], before: Mapping[Key, Count]) -> dict[Key, Count]:
    none = Count()
    changed = {key: Count(*(a - b for a, b in zip(c, before.get(key, none), strict=True))) for key, c in after.items()}
    return {key: count for key, count in changed.items() if count.calls}


def record(key: Key, *, num_messages: int, numel: int, nbytes: int) -> None:
    """Count ``num_messages`` messages of ``numel`` elements in ``nbytes`` bytes each."""
    if num_messages:
        old = _recorded()[key]
        _recorded()[key] = Count(
            old.calls + num_messages, old.elements + num_messages * numel, old.bytes + num_messages * nbytes
        )


def traffic() -> Traffic:
    """Everything sent since import; as a context manager, what is sent inside the block."""
    return Traffic(dict(_recorded()))
