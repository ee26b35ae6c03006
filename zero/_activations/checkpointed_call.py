"""One call of a checkpointed function: its forward, and its recomputation in backward."""

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
from zero._activations.usage import CountedBytes, synchronize

Hook = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class CheckpointedCall:
    """``function(*args, **kwargs)`` in the form that torch.utils.checkpoint calls twice: of a list of leaves.

    Args:
        checkpointer: Stores its inputs.
        function: The checkpointed function.
        args: Its arguments; tensors are found at any depth.
        kwargs: Its keyword arguments.
        only_recomputes: torch runs the forward itself; every call of this object is a recomputation.
        is_reentrant: For torch's ``use_reentrant=True``, which passes arguments on as they are.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        only_recomputes: bool = False,
        is_reentrant: bool = False,
    ) -> None:
        self._checkpointer, self._function, self._is_reentrant = checkpointer, function, is_reentrant
        leaves = list(args)
        self._structure: TreeSpec | None = None
        if not is_reentrant:
            leaves, self._structure = tree_flatten((args, kwargs))
        self._original: tuple[tuple[Any, ...], dict[str, Any]] | None = None if only_recomputes else (args, kwargs)
        self._checkpoint = checkpointer.start_checkpoint(leaves) if torch.is_grad_enabled() else None
        self._random_states = TRACKER.get_states()
        self.leaves = leaves

    def take_leaves(self) -> list[Any]:
        """Return the inputs and drop them here: this object lives as long as the graph, and would keep them alive."""
        leaves, self.leaves = self.leaves, []
        return leaves

    def __call__(self, *leaves: Any) -> Any:
        """Run the function: the first time as it was called, then on the ``leaves`` that were restored."""
        original, self._original = self._original, None
        if original is not None:
            args, kwargs = original
            with self.entered("forward"):
                return self._function(*(leaves if self._is_reentrant else args), **kwargs)
        args, kwargs = (leaves, {}) if self._structure is None else tree_unflatten(leaves, self._structure)
        # In backward no forward of the model runs in this thread: without scope.entered, checkpoints nested in the
        # function would be torch's own. Without restored random states, dropout would differ from that of the forward.
        with TRACKER.restored(self._random_states), self.entered("recomputation"):
            return self._function(*args, **kwargs)

    @contextmanager
    def entered(self, kind: str) -> Iterator[None]:
        """Run the function inside: ``kind`` is "forward" or "recomputation"."""
        times, synchronizes = self._checkpointer.times, self._checkpointer.settings.synchronizes
        with scope.entered(self._checkpointer):
            if synchronizes:
                synchronize()
            with nullcontext() if times is None else times.measured(kind):
                yield
            if synchronizes:
                synchronize()

    def saving(self) -> saved_tensors_hooks:
        """Hooks by which the checkpointer stores what autograd saves inside."""
        # Hooks that are already set, of offloading for example, would be hidden by ours: they get what we do not store.
        outer: Hook | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return saved_tensors_hooks(partial(self._pack, outer), self._unpack)

    def _pack(self, outer: Hook | None, tensor: Tensor) -> Packed:
        packed = self._checkpointer.pack(tensor, self._checkpoint)
        if packed is not None:
            return packed
        if outer is None:
            return self._checkpointer.keep_in_place(tensor)
        return _PackedByOuterHooks(tensor, outer, self._checkpointer.count(tensor))

    def _unpack(self, packed: Packed) -> Tensor:
        if self._is_reentrant and torch.is_grad_enabled():
            raise StateError("create_graph=True (a backward of a backward) needs checkpoints with use_reentrant=False")
        if self._checkpointer.times is not None:
            self._checkpointer.times.start_backward()
        return packed.unpack()


class _PackedByOuterHooks:
    """A tensor that we do not store, packed by the saved-tensor hooks around ours."""

    def __init__(self, tensor: Tensor, outer: Hook, counted: CountedBytes) -> None:
        self._shape, self._counted = tensor.shape, counted
        self._saved_version = (
            TensorVersion(tensor) if type(tensor) is Tensor and tensor.layout is torch.strided else None
        )
        self._packed, self._unpack = outer[0](tensor), outer[1]

    def unpack(self) -> Tensor:
        if self._saved_version is not None:
            self._saved_version.check(self._shape)
        return self._unpack(self._packed)
