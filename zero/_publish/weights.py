"""The weights that a rank publishes: pieces of tensors, under the names of the model's state dict.

ZeroOptimizer    this rank's shards, rounded to the parameters' dtype; at stage 0 every rank takes some tensors
nn.Module        everything; only one process publishes
both             persistent buffers, those of the first rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zcomm import ConfigError, LayoutError, StateError, Topology
from zero._checkpoint.flat_parts import named_buffers, without_wrappers
from zero._publish.manifest import Described, TensorPiece
from zero._sharding.bucket import Bucket, is_managed
from zero._storage.safetensors_file import CODES, is_storable
from zero.optimizer import ZeroOptimizer


class PublishedWeights(NamedTuple):
    """What this rank publishes."""

    model: nn.Module
    tensors: Described
    """All tensors of the model. The same on every rank."""
    pieces: list[TensorPiece]
    """Those of this rank."""
    values: Callable[[], Iterator[Tensor]]
    """Yields the values of the pieces, flat, on any device and in any dtype; each is valid until the next."""
    topology: Topology | None
    """The ranks; None: this process alone."""
    dtype: torch.dtype | None
    """Of the parameters, if they have one."""
    is_closed: Callable[[], bool] = lambda: False
    """Whether the ZeroOptimizer that managed them is closed."""


def topology_of(source: Any) -> Topology | None:
    """The ranks that publish ``source`` together; None: this process alone."""
    optimizer = getattr(source, "optimizer", source)
    return optimizer.topology if isinstance(optimizer, ZeroOptimizer) else None


def weights_of(source: Any, dtype: torch.dtype | None) -> PublishedWeights:
    """The weights of a ZeroOptimizer, of an Engine, or of a model in one process. Not collective.

    Raises:
        ConfigError: ``dtype`` is no floating-point dtype that a file can have.
        LayoutError: A tensor cannot be stored.
        StateError: The model is managed by a ZeroOptimizer that was not passed, or split over model-parallel ranks.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in CODES):
        raise ConfigError(
            f"weights are published in a floating-point torch.dtype such as torch.bfloat16: got {dtype!r}"
        )
    optimizer = getattr(source, "optimizer", source)
    if isinstance(optimizer, ZeroOptimizer):
        return _of_optimizer(optimizer, dtype)
    if not isinstance(source, nn.Module):
        raise LayoutError(f"a ZeroOptimizer, an Engine or an nn.Module can be published: got {type(source).__name__}")
    return _of_module(source, dtype)


def _cast(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def _described_buffers(model: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    buffers = named_buffers(model)
    for name, buffer in buffers.items():
        _check(name, buffer)
    return {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}


def _check(name: str, tensor: Tensor) -> None:
    if not is_storable(tensor) or tensor.dtype is torch.complex128:
        raise LayoutError(
            f"{name!r} is a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}, which "
            "cannot be published: convert it, or register it with persistent=False"
        )


def _unchanged(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor ``name``, flat, which must be as it was when the publisher was made."""
    found = tensors.get(name)
    if found is None or (found.dtype, tuple(found.shape)) != (dtype, shape):
        what = "is missing" if found is None else f"is {found.dtype} {tuple(found.shape)}"
        raise LayoutError(
            f"{name!r} was {dtype} {shape} when the publisher was made, and {what}: close it, and make another one"
        )
    return found.detach().reshape(-1)


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {without_wrappers(name): param for name, param in model.named_parameters()}


def _check_no_more(tensors: Mapping[str, Tensor], known: Described) -> None:
    """Raise LayoutError if the model has tensors that it did not have when the publisher was made."""
    if more := tensors.keys() - known.keys():
        raise LayoutError(
            f"the model had no {min(more)!r} of its own when the publisher was made, and has by now: close it, and "
            "make another one"
        )


def _whole(described: Described) -> list[TensorPiece]:
    """Every tensor as one piece."""
    pieces = [TensorPiece(name, 0, torch.Size(shape).numel()) for name, (_, shape) in described.items()]
    return [piece for piece in pieces if piece.stop]


def _of_module(model: nn.Module, dtype: torch.dtype | None) -> PublishedWeights:
    params = _named_parameters(model)
    if any(is_managed(param) for param in params.values()):
        raise StateError("a ZeroOptimizer manages this model, or zero.Init has built it: publish the ZeroOptimizer")
    for name, param in params.items():
        _check(name, param.data)
    described = {name: (_cast(p.dtype, dtype), tuple(p.shape)) for name, p in params.items()}
    own = {name: (p.dtype, tuple(p.shape)) for name, p in params.items()} | (buffers := _described_buffers(model))
    described |= buffers
    pieces, common = _whole(described), {_cast(p.dtype, dtype) for p in params.values()}

    def values() -> Iterator[Tensor]:
        tensors: dict[str, Tensor] = {**_named_parameters(model), **named_buffers(model)}
        _check_no_more(tensors, own)
        for name, _, _ in pieces:
            yield _unchanged(name, tensors, *own[name])

    return PublishedWeights(model, described, pieces, values, None, common.pop() if len(common) == 1 else None)


def _of_optimizer(optimizer: ZeroOptimizer, dtype: torch.dtype | None) -> PublishedWeights:
    runtime, topology = optimizer.parts.runtime, optimizer.topology
    if optimizer.parts.model_parallel.world_size > 1:
        raise StateError("each model-parallel rank has another part of the model, and a folder is of one model")
    slots = {
        without_wrappers(slot.name): (b.dtype, tuple(slot.shape)) for b in runtime.buckets for slot in b.layout.slots
    }
    order = [
        without_wrappers(param.zero_shard.name)  # type: ignore[attr-defined]
        for param in runtime.model.parameters()
    ]
    described: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        name: (_cast(slots[name][0], dtype), slots[name][1]) for name in order
    }
    common = {own for own, _ in described.values()}
    described |= (buffers := _described_buffers(runtime.model))
    pieces, is_sharded = [], runtime.stage.shards_states

    def own_pieces(bucket: Bucket) -> Iterator[tuple[TensorPiece, Tensor]]:
        for piece, master in bucket.master_pieces(runtime.stage):
            # Below stage 1 every rank has all masters.
            if is_sharded or (bucket.index + piece.slot) % topology.world_size == topology.rank:
                name = without_wrappers(bucket.layout.slots[piece.slot].name)
                yield TensorPiece(name, piece.first, piece.first + piece.stop - piece.start), master.detach()

    for bucket in runtime.buckets:
        pieces += [piece for piece, _ in own_pieces(bucket)]
    whole = _whole(buffers) if topology.rank == 0 else []

    def values() -> Iterator[Tensor]:
        for bucket in runtime.buckets:
            with runtime.in_memory([bucket]):
                for _, master in own_pieces(bucket):
                    yield master
        of_model = named_buffers(runtime.model)
        _check_no_more(of_model, buffers)
        for name, _, _ in whole:
            yield _unchanged(name, of_model, *buffers[name])

    one = common.pop() if len(common) == 1 else None
    return PublishedWeights(runtime.model, described, pieces + whole, values, topology, one, lambda: runtime.is_closed)
