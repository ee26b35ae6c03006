"""Functional collectives for ``torch.compile``: registered operators without graph breaks.

    full = zcomm.functional.all_gather_single(shard, topology, format="int8")

Each function returns a new tensor, mutates nothing, and gives the bits of the collective of the same name. It is not
differentiable: pass ``tensor.detach()``. A compiled function holds the name of its group, not the group itself: keep a
Topology alive as long as the functions that were traced with it. A :class:`zcomm.RandomKey` may be created inside the
compiled function; its numbers are arguments of the operator, so a new step does not recompile it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zcomm._collectives.all_gather import all_gather_single as gather_into
from zcomm._collectives.all_reduce import all_reduce as all_reduce_into
from zcomm._collectives.all_to_all import all_to_all_single as exchange_into
from zcomm._collectives.auto_format import AUTO
from zcomm._collectives.encoder import check_random
from zcomm._collectives.reduce_scatter import reduce_scatter_single as reduce_into
from zcomm._formats.formats import codec_for
from zcomm._formats.philox import RandomKey
from zcomm._transport import backend
from zcomm._transport.route import Group, WireFormat, check_arguments, check_numbering, divisor_of, find_route
from zcomm._transport.topology import Numbering, Topology
from zcomm.errors import FormatError, LayoutError

__all__ = ["all_gather_single", "all_reduce", "all_to_all_single", "reduce_scatter_single"]

SEPARATOR = "|"


def all_gather_single(
    input: Tensor,
    group: Group = None,
    *,
    format: WireFormat = "none",
    numbering: Numbering = "rank",
    random: RandomKey | None = None,
) -> Tensor:
    """Every rank's ``input`` [n] as one tensor [world_size * n] of the same dtype; see
    :func:`zcomm.all_gather_single`."""
    input = _checked_input(input, group, format, numbering=numbering)
    key, world_size = _group_key(group)
    full: Tensor = _gather(input, key, world_size, _format_text(format), numbering, _key_words(random))
    return full


def reduce_scatter_single(
    input: Tensor,
    op: str = "sum",
    group: Group = None,
    *,
    format: WireFormat = "none",
    numbering: Numbering = "rank",
    dtype: torch.dtype | None = None,
    random: RandomKey | None = None,
) -> Tensor:
    """This rank's shard [n] of the sum or mean of ``input`` [world_size * n], in ``dtype`` (default: its own); see
    :func:`zcomm.reduce_scatter_single`."""
    input = _checked_input(input, group, format, op=op, numbering=numbering, dtype=dtype)
    key, world_size = _group_key(group)
    dtype = dtype or input.dtype
    shard: Tensor = _reduce(
        input, _op_name(op), key, world_size, _format_text(format), numbering, dtype, _key_words(random)
    )
    return shard


def all_reduce(
    input: Tensor,
    op: str = "sum",
    group: Group = None,
    *,
    format: WireFormat = "none",
    random: RandomKey | None = None,
) -> Tensor:
    """The sum or mean of ``input`` [n] over all ranks; see :func:`zcomm.all_reduce`."""
    input = _checked_input(input, group, format, op=op)
    total: Tensor = _all_reduce(input, _op_name(op), _group_key(group)[0], _format_text(format), _key_words(random))
    return total


def all_to_all_single(
    input: Tensor, group: Group = None, *, format: WireFormat = "none", random: RandomKey | None = None
) -> Tensor:
    """Row j [n] of the result is what rank j had for this rank in ``input`` [world_size * n]; see
    :func:`zcomm.all_to_all_single`."""
    input = _checked_input(input, group, format)
    parts: Tensor = _all_to_all(input, _group_key(group)[0], _format_text(format), _key_words(random))
    return parts


def _checked_input(
    tensor: Tensor,
    group: Group,
    format: WireFormat,
    *,
    op: Any = "sum",
    numbering: Numbering = "rank",
    dtype: Any = None,
) -> Tensor:
    """Check what an operator cannot, since it only receives text and plain tensors; return ``tensor`` detached."""
    if torch.compiler.is_compiling():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise LayoutError("input must be without requires_grad (collectives are not differentiated): use .detach()")
        return tensor.detach()
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise LayoutError(f"dtype must be a torch.dtype: dtype={dtype!r}")
    divisor_of(op, 1)
    if isinstance(tensor, FakeTensor) or (isinstance(tensor, Tensor) and tensor.device.type == "meta"):
        check_arguments(group, format, numbering=numbering)
        return tensor  # it has no memory: the operator's fake implementation takes it
    (tensor,) = check_arguments(group, format, numbering=numbering, input=tensor)
    return tensor


def _check_call(
    input: Tensor,
    key: str,
    format: str,
    *,
    op: str = "sum",
    numbering: str = "rank",
    random: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    divides: bool = False,
) -> int:
    """The checks that an operator and its fake implementation share; returns the number of ranks.

    A size that is known only at run time is checked by the operator.
    """
    group, wire = _group_of(key), _format_of(format)
    check_numbering(numbering)
    route = find_route("functional", group, "none" if wire == AUTO else wire, first="intra")
    divisor_of(op, route.world_size)
    if input.ndim != 1:
        raise LayoutError(f"input must be flat, got shape={tuple(input.shape)}")
    for name, one in (("input", input.dtype), ("the result", dtype or input.dtype)):
        if not one.is_floating_point:
            raise LayoutError(f"{name} must be real floating point, got dtype={one}")
    for _, hop_format in route.hops:
        codec_for(hop_format, input.dtype)
    is_traced = random is not None and any(isinstance(word, torch.SymInt) for word in random)
    check_random(RandomKey(0, 0, 0) if is_traced else _key_of(random), "none" if wire == AUTO else wire)
    numel = input.numel()
    is_known = not isinstance(numel, torch.SymInt) or numel.node.has_hint()
    if divides and is_known and numel % route.world_size:
        raise LayoutError(f"input must divide over the ranks: numel={numel}, world_size={route.world_size}")
    return route.world_size


def _op_name(op: Any) -> str:
    """The reduction as text, for the operator's schema."""
    return op if isinstance(op, str) else "avg" if divisor_of(op, 2) == 2 else "sum"


def _group_key(group: Group) -> tuple[str, int]:
    """The name of a group, and its number of ranks. The default group's name is empty."""
    if isinstance(group, Topology):
        return group.key, group.world_size
    if group is None:
        return "", dist.get_world_size() if dist.is_initialized() else 1
    return f"group:{group.group_name}", group.size()


def _group_of(key: str) -> Any:
    if not key:
        return None
    kind, _, name = key.partition(":")
    return backend.group_named(name) if kind == "group" else Topology.of_key(key)


def _format_text(format: WireFormat) -> str:
    """A format, or both formats of a pair, as text for the operator's schema."""
    return SEPARATOR.join(str(part) for part in (format if isinstance(format, tuple) else (format,)))


def _format_of(text: str) -> str | tuple[str, str]:
    first, separator, second = text.partition(SEPARATOR)
    return (first, second) if separator else first


def _key_words(random: RandomKey | None) -> list[int] | None:
    """A key as integers, for the operator's schema."""
    if random is not None and not isinstance(random, RandomKey):
        raise FormatError(f"random must be a zcomm.RandomKey(seed, tensor, step): random={random!r}")
    return None if random is None else [random.seed, random.tensor, random.step]


def _key_of(words: Sequence[int] | None) -> RandomKey | None:
    return None if words is None else RandomKey(*words)


@torch.library.custom_op("zcomm::all_gather_single", mutates_args=())
def _gather(
    input: Tensor, key: str, world_size: int, format: str, numbering: str, random: Sequence[int] | None = None
) -> Tensor:
    _check_call(input, key, format, numbering=numbering, random=random)
    output = input.new_empty(world_size * input.numel())
    gather_into(
        output,
        input.contiguous(),
        _group_of(key),
        format=_format_of(format),
        numbering=numbering,  # type: ignore[arg-type]
        random=_key_of(random),
    )
    return output


@_gather.register_fake
def _(
    input: Tensor, key: str, world_size: int, format: str, numbering: str, random: Sequence[int] | None = None
) -> Tensor:
    _check_call(input, key, format, numbering=numbering, random=random)
    return input.new_empty(world_size * input.numel())


@torch.library.custom_op("zcomm::reduce_scatter_single", mutates_args=())
def _reduce(
    input: Tensor,
    op: str,
    key: str,
    world_size: int,
    format: str,
    numbering: str,
    dtype: torch.dtype,
    random: Sequence[int] | None = None,
) -> Tensor:
    _check_call(input, key, format, op=op, numbering=numbering, random=random, dtype=dtype, divides=True)
    output = input.new_empty(input.numel() // world_size, dtype=dtype)
    reduce_into(
        output,
        input.contiguous(),
        op,
        group=_group_of(key),
        format=_format_of(format),
        numbering=numbering,  # type: ignore[arg-type]
        random=_key_of(random),
    )
    return output


@_reduce.register_fake
def _(
    input: Tensor,
    op: str,
    key: str,
    world_size: int,
    format: str,
    numbering: str,
    dtype: torch.dtype,
    random: Sequence[int] | None = None,
) -> Tensor:
    _check_call(input, key, format, op=op, numbering=numbering, random=random, dtype=dtype, divides=True)
    return input.new_empty(input.numel() // world_size, dtype=dtype)


@torch.library.custom_op("zcomm::all_reduce", mutates_args=())
def _all_reduce(input: Tensor, op: str, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:
    _check_call(input, key, format, op=op, random=random)
    output = input.clone(memory_format=torch.contiguous_format)
    all_reduce_into(output, op, _group_of(key), format=_format_of(format), random=_key_of(random))
    return output


@_all_reduce.register_fake
def _(input: Tensor, op: str, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:
    _check_call(input, key, format, op=op, random=random)
    return input.new_empty(input.shape)


@torch.library.custom_op("zcomm::all_to_all_single", mutates_args=())
def _all_to_all(input: Tensor, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:
    _check_call(input, key, format, random=random, divides=True)
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    exchange_into(
        output,
        input.contiguous(),
        group=_group_of(key),
        format=_format_of(format),
        random=_key_of(random),
    )
    return output


@_all_to_all.register_fake
def _(input: Tensor, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:
    _check_call(input, key, format, random=random, divides=True)
    return input.new_empty(input.shape)
