"""Masters, gradients and optimizer states of single parameters, read and set whole or by this rank's part.

    full    the parameter's shape, float32, the same on every rank; collective. What is set is rank 0's value.
    local   this rank's part, flat: elements of the flattened parameter, none if it holds none of it. At stage 0 all.

A gradient is the averaged one: between the backward that ends a step's gradient and ``zero_grad()``, times the loss
scale if there is one and it is not unscaled yet. With ``delayed_update`` masters and states have the update that is
under way, which is waited for (collective then), and parameters do not, unless something is set; a step takes the
gradients. The functions return None for parameters that no ZeroOptimizer has,
for gradients of frozen or unused ones, and for states that do not exist (yet). Setting what does not exist is an error.

Cost for each rank: reading gathers the parameter's bucket; setting broadcasts the value, and what is set publishes its
bucket at stages 1 and 2. Names and signatures are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zcomm import LayoutError, StateError, Topology, all_gather_single, control
from zero._ranks.collective_calls import collective
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket, BucketState, ShardInfo


class ParameterLocation(NamedTuple):
    """Where a parameter is; this rank has its elements ``first`` to ``last``, from ``start`` on of its rows."""

    runtime: Runtime
    bucket: Bucket
    slot: int
    name: str
    first: int
    last: int
    start: int

    @property
    def part(self) -> slice:
        """This rank's elements of the parameter in the rows that this rank has of the bucket."""
        return slice(self.start, self.start + self.last - self.first)


def _topology_of(param: nn.Parameter) -> Topology | None:
    place = _place(param)
    return None if place is None else place.runtime.topology


def _place(param: nn.Parameter) -> ParameterLocation | None:
    info: ShardInfo | None = getattr(param, "zero_shard", None)
    if info is None or not isinstance(info.owner, Runtime):
        return None
    runtime, bucket, slot = info.owner, info.bucket, info.bucket.layout.slots[info.slot]
    low, high = 0, bucket.layout.numel
    if runtime.stage.shards_states:
        low = runtime.topology.shard_index("local") * bucket.layout.shard_numel
        high = low + bucket.layout.shard_numel
    start, stop = max(slot.offset, low), min(slot.offset + slot.numel, high)
    if start >= stop:
        return ParameterLocation(runtime, bucket, info.slot, slot.name, 0, 0, 0)
    return ParameterLocation(
        runtime, bucket, info.slot, slot.name, start - slot.offset, stop - slot.offset, start - low
    )


def _gathered(place: ParameterLocation, own: Tensor) -> Tensor:
    """The whole parameter from every rank's ``own``, the rows that it has of the bucket."""
    full = own = own.to(place.bucket.device)
    if place.runtime.stage.shards_states:
        full = torch.empty(place.bucket.layout.numel, dtype=own.dtype, device=own.device)
        all_gather_single(full, own.contiguous(), place.runtime.topology, numbering="local")
    return place.bucket.views(full)[place.slot].float().clone()


def _checked(place: ParameterLocation, value: Tensor, numel: int) -> Tensor:
    """``value`` if it has ``numel`` elements, else an error, on every rank."""

    def check() -> None:
        if value.numel() != numel:
            raise LayoutError(f"a value of {place.name!r} must have {numel} elements here: got {tuple(value.shape)}")

    on_every_rank(check, place.runtime.topology, fact=f"set {place.name}")
    return value


def _own_part(place: ParameterLocation, value: Tensor) -> Tensor:
    """This rank's part of rank 0's whole ``value``."""
    numel = place.bucket.layout.slots[place.slot].numel
    whole = _checked(place, value, numel).detach().to(place.bucket.device, copy=True).reshape(-1)
    control.broadcast_(whole, 0, place.runtime.topology)
    return whole[place.first : place.last]


@collective("param", of=_topology_of)
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The float32 master of ``param``, whole. Collective."""
    place = _place(param)
    if place is None:
        return None
    with place.runtime.in_memory([place.bucket]):
        return _gathered(place, place.bucket.master)


@collective("param")
def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the float32 master of ``param``, a flat copy."""
    place = _place(param)
    if place is None:
        return None
    place.runtime.finish_update()
    with place.bucket.rest.in_memory(), place.runtime.states_in_memory(place.bucket):
        return place.bucket.master[place.part].float().clone()


@collective("param", of=_topology_of)
@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the master of ``param``, and with it the parameter, to rank 0's ``value``. Collective."""
    place = _managed(param)
    _set_master(place, _own_part(place, value))


@collective("param", of=_topology_of)
@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the master of ``param``. Collective: every rank sets its own."""
    place = _managed(param)
    _set_master(place, _checked(place, value, place.last - place.first).reshape(-1))


def _set_master(place: ParameterLocation, own: Tensor) -> None:
    runtime, bucket = place.runtime, place.bucket
    with runtime.in_memory([bucket], is_changed=True):
        bucket.master[place.part].copy_(own)
    runtime.publish([bucket], params=[bucket.params[place.slot]])
    if not runtime.stage.shards_parameters:
        return
    if bucket.state is not BucketState.SHARDED:  # gathered, or on its way, with the old value
        runtime.gatherer.acquire(bucket)
        values = _gathered(place, on_every_rank(bucket.rest.read, runtime.topology))
        assert bucket.full is not None, "full without a buffer"
        bucket.views(bucket.full)[place.slot].copy_(values)


def _managed(param: nn.Parameter) -> ParameterLocation:
    place = _place(param)
    if place is None:
        raise StateError("only parameters that a ZeroOptimizer manages can be set: construct it first")
    return place


def _reduced(place: ParameterLocation) -> Tensor | None:
    """The rows that this rank has of the reduced gradient; the same on every rank whether there is one."""
    place.runtime.check_present()
    reducer = place.runtime.reducer
    grads = reducer.by_bucket.get(place.bucket.index)
    if grads is None:
        return None

    def read() -> Tensor | None:
        return reducer.results(grads, wide=True) if grads.used[place.slot] else None

    return on_every_rank(read, place.runtime.topology, fact=f"gradient of {place.name}: {grads.used[place.slot]}")


@collective("param", of=_topology_of)
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The averaged gradient of ``param``, whole. Collective."""
    place = _place(param)
    rows = None if place is None else _reduced(place)
    return None if place is None or rows is None else _gathered(place, rows)


@collective("param", of=_topology_of)
def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the averaged gradient of ``param``, a flat copy. Collective, to agree that there is one."""
    place = _place(param)
    rows = None if place is None else _reduced(place)
    return None if place is None or rows is None else rows[place.part].float().clone()


def _set_grad(param: nn.Parameter, own: Callable[[ParameterLocation], Tensor]) -> None:
    place = _managed(param)
    if _reduced(place) is None:
        raise StateError(f"{place.name!r} has no gradient to set: no rank's backward has used it since zero_grad()")
    values, runtime = own(place), place.runtime
    runtime.reducer.change(runtime.reducer.by_bucket[place.bucket.index], lambda rows: rows[place.part].copy_(values))
    if runtime.gradient_files is not None:
        on_every_rank(runtime.gradient_files.raise_error, runtime.topology)
    runtime.reducer.on_edit(values)


@collective("param", of=_topology_of)
@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the averaged gradient of ``param`` to rank 0's ``value``. Collective."""
    _set_grad(param, lambda place: _own_part(place, value))


@collective("param", of=_topology_of)
@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the averaged gradient of ``param``. Collective: every rank sets its own."""
    _set_grad(param, lambda place: _checked(place, value, place.last - place.first).reshape(-1))


def _state(place: ParameterLocation, param: nn.Parameter, key: str) -> tuple[Tensor | None, float | None, bool]:
    """This rank's part of a state, or its value if it is one number for the whole parameter; and whether it exists."""
    place.runtime.finish_update()
    states = place.runtime.states
    value = None if states is None else states.get(param, key)
    is_part = states is not None and states.is_elementwise(param, key)
    number = None if value is None or is_part else float(value)
    kinds = control.gather_float64(
        torch.tensor([2.0 if is_part else 0.0 if number is None else 1.0, number or 0.0]), place.runtime.topology
    )
    if (kinds[:, 0] == 1).any():
        return None, float(kinds[:, 1].max()), True
    return value if is_part else None, None, bool((kinds[:, 0] == 2).any())


def _found_state(param: nn.Parameter, key: str) -> tuple[ParameterLocation, Tensor | None, Tensor | None] | None:
    """Where ``param`` is, this rank's part of its state, and the state if it is one number; None if there is none."""
    place = _place(param)
    if place is None:
        return None
    own, number, exists = _state(place, param, key)
    return (place, own, None if number is None else torch.tensor(number)) if exists else None


@collective("param", "optim_state_key", of=_topology_of)
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The optimizer's state of that name for ``param``, whole; a scalar if it is one number. Collective."""
    found = _found_state(param, optim_state_key)
    if found is None:
        return None
    place, own, number = found
    if number is not None:
        return number
    with place.runtime.in_memory([place.bucket]):
        rows = torch.zeros_like(place.bucket.master)
        if own is not None:
            rows[place.part].copy_(_values(place, param, optim_state_key))
    return _gathered(place, rows)


@collective("param", "optim_state_key", of=_topology_of)
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of that state, a flat copy; a scalar if it is one number. Collective: it is agreed on."""
    found = _found_state(param, optim_state_key)
    if found is None:
        return None
    place, own, number = found
    if number is not None:
        return number
    with place.runtime.states_in_memory(place.bucket):
        return torch.empty(0) if own is None else _values(place, param, optim_state_key).float().clone()


def _values(place: ParameterLocation, param: nn.Parameter, key: str) -> Tensor:
    """This rank's part of a state, which is in memory."""
    assert place.runtime.states is not None, "a state without an optimizer"
    return place.runtime.states.values(param, key, place.last - place.first)


def _set_state(param: nn.Parameter, key: str, own_value: Callable[[ParameterLocation], Tensor], value: Tensor) -> None:
    place = _managed(param)
    own, number, exists = _state(place, param, key)
    states = place.runtime.states
    if not exists:
        raise StateError(f"{place.name!r} has no optimizer state {key!r}: states come with the first step")
    if number is None:
        part = own_value(place)
        with place.runtime.in_memory([place.bucket], is_changed=True):
            if own is not None and states is not None:
                states.set(param, key, part)
        return
    held = None if states is None else states.get(param, key)
    if isinstance(held, Tensor):
        held.fill_(float(value))


@collective("param", "optim_state_key", of=_topology_of)
@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set that state of ``param`` to rank 0's ``value``. Collective."""
    _set_state(param, optim_state_key, lambda place: _own_part(place, value), value)


@collective("param", "optim_state_key", of=_topology_of)
@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of that state. Collective: every rank sets its own."""

    def own(place: ParameterLocation) -> Tensor:
        return _checked(place, value, place.last - place.first).reshape(-1)

    _set_state(param, optim_state_key, own, value)
