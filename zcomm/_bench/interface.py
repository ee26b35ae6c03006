"""What a network interface has sent, by its own counter: headers, acknowledgements and everybody's traffic included."""

from __future__ import annotations

from pathlib import Path

from zcomm.errors import ConfigError

TABLE = Path("/proc/net/dev")


def sent_nbytes(interface: str) -> int:
    """Bytes sent since ``interface`` came up, from /proc/net/dev: what /sys shows is another network namespace's."""
    for line in TABLE.read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == interface:
            return int(counts.split()[8])
    raise ConfigError(f"--interface must name a network interface of this machine: {interface!r}")


def check_interface(interface: str | None) -> None:
    """Raise ConfigError if there is no such interface here."""
    if interface is not None:
        sent_nbytes(interface)
