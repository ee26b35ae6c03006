"""Encode plain Python values as JSON and tensors, and decode them: what a checkpoint uses in place of pickles.

Decoding builds only the types named here and executes nothing. JSON's own types are stored as such; any other value is
an object whose key ``"$"`` gives its kind:

    tuple, set, frozenset, dict with other keys than strings, OrderedDict, Counter   items
    float (inf, nan), torch.dtype                                            text
    torch.Tensor, numpy.ndarray, numpy scalars, bytes                        a tensor stored beside the JSON
    tensor subclasses that are states of the optimizer in use                parts
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero._optim.subclass_states import apart, is_subclass_state, joined
from zero._storage.safetensors_file import CODES, DTYPES, is_storable
from zero.errors import CheckpointError

KIND = "$"


class Tree:
    """Encodes values as JSON; the tensors in them are collected in ``tensors``.

    Args:
        prefix: First part of the tensors' keys.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return ``value`` as JSON.

        Raises:
            CheckpointError: A value of another type is in it; the message gives its ``path``.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {KIND: "float", "text": repr(value)}
        if kind is torch.dtype and value in CODES:
            return {KIND: "dtype", "text": CODES[value]}
        if kind is list:
            return self._items(value, path)
        if kind in (tuple, torch.Size):
            return {KIND: "tuple", "items": self._items(value, path)}
        if kind in (set, frozenset):
            return {KIND: kind.__name__, "items": self._items(sorted(value, key=repr), path)}
        if kind in (dict, OrderedDict, Counter):
            return self._dict(value, path)
        return self._tensor(value, path)

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.encode(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if type(value) is dict and all(type(key) is str for key in value) and KIND not in value:
            return {key: self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        items = [[self.encode(k, f"a key of {path}"), self.encode(v, f"{path}[{k!r}]")] for k, v in value.items()]
        return {KIND: type(value).__name__, "items": items}

    def _tensor(self, value: Any, path: str) -> Any:
        if is_subclass_state(value):
            return {KIND: "subclass", "parts": self.encode(apart(value), path)}
        if isinstance(value, Tensor) and is_storable(value):
            return self._store("tensor", value.detach())
        is_array = type(value) in (np.ndarray, np.memmap) or isinstance(value, np.generic)  # not masked arrays
        if is_array and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            array = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
            return self._store("scalar" if isinstance(value, np.generic) else "array", torch.from_numpy(array), value)
        if type(value) is bytes:
            return self._store("bytes", torch.tensor(list(value), dtype=torch.uint8))
        more = "".join(f" {getattr(value, name)}" for name in ("dtype", "layout", "device") if hasattr(value, name))
        raise CheckpointError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}{more}, which a checkpoint does not "
            "store: it holds None, bool, int, float, str, bytes, list, tuple, set, dict, tensors and numpy arrays. "
            "Convert it (vars(), str(), .state_dict(), ...), or leave it out"
        )

    def _store(self, kind: str, tensor: Tensor, original: Any = None) -> dict[str, Any]:
        key = f"{self._prefix}.{len(self.tensors)}"
        self.tensors[key] = tensor
        shape = list(tensor.shape if original is None else original.shape)
        return {KIND: kind, "key": key, "shape": shape}


def decode(document: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Decode ``document``; ``tensor_of(key)`` returns a stored tensor, flat.

    Raises:
        CheckpointError: Unknown kind of value.
    """
    if isinstance(document, list):
        return [decode(item, tensor_of) for item in document]
    if not isinstance(document, dict):
        return document
    if KIND not in document:
        return {key: decode(item, tensor_of) for key, item in document.items()}
    kind = document[KIND]
    if kind == "float":
        return float(document["text"])
    if kind == "dtype":
        return DTYPES[document["text"]]
    if kind in ("tuple", "set", "frozenset"):
        items = [decode(item, tensor_of) for item in document["items"]]
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)
    if kind in ("dict", "OrderedDict", "Counter"):
        pairs = {decode(key, tensor_of): decode(item, tensor_of) for key, item in document["items"]}
        return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[kind](pairs)
    if kind == "subclass":
        return joined(decode(document["parts"], tensor_of))
    return _decode_tensor(kind, document, tensor_of)


def _decode_tensor(kind: str, document: dict[str, Any], tensor_of: Callable[[str], Tensor]) -> Any:
    if kind not in ("tensor", "array", "scalar", "bytes"):
        raise CheckpointError(f"the checkpoint holds a value of kind {kind!r}: it was saved by a newer version")
    tensor = tensor_of(document["key"]).clone().view(document["shape"])
    if kind == "tensor":
        return tensor
    if kind == "bytes":
        return bytes(tensor.tolist())
    return tensor.numpy() if kind == "array" else tensor.numpy()[()]
