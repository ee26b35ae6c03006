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
from zcomm._formats.formats import Format, get_format
from zcomm._formats.philox import RandomKey
from zcomm._residuals.residual import Residual
from zcomm._transport.backend_choice import BackendName
from zcomm._transport.route import Group, Route, WireFormat, check_group, find_route, route_over
from zcomm._transport.topology import Numbering, Topology

MAX_KEPT = 4096
"""A limit for programs whose tensors keep changing size: every size would be remembered."""

_KNOWN: dict[object, tuple[tuple[int, int, BackendName], Format | None, torch.Size | None, torch.Size | None]] = {}
"""By the facts of a call: ranks, hops and backend of its route; the format, None if each hop has its own; and what each
tensor is viewed as, None if it is used as it is."""


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
"""The route of a call, and its tensors as [world_size, n] and [n], or as the collective uses them on that route."""
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
    facts, plan = _facts_of(operation, group, tensors, options), None
    try:
        plan = _KNOWN.get(facts)
    except TypeError:  # an argument of a wrong type, which the checks name
        facts = None
    if plan is not None:
        if options.async_op is not True and options.async_op is not False:
            check_flag("async_op", options.async_op)
        a, b = tensors
        place, wire, of_all, of_rank = plan
        if wire is None or isinstance(group, Topology):
            route = find_route(operation, group, options.format, first=first, backend=options.backend)
        else:
            if group is not None:
                check_group(group)
            route = route_over(group, operation, wire, options.backend)
        if place == (route.all_ranks.size, len(route.hops), route.backend):
            return route, (a if of_all is None else _viewed(a, of_all), b if of_rank is None else _viewed(b, of_rank))
    route, views = check(*tensors, group, options)
    if facts is not None and not is_auto(options.format) and not is_auto(options.gather_format):
        if len(_KNOWN) >= MAX_KEPT:
            _KNOWN.clear()
        of_all, of_rank = (None if v.shape == t.shape else v.shape for t, v in zip(tensors, views, strict=True))
        wire = None if isinstance(options.format, tuple) else get_format(options.format)
        _KNOWN[facts] = (route.all_ranks.size, len(route.hops), route.backend), wire, of_all, of_rank
    return route, views


def _viewed(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Contiguous ``tensor`` as [n] or [world_size, n]; with the kind of view that exchanges make, too."""
    return tensor.as_strided(shape, (shape[-1], 1)[-len(shape) :], tensor.storage_offset())


def _facts_of(operation: str, group: object, tensors: Sequence[Any], options: CallOptions) -> object:
    """The key of a call; None if it must not be remembered, or if a tensor is not a plain one without gradient."""
    format, backend, _, random, numbering, op, gather_format, residual = options
    a, b = tensors
    if type(a) is not Tensor or type(b) is not Tensor or a.requires_grad or b.requires_grad:
        return None
    if random is not None or residual is not None or a.layout is not torch.strided or b.layout is not torch.strided:
        return None
    has_two_hops = isinstance(group, Topology) and group.has_two_hops
    asked = operation, has_two_hops, format, backend, numbering, op, gather_format
    if a.is_cpu and b.is_cpu and a.is_contiguous() and b.is_contiguous():
        return *asked, a.shape, b.shape, a.dtype, b.dtype
    return *asked, a.shape, b.shape, a.dtype, b.dtype, a.device, b.device, a.stride(), b.stride()
