"""Hooks of pytest: which tests are skipped, how two workers (``pytest -n 2``) share them, and lines of the summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

IN_ONE_WORKER = "tests/end_to_end/"
"""These start whole jobs and count the processes that remain: one at a time, and first, as they take longest."""
# For this process and all that it starts. Without it a rank that sends is interrupted by the rank that it wakes, within
# gloo's lock, for which another thread of gloo waits by calling epoll_wait over and over: half of the processor's time.
with suppress(OSError, AttributeError):  # not allowed, or not Linux
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
SUMMARY_LINE = "summary line"
"""The name of a test's property (``record_property``) that is printed in the summary; what workers print is lost."""


@pytest.fixture(autouse=True, scope="module")
def _no_idle_ranks() -> Iterator[None]:
    """End a file's ranks after it: each polls a hundred times a second for each process group; new ones take 0.2 s."""
    yield
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].close_pools()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without a CUDA device, and those marked ``long`` unless they are selected."""
    if "long" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes minutes; run with -m long"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file: fixtures are made once and tests keep their order, unlike with ``--dist worksteal``."""
    if config.getoption("dist") == "worksteal":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return IN_ONE_WORKER if nodeid.startswith(IN_ONE_WORKER) else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the lines that tests have recorded for the summary."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == SUMMARY_LINE:
                terminalreporter.write_line(text)
