"""Checkpoints beside model-parallel ranks: one of all ranks, where a tensor's key says whose part of the model it is.

    data-parallel ranks of part 1 hold   weight/up.bias       and a document
    the checkpoint holds                 part/1/weight/up.bias    {"model_parallel": [document of part 0, of part 1]}

So it is complete, or not there, for all parts at once.
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
    """Who saves and loads together: the data-parallel ranks of all parts of the model.

    Raises:
        CheckpointError: There are other ranks, of which nobody has said what they hold.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != topology.world_size * model_parallel.world_size:
        raise CheckpointError(
            f"a checkpoint is of all {size} ranks: this optimizer knows of {topology.world_size} data-parallel ones "
            f"and {model_parallel.world_size} parts of the model. Pass an mpu or a DeviceMesh of all ranks as group="
        )
    return topology if model_parallel.world_size == 1 else model_parallel.everyone


def join_parts(snapshot: Snapshot, topology: Topology, model_parallel: ModelParallel) -> Snapshot:
    """What this rank saves, under keys of its part, with the documents of all parts. Collective over all ranks."""
    if model_parallel.world_size == 1:
        return snapshot
    everyone = model_parallel.everyone
    place = torch.tensor([model_parallel.rank, topology.rank], dtype=torch.float64)
    places = [tuple(map(int, values)) for values in control.gather_float64(place, everyone).tolist()]
    mine = json.dumps(snapshot.content)
    documents = [
        json.loads(share_text(mine if everyone.rank == first else "", first, everyone))
        for first in (places.index((part, 0)) for part in range(model_parallel.world_size))
    ]
    parts = [replace(part, key=_prefix(model_parallel.rank) + part.key) for part in snapshot.parts]
    return Snapshot(parts, {PARTS: documents})


def parts_in(index: Index) -> list[int | None]:
    """What :func:`part_of` may be given as the number of a part."""
    documents = index.content.get(PARTS)
    return [None] if documents is None else list(range(len(documents)))


def part_of(index: Index, model_parallel_rank: int | None, num_parts: int | None = None) -> Index:
    """What ``index`` says of one part of the model.

    Args:
        index: Of a checkpoint.
        model_parallel_rank: Whose part. None: of a model that has one.
        num_parts: How many there are here, if they must be as many as there.

    Raises:
        CheckpointError: The checkpoint has other parts.
    """
    documents = index.content.get(PARTS)
    count = 1 if documents is None else len(documents)
    if num_parts is not None and count != num_parts:
        raise CheckpointError(
            f"{index.folder} was saved by {count} model-parallel ranks and is loaded by {num_parts}: how layers are "
            f"divided is not known here. Load it on {count}"
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
