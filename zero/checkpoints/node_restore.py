"""Loading replicas and residuals of ``mode="delta_hpz"``: see :mod:`zero.checkpoints.node_parts` for what is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from zero.bucket import Bucket
from zero.checkpoints.index import Index
from zero.checkpoints.node_parts import residual_layout
from zero.checkpoints.parts import held_pieces
from zero.checkpoints.request import Request, Wanted, make_request
from zero.inside import Inside
from zero.node_state import held_of, load_all_residuals, refresh_replicas, reset_residuals, residuals_of
from zero.runtime import Runtime

__all__ = ["make_whole_request", "restore_node_parts"]


def make_whole_request(inside: Inside, index: Index, wanted: Wanted) -> Request:
    """What this rank asks for, replicas and residuals among it: see :func:`zero.checkpoints.request.make_request`."""
    request = make_request(inside, index, wanted)
    if wanted.optimizer_states and not wanted.module_only:
        _ask_for_node_parts(request, inside)
    return request


def _ask_for_node_parts(request: Request, inside: Inside) -> None:
    """As far as they were saved and are of use here."""
    runtime, tensors = inside.runtime, request.index.tensors
    of_bucket = held_of(runtime)
    for held, _ in held_pieces(inside):
        key = f"replica/{held.name}"
        if held.bucket in of_bucket and key in tensors:
            request.add(key, held.values.numel(), held.first, tensors[key].dtype)
    prefixes = tuple(f"rank/{rank}/residual/" for rank in _ranks(request, runtime))
    for key in tensors:
        if key.startswith(prefixes):
            request.add_whole(key)


def _ranks(request: Request, runtime: Runtime) -> list[int]:
    """Whose residuals are read here."""
    layout, content = residual_layout(runtime), request.index.content
    if layout is None or content.get("residual_layout") is None:
        return []
    is_same = content["residual_layout"] == layout
    return [runtime.topology.rank] if is_same else list(range(content["world_size"]))


def restore_node_parts(inside: Inside, request: Request) -> None:
    """Give replicas and residuals what was read; residuals that were not saved start anew. Collective."""
    runtime = inside.runtime
    reset_residuals(runtime)
    if any(key.startswith("replica/") for key in request.index.tensors):
        refresh_replicas(runtime, _shards(inside, request))
    ranks = _ranks(request, runtime)
    if ranks == [runtime.topology.rank]:
        for residual, state in zip(residuals_of(runtime), _states(request, ranks), strict=True):
            residual.load_state_dict(state)
    elif ranks:
        load_all_residuals(runtime, _states(request, ranks))


def _shards(inside: Inside, request: Request) -> dict[Bucket, Tensor]:
    shards = {bucket: bucket.shard.clone() for bucket in held_of(inside.runtime)}
    for held, _ in held_pieces(inside):
        key = f"replica/{held.name}"
        if request.has(key):
            shards[held.bucket][held.start : held.start + held.values.numel()] = request.values(key)
    return shards


def _states(request: Request, ranks: list[int]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        text = bytes(request.values(f"rank/{rank}/residual/json").tolist())
        yield from request.decoded(json.loads(text))
