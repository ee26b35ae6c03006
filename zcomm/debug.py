"""With ZCOMM_DEBUG=1, ranks compare their calls before each exchange: a mismatch is one error, the same on every rank.

Costs one small all-gather a call, and waits for everything that was started before. Without it nothing is compared
beforehand: a message of another kind is refused when it is decoded, and where even the lengths differ the backend ends
the process (gloo) or reports an error.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from zcomm import env
from zcomm.backend import Hop
from zcomm.control import texts_over
from zcomm.errors import LayoutError
from zcomm.formats import Format
from zcomm.work import WorkQueue

__all__ = ["compare_calls"]

PACKAGES = tuple(str(Path(__file__).parents[1] / name) for name in ("zcomm", "zero"))


def compare_calls(
    operation: str, hops: tuple[tuple[Hop, Format], ...], whole: Hop, queue: WorkQueue | None, **facts: object
) -> None:
    """Raise LayoutError on every rank of ``whole`` unless all of them call ``operation`` with equal ``facts``."""
    if whole.group is None or not env.is_set("ZCOMM_DEBUG"):
        return
    if queue is not None:
        queue.drain()
    formats = " -> ".join(str(wire) for _, wire in hops)
    call = f"{operation}(" + ", ".join(f"{key}={value}" for key, value in {**facts, "format": formats}.items()) + ")"
    calls = texts_over(whole, f"{call}\n{_caller()}")
    if len({text.partition("\n")[0] for text in calls}) > 1:
        lines = [f"  rank {rank}: {text.replace(chr(10), ' at ')}" for rank, text in enumerate(calls)]
        raise LayoutError("the ranks' calls must be equal:\n" + "\n".join(lines))


def _caller() -> str:
    """The innermost line outside of zcomm and zero."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(PACKAGES):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown line"
