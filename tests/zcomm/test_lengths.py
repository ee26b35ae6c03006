"""Ranks send messages of different lengths over a group without a Topology: an error, never wrong values."""

# covers zcomm/__init__.py

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from tests.ranks import forkserver

TIMEOUT_S = 5


def _gather(numel: int, format: str) -> None:
    zcomm.all_gather_single(torch.empty(2 * numel), torch.ones(numel), format=format)


def _reduce(numel: int, format: str) -> None:
    zcomm.reduce_scatter_single(torch.empty(numel), torch.ones(2 * numel), format=format)


def _exchange(numel: int, format: str) -> None:
    zcomm.all_to_all_single(torch.empty(2 * numel), torch.ones(2 * numel), format=format)


CASES: list[tuple[Callable[[int, str], None], tuple[int, str], tuple[int, str]]] = [
    (_gather, (1000, "int8"), (1000, "int4")),
    (_reduce, (1200, "nf4"), (1000, "nf4")),
    (_exchange, (1000, "int4/64"), (1000, "int4/128")),
]
"""A call, with the arguments of the rank that sends more and of the one that sends less."""


def _live(rank: int, store: str, case: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    call, *arguments = CASES[case]
    for _ in range(3):
        call(*arguments[0])  # leaves messages of the right length in the memory that is used again
    try:
        call(*arguments[rank])
        pipe.send("no error")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def _end_of(process: Any, pipe: Connection) -> str:
    assert pipe.poll(60), "no answer in time"
    try:
        return str(pipe.recv())
    except EOFError:
        process.join()
        return f"exit code {process.exitcode}"


def test_a_message_of_another_length_is_never_taken_for_values(tmp_path: Path) -> None:
    started = []
    for case in range(len(CASES)):
        for rank in range(2):
            here, there = forkserver().Pipe()
            process = forkserver().Process(target=_live, args=(rank, str(tmp_path / str(case)), case, there))
            process.start()
            there.close()
            started.append((case, rank, process, here))
    try:
        for case, rank, process, pipe in started:
            end = _end_of(process, pipe)
            assert end.startswith("CommunicationError"), (case, rank, end)
    finally:
        for _, _, process, _ in started:
            process.kill()
            process.join()
