"""Skips the argument checks of a call if an equal one, on tensors of the same sizes, has passed them.

    first call   types, formats, sizes and dtypes checked  --> remembered: how each tensor is viewed
    equal call   looked up by the same facts               --> route, views, exchange

What is not among the facts is checked in every call: memory that overlaps, random numbers, whether the group is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm._base.arguments import check_flag
from zcomm._collectives.auto_format import First, is_auto
from zcomm._formats.philox import RandomKey
from zcomm._residuals.residual import Residual
from zcomm._transport.backend_choice import BackendName
from zcomm._transport.route import Group, Route, WireFormat, find_route
from zcomm._transport.topology import Numbering

MAX_KEPT = 4096
"""A limit for programs whose tensors keep changing size: every size would be remembered."""

_KNOWN: dict[object, tuple[torch.Size | None, torch.Size | None]] = {}
"""By the facts of a call, what each tensor is viewed as; None: it is used as it is."""


class CallOptions(NamedTuple):
    """The arguments of a collective besides its tensors and its group."""

    format: WireFormat
    backend: BackendName | None
    async_op: bool
    random: RandomKey | None
    numbering: Numbering = "rank"
    op: Any = None
    gather_format: WireFormat | None = None
    residual: Residual | None = None


Checked = tuple[Route, tuple[Tensor, Tensor]]
"""The route of a call, and its tensors as [world_size, n] and [n], or as the collective uses them."""
Check = Callable[[Any, Any, Group, CallOptions], Checked]


def planned(
    operation: str, group: Group, tensors: tuple[Any, Any], options: CallOptions, check: Check, *, first: First
) -> Checked:
    """What ``check`` finds for this call, without calling it again if an equal call has passed it.

    Args:
        operation: The name of the collective.
        group: Of the call.
        tensors: Its tensors, the one of all ranks first.
        options: Its other arguments.
        check: Checks all arguments.
        first: The hop that is first if there are two.
    """
    facts, shapes, async_op = _facts_of(operation, tensors, options), None, options.async_op
    try:
        shapes = _KNOWN.get(facts)
    except TypeError:  # an argument of a wrong type, which the checks name
        facts = None
    if shapes is not None:
        if async_op is not True and async_op is not False:
            check_flag("async_op", async_op)
        a, b = tensors
        of_all, of_rank = shapes
        route = find_route(operation, group, options.format, first=first, backend=options.backend)
        if (a.shape if of_all is None else of_all)[0] == route.world_size:
            return route, (a if of_all is None else a.view(of_all), b if of_rank is None else b.view(of_rank))
    route, views = check(*tensors, group, options)
    if facts is not None and views[0].shape[0] == route.world_size:
        if len(_KNOWN) >= MAX_KEPT:
            _KNOWN.clear()
        of_all, of_rank = (None if v.shape == t.shape else v.shape for t, v in zip(tensors, views, strict=True))
        _KNOWN[facts] = of_all, of_rank
    return route, views


def _facts_of(operation: str, tensors: Sequence[Any], options: CallOptions) -> object:
    """The key of a call; None if it must not be remembered, or if a tensor is not a plain one without gradient."""
    format, backend, _, random, numbering, op, gather_format, residual = options
    a, b = tensors
    if type(a) is not Tensor or type(b) is not Tensor or a.requires_grad or b.requires_grad:
        return None
    if random is not None or residual is not None or is_auto(format) or is_auto(gather_format):
        return None
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return None
    facts = operation, format, backend, numbering, op, gather_format, a.shape, b.shape, a.dtype, b.dtype
    if a.is_cpu and b.is_cpu and a.is_contiguous() and b.is_contiguous():
        return facts
    return *facts, a.device, b.device, a.stride(), b.stride()
