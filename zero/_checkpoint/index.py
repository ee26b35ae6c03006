"""The index of a checkpoint, metadata.json: its tensors, their chunks and files, and all values that are not tensors.

Every tensor is stored flat, in chunks of at most CHUNK_NUMEL elements, cut at multiples of CHUNK_NUMEL, each with a
checksum. So a reader needs memory for one chunk, whatever the size of a tensor.

    {"format": "zero-checkpoint", "version": 1, "crc32": of the content, "content": {
        "tensors": {KEY: {"dtype": "F32", "numel": 300, "chunks": [[offset, numel, file, position, crc32], ...]}},
        "files": {NAME: nbytes}, "headers": {NAME: [nbytes, crc32]}, ...}}

DCP's own metadata file is a pickle. This one is plain JSON: reading it executes nothing. :meth:`Index.as_dcp` turns it
into DCP's classes.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zero._checkpoint.durability import METADATA, is_shard_name, open_own, tags_in
from zero._storage.safetensors_file import CODES, DTYPES
from zero.errors import CheckpointError

CHUNK_NUMEL = 2**24
"""Elements: 64 MiB of float32."""
FORMAT, VERSION = "zero-checkpoint", 1
MAX_NUMEL = 2**62
UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""What reading a malformed document raises. ArithmeticError: JSON may hold infinities. RecursionError: deep nesting."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Elements ``[offset, offset + numel)`` of a tensor, stored at byte ``position`` of ``file``."""

    offset: int
    numel: int
    file: str
    position: int
    crc32: int | None
    """None: no checksum is known."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A flat tensor, and the chunks that cover it, in order."""

    dtype: torch.dtype
    numel: int
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class Index:
    """The content of one checkpoint's folder."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    content: Mapping[str, Any] = field(default_factory=dict)
    """All values that are not tensors, as JSON."""
    digest: str = ""
    """A hash of metadata.json. That holds checksums of all other files, so two checkpoints differ in it."""
    own_names: Mapping[str, str] = field(default_factory=dict)
    """The model's names of parameters that were saved under others: see :mod:`zero._checkpoint.own_names`."""

    def as_dcp(self) -> Metadata:
        """The same as DCP's Metadata, for its planner."""
        tensors: dict[str, Any] = {}
        chunks: dict[MetadataIndex, tuple[torch.dtype, StoredChunk]] = {}
        for key, stored in self.tensors.items():
            spans = [ChunkStorageMetadata(torch.Size((c.offset,)), torch.Size((c.numel,))) for c in stored.chunks]
            properties = TensorProperties(dtype=stored.dtype)
            tensors[key] = TensorStorageMetadata(properties, torch.Size((stored.numel,)), spans)
            for chunk in stored.chunks:
                chunks[MetadataIndex(key, (chunk.offset,))] = (stored.dtype, chunk)
        return Metadata(state_dict_metadata=tensors, storage_data=chunks)


def write_index(tensors: Mapping[str, StoredTensor], files: Mapping[str, int], content: Mapping[str, Any]) -> bytes:
    """The bytes of metadata.json."""
    stored = {
        key: {
            "dtype": CODES[tensor.dtype],
            "numel": tensor.numel,
            "chunks": [[c.offset, c.numel, c.file, c.position, c.crc32] for c in tensor.chunks],
        }
        for key, tensor in tensors.items()
    }
    full = {**content, "files": dict(files), "tensors": stored}
    document = {"format": FORMAT, "version": VERSION, "crc32": _checksum(full), "content": full}
    return json.dumps(document, allow_nan=False, indent=1).encode()


def read_index(folder: Path, name: str = METADATA) -> Index:
    """Read the index of the checkpoint in ``folder``, and check that its files exist and have their full length.

    Args:
        folder: ``SAVE_DIR/TAG``.
        name: The metadata file; a temporary name while it is not committed yet.

    Raises:
        CheckpointError: There is no checkpoint, it is incomplete or damaged, or of a newer version.
    """
    path = folder / name
    try:
        with open_own(path) as file:
            data = file.read()
        document = json.loads(data)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(_describe_missing(folder)) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged: {error}{_others(folder)}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the metadata of a checkpoint")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {document.get('version')!r} of the format, this library reads {VERSION}: update it"
        )
    content: Any = document.get("content")
    if document.get("crc32") != _checksum(content):
        raise CheckpointError(f"{path} is damaged: its checksum does not match{_others(folder)}")
    try:
        tensors = {key: _tensor(value) for key, value in content["tensors"].items()}
        _check_files(folder, tensors, content["files"], content.get("headers", {}))
    except CheckpointError:
        raise
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return Index(folder, tensors, content, hashlib.blake2b(data, digest_size=8).hexdigest())


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _tensor(value: dict[str, Any]) -> StoredTensor:
    chunks = tuple(StoredChunk(int(c[0]), int(c[1]), str(c[2]), int(c[3]), c[4]) for c in value["chunks"])
    chunks = tuple(sorted(chunks, key=lambda chunk: chunk.offset))
    at = 0
    for chunk in chunks:
        if chunk.offset != at or chunk.numel < 0 or chunk.position < 0:
            raise ValueError(f"chunks must cover a tensor without gaps: {value!r}")
        at += chunk.numel
    if at != value["numel"] or at > MAX_NUMEL:
        raise ValueError(f"chunks must cover the full tensor: {value!r}")
    return StoredTensor(DTYPES[value["dtype"]], int(value["numel"]), chunks)


def _check_files(
    folder: Path, tensors: Mapping[str, StoredTensor], files: Mapping[str, int], headers: Mapping[str, tuple[int, int]]
) -> None:
    """Raise unless the files have the length, and the header, that were written. Other readers rely on the headers."""
    if not headers.keys() <= files.keys():
        raise ValueError(f"headers must be of files of the checkpoint: {sorted(headers)}")
    for name, nbytes in files.items():
        if not is_shard_name(name):  # a path would lead out of the folder
            raise ValueError(f"{name!r} is not the name of a shard")
        try:
            with open_own(folder / name) as file:
                found = os.fstat(file.fileno()).st_size
                # Older checkpoints store no headers: 0 bytes have checksum 0.
                header_nbytes, crc32 = headers.get(name, (0, 0))
                is_damaged = not 0 <= header_nbytes <= found or zlib.crc32(file.read(header_nbytes)) != crc32
        except OSError as error:
            raise CheckpointError(f"{folder / name} is missing ({error.strerror}){_others(folder)}") from error
        if found != nbytes:
            raise CheckpointError(
                f"{folder / name} is truncated or replaced: it has {found} bytes, {nbytes} were written"
                f"{_others(folder)}"
            )
        if is_damaged:
            raise CheckpointError(
                f"{folder / name} is damaged: the checksum of its header does not match{_others(folder)}"
            )
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            if chunk.position + chunk.numel * tensor.dtype.itemsize > files[chunk.file]:
                raise ValueError(f"a chunk must end within its file: {chunk}")


def _others(folder: Path) -> str:
    """A hint at the other checkpoints beside ``folder``."""
    tags = [tag for tag in tags_in(folder.parent) if tag != folder.name]
    return f"; other checkpoints in {folder.parent}: {', '.join(tags[-5:])}" if tags else ""


def _describe_missing(folder: Path) -> str:
    if not folder.parent.is_dir():
        return f"there is no folder {folder.parent}"
    if not folder.is_dir():
        tags = tags_in(folder.parent)
        return f"there is no checkpoint {folder.name!r} in {folder.parent}: complete ones are {tags[-5:] or 'none'}"
    if any(folder.glob("*model_states.pt")):
        return (
            f"{folder} is a DeepSpeed checkpoint, which consists of pickles: convert it to safetensors with the "
            "zero_to_fp32.py beside it (--safe_serialization), and pass that file or folder with load_module_only=True"
        )
    return f"{folder} is no complete checkpoint: the save was interrupted before {METADATA}{_others(folder)}"
