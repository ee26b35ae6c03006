"""The configuration's ``activation_checkpointing`` on one model."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from zcomm import StateError, Topology
from zero._activations import scope
from zero._activations.activation_settings import ActivationSettings
from zero._activations.checkpointer import Checkpointer
from zero._activations.routing import ROUTING
from zero._ranks.distributed import is_first_of_job

logger = logging.getLogger("zero")
NO_TENSOR_RANKS = (
    "no other rank has the same activations; give the tensor-parallel ranks by mpu=, or a mesh with an axis 'tp'"
)
"""Why partitioning is inactive."""
_INSTALLED: WeakKeyDictionary[nn.Module, Checkpointer] = WeakKeyDictionary()


def install(
    model: nn.Module, settings: ActivationSettings, tensor_group: dist.ProcessGroup | None, all_ranks: Topology
) -> list[ForwardHooks]:
    """Make checkpoints inside ``model``'s forward, by torch.utils.checkpoint or ours, rest as ``settings`` say.

    Collective over ``tensor_group``, and over ``all_ranks``.

    Returns:
        What is to be removed at the end; empty if there is nothing to do.

    Raises:
        OSError: On every rank, with path and errno: inputs cannot rest in the files that were asked for.
    """
    if not settings.has_effect:
        return []
    return [ForwardHooks(model, new_checkpointer(settings, tensor_group, all_ranks))]


def new_checkpointer(
    settings: ActivationSettings, tensor_group: dist.ProcessGroup | None, all_ranks: Topology | None = None
) -> Checkpointer:
    """A checkpointer, with files and process groups of its own if it needs them. Collective over both."""
    settings, ranks = _effective(settings, tensor_group), None
    if settings.partitions and tensor_group is not None:
        ranks = Topology(ranks_per_node=dist.get_world_size(tensor_group), group=tensor_group)
    return Checkpointer(settings, ranks, all_ranks)


def checkpointer_of(model: nn.Module) -> Checkpointer:
    """What is installed on ``model``.

    Raises:
        StateError: Nothing is.
    """
    if model not in _INSTALLED:
        raise StateError(
            "the model has no activation_checkpointing of its own: enable an option of it in the configuration that is "
            "given to zero.initialize or ZeroOptimizer"
        )
    return _INSTALLED[model]


def _effective(settings: ActivationSettings, tensor_group: dist.ProcessGroup | None) -> ActivationSettings:
    if not settings.partitions or tensor_group is not None:
        return settings
    if is_first_of_job():
        logger.warning("inactive: partition_activations (%s)", NO_TENSOR_RANKS)
    return replace(settings, partitions=False)


class ForwardHooks:
    """Hooks on ``model`` that say when its forward runs."""

    def __init__(self, model: nn.Module, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        ROUTING.add()
        _INSTALLED[model] = checkpointer
        disable: Any = torch.compiler.disable
        self._handles = [
            model.register_forward_pre_hook(disable(self._before), prepend=True),
            model.register_forward_hook(disable(self._after), always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHooks:
        """A copy of the model carries hooks that leave it alone."""
        return self

    def remove(self) -> None:
        """Take the hooks off, and free what is held."""
        for handle in self._handles:
            handle.remove()
        ROUTING.remove()
        self._checkpointer.close()

    def _before(self, model: nn.Module, args: Any) -> None:  # noqa: ARG002
        if _INSTALLED.get(model) is self._checkpointer:
            scope.push(model, self._checkpointer)

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        scope.pop(model)
