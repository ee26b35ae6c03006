"""Runs the job under torchrun, which restarts it."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed.run

from tests.faults.definition import TIMEOUT_S
from tests.faults.forked import SLACK_S, attempt_forked, judge, ranks_of, read_reports, saved_at_first
from tests.ranks import forkserver
from zcomm._bench.emulated_nodes import INTERFACE, Node, emulated_nodes, unavailable_reason

ROOT = Path(__file__).parents[2]
LIMIT_S, MACHINES = 150, 2
COLD_EVERY = 8
"""One of so many seeds starts torchrun and the ranks as commands; the others fork them, because imports take long."""


def run_elastic(spec: dict[str, Any], folder: Path, reference: str) -> dict[str, Any]:
    """Run once: torchrun starts the ranks, and restarts them after the fault. Its store outlives them."""
    (folder / "files").mkdir()
    (folder / "spec.json").write_text(json.dumps(spec))
    started, job = time.monotonic(), ["-m", "tests.faults.job", str(folder)]
    if spec["seed"] % COLD_EVERY:
        job = ["--run-path", "--start-method=fork", str(ROOT / "tests" / "faults" / "job.py"), str(folder), "fork"]
    agent_of = _forked_agent if spec["seed"] % COLD_EVERY else _agent
    options = ["--standalone", f"--nproc-per-node={ranks_of(spec)}", "--max-restarts=2", "--monitor-interval=1", *job]
    with agent_of(folder, options) as agent:
        is_over = agent.ends_within(LIMIT_S)
    found = judge(spec, folder, reference, saved_at_first(folder)) if is_over else {"outcome": "hang"}
    return {**spec, **found, "took_s": round(time.monotonic() - started, 2)}


class _Agent(NamedTuple):
    """A running torchrun."""

    ends_within: Callable[[float], bool]
    """Waits for it to end, for so many seconds at most."""


@contextmanager
def _agent(folder: Path, options: list[str], node: Node | None = None) -> Iterator[_Agent]:
    """Start torchrun as a command; at exit, kill it and everything that it has started."""
    variables = (dict(os.environ) if node is None else node.environment()) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    if node is not None:
        command = node.command([]) + command
    with (folder / "output").open("ab") as output:
        agent = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output, start_new_session=True)

        def ends_within(seconds: float) -> bool:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(seconds)
            return agent.poll() is not None

        try:
            yield _Agent(ends_within)
        finally:
            _kill_session(agent.pid)
            agent.wait()


@contextmanager
def _forked_agent(folder: Path, options: list[str]) -> Iterator[_Agent]:
    """Run torchrun's code on a fork of a process that has imported everything; its ranks are forks of that fork."""
    agent: Any = forkserver().Process(target=_serve_agent, args=(folder, options))
    agent.start()

    def ends_within(seconds: float) -> bool:
        agent.join(seconds)
        return agent.exitcode is not None

    try:
        yield _Agent(ends_within)
    finally:
        _kill_session(agent.pid)
        agent.join()


def _kill_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _serve_agent(folder: Path, options: list[str]) -> None:
    gc.freeze()
    os.setsid()
    number = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    torch.distributed.run.main(options)


def run_on_two_machines(spec: dict[str, Any], folder: Path, reference: str) -> dict[str, Any]:
    """Run half of the ranks on each machine and cut the network of one. The second attempt is on forks."""
    started, reason = time.monotonic(), unavailable_reason()
    if reason is not None:
        return {**spec, "outcome": "skipped", "problems": [reason]}
    (folder / "files").mkdir()
    (folder / "spec.json").write_text(json.dumps(spec))
    of_machine = ranks_of(spec) // MACHINES
    with emulated_nodes(MACHINES) as nodes, ExitStack() as stack:
        for index, node in enumerate(nodes):
            options = [
                f"--nnodes={MACHINES}", f"--nproc-per-node={of_machine}", f"--node-rank={index}",
                f"--master-addr={nodes[0].name}", "--master-port=29500", "--max-restarts=0", "--monitor-interval=0.2",
                "-m", "tests.faults.job", str(folder),
            ]  # fmt: skip
            stack.enter_context(_agent(folder, options, node))
        is_cut = _wait((folder / "fault").exists, LIMIT_S)
        _cut(nodes[spec["victim"] // of_machine], spec["fault"])
        (folder / "fault").write_text(str(time.time()))
        (folder / "cut").touch()
        is_over = is_cut and _wait(lambda: len(read_reports(folder, 0, "error")) == ranks_of(spec), TIMEOUT_S + SLACK_S)
    is_over = is_over and attempt_forked(spec, folder, 1)
    found = judge(spec, folder, reference, saved_at_first(folder)) if is_over else {"outcome": "hang"}
    return {**spec, **found, "took_s": round(time.monotonic() - started, 2)}


def _cut(node: Node, how: str) -> None:
    command = ["ip", "-n", node.namespace, "link", "set", INTERFACE, "down"]
    if how == "rate zero":
        command = ["tc", "-n", node.namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf",
                   "rate", "8bit", "burst", "1", "latency", "1ms"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not condition():
        time.sleep(0.01)
    return condition()
