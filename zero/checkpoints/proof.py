"""What a checkpoint refers to is in it: looked up when it is saved, before it counts, in what was written.

parameters, buffers     weight/NAME, buffer/NAME with the elements of their shapes
documents               {"$": "tensor", "key": KEY, "shape": [...]}, wherever that stands in them
ranks                   rank/R/json, a document, and what that refers to
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any

from zero.checkpoints.errors import CheckpointError
from zero.checkpoints.index import UNREADABLE, Index
from zero.checkpoints.model_parts import part_of, parts_in
from zero.checkpoints.storage import read_chunk
from zero.checkpoints.tree import KIND

__all__ = ["check_loadable"]


def check_loadable(index: Index) -> None:
    """Raise CheckpointError, with the key, if anything that ``index`` refers to is not there.

    Cost: two small reads of every rank's file; tensors are not read.
    """
    try:
        for part in parts_in(index):
            _check(part_of(index, part))
    except UNREADABLE as error:
        raise _not_loadable(index, repr(error)) from error


def _check(index: Index) -> None:
    content = index.content
    expected = dict(_named(content))
    documents = {f"rank/{rank}/json" for rank in range(content["world_size"])}
    documents |= {key for key in index.tensors if key.startswith("rank/") and key.endswith("/json")}
    texts = {key: json.loads(_text_of(index, key)) for key in sorted(documents)}
    for document in (content, *texts.values()):
        expected |= dict(_references(document))
    for key, numel in expected.items():
        stored = index.tensors.get(key)
        if (0 if stored is None else stored.numel) != numel or (stored is None and not _may_lack(key)):
            found = "is not there" if stored is None else f"has {stored.numel} elements"
            raise _not_loadable(index, f"tensor {key!r}, of {numel} elements, {found}")


def _not_loadable(index: Index, why: str) -> CheckpointError:
    return CheckpointError(f"what was written to {index.folder} could not be loaded, and does not count: {why}")


def _may_lack(key: str) -> bool:
    """Parameters without elements have no parts, on any rank."""
    return key.startswith("weight/")


def _named(content: Any) -> Iterator[tuple[str, int]]:
    for name, there in content["parameters"].items():
        if there["is_trainable"] or not content["excludes_frozen"]:
            yield f"weight/{name}", prod(there["shape"])
    for name, there in content["buffers"].items():
        yield f"buffer/{name}", prod(there["shape"])


def _references(document: Any) -> Iterator[tuple[str, int]]:
    """The keys of the tensors that stand for values in ``document``, and how many elements those have."""
    if isinstance(document, dict):
        if KIND in document and "key" in document:
            yield document["key"], prod(document["shape"])
            return
        document = list(document.values())
    if isinstance(document, list):
        for item in document:
            yield from _references(item)


def _text_of(index: Index, key: str) -> bytes:
    stored = index.tensors[key]
    return b"".join(bytes(read_chunk(index.folder, key, c, stored.dtype).tolist()) for c in stored.chunks)
