"""Checks before a step that the model was not edited behind the optimizer's back.

Always: no parameter was added, replaced, moved or unfrozen. With ``ZERO_DEBUG=1``: no values were changed.

Below stage 3 parameters are ordinary tensors, and ``param.copy_(values)`` seems to work. It does if the parameters are
their own masters. 16-bit or quantized parameters are overwritten from the masters at the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from zcomm import StateError, Topology
from zcomm._base import env
from zero._ranks.rank_errors import on_every_rank
from zero._sharding.bucket import Bucket, ShardInfo, has_same_bits


def check_model_unchanged(model: nn.Module, buckets: Sequence[Bucket]) -> None:
    """Raise StateError if a parameter was added, replaced, moved or unfrozen after ``buckets`` were built."""
    managed = {id(param) for bucket in buckets for param in bucket.params}
    frozen = [param for bucket in buckets if not bucket.is_trainable for param in bucket.params]
    # This runs in every step, so names are looked up only for an error.
    if not _parameter_ids(model) <= managed or any(param.requires_grad for param in frozen):
        _raise_named(model, managed)
    for bucket in buckets:
        for slot in bucket.moved_slots():
            name, param = bucket.layout.slots[slot].name, bucket.params[slot]
            raise StateError(
                f"parameter {name!r} got other memory, of {param.dtype} on {param.device}, after ZeroOptimizer was "
                "constructed and would never be updated: call model.to() before, and assign values inside "
                "zero.GatheredParameters([param], modifier_rank=0)"
            )


def _parameter_ids(model: nn.Module) -> set[int]:
    """The ids of all parameters of ``model``, without ``model.parameters()``, which hashes each tensor in Python."""
    modules, seen, found = [model], {id(model)}, set[int]()
    for module in modules:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
        found.update(map(id, module._parameters.values()))
    return found - {id(None)}


def _raise_named(model: nn.Module, managed: Collection[int]) -> None:
    """Raise for the first parameter that was added or replaced, or unfrozen."""
    for name, param in model.named_parameters():
        if id(param) not in managed:
            raise StateError(
                f"parameter {name!r} was added or replaced after ZeroOptimizer was constructed and would never be "
                "updated: construct ZeroOptimizer after the model is complete"
            )
        info: ShardInfo = param.zero_shard  # type: ignore[attr-defined]
        if param.requires_grad and not info.bucket.is_trainable:
            raise StateError(
                f"parameter {name!r} was frozen when ZeroOptimizer was constructed and requires grad now: "
                "construct ZeroOptimizer after unfreezing"
            )


class DebugCopies:
    """Copies of the values last written back, by bucket. Without ``ZERO_DEBUG=1`` nothing is kept or checked."""

    def __init__(self, topology: Topology, *, is_always_full: bool) -> None:
        self._topology = topology
        self._is_on = is_always_full and env.is_set("ZERO_DEBUG")
        self._copies: dict[Bucket, Tensor] = {}

    def remember(self, buckets: Iterable[Bucket]) -> None:
        """Note the full parameters of ``buckets`` as the expected values."""
        if self._is_on:
            for bucket in buckets:
                if bucket.full is not None and not bucket.is_its_master:
                    self._copies[bucket] = bucket.full.clone()

    def check(self) -> None:
        """Raise StateError on every rank if values were changed on any of them. Collective."""
        if self._is_on:
            on_every_rank(self._check_here, self._topology)

    def _check_here(self) -> None:
        for bucket, copy in self._copies.items():
            both = zip(bucket.layout.slots, bucket.views(bucket.buffer), bucket.views(copy), strict=True)
            changed = [slot.name for slot, now, then in both if not has_same_bits(now, then)]
            if changed:
                raise StateError(
                    f"{len(changed)} parameters were changed since the last step, first {changed[:3]}: their masters "
                    "do not see that, so step() would undo it. Change them inside "
                    "zero.GatheredParameters([param], modifier_rank=0)"
                )
