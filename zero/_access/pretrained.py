"""``zero.load_pretrained``: load plain weights into a sharded model that is too large for one rank's memory.

    rank 0's file --one bucket's tensors--> the full bucket, broadcast to every rank --> shards and masters

The model was built under zero.Init, or is managed by a ZeroOptimizer; other parameters, and buffers, are broadcast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zcomm import LayoutError, StateError, Topology, control
from zero._access.gathered_parameters import GatheredParameters
from zero._ranks.rank_errors import on_every_rank, share_text
from zero._sharding.bucket import is_managed
from zero._storage.pretrained_reader import open_tensors


class Loaded(NamedTuple):
    """The names that did not match, the same on every rank."""

    missing_keys: list[str]
    """Parameters and buffers that only the model has."""
    unexpected_keys: list[str]
    """Tensors that only the source has."""


class Contents(NamedTuple):
    """The tensors that rank 0 loads, by the model's names; empty on the other ranks."""

    read: dict[str, Callable[[], Tensor]]
    unexpected: list[str]


@torch.no_grad()
def load_pretrained(
    model: nn.Module,
    source: Mapping[str, Tensor] | str | os.PathLike[str] | None,
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> Loaded:
    """Load rank 0's tensors into ``model``, whose parameters are sharded. Collective.

    Args:
        model: Built under :class:`zero.Init`, or managed by a ZeroOptimizer, whose masters are loaded, too.
        source: On rank 0 tensors by name, a file or a folder: see :func:`zero._storage.pretrained_reader.open_tensors`.
            Other ranks may pass None. Values are cast to the parameters' dtype.
        strict: Raise if a name is missing or unexpected. A tied parameter needs one of its names.
        rename: Maps a name in ``source`` to the model's; None skips the tensor.

    Returns:
        The names that are missing and those that are unexpected.

    Raises:
        LayoutError: A tensor has another shape; or, if ``strict``, names do not match. On every rank, before anything
            is changed.
        StateError: No parameter of ``model`` is sharded.

    Cost for each rank: memory for one bucket (with zero.Init, one module) and, on rank 0, for one tensor of ``source``;
    one all-gather and one broadcast of the model.
    """
    topology = _topology_of(model)
    tensors = dict(_tensors(model))
    contents = on_every_rank(lambda: _contents(model, source, rename, strict=strict, rank=topology.rank), topology)
    present = torch.tensor([name in contents.read for name in tensors])
    control.broadcast_(present, 0, topology)
    chosen = {name for name, is_there in zip(tensors, present.tolist(), strict=True) if is_there}
    for names in _by_bucket({name: tensor for name, tensor in tensors.items() if name in chosen}):
        _load(names, contents, topology)
    kept = {id(tensors[name]) for name in chosen}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in kept]
    return Loaded(missing, json.loads(share_text(json.dumps(contents.unexpected), 0, topology)))


def _load(group: dict[str, Tensor], contents: Contents, topology: Topology) -> None:
    params = {name: tensor for name, tensor in group.items() if is_managed(tensor)}

    def copy(tensors: Mapping[str, Tensor]) -> None:
        if topology.rank == 0:
            for name, tensor in tensors.items():
                tensor.copy_(contents.read[name]())

    if params:
        with GatheredParameters([p for p in params.values() if isinstance(p, nn.Parameter)], modifier_rank=0):
            copy(params)
    else:
        on_every_rank(lambda: copy(group), topology)
        for tensor in group.values():
            control.broadcast_(tensor, 0, topology)


def _topology_of(model: nn.Module) -> Topology:
    for param in model.parameters():
        if is_managed(param):
            topology: Topology = param.zero_shard.owner.topology  # type: ignore[attr-defined]
            return topology
    raise StateError(f"no parameter of this {type(model).__name__} is sharded: use model.load_state_dict()")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of ``model``, tied ones under every name."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _contents(
    model: nn.Module,
    source: Mapping[str, Tensor] | str | os.PathLike[str] | None,
    rename: Callable[[str], str | None] | None,
    *,
    strict: bool,
    rank: int,
) -> Contents:
    if rank != 0:
        return Contents({}, [])
    if source is None:
        raise LayoutError("rank 0 must pass tensors, a file or a folder: source=None")
    tensors = dict(_tensors(model))
    renamed = {(name if rename is None else rename(name)): read for name, read in open_tensors(source).items()}
    read = {name: how for name, how in renamed.items() if name is not None and name in tensors}
    unexpected = sorted(name for name in renamed if name is not None and name not in tensors)
    loaded = {id(tensors[name]) for name in read}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in loaded]
    if strict and (missing or unexpected):
        raise LayoutError(
            f"names must match: {len(missing)} missing, first {missing[:3]}; {len(unexpected)} unexpected, first "
            f"{unexpected[:3]}; rename= maps names, strict=False takes what matches"
        )
    for name, how in read.items():
        shape = how().shape
        if shape != tensors[name].shape:
            raise LayoutError(f"{name!r} must have shape {tuple(tensors[name].shape)}: got {tuple(shape)}")
    return Contents(read, unexpected)


def _by_bucket(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the sharded parameters, those of one bucket together; tensors that are not sharded are one group."""
    groups: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        shard = getattr(tensor, "zero_shard", None)
        groups.setdefault(0 if shard is None else id(shard.bucket), {})[name] = tensor
    yield from groups.values()
