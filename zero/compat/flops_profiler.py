"""``deepspeed.profiling.flops_profiler`` over ``torch.utils.flop_counter``, whose rules decide what is counted.

Counted are products of matrices, convolutions and attention, two operations for each multiply-accumulate; additions
of a bias and element-wise functions are not.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zcomm import ConfigError, StateError

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


class FlopsProfiler:
    """Counts the operations of forward passes between :meth:`start_profile` and :meth:`stop_profile` on this rank.

    Args:
        model: Is called, as a whole, by the passes that are counted.
        ds_engine: Not used.
        recompute_fwd_factor: Not used: backward is not counted.

    Raises:
        StateError: Something is asked before :meth:`start_profile` or after :meth:`end_profile`.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.started = model, False
        self._hooks: list[Any] = []
        self._stack: list[tuple[nn.Module, int]] = []  # modules in forward, and the count when they began

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Begin, from zero.

        Raises:
            ConfigError: There is an ``ignore_list``.
        """
        if ignore_list:
            raise ConfigError(f"ignore_list must be empty: modules cannot be left out, got {ignore_list}")
        self.stop_profile()
        self._flops, self._seconds, self.started = Counter[nn.Module](), 0.0, True
        for module in self.model.modules():
            self._hooks.append(module.register_forward_pre_hook(self._enter))
            self._hooks.append(module.register_forward_hook(self._exit, always_call=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._stack:
            self._begin_s, self._mode = self._now_s(), FlopCounterMode(display=False)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._stack.append((module, self._mode.get_total_flops()))

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack:  # the profile has begun inside
            return
        _, before = self._stack.pop()
        if all(outer is not module for outer, _ in self._stack):  # else it has called itself
            self._flops[module] += self._mode.get_total_flops() - before
        if not self._stack:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._seconds += self._now_s() - self._begin_s

    def _now_s(self) -> float:
        if any(param.is_cuda for param in self.model.parameters()):
            torch.cuda.synchronize()
        return time.perf_counter()

    def stop_profile(self) -> None:
        """Count no more; what was counted stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def end_profile(self) -> None:
        """Stop, and drop what was counted."""
        self.stop_profile()
        self.started = False

    def _check_started(self) -> None:
        if not self.started:
            raise StateError("call start_profile() first, and end_profile() last")

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the passes."""
        self._check_started()
        return number_to_string(self._flops[self.model]) if as_string else self._flops[self.model]

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of the passes."""
        macs = self.get_total_flops() // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the passes, which counting makes slower."""
        self._check_started()
        return f"{number_to_string(self._seconds)}s" if as_string else self._seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of the parameters, those of other ranks included."""
        self._check_started()
        return params_to_string(_numel(self.model)) if as_string else _numel(self.model)

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals and, if ``detailed``, each module down to ``module_depth`` (-1: all), or write them.

        ``top_modules`` is not used: modules are in the order of the model.
        """
        self._check_started()
        lines = [
            f"Flops profiler, step {profile_step}: {self.get_total_params(True)} parameters, forward: "
            f"{self.get_total_macs(True)}, {self.get_total_flops(True)}FLOPs, {self.get_total_duration(True)}"
        ]
        total = self._flops[self.model] or 1
        for name, module in self.model.named_modules() if detailed else ():
            depth = name.count(".") + 1 if name else 0
            if module_depth in (-1, depth) or depth < module_depth:
                lines.append(
                    f"{'  ' * depth}{name or 'model'} ({type(module).__name__}): {params_to_string(_numel(module))}, "
                    f"{macs_to_string(self._flops[module] // 2)}, {self._flops[module] / total:.2%}"
                )
        text = "\n".join(lines) + "\n"
        if output_file:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text)
        else:
            sys.stdout.write(text)


def _numel(module: nn.Module) -> int:
    return sum(int(getattr(param, "ds_numel", param.numel())) for param in module.parameters())


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Run ``model`` in evaluation and count: operations, multiply-accumulates and parameters, as text by default.

    ``model`` gets ones of ``input_shape``, or else ``args`` and ``kwargs``, ``warm_up`` times before it is counted,
    and is left in evaluation. ``mode`` is ``"forward"``, or ``"generate"`` for its ``generate()``. Other arguments are
    those of :meth:`FlopsProfiler.print_model_profile` and ``start_profile()``.

    Raises:
        ConfigError: Neither a shape nor arguments, another mode, or ``ignore_modules``.
    """
    call: Any = {"forward": model, "generate": getattr(model, "generate", None)}.get(mode)
    if call is None:
        raise ConfigError(f'mode must be "forward", or "generate" for a model that has generate(): got {mode!r}')
    if input_shape is not None:
        first = next(model.parameters(), torch.empty(0))
        args = [torch.ones(input_shape, dtype=first.dtype, device=first.device)]
    if not args and not kwargs:
        raise ConfigError("get_model_profile() needs input_shape, args or kwargs")
    model.eval()
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            call(*args, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        call(*args, **(kwargs or {}))
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    found = tuple(
        get(as_string) for get in (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
    )
    profiler.end_profile()
    return found
