"""What all tests of ``zero`` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _in_one_thread() -> Iterator[None]:
    """Oracles in this process compute with tensors so small that threads wait for one another, ten times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
