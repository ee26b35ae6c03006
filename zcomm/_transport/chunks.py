"""Splitting a two-hop collective into chunks, so that one hop of a chunk overlaps the other hop of its neighbours.

    tick            0    1    2    3    4            shard = chunk 0 | chunk 1 | chunk 2, a message each
    hop 1 starts    0    1    2
    hop 2 starts         0    1    2                 after hop 1 of this chunk has completed
    chunk ends                0    1    2            after hop 2 of this chunk has completed

Invariants:
    K1  Chunks start on multiples of every format's block, so that codes and scales are those of the undivided shard.
    K2  The split depends only on what is equal on all ranks: sizes, formats, device type and the probe's table. So
        all ranks split alike and start their exchanges in the same order.
    K3  If an exchange cannot be started, no later one is started on any hop. Otherwise the other ranks would take the
        message of a later chunk for that of the failed one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from zcomm._base.pending import Pending
from zcomm._formats.formats import Format
from zcomm._transport.work import Link, Steps

MIN_CHUNK_NUMEL = 2**18
"""Measured on CPUs over gloo."""
MIN_CHUNK_NUMEL_ON_GPU = 2**24
MAX_CHUNKS = 16
HOST_S_PER_CHUNK = 300e-6
"""Host time of a chunk driven from Python: about 5 kernel launches, 2 exchanges, and the Python around them."""
NVLINK = Link(latency_s=0.0, bytes_per_s=450e9)
"""An H100's, each way. The default without measurements, since a faster link makes larger chunks."""
MIN_TRANSFER_PER_HOST_COST = 4
"""The transfer of a chunk must take this many times its host time, or splitting is slower than not splitting."""


def min_numel_of_all_ranks(host_s: float, links: Sequence[Link] = ()) -> int:
    """The smallest worthwhile chunk on a GPU, in elements of one byte summed over all ranks.

    A chunk costs ``host_s`` seconds of host time. Chunks hide the hop that takes less time, so the fastest of ``links``
    decides. Arguments are the same on every rank.
    """
    fastest = max((link.bytes_per_s for link in links), default=NVLINK.bytes_per_s)
    return math.ceil(MIN_TRANSFER_PER_HOST_COST * (host_s + sum(link.latency_s for link in links)) * fastest)


def min_chunk_numel(device_type: str, num_ranks: int, links: Sequence[Link] = ()) -> int:
    """The smallest worthwhile chunk of a shard, in elements, on devices of this type.

    ``links`` are those measured by ``zcomm probe``, if the ranks have agreed on its table. Only GPUs use them.
    """
    if device_type == "cpu":
        return MIN_CHUNK_NUMEL
    return max(MIN_CHUNK_NUMEL_ON_GPU, min_numel_of_all_ranks(HOST_S_PER_CHUNK, links) // num_ranks)


def chunks_of(numel: int, *formats: Format, min_numel: int | None = None) -> list[slice]:
    """The chunks of a shard of ``numel`` elements sent in ``formats``; a small shard is one chunk.

    There are at most ``MAX_CHUNKS``. All but the last have at least ``min_numel`` elements (default:
    ``MIN_CHUNK_NUMEL``).
    """
    multiple = math.lcm(*(format.block or 1 for format in formats), 256)
    wanted = max(MIN_CHUNK_NUMEL if min_numel is None else min_numel, -(-numel // MAX_CHUNKS))
    step = -(-wanted // multiple) * multiple
    return [slice(start, min(start + step, numel)) for start in range(0, numel, step)]


def pipelined(chunks: Sequence[Steps], *, num_exchanges: int) -> Steps:
    """The steps of all ``chunks``, of ``num_exchanges`` exchanges each, interleaved as drawn above.

    If a chunk fails after its last exchange, the others still run theirs, for which other ranks wait; the error is
    raised at the end.
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
                if stage < num_exchanges:  # K3
                    _wait_for(pending)
                    raise failure from None
    if failure is not None:
        raise failure


def _wait_for(exchanges: Sequence[Pending | None]) -> None:
    """Wait for started exchanges: other ranks have started them too, and their buffers are still written."""
    for exchange in exchanges:
        if exchange is not None:
            with suppress(Exception):
                exchange.wait()
