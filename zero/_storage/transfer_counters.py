"""Counts this process's transfers between the device, host memory and files. The caller sums over ranks."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from zcomm._base.rank_context import PerRank
from zcomm._transport.traffic import TrafficCounter, Window

LINKS = ("to_host", "to_device", "read", "write")
"""Device to host, host to device, file to host, host to file."""


class TransferKey(NamedTuple):
    """The key of a count."""

    kind: str
    """``"gradients"``, ``"states"``, ``"parameters"`` or ``"activations"``."""
    link: str
    """One of :data:`LINKS`."""


_COUNTER = PerRank(partial(TrafficCounter, TransferKey))


def record(kind: str, link: str, nbytes: int) -> None:
    """Count one transfer of ``nbytes``."""
    assert link in LINKS, f"{link=}"
    _COUNTER().add((kind, link), 1, 0, nbytes)


class TransferCounts(Window[TransferKey]):
    """Counts since import, or within a ``with moved() as m:`` block.

    Within the block the counts grow; after it they stay. A transfer counts when it starts.
    """

    def __init__(self) -> None:
        super().__init__(_COUNTER())

    def __enter__(self) -> TransferCounts:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def calls(self, *, kind: str | None = None, link: str | None = None) -> int:
        """The number of transfers; None: of every kind or link."""
        return self.total(0, (kind, link))

    def bytes(self, *, kind: str | None = None, link: str | None = None) -> int:
        """Bytes moved."""
        return self.total(2, (kind, link))

    def table(self) -> str:
        """A table with one line per key, and the total."""
        lines = [f"{'kind':<18}{'link':<12}{'transfers':>10}{'bytes':>18}"]
        lines += [f"{k.kind:<18}{k.link:<12}{c.calls:>10}{c.bytes:>18}" for k, c in sorted(self.counts.items())]
        lines.append(f"{'total':<30}{self.calls():>10}{self.bytes():>18}")
        return "\n".join(lines)

    __str__ = table


def moved() -> TransferCounts:
    """Counts of all transfers since import; as a context manager, of those within the block."""
    return TransferCounts()
