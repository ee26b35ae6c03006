"""Reads pretrained weights one tensor at a time: from safetensors, an index of files, or torch.save's format."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from zcomm import LayoutError
from zero._storage.safetensors_file import TensorEntry, from_bytes, read_header
from zero.errors import CheckpointError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")

Tensors = Mapping[str, Callable[[], Tensor]]
"""By name, a function that reads the tensor."""


def open_tensors(source: Mapping[str, Tensor] | str | os.PathLike[str]) -> Tensors:
    """The tensors of ``source``; values are read later, one at a time.

    Args:
        source: Tensors by name; a file (``.safetensors``, or of ``torch.save``); an index of several files; or a folder
            written by ``save_pretrained``.

    Raises:
        LayoutError: ``source`` is none of these, or a file is damaged.
        OSError: A file cannot be read.
    """
    if isinstance(source, Mapping):
        return {name: lambda value=value: value for name, value in source.items()}  # type: ignore[misc]
    path = Path(source)
    if path.is_dir():
        path = next((path / name for name in (*INDEXES, *SINGLES) if (path / name).exists()), path)
    if path.is_dir():
        raise LayoutError(f"a folder must have one of {', '.join((*INDEXES, *SINGLES))}: {path} has none")
    if path.suffix == ".json":
        opened = [open_tensors(path.parent / name) for name in names_in(path)]
        return {name: read for tensors in opened for name, read in tensors.items()}
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    try:
        loaded: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise LayoutError(f"{path} must hold tensors by name and nothing else, or it is damaged: {error}") from error
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise LayoutError(f"{path} must hold tensors by name: it holds {type(loaded).__name__}")
    return open_tensors(loaded)


def _is_plain_name(name: str) -> bool:
    """Whether ``name`` is a file name without folders: an index must not name files outside its own folder."""
    return name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def names_in(path: Path) -> list[str]:
    """The files that an index names, which must be in its folder.

    Raises:
        LayoutError: ``path`` is no index, or names other files.
        OSError: It cannot be read.
    """
    try:
        names = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(f"{path} is not an index of tensor files: {error!r}") from error
    outside = [
        name for name in names if not isinstance(name, str) or not _is_plain_name(name) or name.endswith(".json")
    ]
    if outside:
        raise LayoutError(f"{path} must name only tensor files in its own folder: {outside[0]!r}")
    return sorted(names)


def _open_safetensors(path: Path) -> Tensors:
    with path.open("rb") as file:
        try:
            entries = read_header(path)
        except CheckpointError as error:
            raise LayoutError(f"the file is damaged, or not of this format: {error}") from error
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(entry: TensorEntry) -> Tensor:
        return from_bytes(bytearray(data[entry.start : entry.stop]), entry.dtype).view(entry.shape)

    return {name: partial(read, entry) for name, entry in entries.items()}
