"""``deepspeed.profiling.flops_profiler`` over :class:`zero._runtime.forward_profile.ForwardProfile`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcomm import ConfigError, StateError
from zero._runtime.forward_profile import ForwardProfile, macs_to_string, number_to_string, params_to_string

__all__ = ["FlopsProfiler", "get_model_profile", "macs_to_string", "number_to_string", "params_to_string"]


class FlopsProfiler(ForwardProfile):
    """Counts the operations of forward passes between :meth:`start_profile` and :meth:`stop_profile` on this rank.

    Args:
        model: Is called, as a whole, by the passes that are counted.
        ds_engine: Not used.
        recompute_fwd_factor: Not used: backward is not counted.

    Raises:
        StateError: Something is asked before :meth:`start_profile` or after :meth:`end_profile`.
    """

    started = False

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        super().__init__(model)

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Begin, from zero.

        Raises:
            ConfigError: There is an ``ignore_list``.
        """
        if ignore_list:
            raise ConfigError(f"ignore_list must be empty: modules cannot be left out, got {ignore_list}")
        self.start()
        self.started = True

    def stop_profile(self) -> None:
        """Count no more; what was counted stays."""
        self.stop()

    def end_profile(self) -> None:
        """Stop, and drop what was counted."""
        self.stop()
        self.started = False

    def _check_started(self) -> None:
        if not self.started:
            raise StateError("call start_profile() first, and end_profile() last")

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Operations of the passes."""
        self._check_started()
        return number_to_string(self.flops) if as_string else self.flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of the passes."""
        self._check_started()
        return macs_to_string(self.macs) if as_string else self.macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the passes, which counting makes slower."""
        self._check_started()
        return f"{number_to_string(self.seconds)}s" if as_string else self.seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of the parameters, those of other ranks included."""
        self._check_started()
        return params_to_string(self.params) if as_string else self.params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print, or write, what :meth:`zero._runtime.forward_profile.ForwardProfile.text` says."""
        self._check_started()
        text = self.text(profile_step, module_depth, top_modules, detailed=detailed)
        if output_file:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text)
        else:
            sys.stdout.write(text)


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
