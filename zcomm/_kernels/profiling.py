"""Named spans for ``torch.profiler``: quantize, each hop, decode. Free while no profiler runs.

    with torch.profiler.profile() as profile:
        step()
    profile.export_chrome_trace("trace.json")     open in https://ui.perfetto.dev

On CPU, two-hop collectives with ``async_op=True`` run in a thread; the profiler records other threads only with
``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from zcomm._base.pending import Pending, ends_within

_NOTHING = nullcontext()
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler records this thread."""


def span(*words: object) -> AbstractContextManager[Any]:
    """A context whose body a profiler shows as ``zcomm::`` and the words."""
    return record_function(_name(words)) if is_profiling() else _NOTHING


def _name(words: Iterable[object]) -> str:
    return "zcomm::" + " ".join(map(str, words))


class NamedWait:
    """``pending``, with its ``wait()`` shown as a span."""

    def __init__(self, pending: Pending, *words: object) -> None:
        self._pending, self._name = pending, _name(words)

    def wait(self) -> None:
        with record_function(self._name):
            self._pending.wait()

    def is_completed(self) -> bool:
        return self._pending.is_completed()

    def ends_within(self, seconds: float) -> bool:
        return ends_within(self._pending, seconds)
