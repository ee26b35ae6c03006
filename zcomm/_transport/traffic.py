"""Traffic counters: what this process has sent, by operation, format and link class.

A message to k ranks counts k times. A rank's message to itself is not counted. Counts are of this rank only; the caller
sums over ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from zcomm._base.rank_context import PerRank


class TrafficKey(NamedTuple):
    """What is counted separately."""

    operation: str
    format: str
    link: str
    """``"intra"`` or ``"inter"``."""


class Count(NamedTuple):
    """Messages sent, the tensor elements in them, and their bytes."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0


K = TypeVar("K", bound=tuple[str, ...])


class TrafficCounter(Generic[K]):
    """Counts of this process by keys of class ``key_class``. Collectives also run in threads: hence the lock."""

    def __init__(self, key_class: Callable[..., K]) -> None:
        self._key_class = key_class
        self._counts: dict[K, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, key: tuple[str, ...], num_messages: int, numel: int, nbytes: int) -> None:
        """Count messages of ``numel`` elements and ``nbytes`` bytes each."""
        with self._lock:
            count = self._counts.get(key)  # type: ignore[arg-type]  # a plain tuple hashes and compares as a key
            if count is None:
                count = self._counts[self._key_class(*key)] = [0, 0, 0]
            count[0] += num_messages
            count[1] += num_messages * numel
            count[2] += num_messages * nbytes

    def snapshot(self) -> dict[K, Count]:
        """A copy of the counts."""
        with self._lock:
            return {key: Count(*count) for key, count in self._counts.items()}


class Window(Generic[K]):
    """What ``counter`` has counted since import, or between :meth:`open` and :meth:`close`."""

    def __init__(self, counter: TrafficCounter[K]) -> None:
        self._counter = counter
        self._counts: dict[K, Count] | None = counter.snapshot()
        self._before: dict[K, Count] = {}

    def open(self) -> None:
        self._before, self._counts = self._counter.snapshot(), None

    def close(self) -> None:
        self._counts = self.counts

    @property
    def counts(self) -> dict[K, Count]:
        if self._counts is not None:
            return self._counts
        return _difference(self._counter.snapshot(), self._before)

    def total(self, column: int, wanted: tuple[str | None, ...]) -> int:
        """Sum of a column of :class:`Count` over the keys that match ``wanted``, in which None matches all."""
        chosen = (
            count[column]
            for key, count in self.counts.items()
            if all(w is None or w == k for w, k in zip(wanted, key, strict=True))
        )
        return sum(chosen)


traffic_counter = PerRank(partial(TrafficCounter, TrafficKey))
"""What this rank has sent."""


def record(key: tuple[str, ...], num_messages: int, numel: int, nbytes: int) -> None:
    """Count messages of ``numel`` elements and ``nbytes`` bytes each."""
    traffic_counter().add(key, num_messages, numel, nbytes)


class Traffic:
    """Traffic since import, or inside a ``with zcomm.traffic() as t:`` block, after which the counts no longer change.

    A collective is counted when its exchanges start. With ``async_op=True`` and two hops that may be as late as in
    ``wait()``: wait inside the block.
    """

    def __init__(self) -> None:
        self._window = Window(traffic_counter())

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
        """Messages sent with the given keys; None matches all."""
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
        """Bytes by name, for TensorBoard: ``{"zcomm/all_gather/int8/inter": ..., "zcomm/inter": ...}``."""
        named = {"/".join((prefix, *key)): count.bytes for key, count in self}
        return named | {f"{prefix}/{link}": self.bytes(link=link) for link in ("intra", "inter")}

    def __iter__(self) -> Iterator[tuple[TrafficKey, Count]]:
        return iter(sorted(self.counts.items()))

    def table(self, operations: Collection[str] | None = None) -> str:
        """One line for each key, and the total; only ``operations`` if given."""
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
    """What this process has sent since import; as a context manager, what it sends inside the block."""
    return Traffic()
