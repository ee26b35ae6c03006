"""A checkpoint under the names that the model has: a tied parameter may be saved under any of its names.

    index of the save, {"emb.weight": {"aliases": ["out.weight"]}} --> index as the model would save it

    the model ties emb and out, and out comes first    everything of emb.weight is called out.weight
    the model has both, not tied                       out.weight is a copy of the weight; its optimizer states are not

Two parameters have no states of their own in what was saved for one: :mod:`zero._checkpoint.request` refuses that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zero._checkpoint.flat_parts import WRAPPER, kind_of_key, parameter_of_state, without_wrappers
from zero._checkpoint.index import Index
from zero._runtime.runtime import Runtime

OF_PARAMETER = ("weight", "published", "replica")
"""Kinds of tensors whose keys have a parameter's name and nothing else."""
OF_BUFFER = re.compile(r"(rank/\d+/)?buffer/")


def under_own_names(index: Index, runtime: Runtime) -> Index:
    """``index`` under the names of the model; ``index`` itself if those are the saved ones."""
    index = _with_names_of_buffers(index)
    saved: Mapping[str, Any] = index.content["parameters"]
    first_of = {other: name for name, entry in saved.items() for other in entry.get("aliases", ())}
    all_names = names_of_parameters(runtime)
    sources: dict[str, str] = {}
    for name, names in all_names.items():
        found = next((first_of.get(other, other) for other in names if other in first_of or other in saved), None)
        if name not in saved and found is not None:
            sources[name] = found
    if not sources:
        return index
    heirs = {source: name for name, source in reversed(sources.items()) if source not in all_names}
    parameters = {heirs.get(name, name): entry for name, entry in saved.items()}
    tensors = {own_key(key, heirs): stored for key, stored in index.tensors.items()}
    for name, source in sources.items():
        parameters.setdefault(name, saved[source])
        if f"weight/{source}" in index.tensors:
            tensors.setdefault(f"weight/{name}", index.tensors[f"weight/{source}"])
    content = {**index.content, **_content(index, parameters, heirs)}
    return replace(index, tensors=tensors, content=content, own_names=heirs)


def _with_names_of_buffers(index: Index) -> Index:
    """``index`` with the buffers' names of state dicts: earlier releases saved those with wrappers in them."""
    saved: Mapping[str, Any] = index.content["buffers"]
    if not any(WRAPPER in name for name in saved):
        return index
    content = {**index.content, "buffers": {without_wrappers(name): entry for name, entry in saved.items()}}
    tensors = {without_wrappers(key) if OF_BUFFER.match(key) else key: stored for key, stored in index.tensors.items()}
    return replace(index, tensors=tensors, content=content)


def names_of_parameters(runtime: Runtime) -> dict[str, list[str]]:
    """All names of each parameter of the model, by that of its slot."""
    names: dict[int, list[str]] = {}
    for name, param in runtime.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {
        slot.name: [slot.name, *names[id(param)]]
        for bucket in runtime.buckets
        for param, slot in zip(bucket.params, bucket.layout.slots, strict=True)
    }


def _content(index: Index, parameters: Mapping[str, Any], heirs: Mapping[str, str]) -> dict[str, Any]:
    optimizer = index.content["optimizer"]
    if optimizer is not None:
        groups = [
            {**group, "parameters": [heirs.get(name, name) for name in group["parameters"]]}
            for group in optimizer["groups"]
        ]
        optimizer = {**optimizer, "groups": groups}
    return {"parameters": parameters, "optimizer": optimizer}


def own_key(key: str, own_names: Mapping[str, str]) -> str:
    """``key``, of the checkpoint, with the parameter's own name."""
    kind = kind_of_key(key).kind
    if kind in OF_PARAMETER:
        prefix, _, name = key.partition("/")
        return f"{prefix}/{own_names.get(name, name)}"
    of_state = parameter_of_state(key)
    if of_state is None or of_state not in own_names:
        return key
    kind, state, rest = key.split("/", 2)
    return f"{kind}/{state}/{own_names[of_state]}{rest.removeprefix(of_state)}"
