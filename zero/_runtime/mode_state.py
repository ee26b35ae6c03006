"""The state of a mode in a checkpoint beside the masters: replicas, and residuals of gradients.

With ``mode="delta"`` the full parameters are replicas, and there are no residuals. Without this state a restarted
run would train on, but with other bits: its replicas would be the masters rounded once, not the sum of sent changes.
With exact changes both are the same, and replicas are not saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from zcomm import LayoutError, Residual, load_residuals
from zero._gather.gatherer import Gatherer
from zero._runtime.write_back import WriteBack
from zero._sharding.bucket import Bucket
from zero._storage.runtime_part import RuntimePart

logger = logging.getLogger("zero")


class ModeState(RuntimePart):
    """The replicas and residuals of one model; in other modes there are none.

    Args:
        buckets: Those whose replicas differ from the rounded masters.
        gatherer: Has what receives the changes of their masters.
        residuals: This rank's residuals, one for each trainable bucket.
        write_back: Gives replicas other values than the masters'.
    """

    state_key = "node"

    def __init__(
        self, buckets: Sequence[Bucket], gatherer: Gatherer, residuals: list[Residual], write_back: WriteBack
    ) -> None:
        replicas = gatherer.replicas
        self._replicas = {b: replicas[b.index] for b in buckets if b.is_trainable and b.index in replicas}
        self.residuals, self.set_replicas, self._is_log_rank = residuals, write_back.set_replicas, gatherer.is_log_rank

    def replica_shards(self) -> dict[Bucket, Tensor]:
        """The replicas' values of this rank's shard of every trainable bucket whose replica differs from the master."""
        return {bucket: replica.held for bucket, replica in self._replicas.items()}

    def held(self) -> dict[str, int]:
        return {"residuals": sum(residual.nbytes for residual in self.residuals)}

    def state_dict(self) -> dict[str, Any] | None:
        """Copies of this rank's replica shards and residuals.

        Raises:
            StateError: There are gradients of a step that is not applied.
        """
        if not self._replicas and not self.residuals:
            return None
        return {
            "replicas": {bucket.index: values.clone() for bucket, values in self.replica_shards().items()},
            "residuals": [residual.state_dict() for residual in self.residuals],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> list[Bucket]:
        self.reset_residuals()
        if state is not None:
            saved = state["replicas"]
            self.set_replicas({b: saved[b.index] for b in self._replicas if b.index in saved})
            for residual, saved in zip(self.residuals, state["residuals"], strict=True):
                residual.load_state_dict(saved)
        return []

    def reset_residuals(self) -> None:
        """Drop the residuals: they belong to masters that have been replaced."""
        for residual in self.residuals:
            residual.reset()

    def load_all_residuals(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Load the residuals of all ranks of another topology or layout: their sums, split equally. No communication.

        If they belong to other parameters, residuals start at zero, with one warning.
        """
        self.reset_residuals()
        if not self.residuals:
            return
        try:
            load_residuals(states, self.residuals)
        except LayoutError as error:
            self.reset_residuals()
            if self._is_log_rank:
                logger.warning("residuals of gradients start at zero: %s", error)
