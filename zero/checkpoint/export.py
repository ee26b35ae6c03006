"""A checkpoint's weights as safetensors, written on one process that never holds more than one chunk."""

from __future__ import annotations

from pathlib import Path

import torch

from zero.checkpoint.errors import CheckpointError
from zero.checkpoint.folder import METADATA, check_tag, read_latest, tags_in
from zero.checkpoint.index import Index, read_index
from zero.checkpoint.storage import read_chunk
from zero.checkpoint.tensor_file import DTYPES
from zero.checkpoint.weights_out import MAX_SHARD_NBYTES, WeightsWriter

__all__ = ["export_checkpoint"]


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
) -> list[Path]:
    """Write the weights and buffers of a checkpoint as safetensors that ``transformers`` reads.

    Args:
        checkpoint: The folder that checkpoints were saved to, or that of one checkpoint.
        output: A path that ends with ``.safetensors``.
        tag: Which checkpoint. Default: what ``latest`` names.
        dtype: Of floating-point tensors. Default: the dtypes of the model; masters are rounded to them once.
        max_shard_nbytes: Write several files of at most this size, and their index, if one would be larger.

    Returns:
        The files, the index last.

    Raises:
        CheckpointError: No such checkpoint, it is damaged, or the files cannot be written.

    Tied weights are written once, under their first name. Memory: one chunk, 64 MiB of float32 and its conversion.
    """
    index = read_index(_folder(Path(checkpoint), tag))
    wanted = _wanted(index, dtype)
    writer = WeightsWriter(Path(output), {name: entry for name, (_, entry) in wanted.items()}, max_shard_nbytes)
    try:
        for name, (key, (to_dtype, _)) in wanted.items():
            stored = index.tensors.get(key)
            for chunk in stored.chunks if stored is not None else ():
                assert stored is not None, "chunks of a stored tensor"
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


def _wanted(index: Index, dtype: torch.dtype | None) -> dict[str, tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """By name: the key of the stored tensor, and the dtype and shape to write."""
    wanted = {}
    for kind, section in (("weight", "parameters"), ("buffer", "buffers")):
        for name, there in index.content[section].items():
            own, shape = DTYPES[there["dtype"]], tuple(there["shape"])
            key = f"{kind}/{name}"
            if key not in index.tensors and torch.Size(shape).numel():
                raise CheckpointError(
                    f"{index.folder} has no values of {name!r}: it was saved with exclude_frozen_parameters=True; "
                    "save it with them"
                )
            wanted[name] = (key, (dtype if dtype is not None and own.is_floating_point else own, shape))
    return wanted
