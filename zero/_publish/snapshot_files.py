"""The files of a snapshot: safetensors in Hugging Face's layout, which all ranks write pieces of.

first rank    headers and sizes of the files, the index, config.json
every rank    the pieces of its chunks, at their places; fsync
reader        the headers say where tensors are; chunks are read and hashed piece by piece
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero._checkpoint.durability import create_file, open_own
from zero._checkpoint.plain_weights import MAX_SHARD_NBYTES, divide
from zero._publish.manifest import Described, PublishedChunk, PublishedLayout, reading
from zero._storage.safetensors_file import TensorEntry, as_bytes, make_header, read_header
from zero.errors import PublicationError


class SnapshotFile(NamedTuple):
    """One file of a snapshot."""

    name: str
    header: bytes
    entries: Mapping[str, TensorEntry]
    nbytes: int


def plan_files(tensors: Described) -> list[SnapshotFile]:
    """The files of a snapshot of ``tensors``, and where each tensor is in them. The same on every rank."""
    shards = divide(tensors, MAX_SHARD_NBYTES)
    files = []
    for number, names in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, entries = make_header({name: tensors[name] for name in names}, {"format": "pt"})
        files.append(SnapshotFile(name, header, entries, max([len(header), *(e.stop for e in entries.values())])))
    return files


def create_files(folder: Path, files: list[SnapshotFile], documents: Mapping[str, str]) -> None:
    """Create the files of a snapshot with their headers and sizes, durably but for the values; and ``documents``."""
    for name, header, _, nbytes in files:
        with create_file(folder / name) as file:
            file.write(header)
            file.truncate(nbytes)
    texts = dict(documents)
    if len(files) > 1:
        weight_map = {tensor: file.name for file in files for tensor in file.entries}
        total = sum(file.nbytes - len(file.header) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        texts["model.safetensors.index.json"] = json.dumps(index, indent=2)
    for name, text in texts.items():
        with create_file(folder / name) as file:
            file.write(text.encode())


class SnapshotWriter:
    """Writes this rank's chunks into the files of a snapshot, which another rank may have created."""

    def __init__(self, folder: Path, files: list[SnapshotFile]) -> None:
        self._folder = folder
        self._places = {name: (file.name, entry.start) for file in files for name, entry in file.entries.items()}
        self._open: dict[str, int] = {}

    def write(self, chunk: PublishedChunk, values: Tensor) -> None:
        data, at = as_bytes(values), 0
        for name, start, stop in chunk.pieces:
            file, base = self._places[name]
            if file not in self._open:
                self._open[file] = os.open(self._folder / file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            end = at + (stop - start) * chunk.dtype.itemsize
            _write_all(self._open[file], data[at:end], base + start * chunk.dtype.itemsize)
            at = end

    def sync(self) -> None:
        """Make what this rank has written durable."""
        for number in self._open.values():
            os.fsync(number)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _write_all(number: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(number, data, at)
        data, at = data[written:], at + written


class SnapshotReader:
    """Reads the chunks of a snapshot.

    Raises:
        PublicationError: A file is missing, is a link, is damaged, or holds other tensors than ``layout``.
    """

    def __init__(self, folder: Path, layout: PublishedLayout) -> None:
        self._places: dict[str, tuple[Path, int]] = {}
        with reading(folder):
            for path in sorted(folder.glob("model*.safetensors")):
                open_own(path).close()  # no link, no pipe
                for name, entry in read_header(path).items():
                    if layout.tensors.get(name) != (entry.dtype, entry.shape):
                        raise PublicationError(f"{path} holds a tensor {name!r} that its layout does not have")
                    self._places[name] = path, entry.start
        if missing := layout.tensors.keys() - self._places.keys():
            raise PublicationError(f"{folder} has no complete snapshot: tensor {min(missing)!r} is missing")

    def read(self, chunk: PublishedChunk) -> Tensor:
        """The values of ``chunk``, flat, in memory of their own."""
        values = torch.empty(chunk.numel, dtype=chunk.dtype, device="cpu")
        data, at = as_bytes(values), 0
        for name, start, stop in chunk.pieces:
            path, base = self._places[name]
            end = at + (stop - start) * chunk.dtype.itemsize
            read_into(data[at:end], path, base + start * chunk.dtype.itemsize)
            at = end
        return values


def read_into(data: memoryview, path: Path, at: int) -> None:
    """Fill ``data`` from byte ``at`` of ``path``.

    Raises:
        PublicationError: The file cannot be read, or is too short.
    """
    with reading(path), open_own(path) as file:
        file.seek(at)
        while data:
            count = file.readinto(data)  # type: ignore[attr-defined]
            if not count:
                raise PublicationError(f"{path} is truncated")
            data = data[count:]


def model_documents(model: nn.Module, dtype: torch.dtype | None) -> dict[str, str]:
    """The configuration files that transformers reads beside the weights of ``model``, if it has any."""
    found = {}
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_json_string", None)):
        content = json.loads(config.to_json_string())
        content["architectures"] = content.get("architectures") or [type(model).__name__]
        if dtype is not None:
            content["dtype"] = str(dtype).removeprefix("torch.")
        found["config.json"] = json.dumps(content, indent=2) + "\n"
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)):
        found["generation_config.json"] = generation.to_json_string()
    return found
