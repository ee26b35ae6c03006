"""The modules of a model whose forward runs, and whether it still does.

torch calls the hooks that end a forward after an Exception, but not after KeyboardInterrupt or SystemExit. So each
forward is known by the frame that runs it: it has ended when that frame is on the stack of its thread no more. Whether
anything still refers to the frame says nothing: the traceback that a notebook keeps does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType

from torch import nn

from zcomm.stacks import stacks_of
from zero.saved_tensors import SavingHooks

__all__ = ["RunningForward", "calling_frame"]

HOOKING = frozenset({__name__, "zero.hooks", "torch._dynamo.eval_frame"})
"""Modules whose frames call hooks, or are hooks."""


def calling_frame() -> FrameType:
    """The innermost frame outside of hooks: the one that runs the module whose hook calls this."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in HOOKING and frame.f_back is not None:
        frame = frame.f_back
    return frame


@dataclass(slots=True, eq=False)
class RunningForward:
    """One module's forward."""

    module: nn.Module
    frame: FrameType
    saving: SavingHooks | None = None
    """The hooks on saved tensors that began with it."""
    thread: int = field(default_factory=get_ident)

    @property
    def is_here(self) -> bool:
        """Whether this thread runs it."""
        return self.thread == get_ident()

    def is_running(self) -> bool:
        """Whether its thread has not left it. Cost: a look at each frame between it and the present one."""
        if not self.is_here:
            return any(place.frame == id(self.frame) for place in stacks_of((self.thread,)).get(self.thread, []))
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None
