"""Replicas and residuals of ``mode="delta_hpz"`` in a checkpoint.

    replica/PARAM                what all nodes hold of a trainable parameter, in its dtype
    rank/R/residual/json, tree   what rank R's gradients have lost on their way between nodes

On the topology and buckets they were saved on, each rank gets its own residual back, bit for bit; elsewhere every rank
reads those of all, adds them up by parameter, and takes its part. Replicas are the same everywhere.
"""

from __future__ import annotations

import json
import zlib

import torch

from zero.checkpoints.parts import held_pieces
from zero.checkpoints.planners import Part
from zero.checkpoints.tree import Tree
from zero.inside import Inside
from zero.node_state import held_of, residuals_of
from zero.runtime import Runtime

__all__ = ["node_parts", "residual_layout"]


def residual_layout(runtime: Runtime) -> int | None:
    """A checksum of where residuals lie; None if there are none. The same on every rank."""
    residuals = residuals_of(runtime)
    return zlib.crc32(repr([residual.layout for residual in residuals]).encode()) if residuals else None


def node_parts(inside: Inside) -> list[Part]:
    """What this rank saves."""
    runtime, parts = inside.runtime, []
    of_bucket = held_of(runtime)
    for held, _ in held_pieces(inside):
        if held.bucket in of_bucket:
            values = of_bucket[held.bucket][held.start : held.start + held.values.numel()]
            parts.append(held.part(f"replica/{held.name}", values))
    residuals = residuals_of(runtime)
    if residuals:
        prefix = f"rank/{runtime.topology.rank}/residual"
        tree = Tree(f"{prefix}/tree")
        document = tree.encode([residual.state_dict() for residual in residuals], "residuals")
        text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        parts.append(Part.whole(f"{prefix}/json", text))
        parts += [Part.whole(key, value) for key, value in tree.tensors.items()]
    return parts
