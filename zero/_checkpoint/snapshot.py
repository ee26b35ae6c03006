"""The snapshot of a training state that a checkpoint stores: parts of tensors, and a JSON document.

It is taken on the main thread, between steps. The background thread that writes it must not look at the model, which
training may be changing by then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from zcomm import Topology
from zero._checkpoint.collective_save import agreed
from zero._checkpoint.dcp import FlatPart
from zero._checkpoint.flat_parts import (
    buffer_parts,
    digests_of_buffers,
    document_parts,
    local_weights,
    named_buffers,
    node_parts,
    residual_layout,
    stale_parameter_parts,
    state_parts,
)
from zero._checkpoint.json_tree import Tree
from zero._optim.several import name_of
from zero._runtime.optimizer_parts import OptimizerParts
from zero._runtime.runtime import Runtime
from zero._storage.safetensors_file import CODES
from zero.errors import CheckpointError
from zero.optimizer import ZeroOptimizer


def capture_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all random generators, as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "numpy": (name, keys, *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`capture_random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank saves."""

    parts: list[FlatPart]
    content: dict[str, Any]
    """The document of metadata.json; the first rank's is written."""

    @property
    def is_in_files(self) -> bool:
        """Whether parts are read from files while the snapshot is saved, so that training must wait for the save."""
        return any(part.read is not None for part in self.parts)

    def copied(self) -> Snapshot:
        """Return a copy in host memory of its own, which training does not change."""
        parts = [replace(part, values=part.values.to("cpu", copy=True)) for part in self.parts]
        return Snapshot(parts, self.content)


def take_snapshot(
    optimizer: ZeroOptimizer,
    ranks: Topology,
    *,
    stateful: Mapping[str, Any],
    client_state: Mapping[str, Any],
    exclude_frozen_parameters: bool,
) -> Snapshot:
    """Return this rank's parts, as views of live tensors, and the document. Collective over ``ranks``.

    Raises:
        CheckpointError: A value cannot be stored, or an object raised in ``state_dict()``; the same on every rank.
    """
    internals = optimizer.parts
    internals.runtime.finish_update()
    parts = []
    for local in local_weights(internals.runtime, "values"):
        if local.bucket.is_trainable or not exclude_frozen_parameters:
            parts.append(local.part(f"weight/{local.name}", local.values, ""))
    parts += stale_parameter_parts(internals)

    def take_others() -> tuple[dict[str, Any], list[float]]:
        digests = digests_of_buffers(internals.runtime)
        parts.extend(state_parts(internals) + node_parts(internals))
        content, more = _content(optimizer, internals, dict(stateful), dict(client_state))
        generators = {"random": capture_random_state(internals.runtime.buckets[0].device)}
        parts.extend(more + document_parts(f"rank/{internals.runtime.topology.rank}", generators, "random state"))
        content["excludes_frozen"] = exclude_frozen_parameters
        return content, digests

    content, digests = agreed(take_others, ranks, "the state of the training cannot be taken")
    parts += buffer_parts(internals.runtime, digests)
    return Snapshot(parts, content)


def _content(
    optimizer: ZeroOptimizer, internals: OptimizerParts, stateful: dict[str, Any], client_state: dict[str, Any]
) -> tuple[dict[str, Any], list[FlatPart]]:
    """Return the document, and on the first rank the tensors that it refers to."""
    runtime, tree = internals.runtime, Tree("tree")
    loss_scale = optimizer.loss_scale
    content = {
        "torch": torch.__version__,
        "world_size": runtime.topology.world_size,
        "stage": runtime.stage.number,
        "parameters": _parameters(runtime),
        "buffers": {
            name: {"dtype": CODES[buffer.dtype], "shape": list(buffer.shape)}
            for name, buffer in named_buffers(runtime.model).items()
        },
        "optimizer": {
            "class": name_of(internals.inner),
            "groups": [
                {"parameters": names, "options": tree.encode(options, f"param_groups[{index}]")}
                for index, (names, options) in enumerate(
                    zip(names_of_groups(internals), group_options(internals), strict=True)
                )
            ],
        },
        "loss_scale": None if loss_scale is None else tree.encode(loss_scale.state_dict(), "loss_scale"),
        "residual_layout": residual_layout(runtime),
        "num_updates": runtime.delayed.num_updates if runtime.delayed.is_used else None,
        "is_behind": runtime.has_pending_update,
        "extra_state": {
            name: tree.encode(_given(module.get_extra_state, f"extra state of {name!r}"), f"extra state of {name!r}")
            for name, module in runtime.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        },
        "stateful": {_named(name): tree.encode(_given(s.state_dict, name), name) for name, s in stateful.items()},
        "client_state": tree.encode(client_state, "client_state"),
    }
    parts = [FlatPart.of(key, tensor) for key, tensor in tree.tensors.items()]
    return content, parts if runtime.topology.rank == 0 else []


def _given(call: Callable[[], Any], title: str) -> Any:
    """Return the state of a user's object, or raise an error with its ``title``."""
    try:
        return call()
    except Exception as error:
        raise CheckpointError(f"{title} cannot be saved: {call.__qualname__}() raised {error!r}") from error


def _named(name: Any) -> str:
    """Return ``name`` if it is a str: JSON would turn other keys into text, and loading would not find them."""
    if type(name) is not str:
        raise CheckpointError(f"the names in stateful= must be str: got {name!r}")
    return name


def _parameters(runtime: Runtime) -> dict[str, Any]:
    """Describe every parameter, in the model's order: shape, dtype, whether it is trained, its other names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in runtime.model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    slots = {
        param: (slot, bucket)
        for bucket in runtime.buckets
        for param, slot in zip(bucket.params, bucket.layout.slots, strict=True)
    }
    described = {}
    for param, of_param in names.items():
        slot, bucket = slots[param]
        described[slot.name] = {
            "shape": list(slot.shape),
            "dtype": CODES[bucket.dtype],
            "is_trainable": bucket.is_trainable,
            "aliases": [name for name in of_param if name != slot.name],
        }
    return described


def names_of_groups(internals: OptimizerParts) -> list[list[str]]:
    """The names of the trainable parameters of every parameter group."""
    names: list[list[str]] = [[] for _ in internals.inner.param_groups]
    for bucket in internals.runtime.buckets:
        if bucket.is_trainable:
            for param, slot in zip(bucket.params, bucket.layout.slots, strict=True):
                names[internals.group_of[param]].append(slot.name)
    return names


def group_options(internals: OptimizerParts) -> list[dict[str, Any]]:
    """The options of every parameter group, such as learning rates."""
    return [{key: value for key, value in g.items() if key != "params"} for g in internals.inner.param_groups]
