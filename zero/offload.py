"""``offload_states``: the memory of a model in training is lent to something else, and comes back as it was.

For phases in which another model needs the device, such as generation in reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from zcomm import ConfigError, StateError
from zero._runtime.optimizer_parts import OptimizerParts
from zero._runtime.runtime import Runtime
from zero._runtime.suspended_memory import Away
from zero.optimizer import ZeroOptimizer

__all__ = ["KINDS", "offload_states", "reload_states"]

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names: moments, float32 masters, parameters, gradients at rest, buffers of exchanges."""


def offload_states(
    optimizer: ZeroOptimizer,
    include: Collection[Any] | None = None,
    device: Any = "cpu",
    *,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move what ``optimizer`` holds on the device to host memory, until :func:`reload_states`.

    Args:
        optimizer: Between steps; its states must not rest in files, nor its parameters off the device.
        include: Of :data:`KINDS`; default: all. Where masters are the parameters, in float32, either name moves both.
        device: "cpu".
        pin_memory: Into page-locked memory, where there is CUDA.
        non_blocking: Do not wait for the copies: the device's queue keeps the order.

    Raises:
        ConfigError: An unknown kind or device, or a configuration that offloads already.
        StateError: They are away already, or parameters are in use.

    The same call on every rank; no communication. What is in host memory already, the model's own buffers, the
    secondary partition of hpZ and frozen weights at rest as INT8 stay. Meanwhile calls of the model, ``step()``,
    checkpoints and access to parameters raise StateError.
    """
    inside = optimizer.inside
    runtime, kinds = inside.runtime, _kinds(include)
    if str(getattr(device, "value", device)) != "cpu":
        raise ConfigError(f"states can be offloaded to the host only: device={device!r}; use 'cpu'")
    if runtime.state_files is not None or any(b.is_trainable and not b.rest.is_on_device for b in runtime.buckets):
        raise ConfigError("what is moved must be on the device: offload_optimizer is on nvme, or offload_param is set")
    runtime.check_present()
    runtime.finish_update(publishes=True)
    runtime.hooks.recover()
    used = [bucket.name for bucket in runtime.buckets if bucket.is_needed]
    if used:
        raise StateError(f"parameters are in use, first those of {used[0]!r}: call offload_states() between steps")
    runtime.gatherer.release_all()
    away = Away(kinds)
    if "lp_params" in kinds or "hp_params" in kinds:
        away.hide(runtime.buckets)
    if "contiguous_grad_buffer" in kinds:
        runtime.pool.clear()
    away.put(_tensors(inside, kinds), pins_memory=pin_memory, non_blocking=non_blocking)
    modules = runtime.model.modules()
    away.handles = [module.register_forward_pre_hook(lambda *_: runtime.check_present()) for module in modules]
    runtime.away = away
    _synchronize(runtime, waits=not non_blocking)


def reload_states(optimizer: ZeroOptimizer, *, non_blocking: bool = False) -> None:
    """Bring back what :func:`offload_states` has moved; nothing if nothing is away."""
    runtime = optimizer.inside.runtime
    if runtime.away is None:
        return
    runtime.away.restore(non_blocking=non_blocking)
    runtime.away = None
    _synchronize(runtime, waits=not non_blocking)


def _kinds(include: Collection[Any] | None) -> tuple[str, ...]:
    if include is None:
        return KINDS
    names = tuple(str(getattr(kind, "value", kind)) for kind in include)
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"include must be of {', '.join(KINDS)}: {name!r} is not")
    return names


def _tensors(inside: OptimizerParts, kinds: Collection[str]) -> Iterator[Tensor]:
    """What of ``kinds`` is on the device."""
    runtime = inside.runtime
    for bucket in runtime.buckets:
        if "hp_params" in kinds and bucket.host is None and bucket.rest.is_in_memory:
            yield bucket.master
        if "lp_params" in kinds and bucket.rest.is_in_memory:
            yield from (tensor for tensor in (bucket.shard, bucket.full) if tensor is not None)
    for grads in runtime.reducer.all if "lp_grads" in kinds else ():
        yield from (tensor for tensor in (grads.result, grads.full, grads.carry) if tensor is not None)
    for piece in inside.pieces if "optim_states" in kinds else ():
        if piece.bucket.host is None:
            states = inside.inner.state.get(piece.master, {}).values()
            yield from (value for value in states if isinstance(value, Tensor) and value.ndim)


def _synchronize(runtime: Runtime, *, waits: bool) -> None:
    device = runtime.buckets[0].device
    if waits and device.type == "cuda":
        torch.cuda.synchronize(device)
