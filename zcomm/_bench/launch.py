"""Launch the ranks of a benchmark: under torchrun on this machine, or one torchrun on each emulated node."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zcomm._bench.emulated_nodes import Node, emulated_nodes, signals_deferred
from zcomm._transport.backend_choice import BackendName
from zcomm._transport.topology import Topology


def relaunch_under_torchrun(num_ranks: int | None, command: Sequence[str] | None = None) -> None:
    """Replace this process by torchrun with ``num_ranks`` ranks of ``command``, unless torchrun has started it.

    Args:
        num_ranks: None: one rank for each GPU, or 4 without GPUs.
        command: What torchrun runs. None: the script of this process, with its arguments.
    """
    if "LOCAL_RANK" in os.environ:
        return
    ranks = num_ranks or torch.cuda.device_count() or 4
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set the same value and print a warning
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    sys.stdout.flush()  # exec discards what is buffered
    os.execv(sys.executable, [sys.executable, *torchrun, *(sys.argv if command is None else command)])


@contextmanager
def process_group(device: str = "auto") -> Iterator[torch.device]:
    """Initialize the process group of torchrun's ranks; destroy it at the end, also after an error.

    ``device`` "cuda": NCCL for tensors on this rank's GPU, gloo for host memory; "cpu": gloo; "auto": "cuda" if there
    are GPUs.
    """
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=chosen)
    else:
        chosen = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
        dist.init_process_group("gloo")
    try:
        yield chosen
    finally:
        dist.destroy_process_group()


def choose_topology(ranks_per_node: int | None, *, backend: BackendName = "torch") -> Topology:
    """Return the topology as torchrun has started it. On a single machine, each two ranks count as a node.

    ``ranks_per_node`` overrides both. Two ranks, or an odd number, are one node.
    """
    world_size, is_one_machine = dist.get_world_size(), os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if ranks_per_node is None and is_one_machine:
        ranks_per_node = 2 if world_size >= 4 and world_size % 2 == 0 else world_size
    if ranks_per_node is None:
        return Topology.from_env(backend=backend)
    return Topology(ranks_per_node=ranks_per_node, backend=backend)


Work = Callable[[Topology, torch.device], int]
"""The work of one rank, given the topology and the device of its tensors; returns an exit status."""

PORT = 29500
POLL_S = 0.05


def on_ranks(
    arguments: argparse.Namespace, command: Sequence[str], work: Work, *, program: Sequence[str] = ("-m", "zcomm")
) -> int:
    """Call ``work`` on every rank that ``arguments`` request, and return the exit status.

    Args:
        arguments: The options of :func:`zcomm._bench.options.add_launch_arguments`.
        command: The arguments of ``program`` on each rank, the same as this process has.
        work: The work of a rank. Only the first rank may print.
        program: What torchrun runs: a script's path, or ``-m`` and a module.
    """
    if "LOCAL_RANK" in os.environ:
        return _as_a_rank(arguments, work)
    module = [*program, *command]
    if arguments.emulate_nodes is None:
        relaunch_under_torchrun(arguments.num_ranks, module)
    per_node = arguments.ranks_per_node or 2
    with _signals_as_exceptions(), emulated_nodes(arguments.emulate_nodes, rate=arguments.rate) as nodes:
        return _run_agents(nodes, per_node, module)


def _as_a_rank(arguments: argparse.Namespace, work: Work) -> int:
    with process_group(arguments.device) as device:
        groups_ranks = arguments.emulate_nodes is None and arguments.ranks_per_node is not None
        backend: Any = getattr(arguments, "backend", "torch")  # only `zcomm bench` has the option
        topology = choose_topology(arguments.ranks_per_node if groups_ranks else None, backend=backend)
        # One hop over a ProcessGroup has no Topology: it takes the ranks of a node from the environment.
        os.environ["LOCAL_WORLD_SIZE"] = str(topology.ranks_per_node)
        try:
            return work(topology, device)
        finally:
            topology.close()


def _start_agent(nodes: list[Node], index: int, per_node: int, module: list[str]) -> subprocess.Popen[bytes]:
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", f"--nproc-per-node={per_node}",
        f"--node-rank={index}", f"--master-addr={nodes[0].name}", f"--master-port={PORT}", *module,
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1"} | nodes[index].environment()
    return subprocess.Popen(nodes[index].command(torchrun), env=environment)


def _run_agents(nodes: list[Node], per_node: int, module: list[str]) -> int:
    """Start one agent on each node and wait for all. If one fails, the others are killed."""
    agents: list[subprocess.Popen[bytes]] = []
    try:
        with signals_deferred():  # or a signal could leave agents running that `agents` does not know yet
            agents.extend(_start_agent(nodes, index, per_node, module) for index in range(len(nodes)))
        while True:
            # poll() all of them: a wait() for the first agent would miss that the second has failed.
            codes = [agent.poll() for agent in agents]
            if failed := [code for code in codes if code]:
                return failed[0]
            if None not in codes:
                return 0
            time.sleep(POLL_S)
    finally:
        for agent in agents:
            agent.kill()  # its ranks are killed when the node is removed
            agent.wait()


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, as Ctrl-C is one: by default they end the process without cleanup."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
