"""The state of a mode in a checkpoint beside the masters: replicas, and residuals of gradients.

With ``mode="delta"`` the full parameters are replicas, and there are no residuals. Without this state a restarted
run would train on, but with other bits: its replicas would be the masters rounded once, not the sum of sent changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from zcomm import LayoutError, Residual, load_residuals
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket

logger = logging.getLogger("zero")


def replica_shards(runtime: Runtime) -> dict[Bucket, Tensor]:
    """The replicas' values of this rank's shard of every trainable bucket; empty in other modes."""
    replicas = runtime.gatherer.replicas
    return {b: replicas[b.index].held for b in runtime.buckets if b.is_trainable and b.index in replicas}


def residuals_of(runtime: Runtime) -> list[Residual]:
    """This rank's residuals, one for each trainable bucket; none in other modes."""
    return runtime.reducer.reduction.residuals


def node_state(runtime: Runtime) -> dict[str, Any] | None:
    """Copies of this rank's replica shards and residuals; None in other modes.

    Raises:
        StateError: There are gradients of a step that is not applied.
    """
    held = replica_shards(runtime)
    if not held:
        return None
    return {
        "replicas": {bucket.index: values.clone() for bucket, values in held.items()},
        "residuals": [residual.state_dict() for residual in residuals_of(runtime)],
    }


def restore_node_state(runtime: Runtime, saved: Mapping[str, Any] | None) -> None:
    """Restore what :func:`node_state` gave on this rank of the same layout. Collective."""
    reset_residuals(runtime)
    if saved is None or not runtime.gatherer.replicas:
        return
    runtime.set_replicas({b: saved["replicas"][b.index] for b in replica_shards(runtime)})
    for residual, state in zip(residuals_of(runtime), saved["residuals"], strict=True):
        residual.load_state_dict(state)


def reset_residuals(runtime: Runtime) -> None:
    """Drop the residuals: they belong to masters that have been replaced."""
    for residual in residuals_of(runtime):
        residual.reset()


def load_all_residuals(runtime: Runtime, states: Iterable[Mapping[str, Any]]) -> None:
    """Load the residuals of all ranks of another topology or layout: their sums, split equally. No communication.

    If they belong to other parameters, residuals start at zero, with one warning.
    """
    reset_residuals(runtime)
    residuals = residuals_of(runtime)
    if not residuals:
        return
    try:
        load_residuals(states, residuals)
    except LayoutError as error:
        reset_residuals(runtime)
        if runtime.is_log_rank:
            logger.warning("residuals of gradients start at zero: %s", error)
