"""The collectives as functions of tensors, for code under ``torch.compile``: registered operators, no graph break.

    full = zcomm.functional.all_gather_single(shard, topology, format="int8")

Each returns a new tensor and mutates nothing, and has the bits of the collective of the same name. A compiled function
keeps the name of its group, not the group: keep a Topology alive as long as functions that were traced with it. They
are not differentiated: pass ``tensor.detach()``. A :class:`zcomm.RandomKey` may be made inside the compiled function:
its numbers are arguments of the operator, so another step is no reason to compile again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import backend
from zcomm.all_gather import all_gather_single as gather_into
from zcomm.all_reduce import all_reduce as all_reduce_into
from zcomm.all_to_all import all_to_all_single as exchange_into
from zcomm.errors import FormatError, LayoutError
from zcomm.philox import RandomKey
from zcomm.reduce_scatter import reduce_scatter_single as reduce_into
from zcomm.route import Group, WireFormat
from zcomm.topology import Numbering, Topology

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
    key, world_size = _named(group)
    full: Tensor = _gather(_detached(input), key, world_size, _text(format), numbering, _words(random))
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
    key, world_size = _named(group)
    shard: Tensor = _reduce(
        _detached(input), op, key, world_size, _text(format), numbering, dtype or input.dtype, _words(random)
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
    key, _ = _named(group)
    total: Tensor = _all_reduce(_detached(input), op, key, _text(format), _words(random))
    return total


def all_to_all_single(
    input: Tensor, group: Group = None, *, format: WireFormat = "none", random: RandomKey | None = None
) -> Tensor:
    """Row j [n] of the result is what rank j had for this rank in ``input`` [world_size * n]; see
    :func:`zcomm.all_to_all_single`."""
    key, _ = _named(group)
    parts: Tensor = _all_to_all(_detached(input), key, _text(format), _words(random))
    return parts


def _detached(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        raise LayoutError("input must be without requires_grad (collectives are not differentiated): use .detach()")
    if tensor.layout is not torch.strided:
        raise LayoutError(f"input must be dense, got layout={tensor.layout}")
    return tensor


def _named(group: Group) -> tuple[str, int]:
    """The name of a group, and its number of ranks. An empty name is the default group."""
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


def _text(format: WireFormat) -> str:
    """A format, or both of a pair, as an operator's argument."""
    return SEPARATOR.join(str(part) for part in (format if isinstance(format, tuple) else (format,)))


def _format_of(text: str) -> str | tuple[str, str]:
    first, separator, second = text.partition(SEPARATOR)
    return (first, second) if separator else first


def _words(random: RandomKey | None) -> list[int] | None:
    """A key as an operator's argument."""
    if random is not None and not isinstance(random, RandomKey):
        raise FormatError(f"random must be a zcomm.RandomKey(seed, tensor, step): random={random!r}")
    return None if random is None else [random.seed, random.tensor, random.step]


def _key_of(words: Sequence[int] | None) -> RandomKey | None:
    return None if words is None else RandomKey(*words)


@torch.library.custom_op("zcomm::all_gather_single", mutates_args=())
def _gather(
    input: Tensor, key: str, world_size: int, format: str, numbering: str, random: Sequence[int] | None = None
) -> Tensor:
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
    input: Tensor,
    key: str,  # noqa: ARG001
    world_size: int,
    format: str,  # noqa: ARG001
    numbering: str,  # noqa: ARG001
    random: Sequence[int] | None = None,  # noqa: ARG001
) -> Tensor:
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
    op: str,  # noqa: ARG001
    key: str,  # noqa: ARG001
    world_size: int,
    format: str,  # noqa: ARG001
    numbering: str,  # noqa: ARG001
    dtype: torch.dtype,
    random: Sequence[int] | None = None,  # noqa: ARG001
) -> Tensor:
    return input.new_empty(input.numel() // world_size, dtype=dtype)


@torch.library.custom_op("zcomm::all_reduce", mutates_args=())
def _all_reduce(input: Tensor, op: str, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:
    output = input.clone(memory_format=torch.contiguous_format)
    all_reduce_into(output, op, _group_of(key), format=_format_of(format), random=_key_of(random))
    return output


@_all_reduce.register_fake
def _(input: Tensor, op: str, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:  # noqa: ARG001
    return input.new_empty(input.shape)


@torch.library.custom_op("zcomm::all_to_all_single", mutates_args=())
def _all_to_all(input: Tensor, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:
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
def _(input: Tensor, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:  # noqa: ARG001
    return input.new_empty(input.shape)
