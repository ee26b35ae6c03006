"""Cutting a collective of two hops into chunks, so that one hop of a chunk overlaps the other hop of its neighbours.

    tick            0    1    2    3    4            shard = chunk 0 | chunk 1 | chunk 2, each message of its own
    hop 1 starts    0    1    2
    hop 2 starts         0    1    2                 before that: hop 1 of this chunk has ended
    chunk ends                0    1    2            before that: hop 2 of this chunk has ended

Invariants:
    K1  Chunks start on multiples of every format's block: values, codes and scales are those of the whole.
    K2  Sizes, formats and nothing else decide: all ranks cut alike, and start their exchanges in the same order.
    K3  After an exchange that could not be started, none is started on any hop: messages are never taken for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from zcomm.backend import Pending
from zcomm.formats import Format
from zcomm.work import Steps

__all__ = ["chunks_of", "pipelined"]

MIN_CHUNK_NUMEL = 2**18
MAX_CHUNKS = 16


def chunks_of(numel: int, *formats: Format) -> list[slice]:
    """The chunks of a shard of ``numel`` elements that travels in ``formats``; one if it is small.

    At most ``MAX_CHUNKS``, of at least ``MIN_CHUNK_NUMEL`` elements, but for the last.
    """
    multiple = math.lcm(*(format.block or 1 for format in formats), 256)
    wanted = max(MIN_CHUNK_NUMEL, -(-numel // MAX_CHUNKS))
    step = -(-wanted // multiple) * multiple
    return [slice(start, min(start + step, numel)) for start in range(0, numel, step)]


def pipelined(chunks: Sequence[Steps], *, num_exchanges: int) -> Steps:
    """The steps of all ``chunks``, of ``num_exchanges`` exchanges each, as drawn above.

    A chunk that fails after its last exchange does not keep the others from theirs, on which other ranks wait; its
    error is raised at the end.
    """
    pending: list[Pending | None] = [None] * len(chunks)
    failure: Exception | None = None
    for tick in range(len(chunks) + num_exchanges):
        for stage in range(num_exchanges + 1):
            index = tick - stage
            if not 0 <= index < len(chunks):
                continue
            if stage:
                yield pending[index]
                pending[index] = None
            try:
                pending[index] = next(chunks[index], None)
            except Exception as error:
                failure = failure or error
                if stage < num_exchanges:
                    _wait_for(pending)
                    raise failure from None
    if failure is not None:
        raise failure


def _wait_for(exchanges: Sequence[Pending | None]) -> None:
    """Let what was started end, as other ranks have started it, too."""
    for exchange in exchanges:
        if exchange is not None:
            with suppress(Exception):
                exchange.wait()
