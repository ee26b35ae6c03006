"""A checkpoint's weights as safetensors, written on one process that never holds more than one chunk."""

from __future__ import annotations

from math import prod
from operator import index as index_of
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
        tag: Which checkpoint. Default: what ``latest`` names.
        dtype: Of floating-point tensors. Default: the dtypes of the model; masters are rounded to them once.
        model_parallel_rank: Whose part of the model, if it was saved beside model-parallel ranks.
        max_shard_nbytes: Write several files of at most this size, and their index, if one would be larger.

    Returns:
        The files, the index last.

    Raises:
        CheckpointError: No such checkpoint, it is damaged, or the files cannot be written.

    Tied weights are written once, under their first name. Memory: one chunk, 64 MiB of float32 and its conversion.
    """
    index = read_index(_folder(Path(checkpoint), tag))
    try:
        index = part_of(index, model_parallel_rank)
        wanted = _wanted(index, dtype)
    except UNREADABLE as error:
        raise CheckpointError(f"the metadata of {index.folder} cannot be read: {error!r}") from error
    writer = WeightsWriter(Path(output), {name: entry for name, (_, entry) in wanted.items()}, max_shard_nbytes)
    try:
        for name, (keys, (to_dtype, _)) in wanted.items():
            for key, stored in ((key, index.tensors[key]) for key in keys if key in index.tensors):
                for chunk in stored.chunks:
                    writer.write(name, read_chunk(index.folder, key, chunk, stored.dtype).to(to_dtype))
        return writer.finish()
    finally:
        writer.discard()


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


class ExportedTensor(NamedTuple):
    """One tensor of the output."""

    keys: list[str]
    """Of the stored tensors: one, or the tiles of a layer that was cut into rows."""
    entry: tuple[torch.dtype, tuple[int, ...]]
    """The dtype and shape to write."""


def _shape(there: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(index_of(n)) for n in there["shape"])


def _wanted(index: Index, dtype: torch.dtype | None) -> dict[str, ExportedTensor]:
    """What to write, by name."""
    wanted: dict[str, ExportedTensor] = {}
    tiles = index.content.get("tiles", {})
    whole_of = {tile: name for name, of_name in tiles.items() for tile in of_name}
    for kind, section in (("weight", "parameters"), ("buffer", "buffers")):
        for stored_name, there in index.content[section].items():
            name = whole_of.get(stored_name, stored_name)
            own, shape = DTYPES[there["dtype"]], _shape(there)
            key = f"{kind}/{stored_name}"
            numel: int = prod(shape)
            if key not in index.tensors and numel:
                raise CheckpointError(
                    f"{index.folder} has no values of {stored_name!r}: it was saved with "
                    "exclude_frozen_parameters=True; save it with them"
                )
            stored = index.tensors.get(key)
            if min(shape, default=0) < 0 or numel != (0 if stored is None else stored.numel):
                raise CheckpointError(f"{index.folder} is damaged: {key!r} has not the elements of its shape {shape}")
            keys, rows = [key], shape[0] if shape else 0
            if name in wanted:
                if not shape or wanted[name].entry[1][1:] != shape[1:]:
                    raise CheckpointError(f"{index.folder} is damaged: the tiles of {name!r} do not fit together")
                keys, rows = [*wanted[name].keys, key], wanted[name].entry[1][0] + rows
            written = dtype if dtype is not None and own.is_floating_point else own
            wanted[name] = ExportedTensor(keys, (written, (rows, *shape[1:]) if shape else ()))
    return wanted
