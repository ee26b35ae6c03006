"""Tests of collectives that run over both backends: torch's groups, and the communicator over the emulated NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import ranks_over


@pytest.fixture(params=["torch", "nccl"])
def both_backends(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test once over each; the ranks of ``run_ranks`` have it as their default."""
    with ranks_over(request.param):
        yield request.param
