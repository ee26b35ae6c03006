"""What is saved for a checkpointed function, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ReferenceType, WeakValueDictionary, ref

from torch import Tensor, nn

from zcomm import Topology
from zero.activations.arena import Ticket
from zero.activations.form import Form, flatten, is_movable
from zero.activations.parts import Parts
from zero.activations.rest import MemoryPlace, Place, Rest
from zero.activations.settings import ActivationSettings
from zero.activations.times import Times
from zero.activations.usage import ActivationMemory, Holding
from zero.activations.watch import Watch, modified
from zero.tiers.settings import Tier

__all__ = ["Checkpointer", "Packed"]


class Packed(Protocol):
    """What autograd keeps instead of a tensor."""

    def unpack(self) -> Tensor:
        """The tensor."""


class Checkpointer:
    """Saves inputs of checkpointed functions as ``settings`` say.

    Args:
        settings: What was asked for.
        tensor_ranks: The tensor-parallel ranks, in groups of this object's own; None: this rank has no others.
    """

    def __init__(self, settings: ActivationSettings, tensor_ranks: Topology | None = None) -> None:
        self.settings = settings
        self.times = Times() if settings.is_profiled else None
        self._parts = Parts(tensor_ranks) if settings.partitions and tensor_ranks is not None else None
        self._place = _new_place(settings)
        self._known: WeakValueDictionary[int, Saved] = WeakValueDictionary()
        self._last: ReferenceType[Saved] | None = None
        self.moves = settings.tier is not Tier.DEVICE or settings.has_arena or self._parts is not None
        """Whether inputs rest elsewhere than where they are."""

    def admit(self, leaves: Sequence[Any]) -> Ticket | None:
        """Room in the arena for a call with these inputs, if there is one."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and is_movable(leaf)]
        if not tensors:
            return None
        return self._place.admit(sum(self._nbytes_at_rest(tensor) for tensor in tensors), tensors[0].device)

    def pack(self, tensor: Tensor, ticket: Ticket | None) -> Packed | None:
        """Move ``tensor`` to where it rests; None if it stays where it is."""
        if not self.moves or not is_movable(tensor):
            return None
        known = self._known.get(id(tensor))
        if known is not None and known.is_of(tensor):
            return known  # an input of several functions: one copy serves all
        values, form = flatten(tensor)
        numel = values.numel()
        if self._parts is not None:
            values = self._parts.take(values)
        rest = self._place.keep(values, ticket)
        saved = Saved(tensor, form, numel, rest, self._parts, self._last)
        self._known[id(tensor)] = saved
        self._last = ref(saved)
        return saved

    def keep(self, tensor: Tensor) -> Packed:
        """``tensor`` as it is."""
        is_param = isinstance(tensor, nn.Parameter)
        nbytes = 0 if is_param else tensor.numel() * tensor.element_size()
        return Kept(tensor, self._place.usage.hold("device", nbytes))

    def memory(self) -> ActivationMemory:
        """What saved inputs hold on this rank."""
        return self._place.memory()

    def reset(self) -> None:
        """Drop the contiguous buffer; the next step makes another."""
        self._place.reset()

    def close(self) -> None:
        """Free buffers, files and process groups."""
        self._place.close()
        if self._parts is not None:
            self._parts.close()

    def _nbytes_at_rest(self, tensor: Tensor) -> int:
        numel = tensor.numel() if self._parts is None else self._parts.numel(tensor.numel())
        return numel * tensor.element_size()


class Saved:
    """A tensor that rests elsewhere."""

    def __init__(
        self,
        tensor: Tensor,
        form: Form,
        numel: int,
        rest: Rest,
        parts: Parts | None,
        previous: ReferenceType[Saved] | None,
    ) -> None:
        self._origin = ref(tensor)
        self._version = -1 if tensor.is_inference() else tensor._version
        self._watch = Watch(tensor)
        self._form, self._numel, self._rest, self._parts = form, numel, rest, parts
        self._previous = previous

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it has the present values of ``tensor``."""
        return self._origin() is tensor and self._version == (-1 if tensor.is_inference() else tensor._version)

    def unpack(self) -> Tensor:
        """The tensor; what was saved before it is asked for next."""
        self._watch.check(self._form.size)
        values = self._rest.fetch()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous._rest.prefetch()
        if self._parts is not None:
            values = self._parts.gather(values, self._numel)
        return self._form.restore(values)


class Kept:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor, holding: Holding) -> None:
        self._tensor, self._holding = tensor, holding
        self._version = None if tensor.is_inference() else tensor._version

    def unpack(self) -> Tensor:
        """The tensor."""
        if self._version is not None and self._tensor._version != self._version:
            raise modified(self._tensor.shape, self._tensor._version, self._version)
        return self._tensor


def _new_place(settings: ActivationSettings) -> Place:
    return MemoryPlace(
        is_on_host=settings.tier is Tier.CPU,
        has_arena=settings.has_arena,
        num_checkpoints=settings.num_checkpoints,
    )
