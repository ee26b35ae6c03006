"""The state of an installation that survives rebuilt buckets and restarts: residuals by parameter, and the number of
the next exchange that draws random numbers.

    bucket seen first --> residual_for() makes its residual --------------> residuals
                             ^ moved, parameter by parameter                   |
    saved states, of buckets that DDP replaced or of a checkpoint <-- retire(), or state_dict() and load_state_dict()

A saved residual whose layout is that of the new buffer is restored bit for bit. From another layout its values are
decoded and encoded again.
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
from zcomm._residuals.grad_scaler import UserLossScale
from zcomm._residuals.relayout import relayout_residuals
from zcomm._residuals.residual import Residual, check_damping
from zcomm._transport.route import Group
from zcomm._transport.topology import Numbering
from zcomm.errors import StateError


class CarriedState:
    """The state that one installation keeps from step to step on this rank.

    Args:
        names: The parameters that may have a residual.
        recipe: Its seed, and how residuals are damped and reset. ConfigError if a value is out of range.
    """

    def __init__(self, names: Iterable[str], recipe: Recipe) -> None:
        check_damping(recipe.residual_beta, recipe.residual_reset_interval, prefix="residual_")
        self.residuals: list[Residual] = []
        self.recipe = recipe
        self._seed, self._num_random = RandomKey(recipe.seed).seed, 0
        self._names = frozenset(names)
        self._saved: list[dict[str, Any]] = []

    def residual_for(
        self, group: Group, spans: Iterable[Span], numel: int, *, numbering: Numbering = "rank", device: torch.device
    ) -> Residual:
        """Make the residual of a new buffer, and fill it from the saved states of its parameters.

        Collective inside the node, over two hops, if those parameters were in other buffers. Every rank must make its
        residuals in the same order; ranks that differ would deadlock in that exchange.
        """
        damping: Any = {"beta": self.recipe.residual_beta, "reset_interval": self.recipe.residual_reset_interval}
        residual = Residual(group, spans, numel, numbering=numbering, device=device, **damping)
        keys = {span.key for span in residual.layout.spans}
        saved = [state for state in self._saved if keys & {span[0] for span in state["layout"]["spans"]}]
        if len(saved) == 1 and saved[0]["layout"] == residual.state_dict()["layout"]:
            residual.load_state_dict(saved[0])
        elif saved:
            relayout_residuals([_restored(state, group, device) for state in saved], [residual], of_both=True)
        self._saved = [others for state in self._saved if (others := _without(keys, state))["layout"]["spans"]]
        self.residuals.append(residual)
        return residual

    def next_random_key(self, *formats: Format) -> RandomKey | None:
        """Return a new key for the next exchange if one of its formats rounds stochastically, else None.

        All ranks call this in the order of their exchanges, so they count alike. A key used twice would correlate the
        rounding errors of two exchanges.
        """
        if not any(wire.is_random for wire in formats):
            return None
        tensor, step = divmod(self._num_random, 2**32)
        self._num_random += 1
        return RandomKey(self._seed, tensor, step)

    def reset(self) -> None:
        """Set all residuals to zero."""
        for residual in self.residuals:
            residual.reset()

    def retire(self, residual: Residual, scaling: UserLossScale) -> None:
        """Save ``residual``, whose buffer no longer exists, for the buffers that its parameters are in next."""
        self.residuals.remove(residual)
        self._saved.append(_committed(residual, scaling).state_dict())

    def state_dict(self, scaling: UserLossScale) -> dict[str, Any]:
        """See :meth:`zcomm.install.report.Installation.state_dict`."""
        states = [_committed(residual, scaling).state_dict() for residual in self.residuals]
        ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        return {**ranks, "residuals": [*states, *self._saved], "num_random": self._num_random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`zcomm.install.report.Installation.load_state_dict`."""
        if self.residuals or self._num_random:
            raise StateError("load_state_dict() must come before the first backward: uninstall() and install again")
        ranks, mine = (state["rank"], state["world_size"]), (dist.get_rank(), dist.get_world_size())
        if ranks != mine:
            raise StateError(
                f"the state must be this rank's own: saved by (rank, world size)={ranks}, loaded by {mine}; load each "
                "rank's own, or pass the residuals of all ranks to zcomm.load_residuals() after the first step"
            )
        names = {span[0] for residual in state["residuals"] for span in residual["layout"]["spans"]}
        if unknown := sorted(names - self._names):
            raise StateError(f"the state has residuals of unknown parameters: {', '.join(unknown)}")
        self._saved, self._num_random = [dict(residual) for residual in state["residuals"]], int(state["num_random"])


def _committed(residual: Residual, scaling: UserLossScale) -> Residual:
    """``residual`` as the next exchange will find it: a copy, for which alone the last exchange is committed."""
    seen = residual.copy()
    scaling.commit(seen)
    return seen


def _restored(state: Mapping[str, Any], group: Group, device: torch.device) -> Residual:
    layout = state["layout"]
    residual = Residual(group, layout["spans"], layout["numel"], numbering=layout["numbering"], device=device)
    residual.load_state_dict(state)
    return residual


def _without(keys: set[Any], state: dict[str, Any]) -> dict[str, Any]:
    """``state`` without the parameters ``keys``, which are in another residual now."""
    spans = tuple(span for span in state["layout"]["spans"] if span[0] not in keys)
    return {**state, "layout": {**state["layout"], "spans": spans}}
