"""Reads pretrained weights one tensor at a time: from safetensors, an index of files, or torch.save's format.

A safetensors file:  | length of the header, 8 bytes | header, JSON: name -> dtype, shape, [begin, end) | bytes |
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from zcomm import LayoutError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
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
        opened = [open_tensors(path.parent / name) for name in _names_in(path)]
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


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is a file name without folders: an index must not name files outside its own folder."""
    return name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def _names_in(path: Path) -> list[str]:
    """The files that an index names, which must be in its folder."""
    try:
        names = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(f"{path} is not an index of tensor files: {error!r}") from error
    outside = [name for name in names if not isinstance(name, str) or not is_plain_name(name) or name.endswith(".json")]
    if outside:
        raise LayoutError(f"{path} must name only tensor files in its own folder: {outside[0]!r}")
    return sorted(names)


def _open_safetensors(path: Path) -> Tensors:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise LayoutError(f"{path} is not a safetensors file: it is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data_start = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or data_start > len(data):
        raise LayoutError(f"{path} is not a safetensors file: {len(data)} bytes, header of {data_start - 8}")
    try:
        header: dict[str, Any] = json.loads(data[8:data_start])
        header.pop("__metadata__", None)
        wrong = [name for name, entry in header.items() if not _fits(entry, len(data) - data_start)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(f"{path} is not a safetensors file, or its header is damaged: {error!r}") from error
    if wrong:
        raise LayoutError(
            f"{path} is damaged, or of a newer format: the entry of tensor {wrong[0]!r} is {header[wrong[0]]}"
        )

    def read(entry: dict[str, Any]) -> Tensor:
        start, stop = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        content = bytearray(data[data_start + start : data_start + stop])
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.view(entry["shape"])

    return {name: lambda entry=entry: read(entry) for name, entry in header.items()}  # type: ignore[misc]


def _fits(entry: dict[str, Any], nbytes: int) -> bool:
    """Whether a header's entry is consistent, and within the ``nbytes`` bytes of data."""
    (start, stop), dtype, shape = entry["data_offsets"], DTYPES.get(entry["dtype"]), entry["shape"]
    if dtype is None or not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        return False
    return bool(start <= stop <= nbytes and stop - start == prod(shape) * dtype.itemsize)
