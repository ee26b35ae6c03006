"""The main job as on two machines: two torchrun agents in two network namespaces, which define the nodes."""

# covers zcomm/_bench/emulated_nodes.py

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.job import ROOT, SCRIPT, TINY, losses, summary
from zcomm._bench.emulated_nodes import Node, emulated_nodes, unavailable_reason

REASON = unavailable_reason()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), pytest.mark.skipif(REASON is not None, reason=str(REASON))]
RUN = "ZeRO-3 qwZ qgZ hpZ"


def _start_agent(node: Node, nodes: list[Node], output: Path) -> subprocess.Popen[str]:
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={nodes[0].name}:29500", "--rdzv-id=two-machines",
    ]  # fmt: skip
    return subprocess.Popen(
        node.command([*torchrun, SCRIPT, *TINY, f"--output={output}"]),
        cwd=ROOT, env=node.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _run_on_two_machines(output: Path) -> None:
    with emulated_nodes(2) as nodes:
        agents = [_start_agent(node, nodes, output) for node in nodes]
        try:
            printed = [agent.communicate(timeout=400)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
                assert agent.stdout is not None
                agent.stdout.close()
    failed = [text for agent, text in zip(agents, printed, strict=True) if agent.returncode != 0]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)  # print the full output: an assertion message would cut it


def test_two_machines_give_the_losses_of_one(tmp_path: Path, stands_in_for_two: Path) -> None:
    two, one = tmp_path, stands_in_for_two
    _run_on_two_machines(two)
    assert losses(two, RUN) == losses(one, RUN)
    assert losses(two, RUN), "no losses were written"
    for link in ("within nodes", "between nodes"):
        sent = summary(two, RUN)[f"bytes per step {link}"]
        assert sent == summary(one, RUN)[f"bytes per step {link}"]
        assert sent > 0


def test_nothing_is_left_behind() -> None:
    with emulated_nodes(2, rate="100mbit") as nodes:
        ping = nodes[0].command(["getent", "hosts", nodes[1].name])
        assert nodes[1].address in subprocess.run(ping, capture_output=True, text=True, check=True).stdout
        shaped = subprocess.run(["tc", "-n", nodes[0].namespace, "qdisc"], capture_output=True, text=True, check=True)
        assert "tbf" in shaped.stdout
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(node.namespace in listed for node in nodes)
    assert not (Path("/etc/netns") / nodes[0].namespace).exists()
