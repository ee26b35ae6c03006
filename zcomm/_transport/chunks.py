"""Cutting a collective of two hops into chunks, so that one hop of a chunk overlaps the other hop of its neighbours.

    tick            0    1    2    3    4            shard = chunk 0 | chunk 1 | chunk 2, each message of its own
    hop 1 starts    0    1    2
    hop 2 starts         0    1    2                 before that: hop 1 of this chunk has ended
    chunk ends                0    1    2            before that: hop 2 of this chunk has ended

Invariants:
    K1  Chunks start on multiples of every format's block: values, codes and scales are those of the whole.
    K2  Sizes, formats, the kind of device and the probe's table, which all ranks have alike, decide, and nothing else:
        all ranks cut alike, and start their exchanges in the same order.
    K3  After an exchange that could not be started, none is started on any hop: messages are never taken for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from zcomm._base.pending import Pending
from zcomm._formats.formats import Format
from zcomm._transport.work import Link, Steps

MIN_CHUNK_NUMEL = 2**18
"""On CPUs, over gloo: measured."""
MIN_CHUNK_NUMEL_ON_GPU = 2**24
MAX_CHUNKS = 16
PYTHON_S = 300e-6
"""What a chunk costs the host when Python drives it: some 5 launches, 2 exchanges, and the Python around them."""
NVLINK = Link(latency_s=0.0, bytes_per_s=450e9)
"""Of an H100, each way; assumed where nothing is known: a faster link makes larger chunks."""
WORTH = 4
"""A transfer must take so many times what its chunk costs the host, or cutting is slower than not cutting."""


def fewest_of_all_ranks(host_s: float, links: Sequence[Link] = ()) -> int:
    """Elements of all ranks together in a chunk that costs the host ``host_s`` seconds, on a GPU, at a byte each.

    Chunks save the time of the hop that takes less, so the fastest link decides. What it is given is the same on every
    rank.
    """
    fastest = max((link.bytes_per_s for link in links), default=NVLINK.bytes_per_s)
    return math.ceil(WORTH * (host_s + sum(link.latency_s for link in links)) * fastest)


def least_chunk(device_type: str, num_ranks: int, links: Sequence[Link] = ()) -> int:
    """Elements of a shard from which a chunk is worth what it costs, on such devices of ``num_ranks`` ranks.

    ``links`` are what ``zcomm probe`` found, if the ranks have agreed on its table; used on GPUs.
    """
    if device_type == "cpu":
        return MIN_CHUNK_NUMEL
    return max(MIN_CHUNK_NUMEL_ON_GPU, fewest_of_all_ranks(PYTHON_S, links) // num_ranks)


def chunks_of(numel: int, *formats: Format, least: int | None = None) -> list[slice]:
    """The chunks of a shard of ``numel`` elements that travels in ``formats``; one if it is small.

    At most ``MAX_CHUNKS``, of at least ``least`` (default: ``MIN_CHUNK_NUMEL``) elements, but for the last.
    """
    multiple = math.lcm(*(format.block or 1 for format in formats), 256)
    wanted = max(MIN_CHUNK_NUMEL if least is None else least, -(-numel // MAX_CHUNKS))
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
