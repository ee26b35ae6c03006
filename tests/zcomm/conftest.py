"""Fixtures that run tests of collectives over both backends: torch's groups, and the emulated NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import ranks_over


@pytest.fixture(params=["torch", "nccl"])
def both_backends(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each test over each backend, which is the default of the ranks of ``run_ranks``."""
    with ranks_over(request.param):
        yield request.param
