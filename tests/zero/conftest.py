"""Fixtures of all tests of ``zero``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _in_one_thread() -> Iterator[None]:
    """Limit torch to one thread: with tensors as small as the oracles', more threads take ten times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
