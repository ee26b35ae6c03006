"""The parts of the model and optimizer that a rank holds, as flat parts with global names.

    weight/PARAM           every parameter: the float32 master of a trainable one, the value of a frozen one
    published/PARAM        trainable parameters as forward reads them, where a delayed update is not written back yet
    replica/PARAM, ...     see below
    state/NAME/PARAM       optimizer states with one value for each element (moments)
    tensor|int|float/NAME/PARAM     optimizer states with one value for a parameter (step)
    tensor[N,M]/NAME/PARAM          optimizer states of any other shape, of whole tensors (factors of moments); [1]: one
                                    value, of any parameter
    nested/NAME/PARAM/json, tree    those that are lists of tensors and the like, of whole tensors (preconditioners,
                                    8-bit moments with their scales)
    tensor[K:N,M], nested[K:]       those of tensor number K of the several that are stacked in the parameter
    buffer/BUFFER          the first rank's persistent buffers
    rank/R/buffer/BUFFER   those of rank R that differ from the first rank's

The name and offset of a part depend on the parameter alone, not on stage, bucket or world size: so a checkpoint loads
at any other stage and world size.

``mode="delta_hpz"`` adds residuals, and replicas unless they are the rounded masters:

    replica/PARAM                the value of a trainable parameter that all nodes hold, in its dtype
    rank/R/residual/json, tree   what the encoding of rank R's gradients has lost between nodes

With the topology and buckets of the save each rank gets its own residual back, bit for bit. Otherwise every rank reads
the residuals of all, adds them up by parameter, and takes its part. Replicas are the same on all nodes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zcomm import control
from zero._checkpoint.dcp import FlatPart
from zero._checkpoint.json_tree import Tree
from zero._optim.masters import is_elementwise, is_nested
from zero._optim.several import name_of
from zero._runtime.optimizer_parts import OptimizerParts
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket
from zero._storage.poison import is_placeholder
from zero._storage.safetensors_file import as_bytes, is_storable
from zero.errors import CheckpointError

SCALARS = {"tensor": Tensor, "int": int, "float": float}
"""Kinds of optimizer states that have one value for a parameter, and their types. A tensor may have more values."""
NESTED = "nested"
WRAPPER = "_checkpoint_wrapped_module."
"""What ``checkpoint_wrapper`` of torch puts into the names that ``named_buffers()`` and ``named_parameters()`` give."""


class StateKind(NamedTuple):
    """What a key of an optimizer state says."""

    kind: str
    shape: tuple[int, ...]
    """Of a tensor that has dimensions."""
    part: int | None
    """The number of the tensor that it is of, where several are stacked in the parameter."""

    @property
    def is_of_tensor(self) -> bool:
        """Whether it fits only the tensor that it is of: it has no value for each element, and is no number."""
        return prod(self.shape) != 1 or self.part is not None or self.kind == NESTED


def kind_of_key(key: str) -> StateKind:
    """The kind of what a key names."""
    kind, _, rest = key.partition("/")[0].partition("[")
    part, _, shape = rest.rstrip("]").rpartition(":")
    return StateKind(kind, tuple(int(size) for size in shape.split(",") if size), int(part) if part else None)


def parameter_of_state(key: str) -> str | None:
    """The parameter whose optimizer state ``key`` names; None if it names something else."""
    kind, name = kind_of_key(key).kind, key.split("/", 2)[-1]
    if kind == NESTED:
        name = name.rpartition("/")[0]
    return name if kind in ("state", NESTED) or kind in SCALARS else None


class LocalPart(NamedTuple):
    """Elements ``[first, first + len(values))`` of a parameter of ``numel`` elements, which this rank stores."""

    name: str
    numel: int
    first: int
    values: Tensor
    bucket: Bucket
    start: int
    """Their offset in the bucket's master."""
    is_whole: bool = False
    """Whether ``values`` is a tensor that is updated as a whole."""
    of_stack: int | None = None
    """The number of that tensor, where several are stacked in the parameter."""

    def part(self, key: str, values: Tensor, state: str | None = None) -> FlatPart:
        """The same elements of another tensor of the parameter's shape.

        Args:
            key: Its name.
            values: It, in memory, or in files if it is a state.
            state: The name of a moment, or ``""`` for the master; None: it is neither.
        """
        read = None if state is None else self.bucket.states.reader(state, self.start)
        return FlatPart(key, self.numel, self.first, values.reshape(-1)[: self.values.numel()], read)


def local_weights(runtime: Runtime, access: Literal["sizes", "values", "changes"]) -> Iterator[LocalPart]:
    """Yield this rank's part of every parameter, trainable or not, without padding. Collective if some are in files.

    Parameters in files are read if ``access`` is not "sizes", one bucket at a time: use their values before the next
    iteration. With "changes", what was written to them goes back to the file. Masters in files have no values here.
    """
    for bucket in runtime.buckets:
        stays = access == "sizes" or bucket.states.is_in_files
        with runtime.in_memory([] if stays else [bucket], is_changed=access == "changes"):
            for piece, master in bucket.master_pieces(runtime.stage):
                slot = bucket.layout.slots[piece.slot]
                yield LocalPart(slot.name, slot.numel, piece.first, master, bucket, piece.start)


def local_masters(internals: OptimizerParts) -> Iterator[LocalPart]:
    """Yield this rank's part of every parameter that it updates; ``values`` is the master, a key of the states."""
    for piece in internals.pieces:
        slot, place = piece.bucket.layout.slots[piece.slot], (piece.bucket, piece.start)
        yield LocalPart(slot.name, slot.numel, piece.first, piece.master, *place, piece.is_whole, piece.part)


def stale_parameter_parts(internals: OptimizerParts) -> list[FlatPart]:
    """Parameters to which a delayed update is not written back yet. Collective if they are in files."""
    return _shard_parts(internals, "published", internals.runtime.delayed.stale_shards())


def _shard_parts(internals: OptimizerParts, kind: str, shards: Mapping[Bucket, Tensor]) -> list[FlatPart]:
    """This rank's part of every parameter in ``shards``, which hold other values of it than the masters."""
    return [
        local.part(f"{kind}/{local.name}", shards[local.bucket][local.start :])
        for local in local_masters(internals)
        if local.bucket in shards
    ]


def state_parts(internals: OptimizerParts) -> list[FlatPart]:
    """The states of the inner optimizer.

    Raises:
        CheckpointError: A state is neither of the parameter's size nor a number. On this rank alone.
    """
    parts, numbers = list[FlatPart](), set[str]()
    for local in local_masters(internals):
        for name, value in internals.inner.state.get(local.values, {}).items():
            if value is None:
                continue
            is_moment = isinstance(value, Tensor) and value.dim() > 0 and is_storable(value)
            if is_moment and is_elementwise(local.values, value):
                stored = name if is_placeholder(value) else None  # files have room for the moments of a trial only
                parts.append(local.part(f"state/{name}/{local.name}", value, stored))
                continue
            if local.is_whole and is_nested(value) and "/" not in name:
                kind = NESTED if local.of_stack is None else f"{NESTED}[{local.of_stack}:]"
                parts += document_parts(f"{kind}/{name}/{local.name}", value, f"state {name!r} of {local.name!r}")
                continue
            kind = _scalar_kind(internals, local, name, value)
            wide = torch.int64 if isinstance(value, int) else torch.float64
            stored = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=wide)
            key = f"{kind}/{name}/{local.name}"
            if key not in numbers:  # tensors that are stacked in a parameter have equal ones
                numbers.add(key)
                parts.append(FlatPart.of(key, stored))
    return parts


def _scalar_kind(internals: OptimizerParts, local: LocalPart, name: str, value: Any) -> str:
    param, kind = local.name, next((kind for kind, cls in SCALARS.items() if isinstance(value, cls)), None)
    is_scalar = not isinstance(value, Tensor) or (value.numel() == 1 and is_storable(value))
    has_shape = kind == "tensor" and value.ndim and (local.is_whole or value.numel() == 1)
    if has_shape and is_storable(value) and "/" not in name:
        return f"tensor[{'' if local.of_stack is None else f'{local.of_stack}:'}{','.join(map(str, value.shape))}]"
    if kind is None or not is_scalar or "/" in name:
        shape = f" of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else ""
        raise CheckpointError(
            f"{name_of(internals.inner)} keeps state {name!r} of {param!r} as a {type(value).__name__}{shape}: "
            "a checkpoint stores tensors with one value for each element, and numbers"
        )
    return kind


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers of ``model``, by their names in its state dict; one that modules share by the first."""
    transient = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    of_all = [(name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name not in transient]
    first = {id(buffer): name for name, buffer in reversed(of_all)}
    return {without_wrappers(name): buffer for name, buffer in of_all if first[id(buffer)] == name}


def without_wrappers(name: str) -> str:
    """The name that the state dict has for ``name``: torch's activation checkpointing takes its own modules out."""
    return name.replace(WRAPPER, "")


def digests_of_buffers(runtime: Runtime) -> list[float]:
    """Checksums of this rank's buffers, by which ranks find out whether theirs are equal.

    Raises:
        CheckpointError: A buffer cannot be stored. On this rank alone.
    """
    digests = []
    for name, buffer in named_buffers(runtime.model).items():
        if not is_storable(buffer):
            raise CheckpointError(
                f"buffer {name!r} is a {type(buffer).__name__} of {buffer.dtype}, {buffer.layout}, on {buffer.device}, "
                "which a checkpoint does not store: convert it, or register it with persistent=False"
            )
        digests.append(float(zlib.crc32(as_bytes(buffer))))
    return digests


def buffer_parts(runtime: Runtime, digests: list[float]) -> list[FlatPart]:
    """The buffers: each rank's own where they differ from the first rank's. Collective: one small exchange."""
    topology, buffers = runtime.topology, named_buffers(runtime.model)
    if not buffers:
        return []
    first = control.gather_float64(torch.tensor(digests, dtype=torch.float64), topology)[0]
    parts = []
    for index, (name, buffer) in enumerate(buffers.items()):
        if topology.rank == 0:
            parts.append(FlatPart.of(f"buffer/{name}", buffer))
        elif first[index] != digests[index]:
            parts.append(FlatPart.of(f"rank/{topology.rank}/buffer/{name}", buffer))
    return parts


def residual_layout(runtime: Runtime) -> int | None:
    """A checksum of the layout of residuals, the same on every rank; None if there are none."""
    layouts = [residual.layout for residual in runtime.mode_state.residuals]
    sizes = [layout.shard_sizes for layout in layouts if layout.shard_sizes is not None]  # not in a layout's text
    return zlib.crc32(repr([*layouts, *sizes]).encode()) if layouts else None


def node_parts(internals: OptimizerParts) -> list[FlatPart]:
    """The replicas and residuals of this rank."""
    runtime = internals.runtime
    parts = _shard_parts(internals, "replica", runtime.mode_state.replica_shards())
    if states := [residual.state_dict() for residual in runtime.mode_state.residuals]:
        parts += document_parts(f"rank/{runtime.topology.rank}/residual", states, "residuals")
    return parts


def document_parts(prefix: str, value: Any, title: str) -> list[FlatPart]:
    """``value`` as a JSON document, which is stored as a tensor of bytes, and the tensors that it refers to."""
    tree = Tree(f"{prefix}/tree")
    document = tree.encode(value, title)
    text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    return [FlatPart.of(f"{prefix}/json", text), *(FlatPart.of(key, tensor) for key, tensor in tree.tensors.items())]
