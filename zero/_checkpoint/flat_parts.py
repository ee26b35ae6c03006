"""What a rank holds of the model and its optimizer, as flat parts with global names.

    weight/PARAM           every parameter: the float32 master of a trainable one, a frozen one as it is
    published/PARAM        trainable parameters as forward reads them, where a delayed update has not reached them yet
    replica/PARAM, ...     see below
    state/NAME/PARAM       optimizer states with one value for each element (moments)
    tensor|int|float/NAME/PARAM     optimizer states with one value for a parameter (step)
    buffer/BUFFER          the first rank's persistent buffers
    rank/R/buffer/BUFFER   those of rank R that differ from the first rank's

A part's name and offset depend on the parameter alone, not on stage, bucket or world size.

Replicas and residuals of ``mode="delta_hpz"`` in a checkpoint.

    replica/PARAM                what all nodes hold of a trainable parameter, in its dtype
    rank/R/residual/json, tree   what rank R's gradients have lost on their way between nodes

On the topology and buckets they were saved on, each rank gets its own residual back, bit for bit; elsewhere every rank
reads those of all, adds them up by parameter, and takes its part. Replicas are the same everywhere.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zcomm import control
from zero._checkpoint.dcp import FlatPart
from zero._checkpoint.json_tree import Tree
from zero._optim.masters import MasterPiece, is_elementwise
from zero._optim.state_files import StateFiles
from zero._runtime.delta_hpz_state import held_of, residuals_of
from zero._runtime.optimizer_parts import OptimizerParts
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket
from zero._storage.safetensors_file import as_bytes, is_storable
from zero.errors import CheckpointError

SCALARS = {"tensor": Tensor, "int": int, "float": float}
"""Kinds of states with one value for a parameter."""


class Held(NamedTuple):
    """Elements ``[first, first + len(values))`` of a parameter of ``numel``, whose values rest on this rank."""

    name: str
    numel: int
    first: int
    values: Tensor
    bucket: Bucket
    start: int
    """Where they begin in the bucket's master."""

    def part(self, key: str, values: Tensor, files: StateFiles | None = None, moment: str = "") -> FlatPart:
        """These elements of another tensor of the parameter's shape; ``files``: where a moment or the master rests."""
        read = None
        if files is not None and self.bucket in files.groups_of:
            read = partial(files.read, self.bucket, moment, self.start)
        return FlatPart(key, self.numel, self.first, values[: self.values.numel()], read)


def held_weights(runtime: Runtime, access: Literal["sizes", "values", "changes"]) -> Iterator[Held]:
    """This rank's part of every parameter, trainable or not, without padding. Collective if some rest in files.

    Parameters that rest in files have their values only if ``access`` is not "sizes", for as long as they are held;
    "changes" keeps what is written to them before the next is asked for. Masters in files have none.
    """
    row = runtime.topology.shard_index("local")
    for bucket in runtime.buckets:
        base = row * bucket.layout.shard_numel if runtime.stage.shards_states else 0
        stays = access == "sizes" or runtime.is_in_files(bucket)
        with runtime.in_memory([] if stays else [bucket], is_changed=access == "changes"):
            for piece, master in bucket.master_pieces(runtime.stage, row):
                slot = bucket.layout.slots[piece.slot]
                yield Held(slot.name, slot.numel, piece.start - slot.offset, master, bucket, piece.start - base)


def held_pieces(inside: OptimizerParts) -> Iterator[tuple[Held, MasterPiece]]:
    """The same for what this rank updates, each with its master."""
    runtime = inside.runtime
    row = runtime.topology.shard_index("local")
    for piece in inside.pieces:
        base = row * piece.bucket.layout.shard_numel if runtime.stage.shards_states else 0
        slot = piece.bucket.layout.slots[piece.slot]
        first = piece.start + base - slot.offset
        yield Held(slot.name, slot.numel, first, piece.master, piece.bucket, piece.start), piece


def published_parts(inside: OptimizerParts) -> list[FlatPart]:
    """Parameters that are not their masters rounded. Collective if they rest in files."""
    delayed, parts = inside.runtime.delayed, []
    published = {} if delayed is None else delayed.published()
    for held, _ in held_pieces(inside):
        if held.bucket in published:
            shard = published[held.bucket]
            parts.append(held.part(f"published/{held.name}", shard[held.start : held.start + held.values.numel()]))
    return parts


def state_parts(inside: OptimizerParts) -> list[FlatPart]:
    """The inner optimizer's state.

    Raises:
        CheckpointError: A state that is neither of the parameter's size, nor a number. This rank's own error.
    """
    parts = []
    for held, piece in held_pieces(inside):
        for name, value in inside.inner.state.get(piece.master, {}).items():
            if value is None:
                continue
            is_moment = isinstance(value, Tensor) and value.dim() == 1 and is_storable(value)
            if is_moment and is_elementwise(piece, value):
                parts.append(held.part(f"state/{name}/{held.name}", value, inside.runtime.state_files, name))
                continue
            kind = _scalar_kind(inside, held.name, name, value)
            stored = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=_wide(value))
            parts.append(FlatPart.whole(f"{kind}/{name}/{held.name}", stored))
    return parts


def _wide(value: float) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64


def _scalar_kind(inside: OptimizerParts, param: str, name: str, value: Any) -> str:
    kind = next((kind for kind, cls in SCALARS.items() if isinstance(value, cls)), None)
    is_scalar = not isinstance(value, Tensor) or (value.numel() == 1 and is_storable(value))
    if kind is None or not is_scalar or "/" in name:
        shape = f" of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else ""
        raise CheckpointError(
            f"{type(inside.inner).__name__} keeps state {name!r} of {param!r} as a {type(value).__name__}{shape}: "
            "a checkpoint stores tensors with one value for each element, and numbers"
        )
    return kind


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state."""
    transient = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in transient}


def digests_of_buffers(runtime: Runtime) -> list[float]:
    """By which ranks see whether they have the same.

    Raises:
        CheckpointError: A buffer that cannot be stored. This rank's own error.
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
            parts.append(FlatPart.whole(f"buffer/{name}", buffer))
        elif first[index] != digests[index]:
            parts.append(FlatPart.whole(f"rank/{topology.rank}/buffer/{name}", buffer))
    return parts


def residual_layout(runtime: Runtime) -> int | None:
    """A checksum of where residuals lie; None if there are none. The same on every rank."""
    residuals = residuals_of(runtime)
    return zlib.crc32(repr([residual.layout for residual in residuals]).encode()) if residuals else None


def node_parts(inside: OptimizerParts) -> list[FlatPart]:
    """What this rank saves."""
    runtime, parts = inside.runtime, []
    of_bucket = held_of(runtime)
    for held, _ in held_pieces(inside):
        if held.bucket in of_bucket:
            values = of_bucket[held.bucket][held.start : held.start + held.values.numel()]
            parts.append(held.part(f"replica/{held.name}", values))
    residuals = residuals_of(runtime)
    if residuals:
        prefix = f"rank/{runtime.topology.rank}/residual"
        tree = Tree(f"{prefix}/tree")
        document = tree.encode([residual.state_dict() for residual in residuals], "residuals")
        text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        parts.append(FlatPart.whole(f"{prefix}/json", text))
        parts += [FlatPart.whole(key, value) for key, value in tree.tensors.items()]
    return parts
