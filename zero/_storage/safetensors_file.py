"""Headers of safetensors files: where each tensor's bytes are, for files written and read in pieces.

    | 8 bytes: length of the header | header: JSON, padded to 8 | data: tensor after tensor |

Source: the format's description in the safetensors repository (README, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero.errors import CheckpointError

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.complex128: "C128",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
}  # fmt: skip
"""The format's names of dtypes. C128 is ours: in a file such a tensor is F64 with a last dimension of two."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
MAX_HEADER_NBYTES = 100_000_000
"""The format's own limit."""


class TensorEntry(NamedTuple):
    """One tensor of a file: bytes ``[start, stop)``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def make_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The header of a file with ``tensors`` in this order, and where each tensor's bytes go."""
    document: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at, spans = 0, {}
    for name, (dtype, shape) in tensors.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        code, more = ("F64", [2]) if dtype is torch.complex128 else (CODES[dtype], [])
        document[name] = {"dtype": code, "shape": [*shape, *more], "data_offsets": [at, at + nbytes]}
        spans[name] = (dtype, shape, at, at + nbytes)
        at += nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: TensorEntry(d, s, base + a, base + b) for name, (d, s, a, b) in spans.items()}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of ``path``, checked against the file's length; the data is not read.

    Raises:
        CheckpointError: ``path`` is not a safetensors file, or it is truncated.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= MAX_HEADER_NBYTES:
                raise CheckpointError(f"{path} is not a safetensors file: header of {length} bytes")
            document = json.loads(file.read(length))
        nbytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file, or its header is damaged: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    document.pop("__metadata__", None)
    return {name: _entry(path, name, value, 8 + length, nbytes) for name, value in document.items()}


def _entry(path: Path, name: str, value: object, base: int, nbytes: int) -> TensorEntry:
    try:
        dtype, shape = DTYPES[value["dtype"]], tuple(index(n) for n in value["shape"])  # type: ignore[index]
        start, stop = (base + index(n) for n in value["data_offsets"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: the entry of tensor {name!r} cannot be read: {value!r}") from error
    if not base <= start <= stop or min(shape, default=0) < 0 or stop - start != prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: the entry of tensor {name!r} is inconsistent: {value!r}")
    if stop > nbytes:
        raise CheckpointError(f"{path} is truncated: tensor {name!r} ends at byte {stop}, the file at {nbytes}")
    return TensorEntry(dtype, shape, start, stop)


def is_storable(tensor: Tensor) -> bool:
    """Whether a checkpoint can store ``tensor``: a plain one, with all its elements in memory."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return is_plain and tensor.dtype in CODES and tensor.layout is torch.strided and not tensor.is_meta


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of ``tensor``, copied unless it is contiguous in host memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def from_bytes(data: bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    """A flat tensor over ``data``, without a copy."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8)).view(dtype)
