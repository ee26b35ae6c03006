"""The update of one step, to be run later than it was decided: with that step's gradients, factor and settings.

The inner optimizer is copied, but for its memory: the copy steps views of the same masters with the same moments, while
schedulers change the learning rates, and a backward the gradients, of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.cpu_optimizer import CPUOptimizer
from zero.masters import MasterPiece
from zero.optimizer_copies import over_groups
from zero.steps import step_pieces
from zero.tiers.file_update import FileUpdate
from zero.tiers.host_gradient import HostGradient
from zero.tiers.state_files import StateFiles

__all__ = ["LateStep"]


class LateStep:
    """What :class:`zero.delayed.DelayedUpdate` runs.

    Args:
        inner: The optimizer.
        pieces: What is stepped: all in memory, or all in ``files``. Their masters have their gradients.
        factor: What the gradients are multiplied by, if the optimizer is one of zero's own.
        gradients: What is cleared once the gradients are not needed any more.
        files: Where masters and moments rest; None: in memory.
        fail: Called with an error that leaves some masters updated and others not.
    """

    def __init__(
        self,
        inner: Optimizer,
        pieces: Sequence[MasterPiece],
        factor: float,
        gradients: Sequence[HostGradient],
        files: StateFiles | None,
        fail: Callable[[Exception], None],
    ) -> None:
        self._inner, self._factor, self._gradients, self._fail = inner, factor, gradients, fail
        self._leaves = [
            [(param, param.detach()) for param in group["params"]] for group in inner.param_groups
        ]  # the same memory, and gradients of their own; parameters without a gradient keep their places
        leaf_of = {id(param): leaf for pairs in self._leaves for param, leaf in pairs}
        self._pieces = [replace(piece, master=leaf_of[id(piece.master)]) for piece in pieces]
        for piece, copied in zip(pieces, self._pieces, strict=True):
            copied.master.grad_dtype = None
            copied.master.grad = piece.master.grad
        self._settings = [_settings(group) for group in inner.param_groups]
        self._copy = self._copied()
        self._files = None if files is None else FileUpdate(files, None, self._copy, self._pieces)

    def _copied(self) -> Optimizer:
        inner, each = self._inner, zip(self._settings, self._leaves, strict=True)
        copied = over_groups(inner, [{**settings, "params": [leaf for _, leaf in pairs]} for settings, pairs in each])
        for pairs in self._leaves:
            for param, leaf in pairs:
                if param in inner.state:
                    copied.state[leaf] = inner.state[param]
        return copied

    @torch.no_grad()
    def run(self) -> None:
        """Update masters and moments, and write the new parameters to ``bucket.staged``; in the thread."""
        for group, settings in zip(self._copy.param_groups, self._settings, strict=True):
            group.update(settings)  # it may run again
        if self._files is not None:
            self._files.run(self._factor, all_buckets=True)
            return
        step_pieces(self._copy, self._pieces, self._factor)
        if not isinstance(self._copy, CPUOptimizer):
            for bucket in dict.fromkeys(piece.bucket for piece in self._pieces):
                bucket.update_shard()

    def commit(self) -> None:
        """It has run on every rank: the original gets the states, and the settings that the optimizer has changed."""
        if self._files is not None:
            self._files.commit()
        for pairs in self._leaves:
            for param, leaf in pairs:
                if leaf in self._copy.state:
                    self._inner.state[param] = self._copy.state[leaf]
        everything = zip(self._inner.param_groups, self._copy.param_groups, self._settings, strict=True)
        for group, after, before in everything:
            group.update({name: after[name] for name in before if _differ(after[name], before[name])})
        self.drop()

    def undo(self, error: Exception) -> bool:
        """It has failed on some rank. True if the files hold what was before, so that it can run again."""
        if self._files is not None:
            self._files.forget()
            if self._files.keeps_previous:
                return True
        self._fail(error)
        return False

    def drop(self) -> None:
        """It will not run again: let go of the gradients."""
        for gradient in self._gradients:
            gradient.clear()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Everything but the parameters; learning rates in tensors are copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is not b
    return bool(a != b)
