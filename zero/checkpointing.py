"""Activation checkpointing for models that call it themselves, with DeepSpeed's names.

    zero.checkpointing.configure(mpu, deepspeed_config="config.json")       once
    hidden = zero.checkpoint(layer, hidden, mask)                           instead of layer(hidden, mask)

A model that calls torch.utils.checkpoint needs none of it: the ``activation_checkpointing`` of its configuration acts
on its calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from zcomm import ConfigError
from zero._activations import scope
from zero._activations.activation_settings import ActivationSettings
from zero._activations.call import CheckpointedCall
from zero._activations.checkpointer import Checkpointer
from zero._activations.install import checkpointer_of, new_checkpointer
from zero._activations.random_states import MODEL_PARALLEL, TRACKER, RandomStates
from zero._activations.usage import ActivationMemory
from zero._config import read_source
from zero._config.offload_sections import activations_of
from zero._config.parse import Source
from zero._ranks.model_parallel import tensor_parallel_group
from zero._storage.tier_settings import Tier

__all__ = [
    "ActivationMemory",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "memory",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

Result = TypeVar("Result")
OPTIONS = {"preserve_rng_state"} | {
    name
    for name, parameter in inspect.signature(torch_checkpoint.checkpoint).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
"""Keywords of torch's checkpoint itself."""
SEED_OFFSET, SEED_STEP = 2718, 1024
"""As in Megatron-LM: what tensor-parallel ranks' seeds begin with, and DeepSpeed's distance between them."""


class _Configured:
    """What ``configure`` said, for calls outside the forward of a model that has a configuration of its own."""

    def __init__(self) -> None:
        self.settings = ActivationSettings()
        self.mpu: Any = None
        self.is_configured = False
        self._checkpointer: Checkpointer | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """By the settings, made when it is first asked for, collectively."""
        if self._checkpointer is None:
            self._checkpointer = new_checkpointer(self.settings, tensor_parallel_group(self.mpu))
        return self._checkpointer

    def change(self, settings: ActivationSettings, mpu: Any) -> None:
        """Other settings from here on."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        self.settings, self.mpu, self._checkpointer = settings, mpu, None

    def reset(self) -> None:
        """Drop buffers."""
        if self._checkpointer is not None:
            self._checkpointer.reset()


_CONFIGURED = _Configured()


def checkpoint(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """``function(*args, **kwargs)`` without keeping its activations: backward computes them again.

    Saved are the tensors in its inputs, at any depth of tuples, lists and dicts; they rest as the configuration of the
    model whose forward runs says, or else as :func:`configure` said. Random numbers, the named ones of
    :func:`get_cuda_rng_tracker` too, and autocast are the same again: so are losses and gradients, bit for bit.

    Args:
        function: Called twice; it must do the same both times, and must not keep its inputs.
        args: Its inputs and outputs may hold anything.
        kwargs: Of ``function``; or options of :func:`torch.utils.checkpoint.checkpoint`, by their names
            (``preserve_rng_state``, ``context_fn``, ``determinism_check``, ``debug``, ``early_stop``).

    Raises:
        ConfigError: ``use_reentrant=True``: call torch's own.
        StateError: In backward, if an input was modified in place after it was saved.
        LayoutError: Inputs that are to be divided differ between the tensor-parallel ranks.

    Cost for each rank: ``function`` twice; if its inputs are divided over N ranks, one all-gather in backward.
    """
    if kwargs.pop("use_reentrant", False):
        raise ConfigError("zero.checkpoint has use_reentrant=False: call torch.utils.checkpoint.checkpoint for True")
    options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
    checkpointer = scope.current() or _CONFIGURED.checkpointer
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = CheckpointedCall(checkpointer, function, args, kwargs)
    del args, kwargs
    with call.saving(), scope.entered(None):
        result: Result = torch_checkpoint.checkpoint(call, *call.take_leaves(), use_reentrant=False, **options)
    return result


def configure(
    mpu_: Any = None,
    deepspeed_config: Source | None = None,
    partition_activations: bool | None = None,  # noqa: FBT001  (DeepSpeed's signature)
    contiguous_checkpointing: bool | None = None,  # noqa: FBT001
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,  # noqa: FBT001
    synchronize: bool | None = None,  # noqa: FBT001
    profile: bool | None = None,  # noqa: FBT001
) -> None:
    """Say where the inputs of :func:`checkpoint` rest; again: anew. The same on every rank.

    Args:
        mpu_: Megatron's interface, or a DeviceMesh: the tensor-parallel ranks of this one.
        deepspeed_config: A dict, or the path of a JSON file, with a section ``activation_checkpointing``. What the
            other arguments say wins over it.
        partition_activations: Divide them over the tensor-parallel ranks.
        contiguous_checkpointing: In one buffer, allocated once.
        num_checkpoints: How many it is made for before the first step.
        checkpoint_in_cpu: In host memory.
        synchronize: Synchronise the device before and after each function.
        profile: Log times after each backward.

    Raises:
        ConfigError: See :func:`zero._config.parse.parse`.
    """
    given: dict[str, Any] = {
        "partitions": partition_activations,
        "has_arena": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "tier": None if checkpoint_in_cpu is None else Tier.CPU if checkpoint_in_cpu else Tier.DEVICE,
        "synchronizes": synchronize,
        "is_profiled": profile,
    }
    settings = (
        ActivationSettings() if deepspeed_config is None else activations_of(read_source(deepspeed_config).values)
    )
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    _CONFIGURED.change(settings, mpu_)
    _CONFIGURED.is_configured = True


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return _CONFIGURED.is_configured


def reset() -> None:
    """Drop the contiguous buffer, for example before an evaluation; the next step makes another."""
    _CONFIGURED.reset()


def memory(model: nn.Module | None = None) -> ActivationMemory:
    """What saved inputs hold on this rank: those of ``model``'s configuration, or else those of :func:`configure`.

    Raises:
        StateError: ``model`` has no such configuration.
    """
    return (_CONFIGURED.checkpointer if model is None else checkpointer_of(model)).memory()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:  # noqa: FBT001  (DeepSpeed's signature)
    """Change ``partition_activations`` alone."""
    _CONFIGURED.change(replace(_CONFIGURED.settings, partitions=partition_activation), _CONFIGURED.mpu)


def set_num_layers(nlayers: int) -> None:
    """Change ``number_checkpoints`` alone."""
    _CONFIGURED.change(replace(_CONFIGURED.settings, num_checkpoints=nlayers), _CONFIGURED.mpu)


def get_cuda_rng_tracker() -> RandomStates:
    """The random states that checkpointed functions find in backward as they were in forward."""
    return TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator the same on the tensor-parallel ranks, and the state of each with another seed."""
    TRACKER.reset()
    torch.manual_seed(seed)
    TRACKER.add(MODEL_PARALLEL, seed + SEED_OFFSET + _tensor_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed the state of each tensor-parallel rank alone, from another seed."""
    TRACKER.reset()
    TRACKER.add(MODEL_PARALLEL, seed + SEED_STEP * _tensor_rank())


def _tensor_rank() -> int:
    group = tensor_parallel_group(_CONFIGURED.mpu)
    return 0 if group is None else dist.get_rank(group)
