"""Restore a loaded checkpoint into the model, the optimizer and all other objects.

User's objects come first: if one of them raises, all get their old state back, and model and optimizer are unchanged.
From the first change of a weight on, an error leaves an optimizer that refuses further steps.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zcomm import Topology
from zero._checkpoint.collective_save import agreed
from zero._checkpoint.flat_parts import (
    NESTED,
    SCALARS,
    LocalPart,
    kind_of_key,
    local_masters,
    local_weights,
    named_buffers,
)
from zero._checkpoint.request import LoadSelection, Request, keys_by_parameter, residual_ranks
from zero._checkpoint.snapshot import group_options, restore_random_state
from zero._checkpoint.streamed_load import StreamedStates
from zero._optim.several import name_of
from zero._ranks.rank_errors import on_every_rank, raise_first
from zero._runtime.initial_values import distinct
from zero._runtime.optimizer_parts import OptimizerParts
from zero._sharding.bucket import Bucket, has_same_bits
from zero.errors import CheckpointError
from zero.optimizer import ZeroOptimizer

logger = logging.getLogger("zero")

ANEW = "construct model and optimizer anew, and load another checkpoint"


def restore_node_parts(internals: OptimizerParts, request: Request) -> None:
    """Restore replicas and residuals; residuals that were not saved become zero. Collective."""
    runtime = internals.runtime
    runtime.mode_state.reset_residuals()
    if any(key.startswith("replica/") for key in request.index.tensors):
        shards = {bucket: bucket.shard.clone() for bucket in runtime.mode_state.replica_shards()}
        runtime.mode_state.set_replicas(_filled(shards, "replica", internals, request))
    ranks = residual_ranks(request, runtime)
    if ranks == [runtime.topology.rank]:
        for residual, state in zip(runtime.mode_state.residuals, _states(request, ranks), strict=True):
            residual.load_state_dict(state)
    elif ranks:
        runtime.mode_state.load_all_residuals(_states(request, ranks))


def _filled(
    shards: dict[Bucket, Tensor], kind: str, internals: OptimizerParts, request: Request
) -> dict[Bucket, Tensor]:
    """``shards``, with what was read of them as ``kind``."""
    for local in local_masters(internals):
        key = f"{kind}/{local.name}"
        if local.bucket in shards and key in request.parts:
            shards[local.bucket][local.start : local.start + local.values.numel()] = request.values_of(key, local)
    return shards


def _states(request: Request, ranks: list[int]) -> Iterator[dict[str, Any]]:
    own = request.index.own_names
    for rank in ranks:
        for state in request.document(f"rank/{rank}/residual"):
            spans = tuple((own.get(span[0], span[0]), *span[1:]) for span in state["layout"]["spans"])
            yield {**state, "layout": {**state["layout"], "spans": spans}}


class _Receiver(NamedTuple):
    title: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any
    """The state to set."""


class Receivers:
    """The objects that load a state of their own from a checkpoint: modules with extra state, and ``stateful``.

    Args:
        model: The model, for its modules with ``set_extra_state``.
        extra_state: The saved extra states, by module name.
        stateful: Objects with ``load_state_dict``, by name.
        states: The state for each of these.
    """

    def __init__(
        self, model: nn.Module, extra_state: Mapping[str, Any], stateful: Mapping[str, Any], states: Mapping[str, Any]
    ) -> None:
        modules = [
            _Receiver(f"extra state of {name!r}", module.get_extra_state, module.set_extra_state, extra_state[name])
            for name, module in model.named_modules()
            if type(module).set_extra_state is not nn.Module.set_extra_state and name in extra_state
        ]
        others = [
            _Receiver(f"state of {name!r}", item.state_dict, item.load_state_dict, states[name])
            for name, item in stateful.items()
        ]
        self._all = [*modules, *others]
        self._before: list[tuple[_Receiver, Any]] = []

    def give(self, ranks: Topology) -> None:
        """Load every object's state; if one raises, on any rank, all objects get their old state back. Collective.

        Raises:
            CheckpointError: Names that object, and those whose old state could not be put back. The same on every rank.

        Memory: a copy of the old states.
        """
        try:
            agreed(self._give, ranks, "a state could not be loaded")
        except CheckpointError as error:
            self.put_back(ranks, error)
            raise

    def _give(self) -> None:
        for receiver in self._all:
            self._before.append((receiver, _copied(receiver)))
            try:
                receiver.set(receiver.state)
            except Exception as error:
                raise CheckpointError(
                    f"the {receiver.title} cannot be loaded: {receiver.set.__qualname__}() raised {error!r}; model and "
                    "optimizer are unchanged"
                ) from error

    def put_back(self, ranks: Topology, error: Exception) -> None:
        """Give each object its old state back, because loading has failed with ``error``. Collective."""

        def put() -> None:
            lost = []
            for receiver, before in reversed(self._before):
                try:
                    receiver.set(*before)  # without a copy of the old state this is a TypeError, handled below
                except Exception:
                    logger.debug("the old %s could not be put back", receiver.title, exc_info=True)
                    lost.append(receiver.title)
            if lost:
                raise CheckpointError(f"{error}; but the {', the '.join(lost)} may be half loaded: construct it anew")

        agreed(put, ranks, str(error))


def _copied(receiver: _Receiver) -> tuple[Any, ...]:
    """A copy of the current state; empty if the object has none before its first use."""
    try:
        return (copy.deepcopy(receiver.get()),)
    except Exception:
        return ()


@torch.no_grad()
def restore(
    optimizer: ZeroOptimizer, request: Request, stateful: Mapping[str, Any], wanted: LoadSelection, ranks: Topology
) -> dict[str, Any]:
    """Restore everything that was requested, write back the parameters, and return the client state. Collective.

    Raises:
        CheckpointError: A document cannot be decoded, an object of ``stateful`` raised, or states for files cannot be
            read: on every rank, before anything is changed. After that: on every rank, and the optimizer refuses
            further steps.
    """
    internals = optimizer.parts
    decoded = agreed(
        lambda: _decoded(internals, request, stateful, wanted), ranks, f"{request.index.folder} is damaged"
    )
    takes_states = wanted.optimizer_states and not wanted.module_only
    receivers = Receivers(internals.runtime.model, decoded["extra_state"], stateful, decoded["stateful"])
    streamed = StreamedStates(internals, request.index, moments=takes_states)
    receivers.give(ranks)
    try:
        streamed.write()
    except Exception as error:
        receivers.put_back(ranks, error)
        raise
    try:
        optimizer.zero_grad()
        _restore_weights(internals, request, streamed)
        if takes_states:
            _restore_inner(optimizer, decoded["inner"], request)
            streamed.stand_ins()
            take = partial(_restore_loss_scale, optimizer, decoded["loss_scale"])
            agreed(take, ranks, f"{request.index.folder} is damaged; {ANEW}")
            _restore_stale_parameters(internals, request)
            restore_node_parts(internals, request)
        _restore_random(internals, decoded["random"], request, ranks)
    except Exception as error:  # partly restored: training on would mix two states
        internals.fail(error)
        raise
    internals.runtime.since_ns = time.time_ns()
    internals.runtime.reducer.facts.forget_step()
    client_state: dict[str, Any] = decoded["client_state"]
    return client_state


def _decoded(
    internals: OptimizerParts, request: Request, stateful: Mapping[str, Any], wanted: LoadSelection
) -> dict[str, Any]:
    """Decode this rank's values that are not tensors of the model or its optimizer."""
    _check_expanded(internals, request)
    content = request.index.content
    if wanted.module_only:
        client_state = request.decoded(content.get("client_state", {}))
        return {"client_state": client_state, "extra_state": {}, "stateful": {}, "random": None}
    decoded = {name: request.decoded(content[name]) for name in ("client_state", "loss_scale", "extra_state")}
    decoded["stateful"] = {name: request.decoded(content["stateful"][name]) for name in stateful}
    decoded["random"] = request.random_state()
    if wanted.optimizer_states:
        decoded["inner"] = _inner_state(internals, request)
    return decoded


def _check_expanded(internals: OptimizerParts, request: Request) -> None:
    """Raise unless elements of a buffer that share memory (``expand()``) have equal values in the checkpoint."""
    for name, buffer, values in _buffers_to_read(internals, request):
        apart = distinct(values, buffer)
        if apart.shape != values.shape and not has_same_bits(apart.expand_as(values), values):
            raise CheckpointError(
                f"buffer {name!r} is expanded: its elements share memory and cannot have the different values that "
                f"{request.index.folder} holds; register a copy of it (.clone())"
            )


def _buffers_to_read(internals: OptimizerParts, request: Request) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each buffer that was read, the buffer, and its new values."""
    runtime = internals.runtime
    for name, buffer in named_buffers(runtime.model).items():
        for key in (f"buffer/{name}", f"rank/{runtime.topology.rank}/buffer/{name}"):
            if key in request.parts:
                yield name, buffer, request.values(key).view(buffer.shape)


def _restore_weights(internals: OptimizerParts, request: Request, streamed: StreamedStates) -> None:
    runtime = internals.runtime
    runtime.delayed.drop()
    for local in local_weights(runtime, "changes"):
        key = f"weight/{local.name}"
        if key in request.parts:
            local.values.copy_(request.values(key))
    for _, buffer, values in _buffers_to_read(internals, request):
        distinct(buffer, buffer).copy_(distinct(values, buffer))
    streamed.commit()
    runtime.write_back(runtime.buckets)


def _restore_inner(optimizer: ZeroOptimizer, state: dict[str, Any], request: Request) -> None:
    """Load the inner optimizer's state. Only it knows which states it needs, so it may raise after weights changed."""
    error = None
    try:
        optimizer.load_inner_state(state)
    except Exception as caught:
        error = CheckpointError(
            f"{request.index.folder} is damaged: {name_of(optimizer.parts.inner)} cannot load its states "
            f"({caught!r}); {ANEW}"
        )
    raise_first(error, CheckpointError, optimizer.topology)


def _restore_stale_parameters(internals: OptimizerParts, request: Request) -> None:
    """Restore parameters to which a delayed update was not written back when the checkpoint was saved."""
    runtime, content = internals.runtime, request.index.content
    late = runtime.delayed
    if content.get("num_updates") is None or not late.is_used:
        return
    late.num_updates = content["num_updates"]
    is_saved = any(key.startswith("published/") for key in request.index.tensors)
    if not (is_saved and content.get("is_behind", True)):
        return

    def read() -> dict[Bucket, Tensor]:
        shards = {bucket: bucket.storage.read().clone() for bucket in late.buckets}
        return _filled(shards, "published", internals, request)

    shards = on_every_rank(read, runtime.topology)
    runtime.write_back(late.restore(shards), are_written=True)


def _inner_state(internals: OptimizerParts, request: Request) -> dict[str, Any]:
    """The state dict for the inner optimizer of this rank."""
    groups = internals.inner.param_groups
    numbers = {id(param): i for i, param in enumerate(p for group in groups for p in group["params"])}
    saved = request.index.content["optimizer"]["groups"]
    packed = [
        {**options, **request.decoded(entry["options"]), "params": [numbers[id(p)] for p in group["params"]]}
        for group, options, entry in zip(groups, group_options(internals), saved, strict=True)
    ]
    keys_of, state = keys_by_parameter(request.parts), {}
    for local in local_masters(internals):
        of_piece: dict[str, Any] = {}
        for key in keys_of.get(local.name, []):
            name, kind = key.split("/", 2)[1], kind_of_key(key)
            if kind.kind == NESTED and key.endswith("/json") and kind.part == local.of_stack:
                of_piece[name] = request.document(key.removesuffix("/json"))
            elif kind.kind != NESTED and kind.part in (None, local.of_stack):
                of_piece[name] = _state_value(key, request, local)
        if of_piece:
            state[numbers[id(local.values)]] = of_piece
    return {"state": state, "param_groups": packed}


def _state_value(key: str, request: Request, local: LocalPart) -> Any:
    (kind, shape, _), master = kind_of_key(key), local.values
    if kind == "tensor":
        return request.values(key).view(shape).clone()
    if kind != "state":
        return SCALARS[kind](request.values(key).item())
    values = request.values_of(key, local)
    padded = values.new_zeros(master.numel())
    padded[: values.numel()] = values
    return padded.view(master.shape).to(master.device)


def _restore_random(internals: OptimizerParts, state: dict[str, Any] | None, request: Request, ranks: Topology) -> None:
    """Restore the random generators; with None this rank keeps its own."""

    def take() -> None:
        if state is not None:
            restore_random_state(state, internals.runtime.buckets[0].device)

    agreed(take, ranks, f"the random generators of {request.index.folder} cannot be restored here; {ANEW}")


def _restore_loss_scale(optimizer: ZeroOptimizer, saved: dict[str, Any] | None) -> None:
    here = optimizer.loss_scale
    if here is None or saved is None:
        return
    if saved.keys() != here.state_dict().keys():
        if optimizer.parts.runtime.is_log_rank:
            logger.warning("the saved loss scale is of another kind: the loss scale starts at %g", here.scale)
        return
    here.load_state_dict(saved)
