"""CUDA side streams: asynchronous collectives run on them and overlap the computation.

    current stream   compute ─┬─ compute ───────────────────┬─ compute on the output
    side stream               └─ quantize, exchange, decode ─┘
                           the call                      wait()

Invariants:
    S1  A collective starts after everything that was on the current stream when it was called. Without the wait it
        would read inputs that are not yet computed (tests/zcomm/test_streams.py).
    S2  The caller may free the tensors of a collective before it completes: record_stream tells the allocator not to
        reuse their memory until the side stream has passed this point. Writing to them still needs ``wait()``.
    S3  The side stream has a high priority: a collective's small kernels run as soon as thread blocks of the
        computation finish, and not after all kernels that are already queued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStreams:
    """One stream for each device, created at the first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after_current(self, device: torch.device, tensors: Sequence[Tensor]) -> Iterator[torch.cuda.Stream]:
        """A context on the side stream of CUDA ``device``, ordered after the current one, for work on ``tensors``."""
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        # S1: streams are not ordered by default.
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:  # also after an error: kernels that were queued before it still use the tensors (S2)
            for tensor in tensors:
                if tensor.device == device:
                    tensor.record_stream(stream)
