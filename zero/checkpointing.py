"""Activation checkpointing with DeepSpeed's functions, for models that call them.

    zero.checkpointing.configure(mpu, deepspeed_config="config.json")       once
    hidden = zero.checkpoint(layer, hidden, mask)                           instead of layer(hidden, mask)

A model that calls torch.utils.checkpoint does not need this module: the ``activation_checkpointing`` section of its
configuration applies to its calls.
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
from zcomm._base.rank_context import PerRank
from zero._activations import scope
from zero._activations.activation_settings import ActivationSettings
from zero._activations.checkpointed_call import CheckpointedCall
from zero._activations.checkpointer import Checkpointer
from zero._activations.forward_hooks import checkpointer_of, new_checkpointer
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
"""Keyword arguments of torch.utils.checkpoint.checkpoint itself."""
SEED_OFFSET, SEED_STEP = 2718, 1024
"""Seeds of tensor-parallel ranks: Megatron-LM's offset of the first, and DeepSpeed's distance between them."""


class _Configured:
    """The settings of ``configure``, for calls outside the forward of a model with its own configuration."""

    def __init__(self) -> None:
        self.settings = ActivationSettings()
        self.mpu: Any = None
        self.is_configured = False
        self._checkpointer: Checkpointer | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """Created when it is first needed. Collective then."""
        if self._checkpointer is None:
            self._checkpointer = new_checkpointer(self.settings, tensor_parallel_group(self.mpu))
        return self._checkpointer

    def change(self, settings: ActivationSettings, mpu: Any) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        self.settings, self.mpu, self._checkpointer = settings, mpu, None

    def reset(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.reset()


_CONFIGURED = PerRank(_Configured)


def checkpoint(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call ``function(*args, **kwargs)`` without keeping its activations: backward recomputes them.

    The tensors in its inputs are saved, at any depth of tuples, lists and dicts. The configuration of the model whose
    forward runs says where they are stored, or else :func:`configure`. Random numbers, also the named ones of
    :func:`get_cuda_rng_tracker`, and autocast are the same in the recomputation, so losses and gradients are equal bit
    for bit.

    Args:
        function: Called twice; it must do the same both times, and must not keep its inputs.
        args: Inputs of ``function``. They may be any objects.
        kwargs: Keyword arguments of ``function``, and options of :func:`torch.utils.checkpoint.checkpoint`
            (``preserve_rng_state``, ``context_fn``, ``determinism_check``, ``debug``, ``early_stop``).

    Raises:
        ConfigError: ``use_reentrant=True``: call torch's own.
        StateError: In backward, if an input was modified in place after it was saved.
        LayoutError: Inputs to be partitioned differ between the tensor-parallel ranks.

    Cost for each rank: ``function`` twice; if its inputs are partitioned over N ranks, one all-gather in backward.
    """
    if kwargs.pop("use_reentrant", False):
        raise ConfigError("zero.checkpoint has use_reentrant=False: call torch.utils.checkpoint.checkpoint for True")
    options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
    checkpointer = scope.current() or _CONFIGURED().checkpointer
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # Only ``call`` may hold the inputs from here: references in this frame would keep them in memory until it returns.
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
    """Set where the inputs of :func:`checkpoint` are stored. A later call replaces it. The same on every rank.

    Args:
        mpu_: Megatron's interface, or a DeviceMesh: it gives the tensor-parallel ranks of this one.
        deepspeed_config: A dict, or the path of a JSON file, with a section ``activation_checkpointing``. The other
            arguments override it.
        partition_activations: Partition the inputs over the tensor-parallel ranks.
        contiguous_checkpointing: Store them in one buffer, allocated once.
        num_checkpoints: The number of checkpoints that the buffer has room for before the first step.
        checkpoint_in_cpu: Store them in host memory.
        synchronize: Synchronize the device before and after each function.
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
    _CONFIGURED().change(settings, mpu_)
    _CONFIGURED().is_configured = True


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return _CONFIGURED().is_configured


def reset() -> None:
    """Free the contiguous buffer, for example before an evaluation; the next step allocates another."""
    _CONFIGURED().reset()


def memory(model: nn.Module | None = None) -> ActivationMemory:
    """The memory of saved inputs on this rank, under ``model``'s configuration, or else that of :func:`configure`.

    Raises:
        StateError: ``model`` has no configuration of activation checkpointing.
    """
    return (_CONFIGURED().checkpointer if model is None else checkpointer_of(model)).memory()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:  # noqa: FBT001  (DeepSpeed's signature)
    """Change ``partition_activations`` alone."""
    _CONFIGURED().change(replace(_CONFIGURED().settings, partitions=partition_activation), _CONFIGURED().mpu)


def set_num_layers(nlayers: int) -> None:
    """Change ``number_checkpoints`` alone."""
    _CONFIGURED().change(replace(_CONFIGURED().settings, num_checkpoints=nlayers), _CONFIGURED().mpu)


def get_cuda_rng_tracker() -> RandomStates:
    """The named random states, which checkpointed functions restore for the recomputation."""
    return TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator alike on the tensor-parallel ranks, and the named state of each differently."""
    TRACKER.reset()
    torch.manual_seed(seed)
    TRACKER.add(MODEL_PARALLEL, seed + SEED_OFFSET + _tensor_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed only the named state of each tensor-parallel rank."""
    TRACKER.reset()
    TRACKER.add(MODEL_PARALLEL, seed + SEED_STEP * _tensor_rank())


def _tensor_rank() -> int:
    group = tensor_parallel_group(_CONFIGURED().mpu)
    return 0 if group is None else dist.get_rank(group)
