"""Counts the operations of forward passes by module, over ``torch.utils.flop_counter``, which decides what is counted.

Counted are products of matrices, convolutions and attention, two operations for each multiply-accumulate; additions
of a bias and element-wise functions are not.
"""

from __future__ import annotations

import importlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float) -> str:
    """``num`` in the largest unit that fits, with two decimals."""
    units = next((name for name, size in UNITS.items() if num >= size), "")
    return f"{round(num / UNITS[units], 2):g} {units}"


def macs_to_string(macs: float) -> str:
    """As in ``2 GMACs``."""
    return f"{number_to_string(macs)}MACs"


def params_to_string(params_num: float) -> str:
    """As in ``2 B``: billions."""
    return number_to_string(params_num).replace("G", "B")


_started: set[int] = set()  # ids of the profiles that hold compiled code back; they may end in any order
_stance: list[Any] = []  # torch's, while there are any


def _force_eager(profile: ForwardProfile) -> None:
    if not _started:
        _stance.append(torch.compiler.set_stance("force_eager"))
    _started.add(id(profile))


def _release_eager(profile: ForwardProfile) -> None:
    if id(profile) in _started:
        _started.remove(id(profile))
        if not _started:
            _stance.pop().__exit__(None, None, None)


class ForwardProfile:
    """What the forwards of ``model`` between :meth:`start` and :meth:`stop` have computed on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seconds = model, 0.0
        """``seconds``: of the forwards; counting makes them longer."""
        self._flops = Counter[nn.Module]()
        self._hooks: list[Any] = []
        self._stack: list[tuple[nn.Module, int]] = []  # modules in forward, and the count when they began

    @property
    def flops(self) -> int:
        """Operations."""
        return self._flops[self.model]

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.flops // 2

    @property
    def params(self) -> int:
        """Elements of the parameters, those of other ranks included."""
        return _numel(self.model)

    def start(self) -> None:
        """Begin, from zero. Compiled code runs uncompiled until :meth:`stop`: its operations could not be counted."""
        self.stop()
        _force_eager(self)
        self._flops, self.seconds = Counter[nn.Module](), 0.0
        for module in self.model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter))
            self._hooks.append(module.register_forward_hook(self._exit, always_call=True))

    def stop(self) -> None:
        """Count no more; what was counted stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        while self._stack:  # within a forward, or in one that was interrupted, which calls no hooks
            self._leave()
        _release_eager(self)

    def _enter(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        if not self._stack:
            counter: Any = importlib.import_module("torch.utils.flop_counter")  # imports triton
            self._begin_s, self._mode = self._now_s(), counter.FlopCounterMode(display=False)
            self._mode.__enter__()
        self._stack.append((module, self._mode.get_total_flops()))

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._stack:  # else the profile has begun inside
            self._leave()

    def _leave(self) -> None:
        module, before = self._stack.pop()
        if all(outer is not module for outer, _ in self._stack):  # else it has called itself
            self._flops[module] += self._mode.get_total_flops() - before
        if not self._stack:
            self._mode.__exit__(None, None, None)
            self.seconds += self._now_s() - self._begin_s

    def _now_s(self) -> float:
        if any(param.is_cuda for param in self.model.parameters()):
            torch.cuda.synchronize()
        return time.perf_counter()

    def text(self, step: int, depth: int = -1, top: int = 1, *, detailed: bool = True) -> str:
        """The totals; then the ``top`` classes of modules at each depth by multiply-accumulates; then each module.

        Args:
            step: The step that is named.
            depth: How far down modules are shown; -1: all.
            top: How many classes.
            detailed: Whether modules are shown as well.
        """
        lines = [
            f"Flops profiler, step {step}: {params_to_string(self.params)} parameters, forward: "
            f"{macs_to_string(self.macs)}, {number_to_string(self.flops)}FLOPs, {number_to_string(self.seconds)}s"
        ]
        return "\n".join([*lines, *self._by_class(depth, top), *(self._by_module(depth) if detailed else ())]) + "\n"

    def _modules(self, deepest: int) -> Iterator[tuple[int, str, nn.Module]]:
        for name, module in self.model.named_modules():
            depth = name.count(".") + 1 if name else 0
            if deepest == -1 or depth <= deepest:
                yield depth, name or "model", module

    def _by_class(self, deepest: int, top: int) -> Iterator[str]:
        at: dict[int, Counter[str]] = defaultdict(Counter)
        for depth, _, module in self._modules(deepest):
            at[depth][type(module).__name__] += self._flops[module] // 2
        for depth, macs in at.items():
            shown = ", ".join(f"{name} {macs_to_string(count)}" for name, count in macs.most_common(top))
            yield f"depth {depth}, top {top}: {shown}"

    def _by_module(self, deepest: int) -> Iterator[str]:
        for depth, name, module in self._modules(deepest):
            yield (
                f"{'  ' * depth}{name} ({type(module).__name__}): {params_to_string(_numel(module))}, "
                f"{macs_to_string(self._flops[module] // 2)}, {self._flops[module] / (self.flops or 1):.2%}"
            )


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())
