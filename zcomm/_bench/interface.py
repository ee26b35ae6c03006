"""Bytes that a network interface has sent, by the kernel's counter: headers and other traffic included."""

from __future__ import annotations

from pathlib import Path

from zcomm.errors import ConfigError

TABLE = Path("/proc/net/dev")


def sent_nbytes(interface: str) -> int:
    """Bytes sent since ``interface`` came up, from /proc/net/dev; /sys may show another network namespace."""
    for line in TABLE.read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == interface:
            return int(counts.split()[8])
    raise ConfigError(f"--interface must name a network interface of this machine: {interface!r}")
