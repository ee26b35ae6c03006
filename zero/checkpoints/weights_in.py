"""Plain weights as a checkpoint: safetensors files, their index, or a state_dict of torch.save without other objects.

Safetensors are read where they are: each rank reads the bytes of its own parts. A file of torch.save is mapped into
memory, with weights_only=True: nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero.checkpoints.errors import CheckpointError
from zero.checkpoints.index import CHUNK_NUMEL, Index, StoredChunk, StoredTensor
from zero.checkpoints.parts import named_buffers
from zero.checkpoints.tensor_file import CODES, Entry, read_header
from zero.inside import Inside
from zero.large_linears import rows_by_key
from zero.tensor_files import is_plain_name

__all__ = ["find_weights", "index_of_weights"]


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
        names = set(json.loads(indices[0].read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{indices[0]} is not the index of safetensors files: {error!r}") from error
    if not all(isinstance(name, str) and is_plain_name(name) for name in names):
        raise CheckpointError(f"{indices[0]} names files outside its folder")
    return [folder / name for name in sorted(names)]


def index_of_weights(path: Path, inside: Inside) -> Index:
    """What ``path`` holds of the parameters and buffers of a model, which may stand there under any of their names.

    Raises:
        CheckpointError: Not safetensors, or truncated.
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
    for kind, name, names in _names(inside):
        known = next((n for n in names if n in entries), None)
        if known is not None:
            file, entry = entries[known]
            tensors[f"{kind}/{name}"] = _stored(file, entry)
            shapes[kind][name] = {"shape": list(entry.shape), "dtype": CODES[entry.dtype]}
            used.update(names)
    for whole, rows in rows_by_key(inside.runtime.model).items():
        if whole in entries and entries[whole][1].shape[:1] == (rows[-1].stop,):
            file, entry = entries[whole]
            used.add(whole)
            for part in rows:
                own = _rows_of_entry(entry, part.start, part.stop)
                tensors[f"weight/{part.key}"] = _stored(file, own)
                shapes["weight"][part.key] = {"shape": list(own.shape), "dtype": CODES[own.dtype]}
    for name in entries.keys() - used:
        _, entry = entries[name]
        shapes["weight"][name] = {"shape": list(entry.shape), "dtype": CODES[entry.dtype]}
    folder = path if path.is_dir() else path.parent
    content = {"parameters": shapes["weight"], "buffers": shapes["buffer"], "world_size": 0, "optimizer": None}
    return Index(folder, tensors, content, _sampled(files))


def _sampled(files: list[Path]) -> str:
    """A digest by which ranks tell files of other weights apart: of names, sizes and 16 pages of each."""
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        with path.open("rb", buffering=0) as file:
            nbytes = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {nbytes} ".encode())
            for number in range(16):
                file.seek(max(nbytes - 4096, 0) * number // 15)
                digest.update(file.read(4096))
    return digest.hexdigest()


def _names(inside: Inside) -> Iterator[tuple[str, str, list[str]]]:
    model = inside.runtime.model
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for bucket in inside.runtime.buckets:
        for param, slot in zip(bucket.params, bucket.layout.slots, strict=True):
            yield "weight", slot.name, [slot.name, *names[id(param)]]
    for name in named_buffers(model):
        yield "buffer", name, [name]


def _rows_of_entry(entry: Entry, start: int, stop: int) -> Entry:
    nbytes = (entry.stop - entry.start) // entry.shape[0]
    first, last = entry.start + start * nbytes, entry.start + stop * nbytes
    return Entry(entry.dtype, (stop - start, *entry.shape[1:]), first, last)


def _stored(file: Path, entry: Entry) -> StoredTensor:
    nbytes, numel = entry.dtype.itemsize, (entry.stop - entry.start) // entry.dtype.itemsize
    chunks = tuple(
        StoredChunk(at, min(CHUNK_NUMEL, numel - at), file.name, entry.start + at * nbytes, None)
        for at in range(0, numel, CHUNK_NUMEL)
    )
    return StoredTensor(entry.dtype, numel, chunks)
