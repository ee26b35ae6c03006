"""Clone an optimizer over other tensors, in its state before the first step.

Some constructors create state (torch's Adagrad does). So state alone does not prove that an optimizer was stepped;
state that its constructor would not create does.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import ConfigError, StateError
from zero._optim.several import Several, name_of, optimizers_of


def check_is_new(optimizer: Optimizer) -> None:
    """Refuse an instance that has been stepped: its state is not what its constructor makes.

    Raises:
        StateError: It has been stepped, or this cannot be checked: it cannot be built from its groups alone.

    Cost: the state of one parameter at a time, if there is any.
    """
    if not optimizer.state:
        return
    name, reason = type(optimizer).__name__, "its constructor makes another one"
    try:
        is_new = all(
            _is_same(
                optimizer.state.get(param, {}), new_state(optimizer, [{**group, "params": [param]}]).get(param, {})
            )
            for group in optimizer.param_groups
            for param in group["params"]
        )
    except Exception as error:
        is_new, reason = False, f"it cannot be checked that no step made it: building another {name} raised {error!r}"
    if not is_new:
        raise StateError(
            f"{name} has state for {len(optimizer.state)} parameters already, and {reason}. Construct ZeroOptimizer "
            "before the first step, or restore with ZeroOptimizer.load_state_dict"
        )


def new_state(optimizer: Optimizer, groups: list[dict[str, Any]]) -> defaultdict[Tensor, Any]:
    """The state that a new optimizer of this class and with these defaults has over ``groups``, before any step."""
    cls: Callable[..., Optimizer] = type(optimizer)
    known = inspect.signature(cls).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return cls([_settings(group, group["params"]) for group in groups], **options).state


def _is_same(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return state.keys() == other.keys() and all(_are_equal(value, other[name]) for name, value in state.items())


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return not (isinstance(value, Tensor) or isinstance(other, Tensor)) and bool(value == other)


def _settings(group: Mapping[str, Any], params: list[Tensor]) -> dict[str, Any]:
    return {**{name: value for name, value in group.items() if name != "param_names"}, "params": params}


def start_training(optimizer: Optimizer) -> None:
    """Put an optimizer that has modes, such as a schedule-free one, into that in which it can be stepped."""
    if callable(train := getattr(optimizer, "train", None)):
        train()


def over_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer with the same attributes, without state, over ``groups``."""
    other: Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.__dict__.pop("step", None)  # a scheduler's wrapper of it steps the original
    other.param_groups, other.state = groups, defaultdict(dict)
    if isinstance(other, Several):
        other.optimizers = [over_groups(one, one.param_groups) for one in other.optimizers]
        other.share()
    return other


def copy_of(optimizer: Optimizer, groups: list[dict[str, Any]], params: list[list[Tensor]]) -> Optimizer:
    """An optimizer with the same settings over ``params`` in ``groups``, before its first step."""
    known: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    new: Optimizer = object.__new__(type(optimizer))
    known[id(optimizer)] = new
    of_new = [_copied(_settings(group, []), known) for group in groups]
    for group, own in zip(of_new, params, strict=True):
        group["params"] = own
    known[id(optimizer.param_groups)] = of_new
    known[id(optimizer.state)] = new_state(optimizer, of_new) if optimizer.state else defaultdict(dict)
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise TypeError(f"it steps another optimizer, {name!r}, whose state would be missing in checkpoints")
        if name != "step":  # a scheduler's wrapper of it steps the original
            is_hooks = name.startswith("_optimizer_")
            new.__dict__[name] = value if is_hooks else _copied(value, known)
    return new


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """A copy of a value that steps may change in place; ``known``: copies by the id of the original."""
    if id(value) in known:
        return known[id(value)]
    is_changed = isinstance(value, (dict, list, set, deque, Tensor, random.Random, torch.Generator))
    try:
        return copy.deepcopy(value, known) if is_changed else value
    except Exception:
        return value


ENCODED = (128, 128)
"""The shape of a tensor of which an optimizer with 8-bit states keeps them in 8 bits."""


def moments_of(inner: Optimizer, dtype: torch.dtype, whole_groups: Sequence[bool]) -> dict[str, torch.dtype]:
    """The dtypes of the elementwise states that ``inner`` keeps of parameters in ``dtype``, found by a trial step.

    ``whole_groups``: which of its parameter groups are updated as whole tensors.

    Raises:
        ConfigError: ``inner`` holds states before its first step, or those of large tensors in another form.
    """
    found: dict[str, torch.dtype] = {}
    if inner.state:
        raise ConfigError(
            f"{name_of(inner)} makes its states before the first step, in memory: use zero's own optimizer of "
            "that name, or offload_optimizer.device 'cpu'"
        )
    owners = [(one, group) for one in optimizers_of(inner) for group in one.param_groups]
    for (one, group), is_whole in zip(owners, whole_groups, strict=True):
        for shape in ((3, 3), (3,), ENCODED) if is_whole else ((3,),):
            with suppress(Exception) if len(shape) == 1 and is_whole else nullcontext():  # Muon takes matrices
                param = torch.ones(shape, dtype=dtype)
                moments = _moments_of(copy_of(one, [group], [[param]]), param)
                for name, value in moments.items():
                    if type(value) is not Tensor or found.setdefault(name, value.dtype) != value.dtype:
                        raise ConfigError(
                            f"{name_of(one)} keeps {name!r} of large tensors in fewer bits, and files have room for "
                            "one dtype: use offload_optimizer.device 'cpu' or 'none'"
                        )
    return found


def _moments_of(trial: Optimizer, param: Tensor) -> dict[str, Tensor]:
    start_training(trial)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        with torch.compiler.set_stance("force_eager"):
            trial.step()
    states = {name: value for name, value in trial.state[param].items() if isinstance(value, Tensor)}
    return {name: value for name, value in states.items() if value.ndim and value.shape == param.shape}
