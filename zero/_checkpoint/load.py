"""Load a checkpoint: find it, compare it with the model, read it to host memory or files, then change the model.

    latest -> index, the same on all ranks -> compared with the model -> every rank reads its parts
           -> schedulers and other objects -> masters, states, generators -> parameters are written back
                                              (those in files: a sub-group at a time, then commit)

Until masters are changed, an error is raised on every rank and leaves model and optimizer unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from zcomm import Topology, control
from zero._checkpoint.collective_save import agreed, check_same_on_ranks
from zero._checkpoint.dcp import FolderReader, LoadPartsPlanner
from zero._checkpoint.durability import check_tag, read_latest
from zero._checkpoint.index import Index, read_index
from zero._checkpoint.model_parallel_parts import part_of, saving_ranks
from zero._checkpoint.other_files import check_nothing_else
from zero._checkpoint.own_names import under_own_names
from zero._checkpoint.plain_weights import find_weights, index_of_weights
from zero._checkpoint.request import LoadSelection, Request, make_request
from zero._checkpoint.restore import restore
from zero._checkpoint.save import wait_for_saves
from zero._ranks.collective_calls import collective
from zero._ranks.rank_errors import share_text
from zero.errors import CheckpointError
from zero.optimizer import ZeroOptimizer

logger = logging.getLogger("zero")


class LoadedCheckpoint(NamedTuple):
    """The result of :func:`load_checkpoint`, in DeepSpeed's order."""

    path: Path | None
    """The folder of the checkpoint. None: ``load_dir`` has no file ``latest``, and nothing was loaded."""
    client_state: dict[str, Any]


@collective(of=lambda optimizer: optimizer.topology, alone=True)
def load_checkpoint(
    optimizer: ZeroOptimizer,
    load_dir: str | Path,
    tag: str | None = None,
    *,
    stateful: Mapping[str, Any] | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_module_only: bool = False,
) -> LoadedCheckpoint:
    """Load a checkpoint that was saved at any stage, on any number of ranks. Collective.

    Args:
        optimizer: The optimizer; its model is loaded with it.
        load_dir: The folder that checkpoints were saved to. With ``load_module_only`` also a file or folder of
            safetensors.
        tag: The name of the checkpoint. Default: what ``latest`` names; without that file nothing is loaded, and
            ``path`` is None, unless ``load_dir`` is a file or holds what other libraries load.
        stateful: Objects that were saved under the same names; ``load_state_dict()`` of each is called.
        load_module_strict: False: skip parameters and buffers that only the model, or only the checkpoint, has.
        load_optimizer_states: False: keep the states of ``optimizer``.
        load_module_only: Load only weights and buffers, converted to the model's dtypes: nothing of ``stateful``.

    Raises:
        CheckpointError: There is no such checkpoint, or something else in its place; it is incomplete, truncated or
            damaged; ranks request different ones, or have different ones under the same name; parameters, shapes,
            dtypes or groups differ; an object of ``stateful`` raises. The same on every rank. Nothing is changed, or
            the message says what to construct anew.

    With the number of ranks of the save, the random generators of all ranks are restored, too, and training continues
    with the same bits as if it had not stopped. Ranks beyond the saved ones keep their generators. Pending gradients
    are dropped.

    Cost for each rank: its shard of masters and states is read, into host memory first; those in files a sub-group at
    a time. With keep_previous_states=False files are overwritten in place: after an error the optimizer must be
    constructed anew.
    """
    ranks = saving_ranks(optimizer.topology, optimizer.parts.model_parallel)
    wanted = LoadSelection(
        optimizer_states=load_optimizer_states, module_only=load_module_only, strict=load_module_strict
    )
    stateful = {} if stateful is None or load_module_only else stateful
    agreed(lambda: wait_for_saves(ranks), ranks, "an earlier save")
    asked = {"tag": repr(tag), **{field.name: repr(getattr(wanted, field.name)) for field in fields(wanted)}}
    check_same_on_ranks(asked, ranks, "ask for the same", "pass the same tag and load_* arguments everywhere")
    index = _find(load_dir, tag, optimizer, ranks, only_weights=load_module_only)
    if index is None:
        agreed(lambda: check_nothing_else(Path(load_dir)), ranks, f"{load_dir} cannot be listed")
        if optimizer.parts.runtime.is_log_rank:
            logger.warning("%s has no file 'latest': nothing is loaded (pass tag= to load one by its name)", load_dir)
        return LoadedCheckpoint(None, {})

    def compare() -> Request:
        request = make_request(optimizer.parts, index, wanted)
        _check_stateful(index, stateful)
        return request

    request = agreed(compare, ranks, f"the metadata of the checkpoint in {load_dir} cannot be read")
    agreed(lambda: _read(request), ranks, f"{index.folder} cannot be read")
    return LoadedCheckpoint(index.folder, restore(optimizer, request, stateful, wanted, ranks))


def _find(
    load_dir: str | Path, tag: str | None, optimizer: ZeroOptimizer, ranks: Topology, *, only_weights: bool
) -> Index | None:
    """Return the index of what to load, the same on all ranks, or None. Their folders may differ. Collective."""
    trouble = f"the metadata of the checkpoint in {load_dir} cannot be read"
    if tag is None:
        latest = agreed(lambda: read_latest(Path(load_dir)) if ranks.rank == 0 else None, ranks, trouble)
        tag = share_text(latest or "", 0, ranks) or None

    def find() -> Index | None:
        folder = Path(load_dir) if tag is None else Path(load_dir) / check_tag(tag)
        if only_weights and find_weights(folder):
            return index_of_weights(folder, optimizer.parts)
        if tag is None:
            return None
        model_parallel = optimizer.parts.model_parallel
        index = part_of(read_index(folder), model_parallel.rank, model_parallel.world_size)
        return under_own_names(index, optimizer.parts.runtime)

    index = agreed(find, ranks, trouble)
    digest = "" if index is None else index.digest
    # Digests are compared, not paths: each node may have a copy under another name. Ranks that loaded different
    # checkpoints would train a mixture of two states, without an error.
    if ranks.world_size > 1 and not control.are_equal(digest, ranks):
        found = "none" if index is None else f"{index.folder} with the digest {digest}"
        remedy = "copy one of them to every node, or let all ranks load from a folder that they share"
        check_same_on_ranks({"the checkpoint": found}, ranks, "load the same", remedy)
    return index


def _check_stateful(index: Index, stateful: Mapping[str, Any]) -> None:
    missing = [name for name in stateful if name not in index.content["stateful"]]
    if missing:
        raise CheckpointError(
            f"{index.folder} has no state of {missing[0]!r}: it was saved with {list(index.content['stateful'])}; "
            "leave it out of stateful="
        )


def _read(request: Request) -> None:
    """Run DCP's steps on this rank alone: every rank reads only what it needs."""
    planner, reader = LoadPartsPlanner(list(request.parts.values())), FolderReader(request.index)
    planner.set_up_planner({}, reader.read_metadata())
    reader.read_data(planner.create_local_plan(), planner)
