"""Giving what was read to the model, the optimizer and everything else."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zcomm import Topology
from zero._checkpoint.agreed_steps import agreed
from zero._checkpoint.flat_parts import SCALARS, held_pieces, held_weights, named_buffers, residual_layout
from zero._checkpoint.index import Index
from zero._checkpoint.request import Request, Wanted, keys_by_parameter, make_request
from zero._checkpoint.snapshot import group_options, restore_random_state
from zero._checkpoint.streamed_load import StreamedStates
from zero._ranks.rank_errors import on_every_rank, raise_first
from zero._runtime.delta_hpz_state import held_of, load_all_residuals, refresh_replicas, reset_residuals, residuals_of
from zero._runtime.initial_values import distinct
from zero._runtime.optimizer_parts import OptimizerParts
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket
from zero.errors import CheckpointError
from zero.optimizer import ZeroOptimizer


def make_whole_request(inside: OptimizerParts, index: Index, wanted: Wanted) -> Request:
    """What this rank asks for, replicas and residuals among it: see :func:`zero._checkpoint.request.make_request`."""
    request = make_request(inside, index, wanted)
    if wanted.optimizer_states and not wanted.module_only:
        _ask_for_node_parts(request, inside)
    return request


def _ask_for_node_parts(request: Request, inside: OptimizerParts) -> None:
    """As far as they were saved and are of use here."""
    runtime, tensors = inside.runtime, request.index.tensors
    of_bucket = held_of(runtime)
    for held, _ in held_pieces(inside):
        key = f"replica/{held.name}"
        if held.bucket in of_bucket and key in tensors:
            request.add(key, held.values.numel(), held.first, tensors[key].dtype)
    prefixes = tuple(f"rank/{rank}/residual/" for rank in _ranks(request, runtime))
    for key in tensors:
        if key.startswith(prefixes):
            request.add_whole(key)


def _ranks(request: Request, runtime: Runtime) -> list[int]:
    """Whose residuals are read here."""
    layout, content = residual_layout(runtime), request.index.content
    if layout is None or content.get("residual_layout") is None:
        return []
    is_same = content["residual_layout"] == layout
    return [runtime.topology.rank] if is_same else list(range(content["world_size"]))


def restore_node_parts(inside: OptimizerParts, request: Request) -> None:
    """Give replicas and residuals what was read; residuals that were not saved start anew. Collective."""
    runtime = inside.runtime
    reset_residuals(runtime)
    if any(key.startswith("replica/") for key in request.index.tensors):
        refresh_replicas(runtime, _shards(inside, request))
    ranks = _ranks(request, runtime)
    if ranks == [runtime.topology.rank]:
        for residual, state in zip(residuals_of(runtime), _states(request, ranks), strict=True):
            residual.load_state_dict(state)
    elif ranks:
        load_all_residuals(runtime, _states(request, ranks))


def _shards(inside: OptimizerParts, request: Request) -> dict[Bucket, Tensor]:
    shards = {bucket: bucket.shard.clone() for bucket in held_of(inside.runtime)}
    for held, _ in held_pieces(inside):
        key = f"replica/{held.name}"
        if request.has(key):
            shards[held.bucket][held.start : held.start + held.values.numel()] = request.values(key)
    return shards


def _states(request: Request, ranks: list[int]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        text = bytes(request.values(f"rank/{rank}/residual/json").tolist())
        yield from request.decoded(json.loads(text))


class _Receiver(NamedTuple):
    title: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any
    """What it is to get."""


class Receivers:
    """Who takes a state of their own out of a checkpoint.

    Args:
        model: Its modules with ``set_extra_state``.
        extra_state: By the module's name; of others nothing was saved.
        stateful: By name, what has ``load_state_dict``.
        states: Of each of these.
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
        """Let each take its state; if one raises, on any rank, all get back what they had. Collective.

        Raises:
            CheckpointError: Names the one, and those that could not be put back. The same on every rank.

        Memory: a copy of what they had.
        """
        try:
            agreed(self._give, ranks, "a state was not taken")
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
                    "optimizer are as they were"
                ) from error

    def put_back(self, ranks: Topology, error: Exception) -> None:
        """Give each what it had: what comes after has failed with ``error``. Collective."""

        def put() -> None:
            lost = []
            for receiver, before in reversed(self._before):
                try:
                    receiver.set(*before)  # no copy: a TypeError, as good as any
                except Exception:
                    logger.debug("%s could not be put back", receiver.title, exc_info=True)
                    lost.append(receiver.title)
            if lost:
                raise CheckpointError(f"{error}; but the {', the '.join(lost)} may be half loaded: make it anew")

        agreed(put, ranks, str(error))


def _copied(receiver: _Receiver) -> tuple[Any, ...]:
    """What it has now; nothing if it cannot say before its first use."""
    try:
        return (copy.deepcopy(receiver.get()),)
    except Exception:
        return ()


logger = logging.getLogger("zero")

ANEW = "construct model and optimizer anew, and load another checkpoint"


@torch.no_grad()
def restore(
    optimizer: ZeroOptimizer, request: Request, stateful: Mapping[str, Any], wanted: Wanted, ranks: Topology
) -> dict[str, Any]:
    """Change everything that was asked for, publish the parameters, and return the client state. Collective.

    Raises:
        CheckpointError: A document cannot be decoded, an object of ``stateful`` does not take its state, or states that
            go to files cannot be read; on every rank, before anything is changed. Later: on every rank, and the
            optimizer takes no step any more.
    """
    inside = optimizer.inside
    decoded = agreed(lambda: _decoded(inside, request, stateful, wanted), ranks, f"{request.index.folder} is damaged")
    takes_states = wanted.optimizer_states and not wanted.module_only
    receivers = Receivers(inside.runtime.model, decoded["extra_state"], stateful, decoded["stateful"])
    streamed = StreamedStates(inside, request.index, moments=takes_states)
    receivers.give(ranks)
    try:
        streamed.write()
    except Exception as error:
        receivers.put_back(ranks, error)
        raise
    try:
        optimizer.zero_grad()
        _restore_weights(inside, request, streamed)
        if takes_states:
            _restore_inner(optimizer, decoded["inner"], request)
            streamed.stand_ins()
            take = partial(_restore_loss_scale, optimizer, decoded["loss_scale"])
            agreed(take, ranks, f"{request.index.folder} is damaged; {ANEW}")
            _restore_published(inside, request)
            restore_node_parts(inside, request)
        _restore_random(inside, decoded["random"], request, ranks)
    except Exception as error:  # neither what it was nor what it was to be
        inside.fail(error)
        raise
    inside.runtime.since_ns = time.time_ns()
    inside.runtime.reducer.facts.forget_step()
    client_state: dict[str, Any] = decoded["client_state"]
    return client_state


def _decoded(inside: OptimizerParts, request: Request, stateful: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """All that is no tensor of the model or its optimizer, as this rank is to have it."""
    _check_expanded(inside, request)
    if wanted.module_only:
        return {"client_state": {}, "extra_state": {}, "stateful": {}, "random": None}
    content = request.index.content
    decoded = {name: request.decoded(content[name]) for name in ("client_state", "loss_scale", "extra_state")}
    decoded["stateful"] = {name: request.decoded(content["stateful"][name]) for name in stateful}
    decoded["random"] = request.random_state()
    if wanted.optimizer_states:
        decoded["inner"] = _inner_state(inside, request)
    return decoded


def _check_expanded(inside: OptimizerParts, request: Request) -> None:
    """Elements of a buffer that are one in memory must be equal."""
    for name, buffer, values in _buffers_to_read(inside, request):
        apart = distinct(values, buffer)
        if apart.shape != values.shape and not _are_same(apart.expand_as(values), values):
            raise CheckpointError(
                f"buffer {name!r} is expanded: its elements share memory and cannot have the different values that "
                f"{request.index.folder} holds; register a copy of it (.clone())"
            )


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: a NaN equals itself, and dtypes without a comparison (float8) can be compared."""
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def _buffers_to_read(inside: OptimizerParts, request: Request) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, buffer, and the values that it is to have, in its shape."""
    runtime = inside.runtime
    for name, buffer in named_buffers(runtime.model).items():
        for key in (f"buffer/{name}", f"rank/{runtime.topology.rank}/buffer/{name}"):
            if request.has(key):
                yield name, buffer, request.values(key).view(buffer.shape)


def _restore_weights(inside: OptimizerParts, request: Request, streamed: StreamedStates) -> None:
    runtime = inside.runtime
    if runtime.delayed is not None:
        runtime.delayed.drop()
    for held in held_weights(runtime, "changes"):
        key = f"weight/{held.name}"
        if request.has(key):
            held.values.copy_(request.values(key))
    for _, buffer, values in _buffers_to_read(inside, request):
        distinct(buffer, buffer).copy_(distinct(values, buffer))
    streamed.commit()
    runtime.publish(runtime.buckets)


def _restore_inner(optimizer: ZeroOptimizer, state: dict[str, Any], request: Request) -> None:
    """Only the inner optimizer knows which states it needs: what it refuses is found when weights have changed."""
    error = None
    try:
        optimizer.load_inner_state(state)
    except Exception as caught:
        error = CheckpointError(
            f"{request.index.folder} is damaged: {type(optimizer.inside.inner).__name__} does not take its states "
            f"({caught!r}); {ANEW}"
        )
    raise_first(error, CheckpointError, optimizer.topology)


def _restore_published(inside: OptimizerParts, request: Request) -> None:
    """Let parameters be behind their masters again."""
    runtime, content = inside.runtime, request.index.content
    late = None if content.get("num_updates") is None else runtime.delayed
    if late is None:
        return
    late.num_updates = content["num_updates"]
    is_saved = any(key.startswith("published/") for key in request.index.tensors)
    if not (is_saved and content.get("is_behind", True)):
        return

    def read() -> dict[Bucket, Tensor]:
        shards = {bucket: bucket.rest.read().clone() for bucket in late.buckets}
        for held, _ in held_pieces(inside):
            if held.bucket in shards and request.has(f"published/{held.name}"):
                part = slice(held.start, held.start + held.values.numel())
                shards[held.bucket][part] = request.values(f"published/{held.name}")
        return shards

    shards = on_every_rank(read, runtime.topology)
    runtime.publish(late.restore(shards), are_written=True)


def _inner_state(inside: OptimizerParts, request: Request) -> dict[str, Any]:
    """The state dict of the inner optimizer on this rank."""
    groups = inside.inner.param_groups
    numbers = {id(param): i for i, param in enumerate(p for group in groups for p in group["params"])}
    saved = request.index.content["optimizer"]["groups"]
    packed = [
        {**options, **request.decoded(there["options"]), "params": [numbers[id(p)] for p in group["params"]]}
        for group, options, there in zip(groups, group_options(inside), saved, strict=True)
    ]
    keys_of, state = keys_by_parameter(request.parts), {}
    for held, piece in held_pieces(inside):
        of_piece: dict[str, Any] = {}
        for key in keys_of.get(held.name, []):
            kind, name, _ = key.split("/", 2)
            of_piece[name] = _state_value(kind, request.values(key), piece.master)
        if of_piece:
            state[numbers[id(piece.master)]] = of_piece
    return {"state": state, "param_groups": packed}


def _state_value(kind: str, values: Tensor, master: Tensor) -> Any:
    if kind == "tensor":
        return values.view(()).clone()
    if kind != "state":
        return SCALARS[kind](values.item())
    padded = values.new_zeros(master.numel())
    padded[: values.numel()] = values
    return padded.to(master.device)


def _restore_random(inside: OptimizerParts, state: dict[str, Any] | None, request: Request, ranks: Topology) -> None:
    """None: this rank keeps its generators."""

    def take() -> None:
        if state is not None:
            restore_random_state(state, inside.runtime.buckets[0].device)

    agreed(take, ranks, f"{request.index.folder} holds other random generators than there are here; {ANEW}")


def _restore_loss_scale(optimizer: ZeroOptimizer, saved: dict[str, Any] | None) -> None:
    here = optimizer.loss_scale
    if here is None or saved is None:
        return
    if saved.keys() != here.state_dict().keys():
        if optimizer.inside.runtime.speaks:
            logger.warning("the saved loss scale is of another kind: this one starts anew at %g", here.scale)
        return
    here.load_state_dict(saved)
