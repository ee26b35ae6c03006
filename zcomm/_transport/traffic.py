"""What this process has sent: counted where it is sent, by operation, format and link class.

A message to k ranks counts k times; nothing is counted for a rank's message to itself. Sums over ranks are up
to the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar


class TrafficKey(NamedTuple):
    """What a count is of."""

    operation: str
    format: str
    link: str
    """``"intra"`` or ``"inter"``."""


class Count(NamedTuple):
    """Messages sent, the tensor elements they carry, and their bytes."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0


K = TypeVar("K", bound=tuple[str, ...])


class TrafficCounter(Generic[K]):
    """The process's counts by keys of class ``key_class``. What is counted also runs in threads: hence the lock."""

    def __init__(self, key_class: Callable[..., K]) -> None:
        self._key_class = key_class
        self._counts: dict[K, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, key: tuple[str, ...], num_messages: int, numel: int, nbytes: int) -> None:
        """Count messages of ``numel`` elements in ``nbytes`` bytes each."""
        with self._lock:
            count = self._counts.get(key)  # type: ignore[arg-type]  # a plain tuple hashes and compares as a key
            if count is None:
                count = self._counts[self._key_class(*key)] = [0, 0, 0]
            count[0] += num_messages
            count[1] += num_messages * numel
            count[2] += num_messages * nbytes

    def snapshot(self) -> dict[K, Count]:
        """The counts as they are now."""
        with self._lock:
            return {key: Count(*count) for key, count in self._counts.items()}


class Window(Generic[K]):
    """Counts of a ledger since import, or between :meth:`open` and :meth:`close`."""

    def __init__(self, ledger: TrafficCounter[K]) -> None:
        self._ledger = ledger
        self._counts: dict[K, Count] | None = ledger.snapshot()
        self._before: dict[K, Count] = {}

    def open(self) -> None:
        """Count from here on."""
        self._before, self._counts = self._ledger.snapshot(), None

    def close(self) -> None:
        """Count no more."""
        self._counts = self.counts

    @property
    def counts(self) -> dict[K, Count]:
        """Everything counted, by key."""
        if self._counts is not None:
            return self._counts
        return _difference(self._ledger.snapshot(), self._before)

    def total(self, column: int, wanted: tuple[str | None, ...]) -> int:
        """Sum of a column of :class:`Count` over the keys that have the ``wanted`` parts; None is any."""
        chosen = (
            count[column]
            for key, count in self.counts.items()
            if all(w is None or w == k for w, k in zip(wanted, key, strict=True))
        )
        return sum(chosen)


_LEDGER = TrafficCounter(TrafficKey)
record = _LEDGER.add
"""``record(key, num_messages, numel, nbytes)``: count messages of ``numel`` elements in ``nbytes`` bytes each."""


class Traffic:
    """Counts since import, or since and inside a ``with zcomm.traffic() as t:`` block.

    Inside the block the counts grow; after it they stay. An asynchronous collective counts when its exchanges start,
    with two hops possibly as late as in its ``wait()``: wait inside the block.
    """

    def __init__(self) -> None:
        self._window = Window(_LEDGER)

    @property
    def counts(self) -> dict[TrafficKey, Count]:
        """Everything counted, by key."""
        return self._window.counts

    def __enter__(self) -> Traffic:
        self._window.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._window.close()

    def calls(self, *, operation: str | None = None, format: str | None = None, link: str | None = None) -> int:
        """Messages sent; None counts all."""
        return self._window.total(0, (operation, format, link))

    def elements(self, *, operation: str | None = None, format: str | None = None, link: str | None = None) -> int:
        """Tensor elements sent."""
        return self._window.total(1, (operation, format, link))

    def bytes(self, *, operation: str | None = None, format: str | None = None, link: str | None = None) -> int:
        """Bytes sent."""
        return self._window.total(2, (operation, format, link))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """``{"all_gather|int8|inter": {"calls": ..., "elements": ..., "bytes": ...}}``."""
        return {"|".join(key): count._asdict() for key, count in self}

    def scalars(self, prefix: str = "zcomm") -> dict[str, int]:
        """Bytes by name, for a TensorBoard writer: ``{"zcomm/all_gather/int8/inter": ..., "zcomm/inter": ...}``."""
        named = {"/".join((prefix, *key)): count.bytes for key, count in self}
        return named | {f"{prefix}/{link}": self.bytes(link=link) for link in ("intra", "inter")}

    def __iter__(self) -> Iterator[tuple[TrafficKey, Count]]:
        return iter(sorted(self.counts.items()))

    def table(self, operations: Collection[str] | None = None) -> str:
        """One line a key, and the total; of ``operations`` alone, if they are given."""
        lines = [f"{'operation':<18}{'format':<10}{'link':<8}{'messages':>10}{'elements':>16}{'bytes':>16}"]
        shown = [(key, count) for key, count in self if operations is None or key.operation in operations]
        lines += [
            f"{k.operation:<18}{k.format:<10}{k.link:<8}{c.calls:>10}{c.elements:>16}{c.bytes:>16}" for k, c in shown
        ]
        calls, elements, nbytes = (sum(count[column] for _, count in shown) for column in range(3))
        lines.append(f"{'total':<36}{calls:>10}{elements:>16}{nbytes:>16}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _difference(after: Mapping[K, Count], before: Mapping[K, Count]) -> dict[K, Count]:
    none = Count()
    changed = {key: Count(*(a - b for a, b in zip(c, before.get(key, none), strict=True))) for key, c in after.items()}
    return {key: count for key, count in changed.items() if count.calls}


def traffic() -> Traffic:
    """Everything sent since import; as a context manager, what is sent inside the block."""
    return Traffic()
