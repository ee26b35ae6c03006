"""Checkpoints with model parallelism: one checkpoint of all ranks, whose keys name the part of the model.

    data-parallel ranks of part 1 hold   weight/up.bias           a document
    the checkpoint holds                 part/1/weight/up.bias    {"model_parallel": [document of part 0, of part 1]}

It is committed for all parts at once, so no part can be older than another.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
import torch.distributed as dist

from zcomm import Topology, control
from zero._checkpoint.index import Index
from zero._checkpoint.snapshot import Snapshot
from zero._ranks.model_parallel import ModelParallel
from zero._ranks.rank_errors import share_text
from zero.errors import CheckpointError

PARTS = "model_parallel"


def saving_ranks(topology: Topology, model_parallel: ModelParallel) -> Topology:
    """Return the topology of all ranks that save and load together: the data-parallel ranks of all model parts.

    Raises:
        CheckpointError: The job has more ranks than these, and it is not known what they hold.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != topology.world_size * model_parallel.world_size:
        raise CheckpointError(
            f"a checkpoint must be saved by all {size} ranks: this optimizer knows of {topology.world_size} "
            f"data-parallel ones and {model_parallel.world_size} parts of the model. Pass an mpu or a DeviceMesh of "
            "all ranks as group="
        )
    return topology if model_parallel.world_size == 1 else model_parallel.all_ranks


def join_parts(snapshot: Snapshot, topology: Topology, model_parallel: ModelParallel) -> Snapshot:
    """Prefix the keys of ``snapshot`` with its part, and collect the documents of all parts. Collective."""
    if model_parallel.world_size == 1:
        return snapshot
    all_ranks = model_parallel.all_ranks
    place = torch.tensor([model_parallel.rank, topology.rank], dtype=torch.float64)
    places = [tuple(map(int, values)) for values in control.gather_float64(place, all_ranks).tolist()]
    mine = json.dumps(snapshot.content)
    documents = [
        json.loads(share_text(mine if all_ranks.rank == first else "", first, all_ranks))
        for first in (places.index((part, 0)) for part in range(model_parallel.world_size))
    ]
    parts = [replace(part, key=_prefix(model_parallel.rank) + part.key) for part in snapshot.parts]
    return Snapshot(parts, {PARTS: documents})


def parts_in(index: Index) -> list[int | None]:
    """The parts in ``index``, for :func:`part_of`; [None] without model parallelism."""
    documents = index.content.get(PARTS)
    return [None] if documents is None else list(range(len(documents)))


def part_of(index: Index, model_parallel_rank: int | None, num_parts: int | None = None) -> Index:
    """Return the index of one part of the model.

    Args:
        index: The index of a checkpoint.
        model_parallel_rank: The part. None: the model was saved without model parallelism.
        num_parts: The number of parts that the checkpoint must have; None: any.

    Raises:
        CheckpointError: The checkpoint has no such part, or another number of parts.
    """
    documents = index.content.get(PARTS)
    count = 1 if documents is None else len(documents)
    if num_parts is not None and count != num_parts:
        raise CheckpointError(
            f"{index.folder} must be loaded by {count} model-parallel ranks, which saved it: got {num_parts}; the "
            "division of layers cannot be changed here"
        )
    if documents is None:
        if model_parallel_rank:
            raise CheckpointError(f"{index.folder} has one part: model_parallel_rank={model_parallel_rank}")
        return index
    if model_parallel_rank is None or not 0 <= model_parallel_rank < count:
        raise CheckpointError(
            f"{index.folder} holds the parts of {count} model-parallel ranks: choose one of 0 to {count - 1} "
            f"(model_parallel_rank={model_parallel_rank})"
        )
    prefix = _prefix(model_parallel_rank)
    tensors = {key[len(prefix) :]: tensor for key, tensor in index.tensors.items() if key.startswith(prefix)}
    return Index(index.folder, tensors, documents[model_parallel_rank], index.digest)


def _prefix(part: int) -> str:
    return f"part/{part}/"
