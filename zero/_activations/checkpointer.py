"""What is saved for a checkpointed function, and how it comes back.

Tensors as flat values and back, with the same strides: another layout may round differently.

[2, 3] with strides (1, 2)      all its memory             values [6] in the order of memory, without a copy
[2, 3] with strides (8, 1)      with gaps                  values [6]; the gaps come back with other contents
[2, 3] with strides (0, 1)      expanded                   values [3]

Saved inputs divided over tensor-parallel ranks, which all have the same: each keeps its part.

values [n]  = | part 0 | part 1 | ... | part N-1, padded |      N parts of ceil(n / N)
backward: one all-gather of the parts, of the same bytes that were saved
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from zcomm import LayoutError, StateError, Topology, all_gather_single, control
from zero._activations.activation_settings import ActivationSettings
from zero._activations.arena import Ticket
from zero._activations.file_storage import FilePlace
from zero._activations.memory_storage import InputStorage, MemoryPlace, Rest
from zero._activations.usage import ActivationMemory, CallTimes, Holding
from zero._storage.tier_settings import Tier


class TensorVersion:
    """Remembers the version of ``tensor``, which autograd counts at every modification."""

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._alias: Tensor | None = None
        if not tensor.is_inference():
            self._alias = tensor.detach()  # shares the count; its own memory is dropped next
            self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._version = self._alias._version

    def check(self, shape: torch.Size) -> None:
        """Raise if it was modified."""
        if self._alias is not None and self._alias._version != self._version:
            raise modified(shape, self._alias._version, self._version)


def modified(shape: torch.Size, version: int, expected: int) -> StateError:
    """The error for an input that was modified."""
    return StateError(
        "an input of a checkpointed function was modified by an inplace operation after it was saved, and the function "
        f"cannot be computed again from it: shape={tuple(shape)}, version={version}, expected {expected}. Modify a "
        "clone of it"
    )


NUM_SAMPLES = 64
TOLERANCE = 0.05
"""Of the largest value: what ranks may differ by that compute the same."""


class Parts:
    """The tensor-parallel ranks of this one, in groups of their own."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._is_checked = False

    def numel(self, numel: int) -> int:
        """Elements of each part of ``numel`` values."""
        return -(-numel // self._topology.world_size)

    def take(self, values: Tensor) -> Tensor:
        """This rank's part of ``values`` [n]: [ceil(n / N)]. Until the first backward, collective.

        Raises:
            LayoutError: On every rank, if they have different values: those must not be divided.
        """
        if not self._is_checked:
            self._check_equal(values)
        numel = self.numel(values.numel())
        start = min(self._topology.rank * numel, values.numel())
        part = values[start : start + numel]
        return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])

    def gather(self, part: Tensor, numel: int) -> Tensor:
        """All values [numel], from every rank's part. Collective."""
        self._is_checked = True
        whole = part.new_empty(part.numel() * self._topology.world_size)
        all_gather_single(whole, part, self._topology)
        return whole[:numel]

    def close(self) -> None:
        """Free the process groups."""
        self._topology.close()

    def _check_equal(self, values: Tensor) -> None:
        """A sample of them: ranks with other sequences or batches are found at the first look."""
        samples = torch.zeros(1 + NUM_SAMPLES, dtype=torch.float64)
        taken = values[:: max(values.numel() // NUM_SAMPLES, 1)][:NUM_SAMPLES].to("cpu", torch.float64)
        samples[0], samples[1 : 1 + taken.numel()] = values.numel(), taken
        of_ranks = control.gather_float64(samples, self._topology)
        spread = (of_ranks - of_ranks[0]).abs().amax(0)
        limit = TOLERANCE * of_ranks[0, 1:].abs().max()
        if spread[0] > 0 or (spread[1:] > limit).any():  # NaN compares as equal
            raise LayoutError(
                "inputs of checkpointed functions must be the same on all tensor-parallel ranks to be divided over "
                f"them: elements by rank {of_ranks[:, 0].int().tolist()}, first values {of_ranks[:, 1].tolist()}. Turn "
                "partition_activations off where ranks have parts of a sequence or batch"
            )


LEAST_NUMEL = 256
"""Smaller tensors stay where they are: moving them costs more than it saves."""


class Form(NamedTuple):
    """What a tensor is besides its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def distinct(self) -> tuple[int, ...]:
        """Its size without what is expanded."""
        return tuple(1 if stride == 0 else n for n, stride in zip(self.size, self.stride, strict=True))

    @property
    def order(self) -> list[int]:
        """Its dimensions, outermost first as in memory."""
        return sorted(range(len(self.size)), key=lambda dim: -self.stride[dim])

    @property
    def extent(self) -> int:
        """Elements from its first to its last in memory."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.distinct, self.stride, strict=True))

    def restore(self, values: Tensor) -> Tensor:
        """A tensor of this form with ``values`` [numel], a view of them if they fill its memory."""
        if values.numel() == self.extent:
            return values.as_strided(self.size, self.stride, values.storage_offset())
        memory, order = values.new_empty(self.extent), self.order
        target = memory.as_strided(self.distinct, self.stride).permute(order)
        target.copy_(values.view(target.shape))
        return memory.as_strided(self.size, self.stride)


def flatten(tensor: Tensor) -> tuple[Tensor, Form]:
    """The values of ``tensor`` [numel], each element of memory once, and its form."""
    form = Form(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
    distinct = tensor.detach().as_strided(form.distinct, form.stride)
    return distinct.permute(form.order).reshape(-1), form


def is_movable(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an activation that may rest elsewhere: plain, floating point, not small, not trained."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if tensor.is_leaf and tensor.requires_grad:  # somebody keeps it for its gradient
        return False
    return tensor.is_floating_point() and tensor.numel() >= LEAST_NUMEL and not _overlaps(tensor)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory in another way than by being expanded."""
    end = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride > 0:
            if stride <= end:
                return True
            end += (n - 1) * stride
    return False


class Packed(Protocol):
    """What autograd keeps instead of a tensor."""

    def unpack(self) -> Tensor:
        """The tensor."""


class Checkpointer:
    """Saves inputs of checkpointed functions as ``settings`` say.

    Args:
        settings: What was asked for.
        tensor_ranks: The tensor-parallel ranks, in groups of this object's own; None: this rank has no others.
        all_ranks: Those that do this together; None: errors of files are not raised on others.
    """

    def __init__(
        self, settings: ActivationSettings, tensor_ranks: Topology | None = None, all_ranks: Topology | None = None
    ) -> None:
        self.settings = settings
        self.times = CallTimes() if settings.is_profiled else None
        self._parts = Parts(tensor_ranks) if settings.partitions and tensor_ranks is not None else None
        self._place = _new_place(settings, all_ranks)
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
        return KeptTensor(tensor, self.holding(tensor))

    def holding(self, tensor: Tensor) -> Holding:
        """Count ``tensor``, unless it is a parameter, as held on the device."""
        nbytes = 0 if isinstance(tensor, nn.Parameter) else tensor.numel() * tensor.element_size()
        return self._place.usage.hold("device", nbytes)

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
        self._watch = TensorVersion(tensor)
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


class KeptTensor:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor, holding: Holding) -> None:
        self._tensor, self._holding = tensor, holding
        self._version = None if tensor.is_inference() else tensor._version

    def unpack(self) -> Tensor:
        """The tensor."""
        if self._version is not None and self._tensor._version != self._version:
            raise modified(self._tensor.shape, self._tensor._version, self._version)
        return self._tensor


def _new_place(settings: ActivationSettings, all_ranks: Topology | None) -> InputStorage:
    if settings.tier is Tier.NVME:
        return FilePlace(settings, all_ranks)
    return MemoryPlace(
        is_on_host=settings.tier is Tier.CPU,
        has_arena=settings.has_arena,
        num_checkpoints=settings.num_checkpoints,
    )
