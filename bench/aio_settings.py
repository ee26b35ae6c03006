"""Find the ``aio`` settings for a disk: measure reading, writing, and both at once, with O_DIRECT.

python bench/aio_settings.py FOLDER [--size-mib 1024] [--seconds 2]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcomm import ConfigError
from zcomm._kernels import kernels
from zero._storage.transfer_buffers import aligned_bytes

PATTERNS = ((128 * 1024, 16), (1024 * 1024, 1), (1024 * 1024, 4), (1024 * 1024, 16), (4 * 1024 * 1024, 8))
"""Bytes of a request, and requests in flight."""
TRANSFER_REQUESTS = 4  # a transfer spans several requests, as a sub-group's does
WITHIN = 0.95  # of the best rate counts as equal: the pattern with the fewest bytes in flight is suggested


@dataclass(frozen=True)
class Rates:
    """Bytes per second of one pattern."""

    request_nbytes: int
    num_requests: int
    read: float
    write: float
    both: float
    """Bytes read plus bytes written, at the same time."""


def measure(folder: Path, *, nbytes: int, seconds: float) -> list[Rates]:
    """Read and write a file in ``folder`` with each of :data:`PATTERNS`, and remove it.

    Raises:
        OSError: The folder does not exist, cannot be written, or lacks the space.
        ConfigError: ``nbytes`` is less than what the largest pattern has in flight.
    """
    least = max(size * count for size, count in PATTERNS) * 2
    if nbytes < least:
        raise ConfigError(f"--size-mib must be at least {least >> 20}: size_mib={nbytes >> 20}")
    path = folder / f"zero-aio-{os.getpid()}"
    rows = []
    try:
        for request_nbytes, num_requests in PATTERNS:
            rows.append(_measure_pattern(path, nbytes, seconds, request_nbytes, num_requests))
            path.unlink()
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
    return rows


def _measure_pattern(path: Path, nbytes: int, seconds: float, request_nbytes: int, num_requests: int) -> Rates:
    queue = kernels.file_queue(num_requests, request_nbytes)
    file = queue.create(str(path), nbytes)
    transfer = request_nbytes * TRANSFER_REQUESTS
    half = nbytes // 2 // transfer * transfer
    buffers = [aligned_bytes(transfer) for _ in range(2 * -(-num_requests // TRANSFER_REQUESTS) + 2)]
    for buffer in buffers:
        buffer.random_()

    def write(index: int) -> int:
        return int(queue.write(file, index * transfer % half, buffers[index % len(buffers)].data_ptr(), transfer))

    def read(index: int) -> int:
        at = half + index * transfer % half
        return int(queue.read(file, at, buffers[index % len(buffers)].data_ptr(), transfer))

    def write_high(index: int) -> int:
        at = half + index * transfer % half
        return int(queue.write(file, at, buffers[index % len(buffers)].data_ptr(), transfer))

    for index in range(half // transfer):  # space never written reads as zeros, without the disk
        queue.wait(write_high(index))
    rates = {}
    for name, submit in (
        ("read", read),
        ("write", write),
        ("both", lambda i: read(i // 2) if i % 2 else write(i // 2)),
    ):
        rates[name] = transfer / _seconds_each(queue, submit, len(buffers), seconds)
    queue.sync(file)
    queue.close(file)
    return Rates(request_nbytes, num_requests, **rates)


def _seconds_each(queue: Any, submit: Callable[[int], int], num_in_flight: int, seconds: float) -> float:
    """Mean time of a transfer with ``num_in_flight`` of them in flight."""
    tickets: deque[int] = deque()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or count < num_in_flight:
        tickets.append(submit(count))
        count += 1
        if len(tickets) == num_in_flight:
            queue.wait(tickets.popleft())
    while tickets:
        queue.wait(tickets.popleft())
    return (time.perf_counter() - start) / count


def run(folder: str, *, nbytes: int, seconds: float) -> str:
    """Measure; return the table and the suggested settings."""
    where = Path(folder)
    free = shutil.disk_usage(where).free
    engine = kernels.file_queue(1, int(kernels.native().FILE_ALIGNMENT)).engine
    rows = measure(where, nbytes=nbytes, seconds=seconds)
    lines = [
        f"# {where.resolve()}: {free / 1e9:.1f} GB free; "
        f"a file of {nbytes >> 20} MiB, {seconds:g} s each, O_DIRECT by {engine}",
        f"# {'request':>8} {'in flight':>9} {'read(GB/s)':>10} {'write(GB/s)':>11} {'both(GB/s)':>10}",
    ]
    lines += [
        f"{row.request_nbytes >> 10:>6} KiB {row.num_requests:>9} {row.read / 1e9:>10.2f} {row.write / 1e9:>11.2f} "
        f"{row.both / 1e9:>10.2f}"
        for row in rows
    ]
    best = _suggested(rows)
    setting = f'{{"block_size": {best.request_nbytes}, "queue_depth": {best.num_requests}}}'
    return "\n".join([*lines, f'# suggested: "aio": {setting}']) + "\n"


def _suggested(rows: list[Rates]) -> Rates:
    fast = [row for row in rows if row.both >= WITHIN * max(other.both for other in rows)]
    return min(fast, key=lambda row: row.request_nbytes * row.num_requests)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rates of each pattern and a suggestion; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the disk under a folder.")
    parser.add_argument("path", metavar="FOLDER", help="a folder on the disk; a file is created there and removed")
    parser.add_argument("--size-mib", type=int, default=1024, metavar="N", help="size of the file (default 1024)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each row and direction (default 2)")
    options = parser.parse_args(arguments)
    try:
        print(run(options.path, nbytes=options.size_mib << 20, seconds=options.seconds), end="")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
