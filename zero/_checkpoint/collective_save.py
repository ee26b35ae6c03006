"""The collective steps of a save: DCP's planners and this package's storage, with JSON between the ranks.

    every rank's items -> the first rank plans -> each writes its shard -> the first rank writes metadata.json

In each round every rank sends its items, or its results, to the first rank and gets an answer that concerns it alone.
If a rank has failed, the answer is the same error for all.

DCP's own driver exchanges plans, results and errors as pickles, and unpickling executes code from other ranks. JSON is
read as data.

``agreed`` runs a step of a save or load that may fail on one rank alone (a user's object, a disk, memory): all ranks
raise, or none. A rank that raised alone would leave the others in their next collective: a deadlock until the group's
timeout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from zcomm import CommunicationError, Topology, control
from zero._checkpoint.dcp import FolderWriter, SavePartsPlanner, write_item
from zero._checkpoint.index import StoredChunk
from zero._config.rank_consistency import differences_between_ranks
from zero._ranks.first_rank import on_first_rank
from zero._ranks.rank_errors import is_agreed, raise_first
from zero._storage.safetensors_file import CODES, DTYPES
from zero.errors import CheckpointError

Result = TypeVar("Result")


def agreed(call: Callable[[], Result], ranks: Topology, trouble: str) -> Result:
    """Return ``call()``; if it raises on any of ``ranks``, all of them raise. Collective.

    Args:
        call: The step. It must not communicate: the other ranks would wait for one that has raised.
        ranks: The ranks that take this step.
        trouble: Text in front of an error that is no CheckpointError.

    Raises:
        CheckpointError: That of the first rank that failed, with the same text on every rank.

    Cost: one small exchange.
    """
    results, error, handled = [], None, sys.exc_info()[1]
    try:
        results.append(call())
    except CheckpointError as caught:
        error = caught
    except Exception as caught:
        if isinstance(caught, CommunicationError) or is_agreed(caught, handled=handled):
            raise  # the other ranks raise, too, and skip the exchange below
        error = CheckpointError(f"{trouble}: {caught!r}")
        error.__cause__ = caught
    raise_first(error, CheckpointError, ranks)
    return results[0]


def check_same_on_ranks(facts: Mapping[str, str], ranks: Topology, what: str, remedy: str) -> None:
    """Raise CheckpointError, the same on every rank, unless ``facts`` are equal on all ranks. Collective."""
    if ranks.world_size > 1 and not control.are_equal(json.dumps(facts, sort_keys=True), ranks):
        found = "; ".join(differences_between_ranks(facts, ranks, lane="checkpoint"))
        raise CheckpointError(f"every rank must {what}: {found}; {remedy}")


Row = Sequence[Any]
"""A WriteItem or a WriteResult as JSON."""


def write_together(planner: SavePartsPlanner, writer: FolderWriter, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint. Collective over ``group``; None: this process alone.

    Raises:
        CheckpointError: A rank failed. The same on every rank.

    Cost for each rank: two lines of JSON to the first rank for each of its chunks.
    """
    is_first = group is None or group.rank() == 0
    metadata: list[Metadata] = []

    def propose() -> list[Row]:
        planner.set_up_planner({}, is_coordinator=is_first)
        writer.set_up_storage_writer(is_first)
        return [_row_of(item) for item in planner.create_local_plan().items]

    def plan(of_ranks: list[list[Row]]) -> list[Any]:
        plans, of_all = planner.create_global_plan([SavePlan([_item_of(row) for row in rows]) for rows in of_ranks])
        metadata.append(of_all)
        named = writer.prepare_global_plan(plans)
        return [[one.storage_data, _kept(one, rows)] for one, rows in zip(named, of_ranks, strict=True)]

    name, kept = on_first_rank(propose, plan, group, CheckpointError)

    def write() -> list[Row]:
        items = planner.plan.items
        own = planner.finish_plan(SavePlan([items[number] for number in kept], storage_data=name))
        return [_row_of_result(result) for result in writer.write_data(own, planner).value()]

    def finish(of_ranks: list[list[Row]]) -> list[Any]:
        writer.finish(metadata[0], [[_result_of(row) for row in rows] for rows in of_ranks])
        return [None] * len(of_ranks)

    on_first_rank(write, finish, group, CheckpointError)


def _kept(plan: SavePlan, rows: Sequence[Row]) -> list[int]:
    """The numbers of the items of ``rows``, which a rank has proposed, that are in its plan."""
    numbers = {(row[0], row[1]): number for number, row in enumerate(rows)}
    return [numbers[item.index.fqn, item.index.offset[0]] for item in plan.items if item.index.offset is not None]


def _row_of(item: WriteItem) -> Row:
    assert item.index.offset is not None, "chunks have offsets"
    assert item.tensor_data is not None, "parts are tensors"
    data = item.tensor_data
    dtype = CODES[data.properties.dtype]
    return [item.index.fqn, item.index.offset[0], data.chunk.sizes[0], data.size[0], dtype]


def _item_of(row: Row) -> WriteItem:
    key, start, numel, size, dtype = row
    return write_item(key, start, numel, size, DTYPES[dtype])


def _row_of_result(result: WriteResult) -> Row:
    chunk, file_nbytes, header = result.storage_data
    return [result.index.fqn, result.size_in_bytes, file_nbytes, header, *astuple(chunk)]


def _result_of(row: Row) -> WriteResult:
    key, nbytes, file_nbytes, header, *chunk = row
    stored = StoredChunk(*chunk)
    return WriteResult(MetadataIndex(key, (stored.offset,)), nbytes, (stored, file_nbytes, tuple(header)))
