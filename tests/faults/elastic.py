"""The job under torchrun with restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.faults.definition import TIMEOUT_S
from tests.faults.forked import RANKS, SLACK_S, attempt_forked, judge, saved_at_first, told
from zcomm.bench.emulated_nodes import INTERFACE, Node, emulated_nodes, unavailable_reason

ROOT = Path(__file__).parents[2]
LIMIT_S = 240


def run_elastic(spec: dict[str, Any], folder: Path, reference: str) -> dict[str, Any]:
    """One run: torchrun starts the ranks, and again after the fault."""
    (folder / "files").mkdir()
    (folder / "spec.json").write_text(json.dumps(spec))
    options = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=2"]
    started, is_over = time.monotonic(), True
    with _agent(folder, [], options, dict(os.environ)) as agent:
        try:
            agent.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            is_over = False
    found = judge(spec, folder, reference, saved_at_first(folder)) if is_over else {"outcome": "hang"}
    return {**spec, **found, "took_s": round(time.monotonic() - started, 2)}


@contextmanager
def _agent(
    folder: Path, prefix: list[str], options: list[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun, killed at the end with what it has started."""
    # It keeps one store for all restarts unless told otherwise: new ranks would read what the dead ones wrote.
    variables = environment | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval=0.2"]
    command += ["-m", "tests.faults.job", str(folder)]
    with (folder / "output").open("ab") as output:
        agent = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output, start_new_session=True)
        try:
            yield agent
        finally:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def run_on_two_machines(spec: dict[str, Any], folder: Path, reference: str) -> dict[str, Any]:
    """One rank a machine; the network of the victim's is cut. The second attempt is on forks."""
    started, reason = time.monotonic(), unavailable_reason()
    if reason is not None:
        return {**spec, "outcome": "skipped", "problems": [reason]}
    (folder / "files").mkdir()
    (folder / "spec.json").write_text(json.dumps(spec))
    with emulated_nodes(RANKS) as nodes, ExitStack() as stack:
        for index, node in enumerate(nodes):
            options = [
                f"--nnodes={RANKS}", "--nproc-per-node=1", f"--node-rank={index}", f"--master-addr={nodes[0].name}",
                "--master-port=29500", "--max-restarts=0",
            ]  # fmt: skip
            stack.enter_context(_agent(folder, node.command([]), options, node.environment()))
        is_cut = _wait((folder / "fault").exists, LIMIT_S)
        _cut(nodes[spec["victim"]], spec["fault"])
        (folder / "fault").write_text(str(time.time()))
        (folder / "cut").touch()
        is_over = is_cut and _wait(lambda: len(told(folder, 0, "error")) == RANKS, TIMEOUT_S + SLACK_S)
    is_over = is_over and attempt_forked(folder, 1)
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
