"""Loading: find, compare, read everything to host memory, or to files, and only then change the model.

    latest -> index -> compared with the model -> every rank reads its parts -> masters, states, generators -> publish
                                                  sub-group by sub-group to files -> counts

Until the last step an error, the same on every rank, leaves model and optimizer as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero.agreement import is_agreed, raise_first, share_text
from zero.checkpoints.errors import CheckpointError
from zero.checkpoints.folder import check_tag, read_latest
from zero.checkpoints.index import Index, read_index
from zero.checkpoints.model_parts import part_of, saving_ranks
from zero.checkpoints.node_restore import make_whole_request
from zero.checkpoints.planners import LoadPartsPlanner
from zero.checkpoints.request import Request, Wanted
from zero.checkpoints.restore import restore
from zero.checkpoints.save import wait_for_saves
from zero.checkpoints.storage import FolderReader
from zero.checkpoints.weights_in import find_weights, index_of_weights
from zero.collective import collective
from zero.optimizer import ZeroOptimizer

__all__ = ["Loaded", "load_checkpoint"]

logger = logging.getLogger("zero")


class Loaded(NamedTuple):
    """What :func:`load_checkpoint` returns, in DeepSpeed's order."""

    path: Path | None
    """The folder of the checkpoint; None: ``load_dir`` has no ``latest``, and nothing was loaded."""
    client_state: dict[str, Any]


@collective(
    "load_module_strict", "load_optimizer_states", "load_module_only",
    of=lambda optimizer: optimizer.topology, alone=True,
)  # fmt: skip
def load_checkpoint(
    optimizer: ZeroOptimizer,
    load_dir: str | Path,
    tag: str | None = None,
    *,
    stateful: Mapping[str, Any] | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_module_only: bool = False,
) -> Loaded:
    """Go on from a checkpoint that was saved at any stage, on any number of ranks; collective.

    Args:
        optimizer: Of the model that is to be changed.
        load_dir: The folder that checkpoints were saved to. With ``load_module_only`` also a file or folder of
            safetensors, or a state_dict that ``torch.load(weights_only=True)`` reads.
        tag: Which one. Default: what ``latest`` names; without such a file nothing is loaded, and ``path`` is None.
        stateful: Objects that were saved under the same names; each gets ``load_state_dict()``.
        load_module_strict: False: parameters and buffers that only the model has, or only the checkpoint, are skipped.
        load_optimizer_states: False: start with a new optimizer.
        load_module_only: Only weights and buffers, converted to the model's dtypes.

    Raises:
        CheckpointError: No such checkpoint; it is incomplete, truncated or damaged; parameters, shapes, dtypes or
            groups differ. The same on every rank; nothing is changed, or the text says what is to be made anew.

    On as many ranks as it was saved on, each rank's random generators go on, too, and training has the same bits as if
    it had not stopped. Ranks beyond the saved ones keep their generators. Gradients that are held are dropped.
    Cost for each rank: its shard of masters and states read, into host memory first; for files a sub-group at a time.
    With keep_previous_states=False these are overwritten at once: an error leaves an optimizer to be constructed anew.
    """
    model_parallel = optimizer.inside.model_parallel
    ranks = saving_ranks(optimizer.topology, model_parallel)
    wait_for_saves(ranks)
    wanted = Wanted(optimizer_states=load_optimizer_states, module_only=load_module_only, strict=load_module_strict)
    index, request, error = None, None, None
    try:
        folder = _find(Path(load_dir), tag, optimizer, only_weights=load_module_only)
        if folder is None:
            return Loaded(None, {})
        is_file = load_module_only and find_weights(folder)
        if is_file:
            index = index_of_weights(folder, optimizer.inside)
        else:
            index = part_of(read_index(folder), model_parallel.rank, model_parallel.world_size)
        request = make_whole_request(optimizer.inside, index, wanted)
        _check_stateful(index, stateful or {}, wanted)
    except CheckpointError as caught:
        error = caught
    except Exception as caught:  # the others wait: a document of another form, no memory
        error = _unreadable(caught, load_dir)
    raise_first(error, CheckpointError, ranks)
    assert request is not None, "no error and no request"
    try:
        _read(request)
    except CheckpointError as caught:
        error = caught
    raise_first(error, CheckpointError, ranks)
    loaded = restore(optimizer, request, stateful or {}, wanted)
    return Loaded(request.index.folder, loaded)


def _unreadable(error: Exception, load_dir: str | Path) -> CheckpointError:
    if is_agreed(error):
        raise error
    return CheckpointError(f"the metadata of the checkpoint in {load_dir} cannot be read: {error!r}")


def _find(load_dir: Path, tag: str | None, optimizer: ZeroOptimizer, *, only_weights: bool) -> Path | None:
    """The folder to load from, as the first rank sees it."""
    if tag is not None:
        return load_dir / check_tag(tag)
    try:
        latest = read_latest(load_dir) or ""
    except CheckpointError as error:
        latest = f"\0{error}"
    latest = share_text(latest, 0, optimizer.topology)
    if latest.startswith("\0"):
        raise CheckpointError(latest[1:])
    if latest:
        return load_dir / check_tag(latest)
    if only_weights and find_weights(load_dir):
        return load_dir
    if optimizer.inside.runtime.speaks:
        logger.warning("%s has no file 'latest': nothing is loaded (pass tag= to load one by its name)", load_dir)
    return None


def _check_stateful(index: Index, stateful: Mapping[str, Any], wanted: Wanted) -> None:
    missing = [] if wanted.module_only else [name for name in stateful if name not in index.content["stateful"]]
    if missing:
        raise CheckpointError(
            f"{index.folder} holds no state of {missing[0]!r}: it was saved with {list(index.content['stateful'])}; "
            "leave it out of stateful="
        )


def _read(request: Request) -> None:
    """DCP's steps without other ranks: nobody needs what another reads."""
    try:
        planner, reader = LoadPartsPlanner(list(request.parts.values())), FolderReader(request.index)
        planner.set_up_planner({}, reader.read_metadata())
        reader.read_data(planner.create_local_plan(), planner)
    except CheckpointError:
        raise
    except Exception as error:  # the others wait for it
        raise CheckpointError(f"{request.index.folder} cannot be read: {error!r}") from error
