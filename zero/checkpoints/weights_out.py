"""Weights as Hugging Face has them: safetensors files of limited size, and their index if there are several.

    model.safetensors                     one file, or
    model-00001-of-00003.safetensors ...  several, and model.safetensors.index.json, which says where each tensor is

Tensors are written in pieces, in the order they were announced; the files get their names once all is on the disk.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from zero.checkpoints.errors import CheckpointError
from zero.checkpoints.folder import make_folder, remove_file, replace_file, sync_folder
from zero.checkpoints.tensor_file import CODES, as_bytes, make_header

__all__ = ["MAX_SHARD_NBYTES", "Layout", "WeightsWriter"]

MAX_SHARD_NBYTES = 5_000_000_000

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""dtype and shape of every tensor, in order."""


class WeightsWriter:
    """Writes the tensors of ``layout`` to ``output``, a path that ends with ``.safetensors``.

    Args:
        output: Replaced if it is there. With several files, their names are derived from it.
        layout: What will be written.
        max_shard_nbytes: Largest file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: The name does not end with ``.safetensors``, a dtype is none of the format's, or the files
            cannot be written.
    """

    def __init__(self, output: Path, layout: Layout, max_shard_nbytes: int = MAX_SHARD_NBYTES) -> None:
        if output.suffix != ".safetensors":
            raise CheckpointError(f"the name of the output must end with .safetensors: {output}")
        for name, (dtype, _) in layout.items():
            if dtype is torch.complex128 or dtype not in CODES:
                raise CheckpointError(
                    f"{name!r} is {dtype}, which safetensors do not hold: convert it, or leave it out"
                )
        self._output, self._layout = output, dict(layout)
        self._shards = _divide(layout, max_shard_nbytes)
        self._save_id = secrets.token_hex(4)
        self._pending = [
            (name, number) for number, shard in enumerate(self._shards) for name in shard if self._numel(name)
        ]
        self._missing = 0
        """Bytes that are still to come of the tensor that is being written."""
        self._number = -1
        self._file: BinaryIO | None = None
        try:
            make_folder(output.parent)
        except OSError as error:
            raise CheckpointError(f"the folder {output.parent} cannot be made: {error.strerror}") from error

    def write(self, name: str, values: Tensor) -> None:
        """The next elements of tensor ``name``, of any shape and device, in the announced dtype."""
        if not values.numel():
            return
        try:
            if not self._missing:
                self._begin(name)
            data = as_bytes(values)
            assert self._file is not None, "a tensor begins in a file"
            assert len(data) <= self._missing, f"more elements of {name!r} than were announced"
            self._missing -= len(data)
            self._file.write(data)
        except OSError as error:
            raise CheckpointError(f"{self._output} could not be written: {error.strerror}") from error

    def finish(self) -> list[Path]:
        """Make the files durable and give them their names, which are returned, the index last.

        Raises:
            CheckpointError: They cannot be written; what was there before is then untouched.
        """
        try:
            if self._number < 0:
                self._open(0)
            assert not self._pending, f"never written: {self._pending[:3]}"
            self._end_file()
            return self._publish()
        except OSError as error:
            raise CheckpointError(f"{self._output} could not be written: {error.strerror}") from error

    def discard(self) -> None:
        """Remove what was written without a name; nothing is left to do after :meth:`finish`."""
        if self._file is not None:
            self._file.close()
        for number in range(self._number + 1):
            remove_file(self._temporary(number))

    def _numel(self, name: str) -> int:
        return torch.Size(self._layout[name][1]).numel()

    def _begin(self, name: str) -> None:
        expected, number = self._pending.pop(0)
        assert expected == name, f"{name!r} was announced after {expected!r}"
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
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _temporary(self, number: int) -> Path:
        return self._output.with_name(f".{self._output.name}.{number}.{self._save_id}")

    def _publish(self) -> list[Path]:
        count = len(self._shards)
        if count == 1:
            self._temporary(0).replace(self._output)
            sync_folder(self._output.parent)
            return [self._output]
        stem = self._output.name.removesuffix(".safetensors")
        paths = [self._output.with_name(f"{stem}-{n + 1:05d}-of-{count:05d}.safetensors") for n in range(count)]
        for number, path in enumerate(paths):
            self._temporary(number).replace(path)
        index = {
            "metadata": {"total_size": sum(self._numel(n) * d.itemsize for n, (d, _) in self._layout.items())},
            "weight_map": {name: path.name for path, shard in zip(paths, self._shards, strict=True) for name in shard},
        }
        index_path = self._output.with_name(f"{self._output.name}.index.json")
        replace_file(index_path, json.dumps(index, indent=2).encode(), self._save_id)
        return [*paths, index_path]


def _divide(layout: Layout, max_nbytes: int) -> list[list[str]]:
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
