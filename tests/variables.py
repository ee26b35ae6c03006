"""Environment variables of the library that are set within a block, although each is read once per process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zcomm._base import env


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set them within the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        env.forget()
        try:
            yield
        finally:
            patch.undo()
            env.forget()
