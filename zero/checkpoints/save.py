"""Saving: a snapshot on the main thread, the rest in the background thread of the topology.

main thread   refuse or agree -> snapshot (-> copy it, if asynchronous)
background    plan over all ranks -> every rank writes and syncs its shard -> metadata.json -> latest
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from zcomm import DivergedError, Topology
from zcomm.background import Background
from zero.agreement import raise_first, share_text
from zero.checkpoints.agreed import agreed
from zero.checkpoints.errors import CheckpointError
from zero.checkpoints.folder import check_tag
from zero.checkpoints.model_parts import join_parts, saving_ranks
from zero.checkpoints.planners import SavePartsPlanner
from zero.checkpoints.proof import check_loadable
from zero.checkpoints.snapshot import Snapshot, take_snapshot
from zero.checkpoints.storage import FolderWriter
from zero.checkpoints.together import write_together
from zero.collective import collective
from zero.optimizer import ZeroOptimizer

__all__ = ["Saving", "save_checkpoint", "wait_for_saves"]

logger = logging.getLogger("zero")


class Saving:
    """A save under way; true in a condition, as what DeepSpeed returns."""

    def __init__(self, path: Path, future: Future[None]) -> None:
        self.path = path
        """The folder of the checkpoint."""
        self._future, self._is_seen = future, False

    def wait(self) -> Path:
        """Return the folder once the checkpoint is complete and durable on every rank.

        Raises:
            CheckpointError: It could not be written; the same on every rank. The checkpoints before are untouched.
        """
        self._is_seen = True
        self._future.result()
        return self.path

    def end(self) -> None:
        """Wait, and raise what :meth:`wait` raises unless that has been called."""
        if not self._is_seen:
            self.wait()
        self._future.exception()

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
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
) -> Saving:
    """Save model, optimizer and everything else that training goes on from; collective, also over model-parallel ranks.

    Args:
        optimizer: Its model is saved with it.
        save_dir: A folder that all ranks share. The checkpoint is ``save_dir/tag``.
        tag: Names the checkpoint. One of that name is replaced once the new one is complete.
        stateful: Objects with ``state_dict()`` and ``load_state_dict()``: schedulers, a GradScaler, samplers.
        client_state: Plain values and tensors to be given back by :func:`load_checkpoint`: the first rank's.
        save_latest: Let ``save_dir/latest`` name this checkpoint, once it is complete.
        exclude_frozen_parameters: Leave frozen parameters out; loading then keeps those of the model.
        async_op: Return once everything is copied to host memory; a thread writes. The next save waits for it.
            Without effect for states on NVMe, of which host memory may not hold a copy.

    Raises:
        CheckpointError: Gradients of an unfinished step are held; something cannot be stored, named by its path;
            another asynchronous save has failed; the disk is full; or there are ranks of another model. The same on
            every rank.
        DivergedError: On every rank: one took another step than the others, or has other settings, so that they hold
            no one model.

    Stored: masters, optimizer states, parameter groups, buffers, loss scale, and the random generators of every rank
    (python, numpy, torch, GPU). Cost for each rank: its shard in bytes written; with ``async_op`` also in host memory.
    """
    ranks = saving_ranks(optimizer.topology, optimizer.inside.model_parallel)
    path = agreed(lambda: _checked_path(optimizer, save_dir, tag, ranks), ranks, "no checkpoint can be saved")
    _check_same_step(optimizer, ranks)
    folder, background = Path(share_text(str(path), 0, ranks)), ranks.background
    snapshot = take_snapshot(
        optimizer,
        ranks,
        stateful=stateful or {},
        client_state=client_state or {},
        exclude_frozen_parameters=exclude_frozen_parameters,
    )
    snapshot = join_parts(snapshot, optimizer.topology, optimizer.inside.model_parallel)
    async_op = async_op and not snapshot.is_in_files  # not of every rank, perhaps
    take = snapshot.copied if async_op else lambda: snapshot
    snapshot = agreed(take, ranks, "host memory holds no copy of the states: save without async_op")
    since_ns = optimizer.inside.runtime.since_ns
    writer = FolderWriter(folder, snapshot.content, moves_latest=save_latest, since_ns=since_ns, check=check_loadable)
    saving = Saving(folder, background.submit(partial(_write, snapshot, writer, background)))
    if not async_op:
        saving.wait()
        return saving
    background.last = saving
    return saving


def _checked_path(optimizer: ZeroOptimizer, save_dir: str | Path, tag: str, ranks: Topology) -> Path:
    """Where the checkpoint goes, if one can be saved now. What is seen here may differ between ranks."""
    wait_for_saves(ranks)
    _check_between_steps(optimizer)
    return Path(save_dir).absolute() / check_tag(str(tag))


def _check_same_step(optimizer: ZeroOptimizer, ranks: Topology) -> None:
    """Raise DivergedError on all ``ranks`` where those of one part of the model took different steps."""
    error = None
    try:
        optimizer.inside.runtime.reducer.facts.check(optimizer.topology)
    except DivergedError as caught:
        error = caught
    if ranks is not optimizer.topology:
        raise_first(error, DivergedError, ranks)
    elif error is not None:
        raise error


def wait_for_saves(topology: Topology) -> None:
    """Let an asynchronous save before this one finish; raise its error if nobody has seen it on this rank."""
    background = topology.background
    last, background.last = background.last, None
    if last is not None:
        last.end()


def _check_between_steps(optimizer: ZeroOptimizer) -> None:
    if optimizer.inside.runtime.is_within_step:
        raise CheckpointError(
            "a checkpoint is taken between steps: gradients of an unfinished step are held. Save after step(), at the "
            "accumulation boundary (engine.is_gradient_accumulation_boundary()), or call zero_grad() before"
        )


def _write(snapshot: Snapshot, writer: FolderWriter, background: Background) -> None:
    try:
        write_together(SavePartsPlanner(snapshot.parts), writer, background.group)
    except Exception as error:
        is_named = isinstance(error, CheckpointError)
        failure = error if is_named else CheckpointError(f"{type(error).__name__}: {error}")
        logger.error("%s", failure)
        raise failure from (None if is_named else error)
