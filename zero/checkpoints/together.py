"""The steps of a save that ranks do together: DCP's planners and our storage, and JSON between the ranks.

    every rank's items -> all compute the same plan -> each writes its shard -> the first writes metadata.json

DCP's own driver sends plans, results and errors as pickles, which the receiver runs; here they are read as data.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from zcomm import control
from zero.checkpoints.errors import CheckpointError
from zero.checkpoints.index import StoredChunk
from zero.checkpoints.planners import SavePartsPlanner
from zero.checkpoints.storage import FolderWriter
from zero.checkpoints.tensor_file import CODES, DTYPES

__all__ = ["write_together"]

Row = Sequence[Any]
"""A WriteItem or a WriteResult as JSON."""


def write_together(planner: SavePartsPlanner, writer: FolderWriter, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint. Collective over ``group``; None: this process alone.

    Raises:
        CheckpointError: A rank could not do its part. The same on every rank.
    """
    rank = 0 if group is None else group.rank()

    def plan() -> list[Any]:
        planner.set_up_planner({}, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return [secrets.token_hex(4), [_row_of(item) for item in planner.create_local_plan().items]]

    planned = _on_all(plan, group)
    plans, metadata = planner.create_global_plan([SavePlan([_item_of(row) for row in rows]) for _, rows in planned])
    writer.save_id = planned[0][0]
    own = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
    results = _on_all(lambda: [_row_of_result(result) for result in writer.write_data(own, planner).value()], group)

    def finish() -> None:
        if rank == 0:
            writer.finish(metadata, [[_result_of(row) for row in rows] for rows in results])

    _on_all(finish, group)


def _on_all(call: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """What ``call`` returned on every rank, in rank order, or the first rank's error on all."""
    try:
        said = {"value": call()}
    except CheckpointError as error:
        said = {"error": str(error)}
    except Exception as error:  # the others wait for an answer
        said = {"error": f"{type(error).__name__}: {error}"}
    of_ranks = [json.loads(text) for text in control.whole_texts(json.dumps(said), group)]
    errors = [said["error"] for said in of_ranks if "error" in said]
    if errors:
        raise CheckpointError(errors[0])
    return [said["value"] for said in of_ranks]


def _row_of(item: WriteItem) -> Row:
    assert item.index.offset is not None, "chunks have offsets"
    assert item.tensor_data is not None, "parts are tensors"
    data = item.tensor_data
    dtype = CODES[data.properties.dtype]
    return [item.index.fqn, item.index.offset[0], data.chunk.sizes[0], data.size[0], dtype]


def _item_of(row: Row) -> WriteItem:
    key, start, numel, size, dtype = row
    chunk = ChunkStorageMetadata(torch.Size((start,)), torch.Size((numel,)))
    data = TensorWriteData(chunk, TensorProperties(dtype=DTYPES[dtype]), torch.Size((size,)))
    return WriteItem(index=MetadataIndex(key, (start,)), type=WriteItemType.SHARD, tensor_data=data)


def _row_of_result(result: WriteResult) -> Row:
    chunk, file_nbytes, header = result.storage_data
    row = [result.index.fqn, result.size_in_bytes, file_nbytes, header]
    return [*row, chunk.offset, chunk.numel, chunk.file, chunk.position, chunk.crc32]


def _result_of(row: Row) -> WriteResult:
    key, nbytes, file_nbytes, header, *chunk = row
    stored = StoredChunk(*chunk)
    return WriteResult(MetadataIndex(key, (stored.offset,)), nbytes, (stored, file_nbytes, tuple(header)))
