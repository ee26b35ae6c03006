"""One call of a checkpointed function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zcomm import StateError
from zero._activations import scope
from zero._activations.checkpointer import Checkpointer, Packed, TensorVersion
from zero._activations.random_states import TRACKER
from zero._activations.usage import Holding, synchronize

Hook = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class CheckpointedCall:
    """``function(*args, **kwargs)`` as torch.utils.checkpoint calls it: with a list of leaves, twice.

    Args:
        checkpointer: Where its inputs rest.
        function: What is called.
        args: Its arguments, however nested.
        kwargs: The named ones.
        has_run: The forward is run by somebody else; every call of this object is a recomputation.
        is_reentrant: Of torch's ``use_reentrant=True``, which takes arguments as they are.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        has_run: bool = False,
        is_reentrant: bool = False,
    ) -> None:
        self._checkpointer, self._function, self._is_reentrant = checkpointer, function, is_reentrant
        leaves = list(args)
        self._structure: TreeSpec | None = None
        if not is_reentrant:
            leaves, self._structure = tree_flatten((args, kwargs))
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = None if has_run else (args, kwargs)
        self._ticket = checkpointer.admit(leaves) if checkpointer.moves and torch.is_grad_enabled() else None
        self._random_states = TRACKER.get_states()
        self.leaves = leaves
        """The inputs, for the caller to take."""

    def take_leaves(self) -> list[Any]:
        """The inputs, which this object forgets: it lives as long as the graph."""
        leaves, self.leaves = self.leaves, []
        return leaves

    def __call__(self, *leaves: Any) -> Any:
        """Run the function: first as it was called, then on ``leaves`` that came back."""
        first, self._first = self._first, None
        if first is not None:
            args, kwargs = first
            with self.forward():
                return self._function(*(leaves if self._is_reentrant else args), **kwargs)
        args, kwargs = (leaves, {}) if self._structure is None else tree_unflatten(leaves, self._structure)
        with self._recomputing():
            return self._function(*args, **kwargs)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward."""
        with scope.entered(self._checkpointer), self._bounded("forward"):
            yield

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        with scope.entered(self._checkpointer), TRACKER.at(self._random_states), self._bounded("recomputation"):
            yield

    @contextmanager
    def _bounded(self, kind: str) -> Iterator[None]:
        times = self._checkpointer.times
        if self._checkpointer.settings.synchronizes:
            synchronize()
        with nullcontext() if times is None else times.measured(kind):
            yield
        if self._checkpointer.settings.synchronizes:
            synchronize()

    def saving(self) -> saved_tensors_hooks:
        """Inside, what is saved goes where the checkpointer keeps it."""
        outer: Hook | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return saved_tensors_hooks(partial(self._pack, outer), self._unpack)

    def _pack(self, outer: Hook | None, tensor: Tensor) -> Packed:
        packed = self._checkpointer.pack(tensor, self._ticket)
        if packed is not None:
            return packed
        if outer is None:
            return self._checkpointer.keep(tensor)
        return _Outside(tensor, outer, self._checkpointer.holding(tensor))

    def _unpack(self, packed: Packed) -> Tensor:
        if self._is_reentrant and torch.is_grad_enabled():
            raise StateError(
                "a backward of a backward (create_graph=True) goes through checkpoints of use_reentrant=False only"
            )
        if self._checkpointer.times is not None:
            self._checkpointer.times.begin_backward()
        return packed.unpack()


class _Outside:
    """What hooks around ours make of a tensor that we leave as it is."""

    def __init__(self, tensor: Tensor, outer: Hook, holding: Holding) -> None:
        self._shape, self._holding = tensor.shape, holding
        self._watch = TensorVersion(tensor) if type(tensor) is Tensor and tensor.layout is torch.strided else None
        self._packed, self._unpack = outer[0](tensor), outer[1]

    def unpack(self) -> Tensor:
        """The tensor."""
        if self._watch is not None:
            self._watch.check(self._shape)
        return self._unpack(self._packed)
