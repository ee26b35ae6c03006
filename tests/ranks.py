"""Runs functions on live ranks: one process for each rank, over gloo on this machine, kept between tests.

Importing torch, and what a first optimizer imports, costs 4 s of a core: one process does it, and ranks are its forks.
A rank that fails, dies or is late costs its pool, which is killed and built anew for the next test.

``ranks_over("nccl")``: ranks of a pool whose collectives go over the emulated NCCL (``ZCOMM_NCCL=emulated``).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcomm import Topology
from zcomm._base import env
from zcomm._transport import backend_choice
from zcomm._transport.nccl_communicators import close_communicators

Result = TypeVar("Result")
TIMEOUT_S = int(os.environ.get("ZCOMM_TEST_TIMEOUT_S", "240"))
"""The timeout of one call: long enough that only a deadlock reaches it, even on a busy machine."""
AFTER_FAILURE_S = 5
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "zcomm", "zero", "pytest", "hypothesis"]

_POOLS: dict[tuple[int, str], Pool] = {}
"""By world size and backend."""
_BACKEND: list[str] = ["torch"]


@contextmanager
def ranks_over(backend: str) -> Iterator[None]:
    """Use ``backend``, "torch" or "nccl", for the ranks' collectives unless a call names another."""
    before, _BACKEND[0] = _BACKEND[0], backend
    try:
        yield
    finally:
        _BACKEND[0] = before


def forkserver() -> Any:
    """The multiprocessing context whose processes are forked from one that has imported what ranks need."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Pool:
    """``world_size`` live processes in one gloo group, whose collectives go over ``backend``."""

    def __init__(self, world_size: int, backend: str) -> None:
        context = forkserver()
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, backend, store, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def close(self, *, kill: bool = False) -> None:
        """Let the ranks exit, or kill them."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            if kill:
                process.kill()
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def run_ranks(world_size: int, fn: Callable[..., None], *args: object) -> None:
    """Call ``fn(rank, *args)`` on ranks 0..world_size-1 and raise AssertionError with every failed rank's traceback."""
    key = world_size, _BACKEND[0]
    if key not in _POOLS:
        _POOLS[key] = Pool(*key)
    pool = _POOLS[key]
    failures: dict[int, str] = {}
    for rank, pipe in enumerate(pool.pipes):
        try:
            pipe.send((fn, args))
        except OSError:
            failures[rank] = " its process is gone"
    waiting = {pipe: rank for rank, pipe in enumerate(pool.pipes) if rank not in failures}
    stop = time.monotonic() + (TIMEOUT_S if not failures else AFTER_FAILURE_S)
    while waiting:
        ready = wait(list(waiting), max(0.0, stop - time.monotonic()))
        if not ready:
            failures |= dict.fromkeys(waiting.values(), " no answer in time")
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            if (text := _answer(pipe, pool.processes[rank])) is not None:
                failures[rank] = text
                stop = min(stop, time.monotonic() + AFTER_FAILURE_S)  # others may wait for this rank
    if failures:
        _POOLS.pop(key).close(kill=True)  # a failed rank may have left the others inside a collective
        raise AssertionError("\n".join(f"rank {rank}:{failures[rank]}" for rank in sorted(failures)))


def _answer(pipe: Connection, process: Any) -> str | None:
    """A rank's answer: None, or the text of its error."""
    try:
        text = pipe.recv()
    except (EOFError, OSError):
        process.join(1)  # the pipe closes a little before the exit code is known
        return f" died with exit code {process.exitcode}"
    return None if text is None else f"\n{text}"


@atexit.register
def close_pools() -> None:
    """End all ranks; each destroys its process group."""
    while _POOLS:
        _POOLS.popitem()[1].close()


@cache
def topology(ranks_per_node: int) -> Topology:
    """On a rank: the pool's topology with so many ranks in a node, created once."""
    _TOPOLOGIES.append(Topology(ranks_per_node=ranks_per_node))
    return _TOPOLOGIES[-1]


_TOPOLOGIES: list[Topology] = []
"""Closed with their communicators when the rank ends."""


def by_first_rank(compute: Callable[[], Result]) -> Result:
    """On a rank: what ``compute`` returns on the first rank. Collective: an oracle need not run on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return compute()
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return cast("Result", found[0])


@cache
def device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """On a rank: the pool's DeviceMesh with these axes, created once."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _serve(rank: int, world_size: int, backend: str, store: str, pipe: Connection) -> None:
    gc.freeze()  # what was there before the fork: collections neither visit it nor copy its pages
    faulthandler.enable()  # a rank that crashes says where each of its threads was
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    if backend == "nccl":
        use_emulated_nccl()
    while (call := _receive(pipe)) is not None:
        fn, args = call
        torch.manual_seed(rank)
        try:
            fn(rank, *args)
            _check_compiler()
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
    while _TOPOLOGIES:
        _TOPOLOGIES.pop().close()
    close_communicators()
    dist.destroy_process_group()


def _check_compiler() -> None:
    """Raise AssertionError if the call has left torch's compiler switched off, for all later calls of this process."""
    if "torch._dynamo.eval_frame" in sys.modules:
        stance = sys.modules["torch._dynamo.eval_frame"]._stance.stance
        assert stance == "default", f"torch.compiler.set_stance({stance!r}) was not taken back"


def use_emulated_nccl() -> None:
    """On a newly forked rank: use the emulated NCCL for collectives."""
    os.environ["ZCOMM_NCCL"] = "emulated"
    env.forget()  # what was read before the fork
    backend_choice.AUTO = "nccl"  # the default of calls that name no backend


def _receive(pipe: Connection) -> tuple[Callable[..., None], tuple[object, ...]] | None:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:  # the test process is gone
        return None
