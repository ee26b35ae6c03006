"""Build the optimizer of a DeepSpeed JSON (``optimizer.type`` and ``params``) as a torch optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from zcomm import ConfigError
from zero._config import NotAvailableError
from zero._config.optimizer_options import OPTIMIZER_OPTIONS, equivalent_optimizer, unsupported_optimizer
from zero._config.parse import read_options
from zero._config.value_types import closest, nearest, shown
from zero._optim.cpu_optimizers import CPUAdagrad, CPUAdam, CPULion
from zero._optim.lamb import Lamb
from zero._optim.lion import Lion

KNOWN: dict[str, type[Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
} | {"lamb": Lamb, "lion": Lion}
"""torch's optimizers, Lamb and Lion, by their names in lower case."""
ON_HOST: dict[str, type[Optimizer]] = {"adam": CPUAdam, "adamw": CPUAdam, "adagrad": CPUAdagrad, "lion": CPULion}
"""zero's own optimizers for host memory."""


def build_optimizer(kind: str, params: dict[str, Any], parameters: Any, *, on_host: bool = False) -> Optimizer:
    """An optimizer over ``parameters`` (parameters, or groups of them).

    ``"Adam"`` is AdamW unless ``adam_w_mode`` is false, and its ``weight_decay`` is 0 if absent, as in DeepSpeed.

    Args:
        kind: The name of an optimizer of torch.optim, or Lion; upper or lower case.
        params: Its options.
        parameters: Parameters, or groups of them.
        on_host: Masters are in host memory: use zero's own CPU optimizer, if it has these options and ``torch_adam``
            is not true.

    Raises:
        ConfigError: Unknown optimizer or option (the error names the nearest one), or an invalid value.
        NotAvailableError: A DeepSpeed optimizer that is not elementwise.
    """
    chosen = read_options(OPTIMIZER_OPTIONS, params)
    name = kind.lower()
    _check_kind(kind)
    if on_host and name in ON_HOST and not chosen.get("torch_adam", False):
        own = ON_HOST[name]
        own_options = {key: value for key, value in chosen.items() if key not in ("torch_adam", "adam_w_mode")}
        if own_options.keys() <= set(inspect.signature(own).parameters) - {"adamw_mode"}:
            if own is CPUAdam:
                own_options["adamw_mode"] = bool(chosen.get("adam_w_mode", True)) or name == "adamw"
            return _built(own, parameters, own_options)
        if name == "lion":  # torch has none with other options
            _check_options(kind, own_options, list(inspect.signature(own).parameters)[1:])
    is_torchs = name in ("adam", "adamw") and bool(chosen.pop("torch_adam", False))
    if name in ("adam", "adamw"):
        decouples = chosen.pop("adam_w_mode", True) or name == "adamw"
        for option in ("bias_correction", "fp32_optimizer_states"):
            if not chosen.pop(option, True):
                raise NotAvailableError(
                    f"not available in this version: optimizer.params.{option}=False in torch's Adam. Use "
                    "zero_optimization.offload_optimizer.device='cpu', and options that zero.CPUAdam has"
                )
        name = "adamw" if decouples else "adam"
        chosen.setdefault("weight_decay", 0.0)
    if name not in KNOWN:
        raise ConfigError(f"optimizer.type must be an optimizer of torch.optim: got {shown(kind)}{_meant(kind)}")
    cls = KNOWN[name]
    _check_options(kind, chosen, list(inspect.signature(cls).parameters)[1:])
    built = _built(cls, parameters, chosen)
    if is_torchs:
        built.torch_adam = True  # type: ignore[attr-defined]  # read by zero._optim.host_adam
    return built


def _check_kind(kind: str) -> None:
    if needs := unsupported_optimizer(kind):
        raise NotAvailableError(
            f"not available in this version: optimizer.type={kind!r} (it needs {needs}). Use AdamW, Lion or SGD"
        )


def _check_options(kind: str, chosen: Iterable[str], known: list[str]) -> None:
    for option in chosen:
        if option == "max_grad_norm":
            raise ConfigError("optimizer.params has no 'max_grad_norm' (it is 'gradient_clipping', at the top level)")
        if option not in known:
            raise ConfigError(f"optimizer.params of {kind} has no {option!r}{nearest(option, known)}")


def _meant(kind: str) -> str:
    """`` (did you mean 'X'?)``: the optimizer that computes the same, or one with a similar name."""
    near = equivalent_optimizer(kind) or closest(kind.lower(), KNOWN)
    return f" (did you mean {(KNOWN[near].__name__ if near in KNOWN else near)!r}?)" if near else ""


def _built(cls: type[Optimizer], parameters: Any, options: dict[str, Any]) -> Optimizer:
    try:
        return cls(parameters, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"optimizer.params of {cls.__name__} are invalid: {error}; got {shown(options)}") from error
