"""Optimizer states by the model's parameters: torch.distributed.checkpoint.state_dict with a ZeroOptimizer.

    get_optimizer_state_dict   state_dict()        every rank's part --bucket by bucket--> full states on rank 0
    set_optimizer_state_dict   load_state_dict()   full states on rank 0 --bucket by bucket--> every rank's part

torch's functions find a state's name by the identity of a parameter in ``param_groups``, so a ZeroOptimizer shows them
the model's parameters there; everybody else sees this rank's flat pieces. The values that are loaded are those that
the caller gave rank 0: what torch makes of them in between is not used. The other ranks' dicts are ignored.

A parameter in 16 bits has its float32 master as state ``"master"``: its model's state dict has only the rounded value.
"""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zcomm import StateError, Topology, control
from zero._gather.gather_sources import gather_shards
from zero._optim.masters import MasterPiece, is_elementwise, is_nested, pieces_by_bucket
from zero._optim.several import name_of
from zero._ranks.rank_errors import on_every_rank, share_text
from zero._runtime.optimizer_parts import OptimizerParts
from zero._sharding.bucket import Bucket
from zero._sharding.released import stack
from zero._storage.safetensors_file import CODES, DTYPES

TORCHS_HELPERS = "torch.distributed.checkpoint.state_dict"
MASTER = "master"
"""The state of a 16-bit parameter that holds its float32 master, as zero's CPU optimizers call it."""
BOTH = "call set_model_state_dict, then set_optimizer_state_dict (set_state_dict was given a model's state dict here)"
States = dict[str, dict[str, Any]]
"""By parameter and state: a number or 0-dim tensor; of a state with a value for each element its dtype or values."""


class ByParameter:
    """An attribute of ZeroOptimizer; torch's functions get ``shown(optimizer)`` instead."""

    def __init__(self, shown: Callable[[Any], Any]) -> None:
        self._shown = shown

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, cls: type) -> Any:
        if optimizer is None:
            return self
        if sys._getframe(1).f_globals.get("__name__") == TORCHS_HELPERS:
            return self._shown(optimizer)
        return vars(optimizer)[self._name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        vars(optimizer)[self._name] = value


class HelperCall(NamedTuple):
    """A call of torch's functions that is running."""

    options: Any
    """torch's StateDictOptions and what it knows of the model."""
    is_loading: bool
    given: Any
    """The state dict to load."""

    @property
    def is_for_first_rank(self) -> bool:
        """Whether torch drops the result on the other ranks."""
        return bool(self.options.full_state_dict and self.options.cpu_offload)


def helper_call() -> HelperCall | None:
    """The call of torch's functions that is running, or None."""
    frames = [frame for frame in stack() if frame.f_globals.get("__name__") == TORCHS_HELPERS]
    options = next((frame.f_locals["info"] for frame in frames if "info" in frame.f_locals), None)
    given = [f.f_locals["state_dict"] for f in frames if f.f_code.co_name == "_load_optim_state_dict"]
    return None if options is None else HelperCall(options, bool(given), given[0] if given else None)


def refuse_sharded(call: HelperCall) -> None:
    """Refuse options under which ranks without values fail."""
    if not call.is_for_first_rank or call.options.ignore_frozen_params:
        raise StateError(
            "at stage 3 rank 0 gets the full state dict, other ranks an empty one: pass get_model_state_dict, "
            "get_optimizer_state_dict and get_state_dict StateDictOptions(full_state_dict=True, cpu_offload=True), "
            "without ignore_frozen_params"
        )


def shown_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups, of the model's parameters."""
    parts: OptimizerParts = optimizer.parts
    groups: list[dict[str, Any]] = [{**group, "params": []} for group in parts.inner.param_groups]
    for param, index in parts.group_of.items():
        groups[index]["params"].append(param)
    return groups


def shown_state(optimizer: Any) -> dict[Any, Any]:
    """Not empty, so that torch makes no step to create states. torch asks first: refuses, on every rank."""
    runtime, call = optimizer.parts.runtime, helper_call()
    assert call is not None, f"{TORCHS_HELPERS} of torch {torch.__version__} is not as expected"
    # torch's set_state_dict loads no model on ranks with an empty dict, while rank 0 waits for them.
    fact = f"{BOTH}: {call.options.handle_model}" if call.is_loading else ""
    on_every_rank(lambda: _check(call, optimizer), runtime.topology, fact=fact)
    return {"": {}}


def _check(call: HelperCall, optimizer: Any) -> None:
    runtime, num_ranks = optimizer.parts.runtime, dist.get_world_size() if dist.is_initialized() else 1
    runtime.check_not_suspended()
    if runtime.topology.world_size != num_ranks:
        raise StateError(
            f"{TORCHS_HELPERS} addresses all ranks of the job: this optimizer is sharded over "
            f"{runtime.topology.world_size} of {num_ranks}; use zero.save_checkpoint and zero.load_checkpoint"
        )
    if not call.is_loading and runtime.stage.shards_parameters and num_ranks > 1:
        refuse_sharded(call)
    if call.is_loading and runtime.topology.rank == 0:
        _check_given(call, shown_groups(optimizer))


def _check_given(call: HelperCall, groups: list[dict[str, Any]]) -> None:
    """Raise unless rank 0's state dict has what :func:`load_full_states` needs."""
    given = call.given
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise StateError(
            "rank 0's optimizer state dict must have the entries 'state' and 'param_groups': get it with "
            "flatten_optimizer_state_dict=False, and give it to rank 0"
        )
    names, pairs = _names_in(call, groups), set()
    home = {name: index for index, group in enumerate(given["param_groups"]) for name in group["params"]}
    for index, group in enumerate(groups):
        for param in group["params"]:
            if param.requires_grad:
                name = names[param]
                pairs.add((index, home.get(name)))
                _check_states(name, param, given["state"].get(name), call, has_any=bool(given["state"]))
    if None in {there for _, there in pairs} or not len(pairs) == len(dict(pairs)) == len({t for _, t in pairs}):
        raise StateError(
            "the parameter groups of the state dict must divide the trainable parameters, by their names, as the "
            f"optimizer's do: (optimizer's, state dict's)={sorted(pairs, key=str)[:9]}; construct the optimizer with "
            "the same groups"
        )


def _names_in(call: HelperCall, groups: list[dict[str, Any]]) -> dict[nn.Parameter, str]:
    """The name of every parameter of ``groups`` in the state dict, which has one of a tied parameter's names."""
    known = {name for group in call.given["param_groups"] for name in group["params"]}
    names = {}
    for param in (param for group in groups for param in group["params"]):
        own = call.options.fqn_param_mapping.get(param)
        if own is None:
            raise StateError(f"the model must have every parameter of the optimizer: shape={tuple(param.shape)} is not")
        names[param] = next((name for name in sorted(own) if name in known), min(own))
    return names


def _check_states(name: str, param: nn.Parameter, states: Any, call: HelperCall, *, has_any: bool) -> None:
    if states is None and has_any and call.options.strict:
        raise StateError(
            f"the state dict must have states of {name!r}: if it never had a gradient pass StateDictOptions(strict="
            "False)"
        )
    if MASTER in (states or {}) and call.options.handle_model:
        raise StateError(
            f"the model must be loaded before the float32 master of {name!r}, and set_state_dict loads it after: {BOTH}"
        )
    for state, value in (states or {}).items():
        is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
        is_full = isinstance(value, Tensor) and not hasattr(value, "placements") and value.shape == param.shape
        if not (is_number or is_full):
            shape = tuple(value.shape) if isinstance(value, Tensor) else ""
            raise StateError(
                f"state {state!r} of {name!r} must be a number or a full tensor of shape {tuple(param.shape)}: got "
                f"{type(value).__name__} {shape}; get it with StateDictOptions(full_state_dict=True)"
            )


def full_state_dict(parts: OptimizerParts, call: HelperCall, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What torch expects of ``optimizer.state_dict()``, with full states. Collective.

    With ``full_state_dict=True, cpu_offload=True`` rank 0 has them, in host memory; else every rank has.

    Cost for each rank: every state is gathered. Memory: one bucket, and the result.
    """
    order = [param for group in groups for param in group["params"]]
    number_of = {param: number for number, param in enumerate(order)}
    packed = [
        {
            **{key: copy.deepcopy(value) for key, value in group.items() if key != "params"},
            "params": [number_of[param] for param in group["params"]],
        }
        for group in groups
    ]
    if call.is_loading:  # torch takes the tensors' device from it, and fails if there is none
        return {"state": {0: {"stand-in": torch.zeros(1)}}, "param_groups": packed}
    parts.runtime.finish_update()
    states = {number_of[param]: values for param, values in _gathered(parts, call).items() if values}
    return {"state": dict(sorted(states.items())), "param_groups": packed}


def _gathered(parts: OptimizerParts, call: HelperCall) -> dict[nn.Parameter, dict[str, Any]]:
    """The full states of every parameter; none on ranks whose result torch drops."""
    runtime, described = parts.runtime, _described_by_all(parts)
    is_kept = runtime.topology.rank == 0 or not call.is_for_first_rank
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for bucket in (bucket for bucket in runtime.buckets if bucket.is_trainable):
        of_bucket = [described.get(slot.name, {}) for slot in bucket.layout.slots]
        with runtime.in_memory([bucket]):
            for state, dtype in _elementwise(of_bucket):
                full = _gather_state(parts, bucket, state, dtype)
                for states, values in zip(of_bucket, bucket.views(full), strict=True):
                    if is_kept and states.get(state) is dtype:
                        states[state] = values.to("cpu" if call.options.cpu_offload else full.device, copy=True)
        found |= zip(bucket.params, of_bucket if is_kept else [{} for _ in of_bucket], strict=True)
    return found


def _elementwise(of_slots: list[dict[str, Any]]) -> list[tuple[str, torch.dtype]]:
    """The states with a value for each element that any parameter of a bucket has, and their dtypes."""
    found = [(k, v) for states in of_slots for k, v in states.items() if isinstance(v, torch.dtype)]
    return list(dict.fromkeys(found))


def _gather_state(parts: OptimizerParts, bucket: Bucket, state: str, dtype: torch.dtype) -> Tensor:
    """State ``state`` of all parameters of ``bucket``; zeros of parameters that have none. Collective."""
    topology, is_sharded = parts.runtime.topology, parts.runtime.stage.shards_states
    own = torch.zeros_like(bucket.master, dtype=dtype, device=bucket.device)
    for piece in parts.pieces:
        if piece.bucket is bucket:
            value = piece.master if state == MASTER else parts.inner.state.get(piece.master, {}).get(state)
            if isinstance(value, Tensor) and is_elementwise(piece.master, value):
                piece.of(own).copy_(value)
    if not is_sharded:
        return own
    full = torch.empty(bucket.layout.numel, dtype=dtype, device=bucket.device)
    gather_shards(full, own, bucket.layout, topology)
    return full


def _described_by_all(parts: OptimizerParts) -> States:
    """The states of each parameter, on any rank: dtypes of those with a value for each element, values of others."""
    topology = parts.runtime.topology
    own = on_every_rank(lambda: json.dumps(_described(parts)), topology)
    merged: dict[str, Any] = {}
    for text in [share_text(own, rank, topology) for rank in range(topology.world_size)]:
        merged = json.loads(text) | merged
    return {name: {state: _decoded(*one) for state, one in states.items()} for name, states in merged.items()}


def _described(parts: OptimizerParts) -> dict[str, dict[str, tuple[str, Any]]]:
    described = {}
    for piece in parts.pieces:
        states: dict[str, tuple[str, Any]] = {}
        for state, value in parts.inner.state.get(piece.master, {}).items():
            if isinstance(value, Tensor) and not is_nested(value):
                is_full = is_elementwise(piece.master, value)
                if not is_full and value.numel() != 1:
                    raise StateError(
                        f"{name_of(parts.inner)} keeps {state!r} in another shape than the parameter, "
                        f"{tuple(value.shape)}, which torch's helpers cannot gather: use zero.save_checkpoint"
                    )
                states[state] = CODES[value.dtype], None if is_full else value.item()
            elif is_nested(value):
                raise StateError(
                    f"{name_of(parts.inner)} keeps {state!r} as a {type(value).__name__}, which torch's helpers cannot "
                    "gather: use zero.save_checkpoint"
                )
            elif value is not None:
                states[state] = "", value
        if piece.master.dtype != piece.bucket.dtype:
            states[MASTER] = CODES[piece.master.dtype], None
        described[piece.bucket.layout.slots[piece.slot].name] = states
    return described


def _decoded(code: str, value: Any) -> Any:
    if not code:
        return value
    return DTYPES[code] if value is None else torch.tensor(value, dtype=DTYPES[code])


def load_full_states(optimizer: Any, call: HelperCall) -> None:
    """Give every rank its part of the states and options that rank 0's caller has given. Collective.

    Cost for each rank: every state is broadcast; torch broadcasts them, too. Memory: one bucket, and the states.
    """
    parts: OptimizerParts = optimizer.parts
    runtime, groups = parts.runtime, shown_groups(optimizer)
    runtime.finish_update(writes_back=True)
    given = _by_slot(parts, call, groups) if runtime.topology.rank == 0 else {}
    options, described = _from_first(lambda: (_options(call, groups), _descriptions(given)), runtime.topology)
    states, new = _own_states(parts, described, given), list[Bucket]()
    masters = {leaf: one.pop(MASTER) for leaf, one in states.items() if MASTER in one}
    optimizer.load_inner_state(_packed(parts, options, states))
    for bucket, pieces in _trainable(parts).items():
        if any(MASTER in described.get(slot.name, {}) for slot in bucket.layout.slots):
            new.append(bucket)
            with runtime.in_memory([bucket], is_changed=True):
                for piece in pieces:
                    if piece.master in masters:
                        piece.master.copy_(masters[piece.master])
    runtime.write_back(new)
    runtime.reducer.facts.forget_step()


def _trainable(parts: OptimizerParts) -> dict[Bucket, list[MasterPiece]]:
    return pieces_by_bucket([bucket for bucket in parts.runtime.buckets if bucket.is_trainable], parts.pieces)


def _by_slot(parts: OptimizerParts, call: HelperCall, groups: list[dict[str, Any]]) -> States:
    """The states that were given, by the parameter's name in its bucket."""
    names, saved, buckets = _names_in(call, groups), call.given["state"], parts.runtime.buckets
    slots = [one for bucket in buckets for one in zip(bucket.params, bucket.layout.slots, strict=True)]
    return {slot.name: dict(saved[names[p]]) for p, slot in slots if p in names and names[p] in saved}


def _own_states(parts: OptimizerParts, described: States, given: States) -> dict[Tensor, dict[str, Any]]:
    """This rank's part of all states, by master. Collective."""
    own: dict[Tensor, dict[str, Any]] = {}
    for bucket, pieces in _trainable(parts).items():
        of_bucket = [described.get(slot.name, {}) for slot in bucket.layout.slots]
        for piece in pieces:  # copies, because steps change counters in place
            own[piece.master] = copy.deepcopy(of_bucket[piece.slot])
        for state, dtype in _elementwise(of_bucket):
            rows = _scatter_state(parts, bucket, state, dtype, given)
            for piece in pieces:
                if own[piece.master].get(state) is dtype:
                    own[piece.master][state] = piece.of(rows).to(piece.master.device, copy=True)
    return own


def _options(call: HelperCall, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options that rank 0's state dict has for each group."""
    names, options = _names_in(call, groups), []
    for group in groups:
        own = {names[param] for param in group["params"] if param.requires_grad}
        found = (one for one in call.given["param_groups"] if not own.isdisjoint(one["params"]))
        saved: dict[str, Any] = next(found, {})
        options.append({key: value for key, value in saved.items() if key not in ("params", "param_names")})
    return options


def _descriptions(given: States) -> States:
    """``given``, with dtypes in place of tensors that have a value for each element."""
    wide = [states.items() for states in given.values()]
    scalars = {"step"} | {k for items in wide for k, v in items if isinstance(v, Tensor) and v.ndim == 0}
    many = {k for items in wide for k, v in items if isinstance(v, Tensor) and v.ndim > 0}
    # A parameter without dimensions has moments without dimensions: other parameters tell them from counters.
    return {
        name: {
            state: value.dtype if isinstance(value, Tensor) and (value.ndim or state not in scalars - many) else value
            for state, value in states.items()
        }
        for name, states in given.items()
    }


def _from_first(make: Callable[[], Any], topology: Topology) -> Any:
    """What ``make`` returns on rank 0: plain values, dtypes and small tensors. Collective."""

    def packed() -> str:
        buffer = io.BytesIO()
        if topology.rank == 0:
            torch.save(make(), buffer)
        return buffer.getvalue().hex()

    text = share_text(on_every_rank(packed, topology), 0, topology)
    load = lambda: torch.load(io.BytesIO(bytes.fromhex(text)), map_location="cpu", weights_only=True)  # noqa: E731
    return on_every_rank(load, topology)


def _scatter_state(parts: OptimizerParts, bucket: Bucket, state: str, dtype: torch.dtype, given: States) -> Tensor:
    """This rank's rows of rank 0's values of ``state``. Collective."""
    topology, stage = parts.runtime.topology, parts.runtime.stage
    full = torch.zeros(bucket.layout.numel, dtype=dtype, device=bucket.device)
    for slot, values in zip(bucket.layout.slots, bucket.views(full), strict=True):
        value = given.get(slot.name, {}).get(state)
        if isinstance(value, Tensor) and value.dtype == dtype:
            values.copy_(value)
    control.broadcast_(full, 0, topology)
    if not stage.shards_states:
        return full
    return bucket.shard_of(full)


def _packed(parts: OptimizerParts, options: list[dict[str, Any]], states: Mapping[Tensor, Any]) -> dict[str, Any]:
    """The state dict for the inner optimizer of this rank."""
    leaves = [leaf for group in parts.inner.param_groups for leaf in group["params"]]
    number_of = {id(leaf): number for number, leaf in enumerate(leaves)}
    packed = [
        {**group, **own, "params": [number_of[id(leaf)] for leaf in group["params"]]}
        for group, own in zip(parts.inner.param_groups, options, strict=True)
    ]
    return {
        "state": {number_of[id(master)]: values for master, values in states.items() if values},
        "param_groups": packed,
    }
