"""What a rank wants of a checkpoint, compared with what is there before anything is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero._checkpoint.dcp import FlatPart
from zero._checkpoint.flat_parts import SCALARS, held_pieces, held_weights, named_buffers
from zero._checkpoint.index import Index
from zero._checkpoint.json_tree import decode
from zero._checkpoint.snapshot import names_of_groups
from zero._optim.host_adam import is_same_rule
from zero._runtime.optimizer_parts import OptimizerParts
from zero._storage.safetensors_file import CODES
from zero.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to take over."""

    optimizer_states: bool = True
    """Moments, parameter groups, loss scale."""
    module_only: bool = False
    """Weights and buffers, converted to the dtypes of the model, and nothing else."""
    strict: bool = True
    """Parameters and buffers must be the same as in the model."""


@dataclass(slots=True)
class Request:
    """Where what is wanted is read to, in host memory: the model is changed once all is there.

    Masters and moments that rest in files are not part of it: see :mod:`zero._checkpoint.streamed_load`.
    """

    index: Index
    parts: dict[str, FlatPart] = field(default_factory=dict)
    random_rank: int | None = None
    """The saved rank whose random state this one goes on with."""

    def add(self, key: str, numel: int, offset: int, dtype: torch.dtype) -> Tensor:
        """Ask for elements of tensor ``key``; the values are there after reading."""
        values = torch.zeros(numel, dtype=dtype)
        self.parts[key] = FlatPart(key, self.index.tensors[key].numel, offset, values)
        return values

    def add_whole(self, key: str) -> None:
        """Ask for all of a tensor."""
        stored = self.index.tensors[key]
        self.add(key, stored.numel, 0, stored.dtype)

    def has(self, key: str) -> bool:
        """Whether ``key`` was asked for."""
        return key in self.parts

    def values(self, key: str) -> Tensor:
        """What was read."""
        if key not in self.parts:
            raise CheckpointError(f"{self.index.folder} is damaged: tensor {key!r} is referred to and not there")
        return self.parts[key].values

    def decoded(self, document: Any) -> Any:
        """The plain value of a part of the content."""
        return decode(document, self.values)

    def random_state(self) -> dict[str, Any] | None:
        """The random generators to go on with."""
        if self.random_rank is None:
            return None
        text = bytes(self.values(f"rank/{self.random_rank}/json").tolist())
        state: dict[str, Any] = self.decoded(json.loads(text))["random"]
        return state


def make_request(inside: OptimizerParts, index: Index, wanted: Wanted) -> Request:
    """What this rank asks for.

    Raises:
        CheckpointError: Parameters, buffers, shapes, dtypes or parameter groups differ; names them. The same on every
            rank, as it depends on the whole model and the index alone.
    """
    problems = _weight_problems(inside, index, wanted) + _buffer_problems(inside, index, wanted)
    if wanted.optimizer_states and not wanted.module_only:
        problems += _group_problems(inside, index)
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise CheckpointError(f"{index.folder} does not fit the model: " + "; ".join(problems[:8]) + more)
    request = Request(index)
    _ask_for_weights(request, inside)
    if not wanted.module_only:
        _ask_for_rest(request, inside, wanted)
    return request


def _weight_problems(inside: OptimizerParts, index: Index, wanted: Wanted) -> list[str]:
    problems = []
    saved = dict(index.content["parameters"])
    for bucket in inside.runtime.buckets:
        for slot in bucket.layout.slots:
            there = saved.pop(slot.name, None)
            if there is None:
                if wanted.strict:
                    problems.append(f"parameter {slot.name!r} is missing (load_module_strict=False keeps the model's)")
                continue
            if tuple(there["shape"]) != slot.shape:
                problems.append(f"parameter {slot.name!r} has shape {there['shape']} there and {list(slot.shape)} here")
                continue
            stored = index.tensors.get(f"weight/{slot.name}")
            if stored is None and slot.numel:
                if bucket.is_trainable:
                    problems.append(f"parameter {slot.name!r} was frozen and left out, and is trained here")
            elif stored is not None and stored.dtype != bucket.master.dtype and not wanted.module_only:
                problems.append(
                    f"parameter {slot.name!r} is {stored.dtype} there and {bucket.master.dtype} here "
                    "(load_module_only=True converts weights)"
                )
    if saved and wanted.strict:
        names = ", ".join(map(repr, list(saved)[:3]))
        problems.append(f"{len(saved)} parameters are not in the model: {names} (load_module_strict=False skips them)")
    return problems


def _buffer_problems(inside: OptimizerParts, index: Index, wanted: Wanted) -> list[str]:
    problems = []
    saved = dict(index.content["buffers"])
    for name, buffer in named_buffers(inside.runtime.model).items():
        there = saved.pop(name, None)
        if there is None:
            if wanted.strict:
                problems.append(f"buffer {name!r} is missing (load_module_strict=False keeps the model's)")
        elif there["shape"] != list(buffer.shape):
            problems.append(f"buffer {name!r} has shape {there['shape']} there and {list(buffer.shape)} here")
        elif there["dtype"] != CODES[buffer.dtype] and not wanted.module_only:
            problems.append(f"buffer {name!r} is {there['dtype']} there and {CODES[buffer.dtype]} here")
    if saved and wanted.strict:
        names = ", ".join(map(repr, list(saved)[:3]))
        problems.append(f"{len(saved)} buffers are not in the model: {names} (load_module_strict=False skips them)")
    return problems


def _group_problems(inside: OptimizerParts, index: Index) -> list[str]:
    remedy = "(load_optimizer_states=False starts a new optimizer)"
    saved = index.content["optimizer"]
    if saved is None:
        return [f"no optimizer was saved {remedy}"]
    here = type(inside.inner).__name__
    if not is_same_rule(inside.inner, saved["class"], [group["options"] for group in saved["groups"]]):
        return [f"the optimizer was {saved['class']} there and is {here} here {remedy}"]
    groups = names_of_groups(inside)
    if len(groups) != len(saved["groups"]):
        return [f"there are {len(saved['groups'])} parameter groups there and {len(groups)} here {remedy}"]
    problems = []
    for number, (there, names) in enumerate(zip(saved["groups"], groups, strict=True)):
        different = sorted(set(there["parameters"]) ^ set(names))
        if different:
            problems.append(f"parameter group {number} has other members, {different[0]!r} among them {remedy}")
    return problems


def _ask_for_weights(request: Request, inside: OptimizerParts) -> None:
    index = request.index
    for held in held_weights(inside.runtime, "sizes"):
        key = f"weight/{held.name}"
        if inside.runtime.is_in_files(held.bucket):
            continue  # see zero._checkpoint.streamed_load
        if key in index.tensors and held.name in index.content["parameters"]:
            request.add(key, held.values.numel(), held.first, held.values.dtype)
    for name, buffer in named_buffers(inside.runtime.model).items():
        if name in index.content["buffers"] and buffer.numel():
            own = f"rank/{inside.runtime.topology.rank}/buffer/{name}"
            is_same_world = index.content["world_size"] == inside.runtime.topology.world_size
            key = own if is_same_world and own in index.tensors else f"buffer/{name}"
            request.add(key, buffer.numel(), 0, buffer.dtype)


def _ask_for_rest(request: Request, inside: OptimizerParts, wanted: Wanted) -> None:
    index, rank = request.index, inside.runtime.topology.rank
    prefixes = ["tree."]
    if rank < index.content["world_size"]:
        request.random_rank = rank
        prefixes += [f"rank/{rank}/json", f"rank/{rank}/tree."]
    for key in index.tensors:
        if key.startswith(tuple(prefixes)):
            request.add_whole(key)
    if wanted.optimizer_states:
        _ask_for_states(request, inside)


def _ask_for_states(request: Request, inside: OptimizerParts) -> None:
    tensors, files = request.index.tensors, inside.runtime.state_files
    keys_of, in_files = keys_by_parameter(tensors), () if files is None else tuple(files.moments)
    for held, _ in held_pieces(inside):
        published = f"published/{held.name}"
        if published in tensors and inside.runtime.delayed is not None:
            request.add(published, held.values.numel(), held.first, tensors[published].dtype)
        for key in keys_of.get(held.name, []):
            if key.startswith("state/"):
                if inside.runtime.is_in_files(held.bucket) and key.split("/")[1] in in_files:
                    continue
                request.add(key, held.values.numel(), held.first, tensors[key].dtype)
            else:
                request.add_whole(key)


def keys_by_parameter(keys: Iterable[str]) -> dict[str, list[str]]:
    """The keys of optimizer states, by the parameter they belong to."""
    keys_of: dict[str, list[str]] = {}
    for key in keys:
        kind, _, rest = key.partition("/")
        if kind == "state" or kind in SCALARS:
            keys_of.setdefault(rest.partition("/")[2], []).append(key)
    return keys_of
