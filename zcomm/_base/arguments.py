"""Type and range checks for arguments of public calls, made before a call does anything else.

Each function returns the argument converted to the type that the caller uses, or raises an error with the argument's
name and value. Tensors are checked by :func:`zcomm._transport.route.check_arguments`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm.errors import ConfigError, LayoutError, TopologyError, ZcommError

MAX_SHOWN = 100
"""Longest value in an error, in characters."""


def shown(value: object) -> str:
    """``value`` as text for an error: short, and without a tensor's elements."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def as_count(name: str, value: Any, *, at_least: int = 0, error: type[ZcommError] = LayoutError) -> int:
    """``value`` as an int of at least ``at_least``. NumPy integers are accepted; True and False are not."""
    if isinstance(value, Integral) and not isinstance(value, bool) and (number := int(value)) >= at_least:
        return number
    raise error(f"{name} must be an integer of at least {at_least}: {name}={shown(value)}")


def as_positive(name: str, value: Any) -> float:
    """``value`` as a finite float above 0."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer that is larger than every float
            if 0 < (number := float(value)) < math.inf:
                return number
    raise ConfigError(f"{name} must be a number above 0: {name}={shown(value)}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False: {name}={shown(value)}")


def check_choice(name: str, value: object, choices: tuple[str, ...], error: type[ZcommError]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise error(f"{name} must be {' or '.join(map(repr, choices))}: {name}={shown(value)}")


def as_device(name: str, value: Any) -> torch.device:
    """``value`` as a device with its index: ``"cuda"`` becomes the current GPU."""
    reason: Exception | None = None
    if isinstance(value, (str, torch.device)):
        try:
            return torch.empty(0, device=value).device
        except (RuntimeError, AssertionError) as error:  # there is no such device, or torch is built without it
            reason = error
    text = f"{name} must be a device, such as 'cpu' or 'cuda': {name}={shown(value)}"
    raise LayoutError(text if reason is None else f"{text}: {reason}") from reason


def as_floating_dtype(name: str, value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    raise LayoutError(f"{name} must be a floating-point torch.dtype: {name}={shown(value)}")


def check_process_group(group: object, wanted: str = "a ProcessGroup, or None for all ranks") -> None:
    """Raise TopologyError unless ``group`` is a ProcessGroup or None; ``wanted`` says in the error what it must be."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    got = type(group).__name__
    if hasattr(group, "get_group"):
        got += "; pass mesh.get_group(), or zcomm.Topology.from_mesh(mesh) for one of nodes and ranks"
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        got = "GroupMember.NON_GROUP_MEMBER, which new_group() returns on a rank that is not in the group"
    raise TopologyError(f"group must be {wanted}: got {got}")
