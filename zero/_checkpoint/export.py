"""The weights of a checkpoint, in one process: as safetensors, a chunk at a time, or as a state dict."""

from __future__ import annotations

from math import prod
from operator import index as index_of
from pathlib import Path

import torch
from torch import Tensor

from zero._checkpoint.dcp import read_chunk
from zero._checkpoint.durability import METADATA, check_tag, read_latest, tags_in
from zero._checkpoint.index import UNREADABLE, Index, read_index
from zero._checkpoint.model_parallel_parts import part_of
from zero._checkpoint.plain_weights import MAX_SHARD_NBYTES, WeightsWriter
from zero._storage.safetensors_file import DTYPES
from zero.errors import CheckpointError


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    model_parallel_rank: int | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
) -> list[Path]:
    """Write the weights and buffers of a checkpoint as safetensors that ``transformers`` reads.

    Args:
        checkpoint: The folder that checkpoints were saved to, or that of one checkpoint.
        output: A path that ends with ``.safetensors``.
        tag: The name of the checkpoint. Default: what ``latest`` names.
        dtype: The dtype of floating-point tensors. Default: that of the model; masters are rounded to it once.
        model_parallel_rank: The model-parallel rank whose part of the model is exported, if there are several.
        max_shard_nbytes: Write several files of at most this size, and their index, if one file would be larger.

    Returns:
        The paths of the files, the index last.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or the files cannot be written.

    Tied weights are written once, under their first name. Memory: one chunk, 64 MiB of float32 and its conversion.
    """
    index = read_index(_folder(Path(checkpoint), tag))
    try:
        index = part_of(index, model_parallel_rank)
        wanted = _wanted(index, dtype)
    except UNREADABLE as error:
        raise CheckpointError(f"the metadata of {index.folder} cannot be read: {error!r}") from error
    layout = {name: (to_dtype, shape) for name, (_, to_dtype, shape) in wanted.items()}
    writer = WeightsWriter(Path(output), layout, max_shard_nbytes)
    try:
        for name, (key, to_dtype, _) in wanted.items():
            if key in index.tensors:  # else a parameter without elements
                stored = index.tensors[key]
                for chunk in stored.chunks:
                    writer.write(name, read_chunk(index.folder, key, chunk, stored.dtype).to(to_dtype))
        return writer.finish()
    finally:
        writer.discard()


def read_weights(
    checkpoint: str | Path,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    exclude_frozen_parameters: bool = False,
) -> dict[str, Tensor]:
    """The weights and buffers of a checkpoint, in host memory; tied weights under each of their names.

    Args:
        checkpoint: The folder that checkpoints were saved to, or that of one checkpoint.
        tag: The name of the checkpoint. Default: what ``latest`` names.
        dtype: The dtype of floating-point tensors. Default: that of the model; masters are rounded to it once.
        exclude_frozen_parameters: Leave out parameters that were not trained.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged.
    """
    index = read_index(_folder(Path(checkpoint), tag))
    try:
        index = part_of(index, None)
        described = index.content["parameters"]
        left_out = {name for name, one in described.items() if exclude_frozen_parameters and not one["is_trainable"]}
        wanted = {name: one for name, one in _wanted(index, dtype).items() if name not in left_out}
        others = {name: list(one["aliases"]) for name, one in described.items()}
    except UNREADABLE as error:
        raise CheckpointError(f"the metadata of {index.folder} cannot be read: {error!r}") from error
    weights: dict[str, Tensor] = {}
    for name, (key, to_dtype, shape) in wanted.items():
        stored = index.tensors.get(key)
        chunks = (
            []
            if stored is None
            else [read_chunk(index.folder, key, chunk, stored.dtype).to(to_dtype) for chunk in stored.chunks]
        )
        values = torch.cat(chunks).view(shape) if chunks else torch.empty(shape, dtype=to_dtype)
        weights |= dict.fromkeys([name, *others.get(name, ())], values)
    return weights


def _folder(checkpoint: Path, tag: str | None) -> Path:
    if tag is not None:
        return checkpoint / check_tag(tag)
    if (checkpoint / METADATA).exists():
        return checkpoint
    latest = read_latest(checkpoint)
    if latest is None:
        tags = tags_in(checkpoint) if checkpoint.is_dir() else []
        raise CheckpointError(
            f"{checkpoint} has no file 'latest' and is no checkpoint: name one with --tag; complete ones are "
            f"{tags[-5:] or 'none'}"
        )
    return checkpoint / latest


def _wanted(index: Index, dtype: torch.dtype | None) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
    """Maps the name of each tensor to write to its key in the checkpoint, and the dtype and shape to write."""
    wanted: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {}
    if index.content.get("tiles"):
        raise CheckpointError(
            f"{index.folder} holds the tiles of layers that tile_linears_above has cut, which is no longer supported: "
            f"tiled layers={sorted(index.content['tiles'])[:3]}; export it with the version that saved it"
        )
    for kind, section in (("weight", "parameters"), ("buffer", "buffers")):
        for name, entry in index.content[section].items():
            own, shape = DTYPES[entry["dtype"]], tuple(int(index_of(n)) for n in entry["shape"])
            key = f"{kind}/{name}"
            numel: int = prod(shape)
            if key not in index.tensors and numel:
                raise CheckpointError(
                    f"{index.folder} has no values of {name!r}: it was saved with "
                    "exclude_frozen_parameters=True; save it with them"
                )
            stored = index.tensors.get(key)
            if min(shape, default=0) < 0 or numel != (0 if stored is None else stored.numel):
                raise CheckpointError(f"{index.folder} is damaged: {key!r} must have the elements of its shape {shape}")
            wanted[name] = key, dtype if dtype is not None and own.is_floating_point else own, shape
    return wanted
