"""Starts a script on several ranks as torchrun does, each forked from this process, which has imported torch.

Importing torch takes longer than most of the scripts. What opens the door is imported before it is opened, but not
what looks for DeepSpeed when it is imported (accelerate, transformers).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from torch.nn.parallel import DistributedDataParallel

import zcomm
from tests.ecosystem import plain_ddp
from zcomm.install.ddp import keep_group
from zero.compat import __main__ as door

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Start:
    """A start of a script."""

    kind: str
    """"door": as ``python -m zero.compat``; "plain": by plain_ddp.py; others: as ``python``."""
    arguments: list[str]
    """Those of the command line from the script, or ``--local_rank``, on."""
    folder: Path
    environment: dict[str, str]
    num_ranks: int
    timeout: float
    """In seconds."""

    def run(self, take: Callable[[int, str, float], None]) -> int:
        """Start the ranks, call ``take(rank, line, seconds)`` for each line, and return the largest exit code.

        Seconds are those that the rank's processor has worked for it. A rank that fails ends the others.
        """
        with self._started() as (processes, readers):
            return self._watch(processes, readers, take)

    @contextmanager
    def _started(self) -> Iterator[tuple[list[BaseProcess], list[int]]]:
        port = _free_port()
        processes: list[BaseProcess] = []
        readers = []
        for rank in range(self.num_ranks):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            process: BaseProcess = FORK.Process(target=self._rank, args=(rank, port, writer))
            process.start()
            os.close(writer)
            processes.append(process)
            readers.append(reader)
        try:
            yield processes, readers
        finally:
            for process in processes:
                process.kill()
                process.join()
            for reader in readers:
                os.close(reader)

    def _watch(self, processes: list[BaseProcess], readers: list[int], take: Callable[[int, str, float], None]) -> int:
        began, rest = time.monotonic(), [""] * self.num_ranks
        failed_at: float | None = None
        while True:
            codes = [process.exitcode for process in processes]
            for rank, reader in enumerate(readers):
                *lines, rest[rank] = (rest[rank] + _read(reader)).replace("\r", "\n").split("\n")
                for line in lines:
                    take(rank, line, _processor_seconds(processes[rank]))
            if None not in codes:
                return max(code if code >= 0 else 128 for code in codes if code is not None)
            if any(codes) and failed_at is None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + 10:
                return 1
            if time.monotonic() > began + self.timeout:
                take(0, f"TimeoutError: {self.timeout:.0f} s", 0.0)
                return 124
            time.sleep(0.05)

    def _rank(self, rank: int, port: int, writer: int) -> None:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        size = str(self.num_ranks)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        own |= {"TORCHELASTIC_RUN_ID": "ecosystem", "TORCHELASTIC_RESTART_COUNT": "0"}
        os.environ.clear()
        os.environ.update(self.environment | own)
        os.chdir(self.folder)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.path[1:1] = [one for one in self.environment["PYTHONPATH"].split(os.pathsep) if one]
        torch.set_num_threads(1)
        _keep_groups()
        sys.argv = ["", *self.arguments]
        with zcomm.traffic() as sent:
            self._script()
        sys.stdout.write(f"\nbytes sent: {sent.bytes()}\n")

    def _script(self) -> None:
        if self.kind in ("door", "plain"):
            (door if self.kind == "door" else plain_ddp).main()
            return
        sys.argv = self.arguments
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _keep_groups() -> None:
    """Let models in DistributedDataParallel that have no hook of ours end, too: see :func:`keep_group`."""
    init = DistributedDataParallel.__init__

    def keeping(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        init(ddp, *args, **kwargs)
        keep_group(ddp)

    DistributedDataParallel.__init__ = keeping  # type: ignore[method-assign]


def _free_port() -> int:
    """Below those that the system gives to sockets that name none: it could give one away before rank 0 listens."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _read(reader: int) -> str:
    try:
        return os.read(reader, 1 << 20).decode(errors="replace")
    except BlockingIOError:
        return ""


def _processor_seconds(process: BaseProcess) -> float:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
