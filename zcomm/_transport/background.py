"""A background thread for work that overlaps training, with a gloo group of its own.

Every rank submits the same functions in the same order, so their collectives match. The group is not shared with the
main thread: two threads that start collectives on one group would start them in a different order on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Background:
    """One thread, started at the first submit. The interpreter waits at exit for everything submitted.

    Args:
        group: A gloo group of all ranks of a topology; None for a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.last: Any = None
        """For the submitter: the work to wait for before it submits more."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zcomm-background")

    def submit(self, function: Callable[[], T]) -> Future[T]:
        return self._thread.submit(function)

    def close(self) -> None:
        """Wait for everything submitted. Errors are raised by the futures."""
        self._thread.shutdown(wait=True)
