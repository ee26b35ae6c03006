"""Save a checkpoint: a snapshot on the main thread, the writing in a background thread of the topology.

    main thread   check that all ranks can save -> snapshot (-> copy it, if async_op)
    background    plan over all ranks -> every rank writes and fsyncs its shard -> metadata.json -> latest

Before metadata.json is committed, :func:`check_loadable` reads it back and looks up everything that it refers to:

    parameters, buffers     weight/NAME, buffer/NAME with the number of elements of their shapes
    documents               {"$": "tensor", "key": KEY, "shape": [...]}, anywhere in them
    ranks                   rank/R/json, a document, and what that refers to
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from zcomm import DivergedError, Topology
from zcomm._transport.groups import Background
from zero._checkpoint.collective_save import agreed, write_together
from zero._checkpoint.dcp import FolderWriter, SavePartsPlanner, read_chunk
from zero._checkpoint.durability import check_tag
from zero._checkpoint.index import UNREADABLE, Index
from zero._checkpoint.json_tree import KIND
from zero._checkpoint.model_parallel_parts import join_parts, part_of, parts_in, saving_ranks
from zero._checkpoint.snapshot import Snapshot, take_snapshot
from zero._ranks.collective_calls import collective
from zero._ranks.rank_errors import raise_first, share_text
from zero.errors import CheckpointError
from zero.optimizer import ZeroOptimizer

logger = logging.getLogger("zero")

TAG_VALIDATIONS = ("ignore", "warn", "fail")


def check_loadable(index: Index) -> None:
    """Raise CheckpointError, with the key, if a tensor that ``index`` refers to is missing.

    Cost: two small reads of every rank's file; tensors are not read.
    """
    try:
        for part in parts_in(index):
            _check(part_of(index, part))
    except UNREADABLE as error:
        raise _not_loadable(index, repr(error)) from error


def _check(index: Index) -> None:
    content = index.content
    expected = dict(_named(content))
    documents = {f"rank/{rank}/json" for rank in range(content["world_size"])}
    documents |= {key for key in index.tensors if key.startswith("rank/") and key.endswith("/json")}
    texts = {key: json.loads(_text_of(index, key)) for key in sorted(documents)}
    for document in (content, *texts.values()):
        expected |= dict(_references(document))
    for key, numel in expected.items():
        stored = index.tensors.get(key)
        may_lack = numel == 0 and key.startswith("weight/")  # no rank has a part of a parameter without elements
        is_complete = may_lack if stored is None else stored.numel == numel
        if not is_complete:
            found = "is missing" if stored is None else f"has {stored.numel} elements"
            raise _not_loadable(index, f"tensor {key!r}, of {numel} elements, {found}")


def _not_loadable(index: Index, why: str) -> CheckpointError:
    return CheckpointError(f"what was written to {index.folder} could not be loaded, and does not count: {why}")


def _named(content: Any) -> Iterator[tuple[str, int]]:
    for name, entry in content["parameters"].items():
        if entry["is_trainable"] or not content["excludes_frozen"]:
            yield f"weight/{name}", prod(entry["shape"])
    for name, entry in content["buffers"].items():
        yield f"buffer/{name}", prod(entry["shape"])


def _references(document: Any) -> Iterator[tuple[str, int]]:
    """Yield the keys of the tensors that ``document`` refers to, and their numbers of elements."""
    if isinstance(document, dict):
        if KIND in document and "key" in document:
            yield document["key"], prod(document["shape"])
            return
        document = list(document.values())
    if isinstance(document, list):
        for item in document:
            yield from _references(item)


def _text_of(index: Index, key: str) -> bytes:
    stored = index.tensors[key]
    return b"".join(bytes(read_chunk(index.folder, key, c, stored.dtype).tolist()) for c in stored.chunks)


class Saving:
    """A save in flight. It is true in a condition, like the result of DeepSpeed's save_checkpoint."""

    def __init__(self, path: Path, future: Future[None]) -> None:
        self.path = path
        """The folder of the checkpoint."""
        self._future, self._is_seen = future, False

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and durable on every rank, and return its folder.

        Raises:
            CheckpointError: It could not be written; the same on every rank. Earlier checkpoints are unchanged.
        """
        self._is_seen = True
        self._future.result()
        return self.path

    def end(self) -> None:
        """Wait; raise the error of the save unless :meth:`wait` has been called, and so has raised it."""
        if not self._is_seen:
            self.wait()
        self._future.exception()

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, without waiting."""
        return self._future.done()

    def __bool__(self) -> bool:
        return True


@collective(of=lambda optimizer: optimizer.topology, alone=True)
def save_checkpoint(
    optimizer: ZeroOptimizer,
    save_dir: str | Path,
    tag: str,
    *,
    stateful: Mapping[str, Any] | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    async_op: bool = False,
    tag_validation: str = "warn",
) -> Saving:
    """Save the model, the optimizer and all other training state. Collective, also over model-parallel ranks.

    Args:
        optimizer: The optimizer; its model is saved with it.
        save_dir: A folder that all ranks share. The checkpoint is ``save_dir/tag``.
        tag: The name of the checkpoint. An existing one is replaced once the new one is complete.
        stateful: Objects with ``state_dict()`` and ``load_state_dict()``: schedulers, a GradScaler, samplers.
        client_state: Plain values and tensors that :func:`load_checkpoint` returns; the first rank's are stored.
        save_latest: Let ``save_dir/latest`` name this checkpoint once it is complete.
        exclude_frozen_parameters: Leave out frozen parameters; loading then keeps those of the model.
        async_op: Return once everything is copied to host memory; a thread writes. The next save waits for it.
            No effect for states on NVMe: host memory may be too small for a copy.
        tag_validation: If a rank gives another ``tag``, such as one made from the time: ``"warn"`` on that rank, and
            save under the first rank's tag; ``"ignore"``: do so silently; ``"fail"``: raise a CheckpointError.

    Raises:
        CheckpointError: A value cannot be stored (the message gives its path); an earlier asynchronous save failed; the
            disk is full; the job has ranks that this optimizer does not know; or, with ``mode="delta_hpz"``, the last
            backward of a step has run and step() has not. The same on every rank.
        DivergedError: Ranks are at different steps or have different settings, so they do not hold one model. On every
            rank.

    Stored: masters, optimizer states, parameter groups, buffers, the loss scale, and each rank's random generators. Not
    the gradients of an unfinished step: what is saved is the state after the last one, with a warning, once.

    Cost for each rank: its shard is written to the disk; with ``async_op`` it is also copied to host memory.
    """
    ranks = saving_ranks(optimizer.topology, optimizer.parts.model_parallel)
    path = agreed(lambda: _checked_path(optimizer, save_dir, tag, ranks), ranks, "no checkpoint can be saved")
    _check_same_step(optimizer, ranks)
    folder, background = Path(share_text(str(path), 0, ranks)), ranks.background
    agreed(lambda: _compare_tags(path.name, folder.name, tag_validation, ranks), ranks, "no checkpoint can be saved")
    contents = {"stateful": stateful or {}, "client_state": client_state or {}}
    snapshot = take_snapshot(optimizer, ranks, exclude_frozen_parameters=exclude_frozen_parameters, **contents)
    snapshot = join_parts(snapshot, optimizer.topology, optimizer.parts.model_parallel)
    async_op = async_op and not snapshot.is_in_files  # may differ between ranks: the exchanges are the same
    take = snapshot.copied if async_op else lambda: snapshot
    snapshot = agreed(take, ranks, "host memory holds no copy of the states: save without async_op")
    since_ns = optimizer.parts.runtime.since_ns
    writer = FolderWriter(folder, snapshot.content, moves_latest=save_latest, since_ns=since_ns, check=check_loadable)
    # The background thread has a process group of its own: its exchanges must not be matched with those of training.
    saving = Saving(folder, background.submit(partial(_write, snapshot, writer, background)))
    if async_op:
        background.last = saving
    else:
        saving.wait()
    return saving


def _checked_path(optimizer: ZeroOptimizer, save_dir: str | Path, tag: str, ranks: Topology) -> Path:
    """Return the folder of the checkpoint, or raise if none can be saved now. On this rank alone."""
    wait_for_saves(ranks)
    _check_between_steps(optimizer)
    if save_dir is None or not str(save_dir):  # as a path, "" is the current folder
        raise CheckpointError(f"save_dir must be a folder: save_dir={save_dir!r}; pass '.' for the current one")
    return Path(save_dir).absolute() / check_tag(str(tag))


def _compare_tags(own: str, first: str, tag_validation: str, ranks: Topology) -> None:
    """Warn, or raise, if this rank's tag is not the first rank's. On this rank alone."""
    if tag_validation not in TAG_VALIDATIONS:
        raise CheckpointError(
            f"tag_validation must be one of {', '.join(TAG_VALIDATIONS)}: tag_validation={tag_validation!r}"
        )
    if own == first or tag_validation == "ignore":
        return
    if tag_validation == "fail":
        raise CheckpointError(
            f"every rank must save under the same tag: the first rank's is {first!r}, that of rank {ranks.rank} {own!r}"
            "; pass the same one everywhere, for example without the time"
        )
    logger.warning("will be saved as %r, the first rank's tag, not as %r, that of rank %d", first, own, ranks.rank)


def _check_same_step(optimizer: ZeroOptimizer, ranks: Topology) -> None:
    """Raise DivergedError on all ``ranks`` if the ranks of one part of the model are at different steps."""
    error = None
    try:
        optimizer.parts.runtime.reducer.facts.check(optimizer.topology)
    except DivergedError as caught:
        error = caught
    if ranks is not optimizer.topology:
        raise_first(error, DivergedError, ranks)
    elif error is not None:
        raise error


def wait_for_saves(topology: Topology) -> None:
    """Wait for an earlier asynchronous save; raise its error unless ``wait()`` has raised it on this rank already."""
    background = topology.background
    last, background.last = background.last, None
    if last is not None:
        last.end()


def _check_between_steps(optimizer: ZeroOptimizer) -> None:
    """Gradients of an unfinished step are left out, which is said once; residuals of one are no state to return to."""
    runtime = optimizer.parts.runtime
    if not all(residual.is_committed for residual in runtime.mode_state.residuals):
        raise CheckpointError(
            f"mode={runtime.settings.mode!r} cannot save between the last backward of a step and step(): call one of "
            "step() and zero_grad() before"
        )
    if runtime.is_within_step and runtime.is_log_rank and not runtime.has_noted_pending:
        runtime.has_noted_pending = True
        logger.warning(
            "a checkpoint is saved within a step: gradients that backwards have left so far are not in it, and a "
            "training that loads it runs the step from its first backward"
        )


def _write(snapshot: Snapshot, writer: FolderWriter, background: Background) -> None:
    try:
        write_together(SavePartsPlanner(snapshot.parts), writer, background.group)
    except Exception as error:
        is_named = isinstance(error, CheckpointError)
        failure = error if is_named else CheckpointError(f"{type(error).__name__}: {error}")
        logger.error("%s", failure)
        raise failure from (None if is_named else error)
