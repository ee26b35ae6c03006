"""``offload_states`` and ``reload_states``: free the device memory of a model in training for a while.

For phases in which another model needs the device, such as generation in reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from zcomm import ConfigError, StateError
from zero._optim.masters import tensors_in
from zero._runtime.optimizer_parts import OptimizerParts
from zero._runtime.runtime import Runtime
from zero._runtime.suspended_memory import SuspendedMemory
from zero.optimizer import ZeroOptimizer

__all__ = ["KINDS", "offload_states", "reload_states"]

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names: moments, float32 masters, parameters, reduced gradients, buffers of exchanges."""


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
        optimizer: Between steps. Its states must not be in files, nor its parameters off the device.
        include: Names of :data:`KINDS`; default: all. If float32 parameters are their masters, either name moves both.
        device: "cpu".
        pin_memory: Use page-locked memory, with CUDA.
        non_blocking: Do not wait for the copies: the device's stream keeps the order.

    Raises:
        ConfigError: An unknown kind or device, or the configuration offloads already.
        StateError: States are offloaded already, or parameters are in use.

    Call it on every rank; it does not communicate. It does not move what is in host memory already, the model's own
    buffers, the secondary partition of hpZ, or frozen weights stored as INT8. Until :func:`reload_states`, calls of the
    model, ``step()``, checkpoints and access to parameters raise StateError.
    """
    parts = optimizer.parts
    runtime, kinds = parts.runtime, _kinds(include)
    if str(getattr(device, "value", device)) != "cpu":
        raise ConfigError(f"states can be offloaded to host memory only: device={device!r}; use 'cpu'")
    if runtime.state_files.groups_of or any(b.is_trainable and not b.storage.is_on_device for b in runtime.buckets):
        raise ConfigError(
            "states and parameters must be on the device: offload_optimizer.device is nvme, or offload_param is set"
        )
    runtime.check_not_suspended()
    runtime.finish_update(writes_back=True)
    runtime.hooks.recover()
    used = [bucket.name for bucket in runtime.buckets if bucket.is_held()]
    if used:
        raise StateError(f"parameters are in use, first those of {used[0]!r}: call offload_states() between steps")
    runtime.gatherer.release_all()
    suspended = SuspendedMemory(kinds)
    if "lp_params" in kinds or "hp_params" in kinds:
        suspended.hide(runtime.buckets)
    if "contiguous_grad_buffer" in kinds:
        runtime.pool.clear()
    # The copies are made on the current stream: the optimizer's kernels of the last step have ended before they read.
    suspended.put(_tensors(parts, kinds), pins_memory=pin_memory, non_blocking=non_blocking)
    # A forward meanwhile would read freed storages: hooks on every module turn it into a StateError.
    suspended.handles = [
        module.register_forward_pre_hook(lambda *_: runtime.check_not_suspended()) for module in runtime.model.modules()
    ]
    runtime.suspended = suspended
    _synchronize(runtime, waits=not non_blocking)


def reload_states(optimizer: ZeroOptimizer, *, non_blocking: bool = False) -> None:
    """Move everything that :func:`offload_states` has moved back to the device."""
    runtime = optimizer.parts.runtime
    if runtime.suspended is None:
        return
    runtime.suspended.restore(non_blocking=non_blocking)
    runtime.suspended = None
    _synchronize(runtime, waits=not non_blocking)


def _kinds(include: Collection[Any] | None) -> tuple[str, ...]:
    if include is None:
        return KINDS
    names = tuple(str(getattr(kind, "value", kind)) for kind in include)
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"include must be names of {', '.join(KINDS)}: got {name!r}")
    return names


def _tensors(parts: OptimizerParts, kinds: Collection[str]) -> Iterator[Tensor]:
    """The tensors of ``kinds`` on the device."""
    runtime = parts.runtime
    for bucket in runtime.buckets:
        if "hp_params" in kinds and not bucket.states.is_on_host and bucket.storage.is_in_memory:
            yield bucket.master
        if "lp_params" in kinds and bucket.storage.is_in_memory:
            yield from (tensor for tensor in (bucket.shard, bucket.full) if tensor is not None)
    for grads in runtime.reducer.all if "lp_grads" in kinds else ():
        yield from grads.store.tensors if grads.store.is_on_device else ()
        yield from (tensor for tensor in (grads.rows, grads.full) if tensor is not None)
    for piece in parts.pieces if "optim_states" in kinds else ():
        if not piece.bucket.states.is_on_host:
            states = parts.inner.state.get(piece.master, {}).values()
            yield from (tensor for value in states for tensor in tensors_in(value) if tensor.ndim)


def _synchronize(runtime: Runtime, *, waits: bool) -> None:
    device = runtime.buckets[0].device
    if waits and device.type == "cuda":
        torch.cuda.synchronize(device)
