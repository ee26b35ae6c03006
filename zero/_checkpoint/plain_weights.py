"""Write and read plain weights in Hugging Face's layout: safetensors files of limited size, and their index.

    model.safetensors                     one file, or
    model-00001-of-00003.safetensors ...  several, and model.safetensors.index.json, which says where each tensor is

Writing: tensors come in pieces, in the order of the layout. Files have temporary names until all are fsynced.
Reading: the files are indexed like a checkpoint, and each rank reads only the bytes of its own parts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zcomm import LayoutError
from zero._checkpoint.durability import make_folder, remove_file, replace_file, sync_folder
from zero._checkpoint.flat_parts import named_buffers, without_wrappers
from zero._checkpoint.index import CHUNK_NUMEL, Index, StoredChunk, StoredTensor
from zero._checkpoint.own_names import names_of_parameters
from zero._runtime.optimizer_parts import OptimizerParts
from zero._storage.pretrained_reader import names_in
from zero._storage.safetensors_file import CODES, TensorEntry, as_bytes, make_header, read_header
from zero.errors import CheckpointError

MAX_SHARD_NBYTES = 5_000_000_000

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of every tensor, in the order of writing."""


class WeightsWriter:
    """Writes the tensors of ``layout`` to ``output``, a path that ends with ``.safetensors``.

    Args:
        output: The file, replaced if it exists. The names of several files are derived from it.
        layout: The tensors that will be written.
        max_shard_nbytes: Size limit of a file; a tensor beyond it has a file of its own.

    Raises:
        CheckpointError: The name does not end with ``.safetensors``, safetensors cannot store a dtype, or the files
            cannot be written.
    """

    def __init__(self, output: Path, layout: Layout, max_shard_nbytes: int = MAX_SHARD_NBYTES) -> None:
        if output.suffix != ".safetensors":
            raise CheckpointError(f"the name of the output must end with .safetensors: {output}")
        for name, (dtype, _) in layout.items():
            if dtype is torch.complex128 or dtype not in CODES:
                raise CheckpointError(
                    f"{name!r} is {dtype}, which safetensors cannot store: convert it, or leave it out"
                )
        self._output, self._layout = output, dict(layout)
        self._shards = divide(layout, max_shard_nbytes)
        self._save_id = secrets.token_hex(4)
        self._pending = [
            (name, number) for number, shard in enumerate(self._shards) for name in shard if self._numel(name)
        ]
        self._missing = 0
        """Bytes still missing of the current tensor."""
        self._number = -1
        self._file: BinaryIO | None = None
        try:
            make_folder(output.parent)
        except OSError as error:
            raise CheckpointError(f"the folder {output.parent} cannot be made: {error.strerror}") from error

    def write(self, name: str, values: Tensor) -> None:
        """Write the next elements of tensor ``name``, of any shape and device, in the dtype of the layout."""
        if not values.numel():
            return
        try:
            if not self._missing:
                self._start_tensor(name)
            data = as_bytes(values)
            assert self._file is not None, "a tensor is written to an open file"
            assert len(data) <= self._missing, f"more elements of {name!r} than in its layout"
            self._missing -= len(data)
            self._file.write(data)
        except OSError as error:
            raise CheckpointError(f"{self._output} could not be written: {error.strerror}") from error

    def finish(self) -> list[Path]:
        """Make the files durable, rename them to their final names, and return these, the index last.

        Raises:
            CheckpointError: The files cannot be written.
        """
        try:
            if self._number < 0:
                self._open(0)
            assert not self._pending, f"never written: {self._pending[:3]}"
            self._end_file()
            return self._commit()
        except OSError as error:
            raise CheckpointError(f"{self._output} could not be written: {error.strerror}") from error

    def discard(self) -> None:
        """Delete temporary files; after :meth:`finish` there are none."""
        if self._file is not None:
            self._file.close()
        for number in range(self._number + 1):
            remove_file(self._temporary(number))

    def _numel(self, name: str) -> int:
        return torch.Size(self._layout[name][1]).numel()

    def _start_tensor(self, name: str) -> None:
        expected, number = self._pending.pop(0)
        assert expected == name, f"{name!r} is written before {expected!r}, which is first in the layout"
        if number != self._number:
            self._open(number)
        self._missing = self._numel(name) * self._layout[name][0].itemsize

    def _open(self, number: int) -> None:
        self._end_file()
        self._file = self._temporary(number).open("xb")
        self._number = number
        header, _ = make_header({name: self._layout[name] for name in self._shards[number]}, {"format": "pt"})
        self._file.write(header)

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.flush()  # fsync does not see what Python still buffers
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _temporary(self, number: int) -> Path:
        return self._output.with_name(f".{self._output.name}.{number}.{self._save_id}")

    def _commit(self) -> list[Path]:
        count = len(self._shards)
        if count == 1:
            self._temporary(0).replace(self._output)
            sync_folder(self._output.parent)
            self._remove_others([self._output])
            return [self._output]
        stem = self._output.name.removesuffix(".safetensors")
        paths = [self._output.with_name(f"{stem}-{n + 1:05d}-of-{count:05d}.safetensors") for n in range(count)]
        for number, path in enumerate(paths):
            self._temporary(number).replace(path)
        index = {
            "metadata": {"total_size": sum(self._numel(n) * d.itemsize for n, (d, _) in self._layout.items())},
            "weight_map": {name: path.name for path, shard in zip(paths, self._shards, strict=True) for name in shard},
        }
        # Written last, because it must not name files that do not exist yet. replace_file syncs the folder, which also
        # makes the renames above durable.
        index_path = self._output.with_name(f"{self._output.name}.index.json")
        replace_file(index_path, json.dumps(index, indent=2).encode(), self._save_id)
        self._remove_others([*paths, index_path])
        return [*paths, index_path]

    def _remove_others(self, written: list[Path]) -> None:
        """Remove the files of an earlier write that had another number of them: readers may prefer those.

        Only once this write is durable; the index first, as it names the others.
        """
        name = self._output.name
        shard = re.compile(re.escape(name.removesuffix(".safetensors")) + r"-\d{5}-of-\d{5}\.safetensors")
        index = self._output.with_name(f"{name}.index.json")
        shards = (path for path in sorted(self._output.parent.iterdir()) if shard.fullmatch(path.name))
        for path in (index, self._output, *shards):
            if path not in written:
                path.unlink(missing_ok=True)
        sync_folder(self._output.parent)


def divide(layout: Layout, max_nbytes: int) -> list[list[str]]:
    """The names of the tensors of each file, in order: at most ``max_nbytes`` in one, but at least one tensor."""
    shards: list[list[str]] = []
    nbytes = 0
    for name, (dtype, shape) in layout.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if not shards or (size and nbytes and nbytes + size > max_nbytes):
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += size
    return shards or [[]]


def find_weights(path: Path) -> bool:
    """Whether ``path`` is a file of weights, or a folder of safetensors that is no checkpoint."""
    if path.is_file():
        return True
    return path.is_dir() and not (path / "metadata.json").exists() and any(path.glob("*.safetensors"))


def _files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix != ".json":
        return [path]
    folder = path if path.is_dir() else path.parent
    indices = [path] if path.is_file() else sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        return sorted(folder.glob("*.safetensors"))
    try:
        return [folder / name for name in names_in(indices[0])]
    except (OSError, LayoutError) as error:
        raise CheckpointError(f"{indices[0]} is not the index of safetensors files: {error}") from error


def index_of_weights(path: Path, internals: OptimizerParts) -> Index:
    """Return an index of the weights in ``path``, under the model's names; tied ones may be stored under any name.

    Raises:
        CheckpointError: The files are not safetensors, or truncated.
    """
    files = _files(path)
    wrong = [file for file in files if file.suffix != ".safetensors"]
    if wrong:
        raise CheckpointError(
            f"{wrong[0]} is not a safetensors file: load it with model.load_state_dict(torch.load(path, "
            "weights_only=True)) on the first rank, and {} on the others"
        )
    entries = {name: (file, entry) for file in files for name, entry in read_header(file).items()}
    tensors: dict[str, StoredTensor] = {}
    shapes: dict[str, dict[str, Any]] = {"weight": {}, "buffer": {}}
    used: set[str] = set()
    for kind, name, names in _names(internals, entries):
        known = next((n for n in names if n in entries), None)
        if known is not None:
            file, entry = entries[known]
            tensors[f"{kind}/{name}"] = _stored(file, entry)
            shapes[kind][name] = _described(entry)
            used.update(names)
    shapes["weight"] |= {name: _described(entries[name][1]) for name in entries.keys() - used}
    folder = path if path.is_dir() else path.parent
    content = {"parameters": shapes["weight"], "buffers": shapes["buffer"], "world_size": 0, "optimizer": None}
    return Index(folder, tensors, content, _sampled(files))


def _described(entry: TensorEntry) -> dict[str, Any]:
    return {"shape": list(entry.shape), "dtype": CODES[entry.dtype]}


def _sampled(files: list[Path]) -> str:
    """A digest of names, sizes and 16 pages of each file, by which ranks find out whether their files are the same."""
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with path.open("rb", buffering=0) as file:
            nbytes = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {nbytes} ".encode())
            for number in range(16):
                file.seek(max(nbytes - 4096, 0) * number // 15)
                digest.update(file.read(4096))
    return digest.hexdigest()


def _names(internals: OptimizerParts, stored: Iterable[str]) -> Iterator[tuple[str, str, list[str]]]:
    for name, names in names_of_parameters(internals.runtime).items():
        yield "weight", name, names
    wrapped = {without_wrappers(name): name for name in stored}  # as earlier releases wrote the names of buffers
    for name in named_buffers(internals.runtime.model):
        yield "buffer", name, [name, wrapped.get(name, name)]


def _stored(file: Path, entry: TensorEntry) -> StoredTensor:
    nbytes, numel = entry.dtype.itemsize, (entry.stop - entry.start) // entry.dtype.itemsize
    chunks = tuple(
        StoredChunk(at, min(CHUNK_NUMEL, numel - at), file.name, entry.start + at * nbytes, None)
        for at in range(0, numel, CHUNK_NUMEL)
    )
    return StoredTensor(entry.dtype, numel, chunks)
