"""The memory of this process, which DeepSpeed counts as allocated memory where the device is the CPU."""

from __future__ import annotations

import os
import resource
from pathlib import Path


class ResidentMemory:
    """Resident bytes now, and the most that were seen since :meth:`reset`."""

    def __init__(self) -> None:
        self._peak = 0

    def now(self) -> int:
        """Resident bytes; where the system does not tell, the most that were ever resident."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        else:
            nbytes = pages * os.sysconf("SC_PAGE_SIZE")
        self._peak = max(self._peak, nbytes)
        return nbytes

    def peak(self) -> int:
        """The most resident bytes that a call of this class saw."""
        self.now()
        return self._peak

    def reset(self) -> None:
        """Start anew with what is resident now."""
        self._peak = 0
        self.now()

    @staticmethod
    def total() -> int:
        """Bytes of memory of this machine."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @staticmethod
    def free() -> int:
        """Bytes of memory that nothing uses."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
