"""Whether kernels on a GPU met messages of another layout: a flag for each device, looked at without waiting for it.

    kernels    decode, decode ── clear the flag where a hash is wrong ── decode      a captured graph's do the same
    look       the flag --copy--> pinned host memory, an event recorded             no launch for each decode
    next look  has the event passed? if the copy is 0: MessageError

On the host a look costs a copy and an event at most every ``LOOK_EVERY_S`` seconds, and a reading of the clock for each
decode. What a wrong message was decoded to has then been used, so the step is lost. What
``decode_sum_requantize`` makes of it is refused by the ranks of the next hop, too.

Invariants:
    G1  The flag is made and filled outside captures: in one it would be filled by the graph's replays alone.
    G2  Nothing is asked or copied on a stream that is being captured. What the graph finds, the next look outside sees.
    G3  After an error the flag is set anew: it is reported once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zcomm.errors import MessageError, StateError

LOOK_EVERY_S = 0.1
CLOSE_WITHIN_S = 1.0
POLL_S = 0.001


class MessageFlag:
    """The flag of one device. Not thread-safe beyond what the GIL gives: two threads may both start a look."""

    def __init__(self, device: torch.device) -> None:
        if self.is_capturing():
            raise StateError(
                f"the first zcomm call on {device} cannot be captured into a graph: make such a call before the capture"
            )
        with torch.inference_mode(mode=False):  # they outlive the mode and the device that are set around the first use
            self.tensor = torch.ones(1, dtype=torch.int32, device=device)
            """int32 [1] on the device, 1 until a kernel meets a message of another layout."""
            self._host = self._on_host()
        self._event: Any = None
        self._next = 0.0
        self._operations: dict[str, None] = {}

    is_capturing: Callable[[], bool] = staticmethod(torch.cuda.is_current_stream_capturing)
    on_device: Callable[[torch.device], AbstractContextManager[Any]] = staticmethod(torch.cuda.device)
    new_event: Callable[[], Any] = staticmethod(torch.cuda.Event)
    clock: Callable[[], float] = staticmethod(time.monotonic)

    @staticmethod
    def _on_host() -> Tensor:
        return torch.ones(1, dtype=torch.int32, device="cpu", pin_memory=torch.cuda.is_available())

    def used_by(self, operation: str) -> Tensor:
        """The flag for a kernel that decodes messages of ``operation``, to be passed on; looks now and then.

        Raises:
            MessageError: A message decoded before was of another layout.
        """
        if self.clock() >= self._next:
            self.look()
        self._operations[operation] = None
        return self.tensor

    def look(self, *, within_s: float = 0.0) -> None:
        """Judge the last look, if its copy has come, and start another; wait for both ``within_s`` seconds at most.

        Raises:
            MessageError: A message decoded before was of another layout.
        """
        if self.is_capturing():
            return
        end = self.clock() + within_s
        self._next = end + LOOK_EVERY_S
        if not self._judge_by(end):
            return  # the GPU is far behind: one look at a time
        with self.on_device(self.tensor.device):
            self._host.copy_(self.tensor, non_blocking=True)
            self._event = self.new_event()
            self._event.record()
        if within_s:
            self._judge_by(end)

    def _judge_by(self, end: float) -> bool:
        while not self._judge():
            if self.clock() >= end:
                return False
            time.sleep(POLL_S)
        return True

    def _judge(self) -> bool:
        """Whether no look is under way any more."""
        if self._event is None:
            return True
        if not self._event.query():
            return False
        self._event = None
        if self._host.item():
            return True
        operations, self._operations = " or ".join(self._operations), {}
        self.tensor.fill_(1)
        raise MessageError(
            f"a message of {operations} is not what this rank expects: sizes or formats differ between ranks; "
            "ZCOMM_CHECK=1 says which"
        )


_FLAGS: dict[torch.device, MessageFlag] = {}


def flag_of(device: torch.device) -> MessageFlag:
    """The flag of ``device``, made at the first use.

    Raises:
        StateError: The first use is in a capture.
    """
    flag = _FLAGS.get(device)
    if flag is None:
        flag = _FLAGS[device] = MessageFlag(device)
    return flag


def look_at_all(*, is_last: bool = False) -> None:
    """Look at the flags there are, as at the end of a step; ``is_last``: and wait a little for what they say.

    Raises:
        MessageError: A message decoded before was of another layout.
    """
    for flag in _FLAGS.values():
        flag.look(within_s=CLOSE_WITHIN_S if is_last else 0.0)
