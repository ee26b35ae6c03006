"""The tensors that a rank needs of a checkpoint; the model and the index are compared before anything is read."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero._checkpoint.dcp import FlatPart
from zero._checkpoint.flat_parts import (
    LocalPart,
    kind_of_key,
    local_masters,
    local_weights,
    named_buffers,
    parameter_of_state,
    residual_layout,
)
from zero._checkpoint.index import Index
from zero._checkpoint.json_tree import decode
from zero._checkpoint.own_names import own_key
from zero._checkpoint.snapshot import names_of_groups
from zero._optim.host_adam import is_same_rule
from zero._optim.several import name_of
from zero._runtime.optimizer_parts import OptimizerParts
from zero._runtime.runtime import Runtime
from zero._storage.safetensors_file import CODES
from zero.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSelection:
    """What to load."""

    optimizer_states: bool = True
    """Moments, parameter groups, loss scale."""
    module_only: bool = False
    """Only weights and buffers, converted to the dtypes of the model."""
    strict: bool = True
    """The checkpoint must have exactly the parameters and buffers of the model."""


@dataclass(slots=True)
class Request:
    """Host memory for what is read: the model is changed only once everything has been read.

    Masters and moments in files are not part of it: see :mod:`zero._checkpoint.streamed_load`.
    """

    index: Index
    parts: dict[str, FlatPart] = field(default_factory=dict)
    random_rank: int | None = None
    """The saved rank whose random state this rank loads."""

    def add(self, key: str, numel: int, offset: int, dtype: torch.dtype) -> None:
        """Request elements of tensor ``key``; those that follow on what was requested of it are added to that."""
        if (known := self.parts.get(key)) is not None and known.offset + known.values.numel() == offset:
            offset, numel = known.offset, known.values.numel() + numel
        self.parts[key] = FlatPart(key, self.index.tensors[key].numel, offset, torch.zeros(numel, dtype=dtype))

    def add_full(self, key: str) -> None:
        """Request the full tensor ``key``."""
        stored = self.index.tensors[key]
        self.add(key, stored.numel, 0, stored.dtype)

    def values(self, key: str) -> Tensor:
        """The values that were read for ``key``, which a document of the checkpoint may name."""
        key = own_key(key, self.index.own_names)
        if key not in self.parts:
            raise CheckpointError(f"{self.index.folder} is damaged: tensor {key!r} is referred to and missing")
        return self.parts[key].values

    def values_of(self, key: str, local: LocalPart) -> Tensor:
        """Those of the elements of ``local``."""
        first = local.first - self.parts[key].offset
        return self.values(key)[first : first + local.values.numel()]

    def decoded(self, document: Any) -> Any:
        """Decode a part of the index's content."""
        return decode(document, self.values)

    def document(self, prefix: str) -> Any:
        """Decode what :func:`zero._checkpoint.flat_parts.document_parts` has stored under ``prefix``."""
        return self.decoded(json.loads(bytes(self.values(f"{prefix}/json").tolist())))

    def random_state(self) -> Any:
        """The state of the random generators to restore, or None."""
        return None if self.random_rank is None else self.document(f"rank/{self.random_rank}")["random"]


def make_request(internals: OptimizerParts, index: Index, wanted: LoadSelection) -> Request:
    """Return what this rank has to read.

    Raises:
        CheckpointError: Parameters, buffers, shapes, dtypes or parameter groups differ; the message names them. The
            same on every rank, as it depends on the full model and the index alone.
    """
    problems = _weight_problems(internals, index, wanted) + _buffer_problems(internals, index, wanted)
    if wanted.optimizer_states and not wanted.module_only:
        problems += _group_problems(internals, index)
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise CheckpointError(f"{index.folder} does not fit the model: " + "; ".join(problems[:8]) + more)
    request = Request(index)
    _request_weights(request, internals)
    for key in index.tensors:
        if key.startswith("tree."):
            request.add_full(key)
    if not wanted.module_only:
        _request_others(request, internals, wanted)
    return request


def _name_problems(kind: str, own: Collection[str], saved: Collection[str]) -> list[str]:
    """Names that only the model has, and those that only the checkpoint has."""
    own, saved = dict.fromkeys(own), dict.fromkeys(saved)  # lists would be searched once for each name
    missing = [name for name in own if name not in saved]
    problems = [f"{kind} {name!r} is missing (load_module_strict=False keeps the model's)" for name in missing]
    others = [name for name in saved if name not in own]
    if others:
        names = ", ".join(map(repr, others[:3]))
        problems.append(f"{len(others)} {kind}s are not in the model: {names} (load_module_strict=False skips them)")
    return problems


def _weight_problems(internals: OptimizerParts, index: Index, wanted: LoadSelection) -> list[str]:
    saved = index.content["parameters"]
    names = [slot.name for bucket in internals.runtime.buckets for slot in bucket.layout.slots]
    problems = _name_problems("parameter", names, saved) if wanted.strict else []
    for bucket in internals.runtime.buckets:
        for slot in bucket.layout.slots:
            entry = saved.get(slot.name)
            if entry is None:
                continue
            if tuple(entry["shape"]) != slot.shape:
                problems.append(
                    f"parameter {slot.name!r} has shape {entry['shape']} in the checkpoint and {list(slot.shape)} in "
                    "the model"
                )
                continue
            stored = index.tensors.get(f"weight/{slot.name}")
            if stored is None and slot.numel:
                if bucket.is_trainable:
                    problems.append(
                        f"parameter {slot.name!r} was frozen and left out of the checkpoint, and is trained here"
                    )
            elif stored is not None and stored.dtype != bucket.master.dtype and not wanted.module_only:
                problems.append(
                    f"parameter {slot.name!r} is {stored.dtype} in the checkpoint and {bucket.master.dtype} in the "
                    "model (load_module_only=True converts weights)"
                )
    return problems


def _buffer_problems(internals: OptimizerParts, index: Index, wanted: LoadSelection) -> list[str]:
    saved, buffers = index.content["buffers"], named_buffers(internals.runtime.model)
    problems = _name_problems("buffer", buffers, saved) if wanted.strict else []
    for name, buffer in buffers.items():
        entry = saved.get(name)
        if entry is None:
            continue
        if entry["shape"] != list(buffer.shape):
            problems.append(
                f"buffer {name!r} has shape {entry['shape']} in the checkpoint and {list(buffer.shape)} in the model"
            )
        elif entry["dtype"] != CODES[buffer.dtype] and not wanted.module_only:
            problems.append(
                f"buffer {name!r} is {entry['dtype']} in the checkpoint and {CODES[buffer.dtype]} in the model"
            )
    return problems


def _group_problems(internals: OptimizerParts, index: Index) -> list[str]:
    remedy = "(load_optimizer_states=False keeps the states of this optimizer)"
    saved = index.content["optimizer"]
    if saved is None:
        return [f"no optimizer was saved {remedy}"]
    here = name_of(internals.inner)
    if not is_same_rule(internals.inner, saved["class"], [group["options"] for group in saved["groups"]]):
        return [f"the optimizer is {saved['class']} in the checkpoint and {here} here {remedy}"]
    groups = names_of_groups(internals)
    if len(groups) != len(saved["groups"]):
        return [f"the checkpoint has {len(saved['groups'])} parameter groups and the optimizer {len(groups)} {remedy}"]
    problems = []
    for number, (entry, names) in enumerate(zip(saved["groups"], groups, strict=True)):
        different = sorted(set(entry["parameters"]) ^ set(names))
        if different:
            problems.append(f"parameter group {number} has other parameters, {different[0]!r} among them {remedy}")
    return problems + [f"{problem} {remedy}" for problem in _stack_problems(internals, index)]


def _stack_problems(internals: OptimizerParts, index: Index) -> Iterator[str]:
    """States of another shape than the parameter fit only the tensors that they are of."""
    keys_of = keys_by_parameter(index.tensors)
    for slot in (slot for bucket in internals.runtime.buckets for slot in bucket.layout.slots):
        kinds = [kind_of_key(key) for key in keys_of.get(slot.name, [])]
        saved = {kind.part for kind in kinds if kind.is_of_tensor}
        if saved and saved != (set(range(len(slot.parts))) if len(slot.parts) > 1 else {None}):
            yield (
                f"parameter {slot.name!r} was updated as {len(saved)} tensors, and is as {max(len(slot.parts), 1)} here"
            )


def _request_weights(request: Request, internals: OptimizerParts) -> None:
    index = request.index
    for local in local_weights(internals.runtime, "sizes"):
        key = f"weight/{local.name}"
        if local.bucket.states.is_in_files:
            continue  # masters in files: zero._checkpoint.streamed_load reads them, a sub-group at a time
        if key in index.tensors and local.name in index.content["parameters"]:
            request.add(key, local.values.numel(), local.first, local.values.dtype)
    for name, buffer in named_buffers(internals.runtime.model).items():
        if name in index.content["buffers"] and buffer.numel():
            own = f"rank/{internals.runtime.topology.rank}/buffer/{name}"
            is_same_world = index.content["world_size"] == internals.runtime.topology.world_size
            key = own if is_same_world and own in index.tensors else f"buffer/{name}"
            request.add(key, buffer.numel(), 0, buffer.dtype)


def _request_others(request: Request, internals: OptimizerParts, wanted: LoadSelection) -> None:
    index, rank = request.index, internals.runtime.topology.rank
    if rank < index.content["world_size"]:
        request.random_rank = rank
        for key in index.tensors:
            if key.startswith((f"rank/{rank}/json", f"rank/{rank}/tree.")):
                request.add_full(key)
    if wanted.optimizer_states:
        _request_states(request, internals)
        _request_node_parts(request, internals)


def _request_states(request: Request, internals: OptimizerParts) -> None:
    tensors = request.index.tensors
    keys_of = keys_by_parameter(tensors)
    for local in local_masters(internals):
        published = f"published/{local.name}"
        if published in tensors and internals.runtime.delayed.is_used:
            request.add(published, local.values.numel(), local.first, tensors[published].dtype)
        for key in keys_of.get(local.name, []):
            kind = kind_of_key(key)
            if kind.is_of_tensor and kind.part != local.of_stack:
                continue
            if key.startswith("state/"):
                if key.split("/")[1] in local.bucket.states.moments:
                    continue
                request.add(key, local.values.numel(), local.first, tensors[key].dtype)
            else:
                request.add_full(key)


def _request_node_parts(request: Request, internals: OptimizerParts) -> None:
    """Request replicas and residuals, if they were saved and this optimizer has them."""
    runtime, tensors = internals.runtime, request.index.tensors
    of_bucket = runtime.mode_state.replica_shards()
    for local in local_masters(internals):
        key = f"replica/{local.name}"
        if local.bucket in of_bucket and key in tensors:
            request.add(key, local.values.numel(), local.first, tensors[key].dtype)
    prefixes = tuple(f"rank/{rank}/residual/" for rank in residual_ranks(request, runtime))
    for key in tensors:
        if key.startswith(prefixes):
            request.add_full(key)


def residual_ranks(request: Request, runtime: Runtime) -> list[int]:
    """The saved ranks whose residuals this rank reads."""
    layout, content = residual_layout(runtime), request.index.content
    if layout is None or content.get("residual_layout") is None:
        return []
    is_same = content["residual_layout"] == layout
    return [runtime.topology.rank] if is_same else list(range(content["world_size"]))


def keys_by_parameter(keys: Iterable[str]) -> dict[str, list[str]]:
    """The keys of optimizer states, by the parameter they belong to."""
    keys_of: dict[str, list[str]] = {}
    for key in keys:
        if (name := parameter_of_state(key)) is not None:
            keys_of.setdefault(name, []).append(key)
    return keys_of
