"""Starting ranks: those that torchrun has started, torchrun on this machine, or one torchrun on each emulated node."""

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

from zcomm._bench.emulated_nodes import Node, emulated_nodes, signals_put_off
from zcomm._bench.ranks_setup import choose_topology, process_group, relaunch_under_torchrun
from zcomm._transport.topology import Topology

Work = Callable[[Topology, torch.device], int]
"""What a rank does; the device is that of its tensors."""

PORT = 29500
POLL_S = 0.05


def on_ranks(
    arguments: argparse.Namespace,
    command: Sequence[str],
    work: Work,
    *,
    program: Sequence[str] = ("-m", "zcomm"),
) -> int:
    """Call ``work`` on every rank that ``arguments`` ask for, and return the exit status.

    Args:
        arguments: The options of :func:`zcomm._bench.options.add_launch_arguments`.
        command: What to run on a rank: the arguments of ``program``, the same that this process has.
        work: The work of a rank, which may print if it is the first.
        program: What torchrun is to run: a script's path, or ``-m`` and a module.
    """
    if "LOCAL_RANK" in os.environ:
        return _as_a_rank(arguments, work)
    module = [*program, *command]
    if arguments.emulate_nodes is None:
        relaunch_under_torchrun(arguments.num_ranks, module)
    per_node = arguments.ranks_per_node or 2
    with _stopped_by_signals(), emulated_nodes(arguments.emulate_nodes, rate=arguments.rate) as nodes:
        return _run_agents(nodes, per_node, module)


def _as_a_rank(arguments: argparse.Namespace, work: Work) -> int:
    with process_group(arguments.device) as device:
        stands_in = arguments.emulate_nodes is None and arguments.ranks_per_node is not None
        backend: Any = getattr(arguments, "backend", "torch")  # of `zcomm bench`
        topology = choose_topology(arguments.ranks_per_node if stands_in else None, backend=backend)
        # One hop over a ProcessGroup has no Topology to say who shares a node.
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
    """Start one agent on each node and wait for all; the first that fails ends the others."""
    agents: list[subprocess.Popen[bytes]] = []
    try:
        with signals_put_off():
            agents.extend(_start_agent(nodes, index, per_node, module) for index in range(len(nodes)))
        while True:
            codes = [agent.poll() for agent in agents]  # of all: one that fails must not wait for those before it
            if failed := [code for code in codes if code]:
                return failed[0]
            if None not in codes:
                return 0
            time.sleep(POLL_S)
    finally:
        for agent in agents:
            agent.kill()  # its ranks go with the node
            agent.wait()


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process like Ctrl-C does: by an exception, which cleans up."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
