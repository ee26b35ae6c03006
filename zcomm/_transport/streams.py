"""The CUDA streams that asynchronous collectives run on, beside the computation.

    current stream   compute ─┬─ compute ───────────────────┬─ compute on the output
    side stream               └─ quantize, exchange, decode ─┘
                           the call                      wait()

Invariants:
    S1  A collective starts after everything that was on the current stream when it was called.
    S2  Whoever frees the tensors of a collective before it has ended does no harm: the allocator knows of the side
        stream. Writing to them is another matter, and needs ``wait()``.
    S3  The side stream has a high priority: a collective's small kernels run as soon as thread blocks of the
        computation's kernels end, and not after the last of those that are queued.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStreams:
    """One stream a device, made when it is first needed."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after_current(self, device: torch.device, tensors: Sequence[Tensor]) -> Iterator[torch.cuda.Stream]:
        """A context on the stream of CUDA ``device``, in which work on ``tensors`` is started."""
        stream = self._streams.get(device)
        if stream is None:
            stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._streams[device] = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            for tensor in tensors:
                if tensor.device == device:
                    tensor.record_stream(stream)
