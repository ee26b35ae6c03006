"""Time file I/O with O_DIRECT, interleaved with fio on the same disk.

    python bench/io.py FOLDER [--size-mib 512] [--rounds 9] [--request-kib 1024] [--in-flight 16] [--json]

Every contender has a separate file. In each round it reads the full file, overwrites it, and reads and writes at the
same time (``both``: half of the bytes each way). The files are removed at the end. ``zero`` is what ``aio_settings.py``
measures, ``checked`` the files of the NVMe tier, which keep checksums of their pages. ``/fio`` is the rate over fio's,
the median over the rounds; without fio on the PATH that column is empty. ``#wrong`` counts transfers that read other
bytes than were written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from zcomm._bench.harness import BenchReport, Column
from zcomm._kernels import kernels
from zero._storage.file_store import FileStore
from zero._storage.tier_settings import FileSettings
from zero._storage.transfer_buffers import aligned_bytes

COLUMNS = [
    Column("direction", "direction"),
    Column("contender", "contender"),
    Column("engine", "  engine"),
    Column("gbps", "p50(GB/s)", ".2f", is_measurement=True),
    Column("over_fio", " /fio", ".3f", is_measurement=True),
]
DIRECTIONS = ("read", "write", "both")
TRANSFER_REQUESTS = 4
MIB = 1024**2


class Contender(ABC):
    """Reads and writes one file."""

    engine: str

    @abstractmethod
    def rate(self, direction: str) -> float:
        """Return bytes per second over the full file."""

    def count_wrong(self) -> int:
        """Count transfers that read other bytes than were written."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Remove the file."""


class Zero(Contender):
    """Transfers of several requests; enough of them that all requests are in flight."""

    def __init__(self, nbytes: int, files: FileSettings) -> None:
        self.transfer = files.request_nbytes * TRANSFER_REQUESTS
        self.count = nbytes // self.transfer
        self.in_flight = 2 * -(-files.num_requests // TRANSFER_REQUESTS) + 2
        self.sources = [aligned_bytes(self.transfer).random_() for _ in range(self.in_flight)]
        self.targets = [aligned_bytes(self.transfer) for _ in range(self.in_flight)]

    @abstractmethod
    def start(self, verb: str, index: int) -> Callable[[], None]:
        """Start a transfer of the file's part ``index``; return a function that waits for it."""

    def rate(self, direction: str) -> float:
        """Measure from the first submission to the last completion."""
        waits: deque[Callable[[], None]] = deque()
        start = time.perf_counter()
        for index in range(self.count):
            waits.append(self.start(("read", "write")[index % 2] if direction == "both" else direction, index))
            if len(waits) == self.in_flight:
                waits.popleft()()
        while waits:
            waits.popleft()()
        return self.count * self.transfer / (time.perf_counter() - start)

    def count_wrong(self) -> int:
        """Read the full file and compare it."""
        num_wrong = 0
        for index in range(self.count):
            self.start("read", index)()
            num_wrong += not torch.equal(self.targets[index % self.in_flight], self.sources[index % self.in_flight])
        return num_wrong


class Plain(Zero):
    """The native file queue."""

    def __init__(self, folder: Path, nbytes: int, files: FileSettings) -> None:
        super().__init__(nbytes, files)
        self.path = folder / f"bench-io-{os.getpid()}"
        self.queue = kernels.file_queue(files.num_requests, files.request_nbytes)
        self.engine = str(self.queue.engine)
        self.file = self.queue.create(str(self.path), nbytes)

    def start(self, verb: str, index: int) -> Callable[[], None]:  # noqa: D102
        buffer = (self.targets if verb == "read" else self.sources)[index % self.in_flight]
        submit = getattr(self.queue, verb)
        ticket = submit(self.file, index * self.transfer, buffer.data_ptr(), self.transfer)
        return lambda: self.queue.wait(ticket)

    def close(self) -> None:  # noqa: D102
        self.path.unlink()


class Checked(Zero):
    """A file of the NVMe tier."""

    engine = "checksums"

    def __init__(self, folder: Path, nbytes: int, files: FileSettings) -> None:
        super().__init__(nbytes, files)
        self.store = FileStore(folder, files=files, name="bench", topology=None)
        self.file = self.store.create("data", nbytes)

    def start(self, verb: str, index: int) -> Callable[[], None]:  # noqa: D102
        buffer = (self.targets if verb == "read" else self.sources)[index % self.in_flight]
        return getattr(self.store, verb)(self.file, index * self.transfer, buffer).wait  # type: ignore[no-any-return]

    def close(self) -> None:  # noqa: D102
        self.store.close()


class Fio(Contender):
    """One job of fio."""

    def __init__(self, folder: Path, nbytes: int, files: FileSettings) -> None:
        self.path = folder / f"bench-io-fio-{os.getpid()}"
        engines = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=True).stdout
        self.engine = "io_uring" if "io_uring" in engines.split() else "libaio"
        self.arguments = [
            "fio", "--name=bench", f"--filename={self.path}", f"--size={nbytes}", f"--bs={files.request_nbytes}",
            f"--iodepth={files.num_requests}", "--direct=1", f"--ioengine={self.engine}", "--output-format=json",
        ]  # fmt: skip

    def rate(self, direction: str) -> float:
        """Use fio's measurement."""
        mode = {"read": "read", "write": "write", "both": "rw"}[direction]
        done = subprocess.run([*self.arguments, f"--rw={mode}"], capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        return float(moved / (max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3))

    def close(self) -> None:  # noqa: D102
        self.path.unlink(missing_ok=True)


def bench(report: BenchReport, folder: Path, nbytes: int, files: FileSettings, rounds: int) -> None:
    """Measure all directions and print their rows."""
    contenders: dict[str, Contender] = {}
    try:
        contenders["zero"] = Plain(folder, nbytes, files)
        contenders["checked"] = Checked(folder, nbytes, files)
        if shutil.which("fio"):
            contenders["fio"] = Fio(folder, nbytes, files)
        else:
            report.note("fio is not measured: it is not installed (apt-get install fio)")
        for contender in contenders.values():
            contender.rate("write")  # space never written is read without the disk
        for direction in DIRECTIONS:
            rates: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(rounds):
                for name, contender in contenders.items():
                    rates[name].append(contender.rate(direction))
            for name, contender in contenders.items():
                row: dict[str, object] = {"direction": direction, "contender": name, "engine": contender.engine}
                row["gbps"] = statistics.median(rates[name]) / 1e9
                if "fio" in rates:
                    pairs = zip(rates[name], rates["fio"], strict=True)
                    row["over_fio"] = statistics.median(mine / of_fio for mine, of_fio in pairs)
                report.row(row, num_wrong=contender.count_wrong())
    finally:
        for contender in contenders.values():
            contender.close()


def main() -> int:
    """Print all rows; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="folder on the disk to measure; three files are created there and removed"
    )
    parser.add_argument("--size-mib", type=int, default=512, help="size of each file (default 512)")
    parser.add_argument("--rounds", type=int, default=9, help="times each contender is timed (default 9)")
    parser.add_argument("--request-kib", type=int, default=1024, help="size of a request (default 1024)")
    parser.add_argument("--in-flight", type=int, default=16, help="requests at a time (default 16)")
    parser.add_argument("--json", action="store_true", help="rows as JSON lines")
    options = parser.parse_args()
    files = FileSettings(request_nbytes=options.request_kib * 1024, num_requests=options.in_flight)
    step = files.request_nbytes * TRANSFER_REQUESTS
    nbytes = max(options.size_mib * MIB // step, 1) * step
    report = BenchReport(COLUMNS, as_json=options.json)
    report.start(
        "io",
        rounds=options.rounds,
        size_mib=nbytes // MIB,
        request_kib=options.request_kib,
        in_flight=options.in_flight,
    )
    bench(report, options.folder, nbytes, files, options.rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
