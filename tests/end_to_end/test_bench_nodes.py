"""``zcomm bench --emulate-nodes``: bytes on a slow network, and cleanup however it ends."""

# covers zcomm/_bench/emulated_nodes.py

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.job import ROOT
from zcomm._bench.emulated_nodes import emulated_nodes, unavailable_reason

REASON = unavailable_reason()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), pytest.mark.skipif(REASON is not None, reason=str(REASON))]
BENCH = [sys.executable, "-m", "zcomm", "bench", "--emulate-nodes", "2", "--rate", "200mbit"]
HEARS_SIGNALS = ["env", "--default-signal=INT"]  # a shell's background jobs ignore SIGINT, and children inherit that
HEADERS = 1514 / 1448  # frame over payload: a full TCP segment on Ethernet


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.strip()}


def _rows(*arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    done = subprocess.run(
        [*BENCH, "--json", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=450, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["collective"], row["format"]): row for row in rows if "collective" in row}


def test_bytes_on_a_slow_network() -> None:
    """Those that a row names are those that crossed the emulated wire. Speed: bench/results."""
    rows = _rows("-b", "4M", "-e", "4M", "-n", "1", "--hops", "2", "--formats", "bf16,int8,int4",
                 "--collectives", "all_gather,reduce_scatter")  # fmt: skip
    assert len(rows) == 8
    for row in rows.values():
        assert row["num_wrong"] == 0
        assert row["p50_us"] > 0
        if row["format"] != "torch":
            assert row["inter_nbytes"] <= row["wire_nbytes"] <= 1.05 * HEADERS * row["inter_nbytes"]
    torchs = rows["reduce_scatter", "torch"]["wire_nbytes"]
    assert torchs > 1.9 * rows["reduce_scatter", "bf16"]["wire_nbytes"]  # gloo sends twice the necessary bytes


@pytest.mark.parametrize(
    ("when", "number"),
    [("in the set-up", signal.SIGINT), ("in the set-up", signal.SIGHUP), ("in a run", signal.SIGTERM)],
)
def test_a_signal_leaves_nothing_behind(number: signal.Signals, when: str) -> None:
    process = subprocess.Popen(
        [*HEARS_SIGNALS, *BENCH, "-b", "64M", "-e", "64M", "-n", "1000"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        if when == "in a run":
            assert process.stdout.readline().startswith("# zcomm bench")
        else:
            while not any(name.startswith(f"zcomm{process.pid}") for name in _namespaces()):
                time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    mine = f"zcomm{process.pid}"
    assert not [name for name in _namespaces() if name.startswith(mine)]
    assert not list(Path("/etc/netns").glob(f"{mine}*"))
    deadline = time.monotonic() + 10  # killed processes may take a moment to end
    while left := _running_in_session(process.pid):
        assert time.monotonic() < deadline, f"outlived their node: {left}"
        time.sleep(0.05)


def _running_in_session(session: int) -> list[str]:
    """Return the lines of /proc/*/stat of the processes in ``session`` that are not zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            line = entry.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _parent, _group, of_session = line.rpartition(")")[2].split()[:4]
        if int(of_session) == session and state not in "ZX":
            found.append(line)
    return found


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    script = (
        "import os, sys\nfrom zcomm._bench.emulated_nodes import emulated_nodes\n"
        "with emulated_nodes(1):\n    print('made', flush=True)\n    os.kill(os.getpid(), 9)"
    )
    killed = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert killed.communicate(timeout=60)[0] == "made\n"
    mine = f"zcomm{killed.pid}"
    assert [name for name in _namespaces() if name.startswith(mine)]
    with emulated_nodes(1):
        assert not [name for name in _namespaces() if name.startswith(mine)]
        assert not list(Path("/etc/netns").glob(f"{mine}*"))
