"""What an installation carries from one step to the next, through new buckets and restarts: residuals, by parameter,
and the number of the next exchange that draws random numbers.

    bucket seen first --> its residuals are made ------------------------------> current
                            ^ moved, parameter by parameter, from                  |
    kept: states of buckets that are no more, or of a checkpoint <-- retired, or saved and loaded

A state whose buffer is laid out as the new one's is restored bit for bit; from another layout values are encoded anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from zcomm._formats.formats import Format
from zcomm._formats.philox import RandomKey
from zcomm._formats.recipes import Recipe
from zcomm._residuals.buffer_layout import Span
from zcomm._residuals.relayout import relayout_residuals
from zcomm._residuals.residual import Residual, check_damping
from zcomm._transport.route import Group
from zcomm._transport.topology import Numbering
from zcomm.errors import StateError


class Carried:
    """The state of one installation, on this rank.

    Args:
        names: The parameters that may have a residual.
        recipe: For its seed, and how its residuals are damped and reset; ConfigError if one cannot be meant.
    """

    def __init__(self, names: Iterable[str], recipe: Recipe) -> None:
        check_damping(recipe.residual_beta, recipe.residual_reset_interval, prefix="residual_")
        self.residuals: list[Residual] = []
        self._recipe = recipe
        self._seed, self._num_random = RandomKey(recipe.seed).seed, 0
        self._names = frozenset(names)
        self._kept: list[dict[str, Any]] = []

    def open(
        self,
        group: Group,
        spans: Iterable[Span],
        numel: int,
        *,
        numbering: Numbering = "rank",
        device: torch.device,
    ) -> Residual:
        """The residual of a buffer that is exchanged from now on, with what is kept of its parameters.

        Collective inside the node, over two hops, if that was in other buffers; every rank calls it in the same order.
        """
        beta, reset_interval = self._recipe.residual_beta, self._recipe.residual_reset_interval
        residual = Residual(
            group, spans, numel, numbering=numbering, beta=beta, reset_interval=reset_interval, device=device
        )
        keys = {span.key for span in residual.layout.spans}
        kept = [state for state in self._kept if keys & {span[0] for span in state["layout"]["spans"]}]
        if len(kept) == 1 and kept[0]["layout"] == residual.state_dict()["layout"]:
            residual.load_state_dict(kept[0])
        elif kept:
            relayout_residuals([_revived(state, group, device) for state in kept], [residual], subset=True)
        self._kept = [rest for state in self._kept if (rest := _without(keys, state))["layout"]["spans"]]
        self.residuals.append(residual)
        return residual

    def key_for(self, *formats: Format) -> RandomKey | None:
        """The random numbers of the exchange that comes next, if one of its formats takes any: every time others.

        Exchanges come in the same order on all ranks, and so does this call.
        """
        if not any(wire.is_random for wire in formats):
            return None
        tensor, step = divmod(self._num_random, 2**32)
        self._num_random += 1
        return RandomKey(self._seed, tensor, step)

    def reset(self) -> None:
        """Forget what exchanges have lost."""
        for residual in self.residuals:
            residual.reset()

    def retire(self, residual: Residual) -> None:
        """Its buffer is exchanged no more: keep what it holds for those that its parameters are in next."""
        self.residuals.remove(residual)
        self._kept.append(_committed(residual).state_dict())

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`zcomm.install.report.Installation.state_dict` says."""
        states = [_committed(residual).state_dict() for residual in self.residuals]
        ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        return {**ranks, "residuals": [*states, *self._kept], "num_random": self._num_random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`zcomm.install.report.Installation.load_state_dict` says."""
        if self.residuals or self._num_random:
            raise StateError("load_state_dict() must come before the first backward: uninstall() and install again")
        ranks, mine = (state["rank"], state["world_size"]), (dist.get_rank(), dist.get_world_size())
        if ranks != mine:
            raise StateError(
                f"the state is of another rank or job: (rank, world size) {ranks}, here {mine}; load each rank's own, "
                "or after the first step pass the residuals of all ranks to zcomm.load_residuals()"
            )
        names = {span[0] for residual in state["residuals"] for span in residual["layout"]["spans"]}
        if unknown := sorted(names - self._names):
            raise StateError(f"the state has residuals of parameters that have none here: {', '.join(unknown)}")
        self._kept, self._num_random = [dict(residual) for residual in state["residuals"]], int(state["num_random"])


def _committed(residual: Residual) -> Residual:
    if not residual.is_committed:
        residual.commit()
    return residual


def _revived(state: Mapping[str, Any], group: Group, device: torch.device) -> Residual:
    layout = state["layout"]
    residual = Residual(group, layout["spans"], layout["numel"], numbering=layout["numbering"], device=device)
    residual.load_state_dict(state)
    return residual


def _without(keys: set[Any], state: dict[str, Any]) -> dict[str, Any]:
    """``state`` less the parameters ``keys``: those are elsewhere now."""
    spans = tuple(span for span in state["layout"]["spans"] if span[0] not in keys)
    return {**state, "layout": {**state["layout"], "spans": spans}}
