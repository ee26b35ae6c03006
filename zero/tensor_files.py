"""Tensors by name, read one at a time from files: safetensors, their index, and PyTorch's own (weights only).

A safetensors file:  | length of the header, 8 bytes | header, JSON: name -> dtype, shape, [begin, end) | bytes |
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcomm import LayoutError

__all__ = ["open_tensors"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")

Tensors = Mapping[str, Callable[[], Tensor]]
"""How each tensor is read."""


def open_tensors(source: Mapping[str, Tensor] | str | os.PathLike[str]) -> Tensors:
    """What is in ``source``, without its values.

    Args:
        source: Tensors by name; a file (``.safetensors``, or what ``torch.save`` wrote); an index of several files; or
            a folder, as ``save_pretrained`` writes it.

    Raises:
        LayoutError: It is none of these, or a file is damaged. OSError: It cannot be read.
    """
    if isinstance(source, Mapping):
        return {name: lambda value=value: value for name, value in source.items()}  # type: ignore[misc]
    path = Path(source)
    if path.is_dir():
        path = next((path / name for name in (*INDEXES, *SINGLES) if (path / name).exists()), path)
    if path.is_dir():
        raise LayoutError(f"a folder must have one of {', '.join((*INDEXES, *SINGLES))}: {path} has not")
    if path.suffix == ".json":
        files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        opened = [open_tensors(path.parent / Path(name).name) for name in files]
        return {name: read for tensors in opened for name, read in tensors.items()}
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    loaded: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return open_tensors(loaded)


def _open_safetensors(path: Path) -> Tensors:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or begin > len(data):
        raise LayoutError(f"{path} is no safetensors file: {len(data)} bytes, a header of {begin - 8}")
    header: dict[str, Any] = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        known = DTYPES.get(entry["dtype"])
        size = 0 if known is None else prod(entry["shape"]) * known.itemsize
        if known is None or stop - start != size or not 0 <= start <= stop <= len(data) - begin:
            raise LayoutError(f"{path} is damaged, or of a newer format: {name!r} is said to be {entry}")

    def read(entry: dict[str, Any]) -> Tensor:
        start, stop = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        content = bytearray(data[begin + start : begin + stop])
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.view(entry["shape"])

    return {name: lambda entry=entry: read(entry) for name, entry in header.items()}  # type: ignore[misc]
