"""Work beside the training: functions run one after the other in a thread, with a gloo group that nobody else uses.

Every rank submits the same functions in the same order, so what they exchange over the group matches; the collectives
of the main thread go over other groups and are not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Background:
    """One thread, started when first needed; at exit the interpreter waits for what was submitted.

    Args:
        group: Of all ranks of a topology, on gloo; None for a process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.last: Any = None
        """For the submitter: what is to be waited for before more is submitted."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zcomm-background")

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call ``function`` after everything submitted before."""
        return self._thread.submit(function)

    def close(self) -> None:
        """Wait for everything submitted; errors are left to whoever waits for the result."""
        self._thread.shutdown(wait=True)
