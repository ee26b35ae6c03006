"""What is skipped where, what two workers (``pytest -n 2``) run, and what is said at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

IN_ONE_WORKER = "tests/end_to_end/"
"""These start jobs of their own and count what those leave behind: one at a time. They are begun first."""
SAID = "said at the end"
"""A property of a test, by ``record_property``: a line of the summary. What workers print is lost."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` need a CUDA device; those marked ``long`` somebody who asks for them."""
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
    """By file: its fixtures are made once, and its tests keep their order. ``--dist worksteal`` goes by test."""
    if config.getoption("dist") == "worksteal":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return IN_ONE_WORKER if nodeid.startswith(IN_ONE_WORKER) else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The lines that tests want to be seen."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == SAID:
                terminalreporter.write_line(text)
