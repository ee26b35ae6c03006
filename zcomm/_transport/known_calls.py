"""Calls whose arguments were checked before: an equal one, on tensors of the same sizes, goes straight to the wire.

    first call   types, formats, sizes, dtypes checked --> remembered: how each tensor is viewed
    equal call   looked up by the same facts           --> views, route, exchange

What is not among the facts is checked in every call: memory that overlaps, random numbers, whether the group is open.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_KEPT = 4096
"""Programs with tensors of ever new sizes would else remember all of them."""


class KnownCall(NamedTuple):
    """What the checks of a call have found."""

    world_size: int
    shapes: tuple[torch.Size | None, ...]
    """By tensor, what it is viewed as; None: it is used as it is."""

    def views(self, *tensors: Tensor) -> list[Tensor]:
        """``tensors``, as the call uses them."""
        return [t if shape is None else t.view(shape) for t, shape in zip(tensors, self.shapes, strict=True)]


_KNOWN: dict[Hashable, KnownCall] = {}


def facts_of(*arguments: Hashable, tensors: Sequence[Tensor]) -> Hashable:
    """The key of a call; None if a tensor is none, or would be differentiated."""
    facts = []
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.requires_grad:
            return None
        facts.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout))
    return arguments, *facts


def known_call(facts: Hashable) -> KnownCall | None:
    """What the checks have found, if a call with these facts has passed them."""
    try:
        return _KNOWN.get(facts)
    except TypeError:  # an argument of a wrong type, which the checks name
        return None


def remember(facts: Hashable, world_size: int, given: Sequence[Tensor], used: Sequence[Tensor]) -> None:
    """The call with these facts has passed all checks; its tensors ``given`` are viewed as ``used``."""
    if facts is None:
        return
    if len(_KNOWN) >= MAX_KEPT:
        _KNOWN.clear()
    shapes = tuple(None if b.shape == a.shape else b.shape for a, b in zip(given, used, strict=True))
    _KNOWN[facts] = KnownCall(world_size, shapes)
