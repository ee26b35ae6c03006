"""What ``zero`` logs within a block; unlike pytest's ``caplog`` it works on ranks, too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    """The messages of the block, as they come."""
    texts: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("zero")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
