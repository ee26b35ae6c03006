"""``safe_get_*`` and ``safe_set_*``: masters, gradients and optimizer states of single parameters.

    full    the parameter's shape, float32, the same on every rank; collective. Setting uses rank 0's value.
    local   this rank's part, flat: elements of the flattened parameter, possibly none. At stage 0 all of them.

A gradient is the averaged one, from the backward that completes it to ``zero_grad()``. Before that getters return the
mean over the ranks of what is not reduced yet (in ``no_sync``, before an accumulation boundary), and change nothing. It
is multiplied by the loss scale until it is unscaled. With ``delayed_update`` reading waits for the update in flight
(collective then): masters and states include it, parameters do not until something is set, and a step consumes the
gradients.

Getters return None for parameters that no ZeroOptimizer manages, for gradients of frozen or unused parameters, and for
states that do not exist (yet). Setting something that does not exist is an error.

Cost for each rank: reading gathers the parameter's bucket; setting broadcasts the value, and at stages 1 and 2 writes
the bucket back. Names and signatures are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zcomm import LayoutError, StateError, Topology, all_reduce, control
from zero._gather.gather_sources import gather_shards
from zero._ranks.collective_calls import collective
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket, BucketState, ShardInfo
from zero._sharding.layout import ShardPiece


class ParameterLocation(NamedTuple):
    """A managed parameter, and this rank's part of it: ``numel`` elements from number ``first`` on."""

    runtime: Runtime
    bucket: Bucket
    slot: int
    name: str
    first: int
    numel: int
    part: slice
    """The same elements in this rank's shard of the bucket."""


def _topology_of(param: nn.Parameter) -> Topology | None:
    location = _locate(param)
    return None if location is None else location.runtime.topology


def _locate(param: nn.Parameter) -> ParameterLocation | None:
    info: ShardInfo | None = getattr(param, "zero_shard", None)
    if info is None or not isinstance(info.owner, Runtime):
        return None
    runtime, bucket, slot = info.owner, info.bucket, info.bucket.layout.slots[info.slot]
    pieces = (piece for piece in bucket.own_pieces(runtime.stage) if piece.slot == info.slot)
    own = next(pieces, ShardPiece(info.slot, 0, 0, 0))
    part = slice(own.start, own.stop)
    return ParameterLocation(runtime, bucket, info.slot, slot.name, own.first, own.stop - own.start, part)


def _gathered(location: ParameterLocation, own: Tensor) -> Tensor:
    """Gather the full parameter from every rank's ``own`` shard of the bucket."""
    full = own = own.to(location.bucket.device)
    if location.runtime.stage.shards_states:
        full = torch.empty(location.bucket.layout.numel, dtype=own.dtype, device=own.device)
        gather_shards(full, own.contiguous(), location.bucket.layout, location.runtime.topology)
    return location.bucket.views(full)[location.slot].float().clone()


def _checked(location: ParameterLocation, value: Tensor, numel: int) -> Tensor:
    """Return ``value`` if it has ``numel`` elements on every rank, else raise on every rank."""

    def check() -> None:
        if value.numel() != numel:
            raise LayoutError(f"a value of {location.name!r} must have {numel} elements here: got {tuple(value.shape)}")

    on_every_rank(check, location.runtime.topology, fact=f"set {location.name}")
    return value


def _local_value(location: ParameterLocation, value: Tensor) -> Tensor:
    """This rank's own ``value`` of its part, flat."""
    return _checked(location, value, location.numel).reshape(-1)


def _of_first_rank(location: ParameterLocation, value: Tensor, numel: int) -> Tensor:
    """Rank 0's ``value``, flat, if it has ``numel`` elements on every rank."""
    full = _checked(location, value, numel).detach().to(location.bucket.device, copy=True).reshape(-1)
    control.broadcast_(full, 0, location.runtime.topology)
    return full


def _own_part(location: ParameterLocation, value: Tensor) -> Tensor:
    """This rank's part of rank 0's full ``value``."""
    full = _of_first_rank(location, value, location.bucket.layout.slots[location.slot].numel)
    return full[location.first : location.first + location.numel]


@collective("param", of=_topology_of)
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the full float32 master of ``param``. Collective."""
    location = _locate(param)
    if location is None:
        return None
    with location.runtime.in_memory([location.bucket]):
        return _gathered(location, location.bucket.master)


@collective("param")
def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the float32 master of ``param``, a flat copy."""
    location = _locate(param)
    if location is None:
        return None
    location.runtime.finish_update()
    with location.bucket.storage.in_memory(), location.runtime.states_in_memory(location.bucket):
        return location.bucket.master[location.part].float().clone()


@collective("param", of=_topology_of)
@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the master of ``param``, and with it the parameter, to rank 0's ``value``. Collective."""
    location = _locate_managed(param)
    _set_master(location, _own_part(location, value))


@collective("param", of=_topology_of)
@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the master of ``param``. Collective: every rank sets its own."""
    location = _locate_managed(param)
    _set_master(location, _local_value(location, value))


def _set_master(location: ParameterLocation, own: Tensor) -> None:
    runtime, bucket = location.runtime, location.bucket
    with runtime.in_memory([bucket], is_changed=True):
        bucket.master[location.part].copy_(own)
    runtime.write_back([bucket], params=[bucket.params[location.slot]])
    # Gathered, or in flight, with the old value.
    if runtime.stage.shards_parameters and bucket.state is not BucketState.SHARDED:
        runtime.gatherer.acquire(bucket)
        values = _gathered(location, on_every_rank(bucket.storage.read, runtime.topology))
        bucket.views(bucket.buffer)[location.slot].copy_(values)


def _locate_managed(param: nn.Parameter) -> ParameterLocation:
    location = _locate(param)
    if location is None:
        raise StateError("only parameters that a ZeroOptimizer manages can be set: construct it first")
    return location


def _reduced(location: ParameterLocation) -> Tensor | None:
    """This rank's shard of the reduced gradient, or None; the ranks agree on whether there is one."""
    location.runtime.check_not_suspended()
    reducer = location.runtime.reducer
    grads = reducer.by_bucket.get(location.bucket.index)
    if grads is None:
        return None

    def read() -> Tensor | None:
        rows = reducer.results(grads, wide=True) if grads.used[location.slot] else None
        return None if rows is None else reducer.consumer.settled(rows)

    return on_every_rank(
        read, location.runtime.topology, fact=f"gradient of {location.name}: {grads.used[location.slot]}"
    )


def _mean_so_far(location: ParameterLocation) -> Tensor | None:
    """The mean over the ranks of gradients that are not reduced yet, of the parameter's shape; None: there are none.

    Raises:
        StateError: An earlier backward of the step is reduced. On every rank.
    """
    runtime, slot = location.runtime, location.slot
    grads = runtime.reducer.by_bucket.get(location.bucket.index)
    if grads is None or not runtime.reducer.accumulation.holds_unreduced:
        return None
    has_local = grads.written[slot] or slot in grads.repeated
    if not control.any_(torch.tensor(has_local, device=location.bucket.device), runtime.topology):
        return None
    if grads.reduced[slot]:
        raise StateError(
            f"a part of the gradient of {location.name!r} is reduced, and a part of no_sync() is not: read it before "
            "no_sync(), or after the next backward outside of it"
        )
    mean = grads.repeated.get(slot)
    if mean is None and has_local:
        assert grads.full is not None, "local gradients are written to the full buffer"
        mean = location.bucket.views(grads.full)[slot]
    shape = location.bucket.layout.slots[slot].shape
    mean = torch.zeros(shape, device=location.bucket.device) if mean is None else mean.float().clone().view(shape)
    all_reduce(mean, runtime.reducer.reduction.op, group=runtime.topology)
    return mean


@collective("param", of=_topology_of)
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the full averaged gradient of ``param``. Collective.

    With fp16 it is multiplied by the loss scale, as ``param.grad`` is before a step: ``optimizer.loss_scale.scale``.
    """
    if (location := _locate(param)) is None:
        return None
    location.runtime.check_not_suspended()
    if (mean := _mean_so_far(location)) is not None:
        return mean
    rows = _reduced(location)
    return None if rows is None else _gathered(location, rows)


@collective("param", of=_topology_of)
def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the averaged gradient of ``param``, a flat copy.

    Collective: the ranks agree on whether there is a gradient. Loss scale: see :func:`safe_get_full_grad`.
    """
    if (location := _locate(param)) is None:
        return None
    location.runtime.check_not_suspended()
    if (mean := _mean_so_far(location)) is not None:
        return mean.flatten()[location.first : location.first + location.numel]
    rows = _reduced(location)
    return None if rows is None else rows[location.part].float().clone()


def _set_grad(param: nn.Parameter, own: Callable[[ParameterLocation], Tensor]) -> None:
    location = _locate_managed(param)
    if _reduced(location) is None:
        raise StateError(f"{location.name!r} has no gradient to set: no rank's backward has used it since zero_grad()")
    values, runtime = own(location), location.runtime
    runtime.reducer.consumer.settle()
    runtime.reducer.change(
        runtime.reducer.by_bucket[location.bucket.index], lambda rows: rows[location.part].copy_(values)
    )
    runtime.state_files.gradients.agree()
    runtime.reducer.consumer.edited(values)


@collective("param", of=_topology_of)
@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the averaged gradient of ``param`` to rank 0's ``value``. Collective."""
    _set_grad(param, lambda location: _own_part(location, value))


@collective("param", of=_topology_of)
@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the averaged gradient of ``param``. Collective: every rank sets its own."""
    _set_grad(param, lambda location: _local_value(location, value))


def _state(location: ParameterLocation, param: nn.Parameter, key: str) -> tuple[bool, float | None, bool]:
    """Whether this rank has a part of a state, or its value if it is one number; and whether any rank has."""
    location.runtime.finish_update()
    states = location.runtime.states
    values, is_part = states.get(param, key), states.is_elementwise(param, key)
    value = values[0] if values else None

    def read_number() -> float | None:
        is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not (value is None or is_part or is_number):
            kind = f"in another shape, {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise StateError(
                f"the optimizer keeps {key!r} of {location.name!r} {'' if ',' in kind else 'as a '}{kind}: these "
                "functions read numbers, and states of the parameter's shape"
            )
        return None if value is None or is_part else float(value)

    number = on_every_rank(read_number, location.runtime.topology)
    kinds = control.gather_float64(
        torch.tensor([2.0 if is_part else 0.0 if number is None else 1.0, number or 0.0]), location.runtime.topology
    )
    if (kinds[:, 0] == 1).any():
        return False, float(kinds[:, 1].max()), True
    return is_part, None, bool((kinds[:, 0] == 2).any())


def _get_state(param: nn.Parameter, key: str, read: Callable[[ParameterLocation, bool], Tensor]) -> Tensor | None:
    """What ``read`` makes of this rank's part of a state, if it has one; a number as a scalar. None: there is none."""
    location = _locate(param)
    if location is None:
        return None
    has_part, number, exists = _state(location, param, key)
    if not exists:
        return None
    return read(location, has_part) if number is None else torch.tensor(number)


@collective("param", "optim_state_key", of=_topology_of)
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return the full optimizer state ``optim_state_key`` of ``param``; a scalar if it is one number. Collective."""

    def read(location: ParameterLocation, has_part: bool) -> Tensor:  # noqa: FBT001
        with location.runtime.in_memory([location.bucket]):
            rows = torch.zeros_like(location.bucket.master)
            if has_part:
                rows[location.part].copy_(torch.cat(_values(location, param, optim_state_key)))
        return _gathered(location, rows)

    return _get_state(param, optim_state_key, read)


@collective("param", "optim_state_key", of=_topology_of)
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state, a flat copy; a scalar if it is one number.

    Collective: the ranks agree on whether the state exists.
    """

    def read(location: ParameterLocation, has_part: bool) -> Tensor:  # noqa: FBT001
        with location.runtime.states_in_memory(location.bucket):
            return torch.cat(_values(location, param, optim_state_key)).float() if has_part else torch.empty(0)

    return _get_state(param, optim_state_key, read)


def _values(location: ParameterLocation, param: nn.Parameter, key: str) -> list[Tensor]:
    """This rank's part of a state that is in memory, without padding: flat, one after the other."""
    return [values.view(-1)[: location.numel] for values in location.runtime.states.get(param, key)]


def _set_state(
    param: nn.Parameter,
    key: str,
    value: Tensor,
    own_part: Callable[[ParameterLocation, Tensor], Tensor],
    checked: Callable[[ParameterLocation, Tensor, int], Tensor],
) -> None:
    location = _locate_managed(param)
    has_part, number, exists = _state(location, param, key)
    if not exists:
        raise StateError(f"{location.name!r} has no optimizer state {key!r}: the first step creates states")
    if number is None:
        part = own_part(location, value)
        with location.runtime.in_memory([location.bucket], is_changed=True):
            first = 0
            for values in _values(location, param, key) if has_part else ():
                values.copy_(part[first : first + values.numel()])
                first += values.numel()
        return
    location.runtime.states.set_number(param, key, checked(location, torch.as_tensor(value), 1).item())


@collective("param", "optim_state_key", of=_topology_of)
@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set the optimizer state ``optim_state_key`` of ``param`` to rank 0's ``value``, also one number. Collective."""
    _set_state(param, optim_state_key, value, _own_part, _of_first_rank)


@collective("param", "optim_state_key", of=_topology_of)
@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of an optimizer state of ``param``. Collective: every rank sets its own."""
    _set_state(param, optim_state_key, value, _local_value, _checked)
