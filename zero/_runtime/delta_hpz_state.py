"""What ``mode="delta_hpz"`` keeps from step to step beside the masters: replicas, and residuals of gradients.

With ``mode="delta"`` full parameters are such replicas, and there are no residuals. Without these training would go on,
but not with the same bits: replicas would be the masters rounded once.
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


def held_of(runtime: Runtime) -> dict[Bucket, Tensor]:
    """What all nodes hold of this rank's shard of every trainable bucket; empty in other modes."""
    replicas = runtime.gatherer.replicas
    return {b: replicas[b.index].held for b in runtime.buckets if b.is_trainable and b.index in replicas}


def residuals_of(runtime: Runtime) -> list[Residual]:
    """This rank's residuals, one for each trainable bucket; none in other modes."""
    sums = [grads.in_node for grads in runtime.reducer.all]
    return [one.residual for one in sums if one is not None and one.residual is not None]


def node_state(runtime: Runtime) -> dict[str, Any] | None:
    """Both, on this rank: copies.

    Raises:
        StateError: There are gradients of a step that is not applied.
    """
    held = held_of(runtime)
    if not held:
        return None
    return {
        "replicas": {bucket.index: values.clone() for bucket, values in held.items()},
        "residuals": [residual.state_dict() for residual in residuals_of(runtime)],
    }


def restore_node_state(runtime: Runtime, saved: Mapping[str, Any] | None) -> None:
    """Go on with what :func:`node_state` gave on this rank of the same layout. Collective."""
    reset_residuals(runtime)
    if saved is None or not runtime.gatherer.replicas:
        return
    refresh_replicas(runtime, {b: saved["replicas"][b.index] for b in held_of(runtime)})
    for residual, state in zip(residuals_of(runtime), saved["residuals"], strict=True):
        residual.load_state_dict(state)


def refresh_replicas(runtime: Runtime, shards: Mapping[Bucket, Tensor]) -> None:
    """Let all nodes hold these values of every rank's shards. Collective; the same buckets on every rank."""
    runtime.hold(shards)


def reset_residuals(runtime: Runtime) -> None:
    """Forget what exchanges have lost: masters are others now."""
    for residual in residuals_of(runtime):
        residual.reset()


def load_all_residuals(runtime: Runtime, states: Iterable[Mapping[str, Any]]) -> None:
    """Take over the states of all ranks of another topology or layout: sums, split equally. No communication.

    Of other parameters than these the residuals start anew, which is said once.
    """
    reset_residuals(runtime)
    residuals = residuals_of(runtime)
    if not residuals:
        return
    try:
        load_residuals(states, residuals)
    except LayoutError as error:
        reset_residuals(runtime)
        if runtime.speaks:
            logger.warning("residuals of gradients start anew: %s", error)
