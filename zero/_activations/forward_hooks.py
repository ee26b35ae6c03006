"""Applies the configuration's ``activation_checkpointing`` to one model, by hooks on its forward."""

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
_INSTALLED: WeakKeyDictionary[nn.Module, Checkpointer] = WeakKeyDictionary()


def install(
    model: nn.Module, settings: ActivationSettings, tensor_group: dist.ProcessGroup | None, all_ranks: Topology
) -> list[ForwardHooks]:
    """Store checkpoints of ``model``'s forward as ``settings`` say, those of torch.utils.checkpoint and ours.

    Collective over ``tensor_group``, and over ``all_ranks``.

    Returns:
        Hooks for the caller to remove at the end; empty if ``settings`` have no effect.

    Raises:
        OSError: On every rank, with path and errno: the files cannot be created.
    """
    if not settings.has_effect:
        return []
    return [ForwardHooks(model, new_checkpointer(settings, tensor_group, all_ranks))]


def new_checkpointer(
    settings: ActivationSettings, tensor_group: dist.ProcessGroup | None, all_ranks: Topology | None = None
) -> Checkpointer:
    """A checkpointer, with files and process groups of its own if it needs them. Collective over both groups."""
    ranks = None
    if settings.partitions and tensor_group is not None:
        ranks = Topology(ranks_per_node=dist.get_world_size(tensor_group), group=tensor_group)
    elif settings.partitions:
        settings = replace(settings, partitions=False)
        if is_first_of_job():
            logger.warning("inactive: partition_activations (%s)", NO_TENSOR_RANKS)
    return Checkpointer(settings, ranks, all_ranks)


def checkpointer_of(model: nn.Module) -> Checkpointer:
    """The checkpointer of ``model``.

    Raises:
        StateError: It has none.
    """
    if model not in _INSTALLED:
        raise StateError(
            "the model has no activation_checkpointing of its own: enable an option of it in the configuration that is "
            "given to zero.initialize or ZeroOptimizer"
        )
    return _INSTALLED[model]


class ForwardHooks:
    """Hooks on ``model`` that set its checkpointer while its forward runs."""

    def __init__(self, model: nn.Module, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        ROUTING.add()
        _INSTALLED[model] = checkpointer
        disable: Any = torch.compiler.disable  # not traced: the hooks change state of the thread
        self._handles = [
            # First of all hooks: another hook of the model may call a checkpointed function.
            model.register_forward_pre_hook(disable(self._before), prepend=True),
            # Also after an exception: or checkpoints of the next model in this thread would go to this one.
            model.register_forward_hook(disable(self._after), always_call=True),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardHooks:
        # deepcopy of a model copies its hooks. The copy is not in _INSTALLED, so they do nothing on it.
        return self

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        ROUTING.remove()
        self._checkpointer.close()

    def _before(self, model: nn.Module, args: Any) -> None:  # noqa: ARG002
        if _INSTALLED.get(model) is self._checkpointer:
            scope.push(model, self._checkpointer)

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        scope.pop(model)
