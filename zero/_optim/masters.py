"""Master pieces: the inner optimizer's parameters, one flat tensor for each parameter in this rank's shards.

Every parameter that this rank's shards intersect becomes one flat leaf tensor, a view of the bucket's master weights.
Elementwise optimizers cannot tell the difference; :mod:`zero._optim.elementwise_check` refuses others. Those that
update whole tensors get one leaf of its shape for each tensor, of which a parameter may be several.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zcomm import ConfigError
from zero._config.settings import nearest_setting
from zero._optim.optimizer_clone import new_state
from zero._optim.several import optimizers_of
from zero._optim.subclass_states import is_subclass_state, parts_in
from zero._sharding.bucket import Bucket
from zero._sharding.stages import Stage
from zero._storage.safetensors_file import is_storable

GivenOptimizer = type[Optimizer] | Optimizer
"""What a user gives: a class or an instance."""
Groups = list[dict[str, Any]]
"""Parameter groups."""


@dataclass(frozen=True, slots=True)
class MasterPiece:
    """The elements of one parameter that this rank updates."""

    param: nn.Parameter
    bucket: Bucket
    slot: int
    first: int
    """The parameter's first of them."""
    start: int
    """Its offset in the bucket's master."""
    master: Tensor
    """Flat; where the optimizer updates whole tensors, of the tensor's shape."""
    part: int | None = None
    """Of a parameter in which several tensors are stacked, the number of the one that this is."""

    @property
    def is_joint(self) -> bool:
        """Whether it is some rows of a matrix that the ranks of a node update together."""
        return self.is_whole and self.master.numel() < prod(self.bucket.layout.slots[self.slot].parts[self.part or 0])

    def of(self, shard: Tensor) -> Tensor:
        """The same elements of another tensor like the bucket's master, in the shape of :attr:`master`."""
        return shard[self.start : self.start + self.master.numel()].view(self.master.shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is a tensor that is updated as a whole."""
        return self.bucket.layout.slots[self.slot].is_whole


def pieces_by_bucket(buckets: Iterable[Bucket], pieces: Iterable[MasterPiece]) -> dict[Bucket, list[MasterPiece]]:
    """The pieces of each of ``buckets``; those of others are left out."""
    found: dict[Bucket, list[MasterPiece]] = {bucket: [] for bucket in buckets}
    for piece in pieces:
        if piece.bucket in found:
            found[piece.bucket].append(piece)
    return found


class OptimizerStates:
    """The inner optimizer's states, looked up by the user's parameter."""

    def __init__(self, inner: Optimizer | None = None, pieces: Sequence[MasterPiece] = ()) -> None:
        self._inner = inner
        self._pieces_of: dict[nn.Parameter, list[MasterPiece]] = {}
        for piece in pieces:
            self._pieces_of.setdefault(piece.param, []).append(piece)

    def get(self, param: nn.Parameter, key: str) -> list[Any]:
        """State ``key`` of each tensor that this rank has of ``param``, in order; empty if there is none yet."""
        return [state[key] for state in self._states_of(param) if state.get(key) is not None]

    def set_number(self, param: nn.Parameter, key: str, number: float) -> None:
        """Set state ``key``, one number, of each tensor that this rank has of ``param``; it keeps its type."""
        for state in self._states_of(param):
            if isinstance(held := state.get(key), Tensor):
                held.fill_(number)
            elif held is not None:
                state[key] = type(held)(number)

    def _states_of(self, param: nn.Parameter) -> list[dict[str, Any]]:
        if self._inner is None:
            return []
        return [self._inner.state.get(piece.master, {}) for piece in self._pieces_of.get(param, ())]

    def is_elementwise(self, param: nn.Parameter, key: str) -> bool:
        """Whether state ``key`` of this rank's part of ``param`` has a value for each element."""
        both = list(zip(self._pieces_of.get(param, ()), self.get(param, key), strict=False))
        return bool(both) and all(isinstance(v, Tensor) and is_elementwise(piece.master, v) for piece, v in both)


def is_elementwise(master: Tensor, value: Tensor) -> bool:
    """Whether ``value``, a state of ``master``, has a value for each element, in its place.

    By shape: a state of a whole tensor may have as many elements by chance, as a factor of a row vector has.
    """
    return value.ndim > 0 and value.shape == master.shape and not is_subclass_state(value)


def is_nested(value: Any) -> bool:
    """Whether ``value``, a state, is a list, tuple or dict of tensors that can be saved, numbers and such.

    So is a tensor subclass that consists of several.
    """
    if is_subclass_state(value):
        return True
    if type(value) not in (list, tuple, dict):
        return False
    items = list(value.values()) if isinstance(value, dict) else value
    has_names = not isinstance(value, dict) or all(isinstance(key, (str, int)) for key in value)
    known = (bool, int, float, type(None))
    return has_names and all(
        is_nested(item) or type(item) in known or (isinstance(item, Tensor) and is_storable(item)) for item in items
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a state: it, or those nested in it."""
    if is_subclass_state(value):
        yield from parts_in(value)
    elif isinstance(value, Tensor):
        yield value
    elif is_nested(value):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def build_pieces(buckets: list[Bucket], stage: Stage) -> list[MasterPiece]:
    """This rank's pieces of all trainable buckets, in order."""
    pieces = []
    for bucket in buckets:
        if bucket.is_trainable:
            for piece in bucket.layout.tensors(bucket.row if stage.shards_states else None):
                param, slot = bucket.params[piece.slot], bucket.layout.slots[piece.slot]
                master = bucket.master[piece.start : piece.stop]
                leaf = master
                if slot.is_whole:
                    shape = slot.parts[piece.part or 0]
                    leaf = master.view(shape if prod(shape) == master.numel() else (-1, shape[-1]))
                pieces.append(MasterPiece(param, bucket, piece.slot, piece.first, piece.start, leaf, piece.part))
    return pieces


def as_groups(model: nn.Module, optimizer: type[Optimizer] | Optimizer) -> list[dict[str, Any]]:
    """The user's parameter groups, checked against the model."""
    named = dict(model.named_parameters(remove_duplicate=False))
    trainable = {p: name for name, p in named.items() if p.requires_grad}
    updates_nothing = isinstance(optimizer, Optimizer) and not any(group["params"] for group in optimizer.param_groups)
    if not (trainable or updates_nothing):
        raise ConfigError(
            f"the model must have a parameter with requires_grad=True: {type(model).__name__} has "
            f"{len(set(named.values()))} parameters, none of them trainable"
        )
    if isinstance(optimizer, type):
        return [{"params": list(trainable)}]
    known, grouped = set(named.values()), set()
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in known:
                raise ConfigError(
                    "every parameter of the optimizer must be in the model: parameter group "
                    f"{index}, position {position}, shape {tuple(param.shape)} is not"
                )
            grouped.add(param)
    missing = [name for param, name in trainable.items() if param not in grouped]
    if missing:
        raise ConfigError(
            f"every trainable parameter must be in a parameter group: {len(missing)} are in none, first {missing[:3]}; "
            "add them to a group or call requires_grad_(False) on them"
        )
    return optimizer.param_groups


def build_inner(
    optimizer: GivenOptimizer, groups: Groups, pieces: list[MasterPiece], options: Mapping[str, Any]
) -> Optimizer:
    """The user's optimizer over master pieces instead of parameters; group settings are kept.

    State that an instance's constructor has made is made again over the masters.
    """
    masters: dict[nn.Parameter, list[Tensor]] = {}
    for piece in pieces:
        masters.setdefault(piece.param, []).append(piece.master)
    replaced = [[m for p in group["params"] for m in masters.get(p, [])] for group in groups]
    if not isinstance(optimizer, type):
        for group, params in zip(optimizer.param_groups, replaced, strict=True):
            group["params"] = params
        if optimizer.state:
            states = [new_state(one, one.param_groups) for one in optimizers_of(optimizer)]
            optimizer.state.clear()
            for state in states:
                optimizer.state.update(state)
        return optimizer
    try:
        return optimizer([{"params": params} for params in replaced], **options)
    except TypeError as error:
        known = inspect.signature(optimizer).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        wrong = [f"{key!r}{nearest_setting(key, known)}" for key in options if not takes_any and key not in known]
        if wrong:
            text = f"neither {optimizer.__name__} nor ZeroOptimizer has the options {', '.join(wrong)}"
        else:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            text = f"{optimizer.__name__} could not be constructed with {given}"
        raise ConfigError(f"{text}: {error}") from error


def check_options(optimizer: type[Optimizer] | Optimizer, options: Mapping[str, Any]) -> None:
    """Refuse options beside an optimizer instance, which has its own."""
    if options and not isinstance(optimizer, type):
        raise ConfigError(
            f"options of the optimizer go to the instance that was passed: {type(optimizer).__name__} and "
            + ", ".join(f"{key}={value!r}{nearest_setting(key)}" for key, value in options.items())
        )


def compact(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy if it is a view of a larger storage: torch.save would write all of that."""
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part else tensor
