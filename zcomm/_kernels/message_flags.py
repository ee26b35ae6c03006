"""Layout errors found by GPU kernels: one flag per device, which the host reads without waiting for the device.

    kernels       decode, decode -- clear the flag where a hash is wrong -- decode     in a captured graph, too
    a check       the flag --copy--> pinned host memory, then an event                 no launch for each decode
    next check    once the event has completed: if the copy is 0, raise MessageError

A check costs the host a copy and an event at most every ``CHECK_INTERVAL_S`` seconds, and a reading of the clock for
each decode. The error therefore comes late: the values of the wrong message have been used, and the step is lost. What
``decode_sum_requantize`` encodes from it has hash 0, so the ranks of the next hop refuse it, too.

Invariants:
    Y1  The flag is allocated and filled outside of graph captures: inside, only the graph's replays would fill it.
    Y2  Nothing is queried or copied on a stream that is being captured: that would invalidate the capture. The next
        check outside of the capture sees what the graph's kernels found.
    Y3  After an error the flag is set again: each error is raised once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zcomm._base.rank_context import PerRank, clock
from zcomm.errors import MessageError, StateError

CHECK_INTERVAL_S = 0.1
LAST_CHECK_TIMEOUT_S = 1.0
POLL_S = 0.001


class MessageFlag:
    """The flag of one device. Not thread-safe beyond what the GIL gives: two threads may both start a check."""

    def __init__(self, device: torch.device) -> None:
        if self.is_capturing():
            raise StateError(
                f"the first zcomm call on {device} cannot be captured into a graph: make one call before the capture"
            )
        # The tensors outlive the first use: made under inference mode, later in-place writes to them would raise.
        with torch.inference_mode(mode=False):
            self.tensor = torch.ones(1, dtype=torch.int32, device=device)
            """int32 [1] on the device, 1 until a kernel finds a message of another layout."""
            # Pinned: a copy to pageable memory would block the host until the device has caught up.
            is_pinned = torch.cuda.is_available()
            self._host_copy = torch.ones(1, dtype=torch.int32, device="cpu", pin_memory=is_pinned)
        self._event: Any = None
        self._next = 0.0
        self._operations: dict[str, None] = {}

    is_capturing: Callable[[], bool] = staticmethod(torch.cuda.is_current_stream_capturing)
    on_device: Callable[[torch.device], AbstractContextManager[Any]] = staticmethod(torch.cuda.device)
    new_event: Callable[[], Any] = staticmethod(torch.cuda.Event)
    clock: Callable[[], float] = staticmethod(lambda: clock().monotonic())

    def used_by(self, operation: str) -> Tensor:
        """The flag, to be passed to a kernel that decodes messages of ``operation``; checks it at intervals.

        Raises:
            MessageError: A message decoded before was of another layout.
        """
        if self.clock() >= self._next:
            self._check()
        self._operations[operation] = None
        return self.tensor

    def _check(self, *, within_s: float = 0.0) -> None:
        """Finish the last check if its copy has arrived, and start another; wait ``within_s`` seconds at most for both.

        Raises:
            MessageError: A message decoded before was of another layout.
        """
        if self.is_capturing():
            return
        end = self.clock() + within_s
        self._next = end + CHECK_INTERVAL_S
        if not self._finish_check_by(end):
            return  # the GPU is far behind; a second copy would overwrite the one in flight
        with self.on_device(self.tensor.device):
            self._host_copy.copy_(self.tensor, non_blocking=True)
            self._event = self.new_event()
            self._event.record()  # after the copy on the same stream: before it completes, the host copy is stale
        if within_s:
            self._finish_check_by(end)

    def _finish_check_by(self, end: float) -> bool:
        while not self._finish_check():
            if self.clock() >= end:
                return False
            clock().sleep(POLL_S)
        return True

    def _finish_check(self) -> bool:
        """Whether no check is in flight any more; raises what a completed one found."""
        if self._event is None:
            return True
        if not self._event.query():
            return False
        self._event = None
        if self._host_copy.item():
            return True
        operations, self._operations = " or ".join(self._operations), {}
        self.tensor.fill_(1)
        raise MessageError(
            f"a message of {operations} has another layout than this rank expects: pass the same sizes and formats on "
            "all ranks; set ZCOMM_CHECK=1 to see which differ"
        )


_FLAGS = PerRank(dict[torch.device, MessageFlag])


def flag_of(device: torch.device) -> MessageFlag:
    """The flag of ``device``, created at the first use.

    Raises:
        StateError: The first use is inside a graph capture.
    """
    flags = _FLAGS()
    if device not in flags:
        flags[device] = MessageFlag(device)
    return flags[device]


def check_all_flags(*, is_last: bool = False) -> None:
    """Check the flags of all devices, as at the end of a step; ``is_last``: and wait a moment for the result.

    Raises:
        MessageError: A message decoded before was of another layout.
    """
    for flag in _FLAGS().values():
        flag._check(within_s=LAST_CHECK_TIMEOUT_S if is_last else 0.0)
