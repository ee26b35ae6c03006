"""Objects of the caller that take their state by code of their own: all of them on every rank, or none."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from zcomm import Topology
from zero.checkpoints.agreed import agreed
from zero.checkpoints.errors import CheckpointError

__all__ = ["Receivers"]

logger = logging.getLogger("zero")


class _Receiver(NamedTuple):
    title: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any
    """What it is to get."""


class Receivers:
    """Who takes a state of their own out of a checkpoint.

    Args:
        model: Its modules with ``set_extra_state``.
        extra_state: By the module's name; of others nothing was saved.
        stateful: By name, what has ``load_state_dict``.
        states: Of each of these.
    """

    def __init__(
        self, model: nn.Module, extra_state: Mapping[str, Any], stateful: Mapping[str, Any], states: Mapping[str, Any]
    ) -> None:
        modules = [
            _Receiver(f"extra state of {name!r}", module.get_extra_state, module.set_extra_state, extra_state[name])
            for name, module in model.named_modules()
            if type(module).set_extra_state is not nn.Module.set_extra_state and name in extra_state
        ]
        others = [
            _Receiver(f"state of {name!r}", item.state_dict, item.load_state_dict, states[name])
            for name, item in stateful.items()
        ]
        self._all = [*modules, *others]
        self._before: list[tuple[_Receiver, Any]] = []

    def give(self, ranks: Topology) -> None:
        """Let each take its state; if one raises, on any rank, all get back what they had. Collective.

        Raises:
            CheckpointError: Names the one, and those that could not be put back. The same on every rank.

        Memory: a copy of what they had.
        """
        try:
            agreed(self._give, ranks, "a state was not taken")
        except CheckpointError as error:
            self.put_back(ranks, error)
            raise

    def _give(self) -> None:
        for receiver in self._all:
            self._before.append((receiver, _copied(receiver)))
            try:
                receiver.set(receiver.state)
            except Exception as error:
                raise CheckpointError(
                    f"the {receiver.title} cannot be loaded: {receiver.set.__qualname__}() raised {error!r}; model and "
                    "optimizer are as they were"
                ) from error

    def put_back(self, ranks: Topology, error: Exception) -> None:
        """Give each what it had: what comes after has failed with ``error``. Collective."""

        def put() -> None:
            lost = []
            for receiver, before in reversed(self._before):
                try:
                    receiver.set(*before)  # no copy: a TypeError, as good as any
                except Exception:
                    logger.debug("%s could not be put back", receiver.title, exc_info=True)
                    lost.append(receiver.title)
            if lost:
                raise CheckpointError(f"{error}; but the {', the '.join(lost)} may be half loaded: make it anew")

        agreed(put, ranks, str(error))


def _copied(receiver: _Receiver) -> tuple[Any, ...]:
    """What it has now; nothing if it cannot say before its first use."""
    try:
        return (copy.deepcopy(receiver.get()),)
    except Exception:
        return ()
