"""Stores the inputs of checkpointed functions until backward, and restores them.

A tensor is stored as flat values and restored with the same strides: kernels may round differently for other strides.

[2, 3] with strides (1, 2)      dense                      values [6] in the order of memory, without a copy
[2, 3] with strides (8, 1)      with gaps                  values [6]; the gaps are restored with other contents
[2, 3] with strides (0, 1)      expanded                   values [3]

With partition_activations each tensor-parallel rank stores its part of the values, which are the same on all of them.

values [n]  = | part 0 | part 1 | ... | part N-1, padded |      N parts of ceil(n / N)
backward: one all-gather of the parts restores the saved bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from zcomm import LayoutError, StateError, Topology, all_gather_single, control
from zero._activations.activation_settings import ActivationSettings
from zero._activations.arena import LiveCheckpoint
from zero._activations.file_storage import FileInputStorage
from zero._activations.memory_storage import MemoryInputStorage, StoredValues
from zero._activations.usage import ActivationMemory, CallTimes, CountedBytes
from zero._storage.tier_settings import Tier


class TensorVersion:
    """The version of ``tensor`` when it was saved; autograd raises a tensor's version at every modification."""

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._alias: Tensor | None = None
        if not tensor.is_inference():
            # A detached alias shares the version counter. Without the next line it would also keep the memory alive,
            # which checkpointing is to free.
            self._alias = tensor.detach()
            self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._version = self._alias._version

    def check(self, shape: torch.Size) -> None:
        """Raise StateError if the tensor was modified since."""
        if self._alias is not None and self._alias._version != self._version:
            raise _modified_error(shape, self._alias._version, self._version)


def _modified_error(shape: torch.Size, version: int, expected: int) -> StateError:
    return StateError(
        "an input of a checkpointed function was modified by an inplace operation after it was saved, so the function "
        f"cannot be recomputed: shape={tuple(shape)}, version={version}, expected={expected}. Modify a clone instead"
    )


NUM_SAMPLES = 64
TOLERANCE = 0.05
"""Relative to the largest value: ranks that compute the same may differ by this much."""


class InputPartition:
    """Divides saved inputs over the tensor-parallel ranks, which exchange over process groups of their own."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._are_compared = False

    def part_numel(self, numel: int) -> int:
        """Elements of one rank's part of ``numel`` values."""
        return -(-numel // self._topology.world_size)

    def own_part(self, values: Tensor) -> Tensor:
        """This rank's part of ``values`` [n]: [ceil(n / N)]. Collective until the first backward.

        Raises:
            LayoutError: On every rank, if the values differ between them.
        """
        if not self._are_compared:
            self._check_equal(values)
        numel = self.part_numel(values.numel())
        start = min(self._topology.rank * numel, values.numel())
        part = values[start : start + numel]
        return part if part.numel() == numel else torch.cat([part, part.new_zeros(numel - part.numel())])

    def gather(self, part: Tensor, numel: int) -> Tensor:
        """All values [numel], gathered from every rank's part. Collective."""
        self._are_compared = True
        padded = part.new_empty(part.numel() * self._topology.world_size)
        all_gather_single(padded, part, self._topology)
        return padded[:numel]

    def close(self) -> None:
        self._topology.close()

    def _check_equal(self, values: Tensor) -> None:
        """Compare samples: dividing inputs that differ (sequence parallelism) would silently mix ranks' values."""
        samples = torch.zeros(1 + NUM_SAMPLES, dtype=torch.float64)
        taken = values[:: max(values.numel() // NUM_SAMPLES, 1)][:NUM_SAMPLES].to("cpu", torch.float64)
        samples[0], samples[1 : 1 + taken.numel()] = values.numel(), taken
        by_rank = control.gather_float64(samples, self._topology)
        spread = (by_rank - by_rank[0]).abs().amax(0)
        limit = TOLERANCE * by_rank[0, 1:].abs().max()
        if spread[0] > 0 or (spread[1:] > limit).any():  # NaN > limit is false: NaN counts as equal
            raise LayoutError(
                "inputs of checkpointed functions must be the same on all tensor-parallel ranks to be divided over "
                f"them: elements by rank {by_rank[:, 0].int().tolist()}, first values {by_rank[:, 1].tolist()}. Turn "
                "partition_activations off where ranks have parts of a sequence or batch"
            )


MIN_NUMEL = 256
"""Smaller tensors stay where they are: storing them elsewhere costs more than it saves."""


class TensorLayout(NamedTuple):
    """Everything of a tensor but its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def unexpanded_size(self) -> tuple[int, ...]:
        """The size with 1 for each expanded dimension."""
        return tuple(1 if stride == 0 else n for n, stride in zip(self.size, self.stride, strict=True))

    @property
    def dims_in_memory_order(self) -> list[int]:
        """The dimensions, outermost in memory first."""
        return sorted(range(len(self.size)), key=lambda dim: -self.stride[dim])

    @property
    def span_numel(self) -> int:
        """Elements of memory from the first to the last, with gaps."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.unexpanded_size, self.stride, strict=True))

    def restore(self, values: Tensor) -> Tensor:
        """A tensor of this layout with ``values`` [numel]; a view of them if the layout has no gaps."""
        if values.numel() == self.span_numel:
            return values.as_strided(self.size, self.stride, values.storage_offset())
        memory, order = values.new_empty(self.span_numel), self.dims_in_memory_order
        target = memory.as_strided(self.unexpanded_size, self.stride).permute(order)
        target.copy_(values.view(target.shape))
        return memory.as_strided(self.size, self.stride)


def flatten(tensor: Tensor) -> tuple[Tensor, TensorLayout]:
    """The values of ``tensor`` [numel], each element of memory once, and the layout to restore it with."""
    layout = TensorLayout(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
    unexpanded = tensor.detach().as_strided(layout.unexpanded_size, layout.stride)
    return unexpanded.permute(layout.dims_in_memory_order).reshape(-1), layout


def is_movable(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an activation that may be stored elsewhere: plain, floating point, not small, no leaf."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if tensor.is_leaf and tensor.requires_grad:  # its owner keeps it anyway, for its gradient
        return False
    return tensor.is_floating_point() and tensor.numel() >= MIN_NUMEL and not _overlaps(tensor)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory other than by expansion, as those of ``unfold`` do."""
    end = 0
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride > 0:
            if stride <= end:
                return True
            end += (n - 1) * stride
    return False


class Packed(Protocol):
    """What autograd keeps instead of a tensor."""

    def unpack(self) -> Tensor: ...


class Checkpointer:
    """Stores inputs of checkpointed functions as ``settings`` say.

    Args:
        settings: Where, and how.
        tensor_ranks: The tensor-parallel ranks, in process groups of this object's own; None: there is only this one.
        all_ranks: Ranks on which a file error of one is raised on all; None: on this rank only.
    """

    def __init__(
        self, settings: ActivationSettings, tensor_ranks: Topology | None = None, all_ranks: Topology | None = None
    ) -> None:
        self.settings = settings
        self.times = CallTimes() if settings.is_profiled else None
        self._partition = None if tensor_ranks is None else InputPartition(tensor_ranks)
        self._storage = _new_storage(settings, all_ranks)
        self._saved: WeakValueDictionary[int, SavedInput] = WeakValueDictionary()
        self._last: ReferenceType[SavedInput] | None = None

    def start_checkpoint(self, leaves: Sequence[Any]) -> LiveCheckpoint | None:
        """Count a call with these inputs in the arena; None if there is none."""
        if not self.settings.has_arena:
            return None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and is_movable(leaf)]
        if not tensors:
            return None
        return self._storage.start_checkpoint(sum(self._stored_nbytes(tensor) for tensor in tensors), tensors[0].device)

    def pack(self, tensor: Tensor, checkpoint: LiveCheckpoint | None) -> Packed | None:
        """Store ``tensor`` elsewhere; None if it stays where it is."""
        if not self.settings.moves or not is_movable(tensor):
            return None
        known = self._saved.get(id(tensor))
        if known is not None and known.is_of(tensor):
            return known  # an input of several functions is stored once
        values, layout = flatten(tensor)
        numel = values.numel()
        if self._partition is not None:
            values = self._partition.own_part(values)
        stored = self._storage.store(values, checkpoint)
        saved = SavedInput(tensor, layout, numel, stored, self._partition, self._last)
        self._saved[id(tensor)] = saved
        self._last = ref(saved)
        return saved

    def keep_in_place(self, tensor: Tensor) -> Packed:
        return InputInPlace(tensor, self.count(tensor))

    def count(self, tensor: Tensor) -> CountedBytes:
        """Count ``tensor``, unless it is a parameter, as saved on the device."""
        nbytes = 0 if isinstance(tensor, nn.Parameter) else tensor.numel() * tensor.element_size()
        return self._storage.usage.count("device", nbytes)

    def memory(self) -> ActivationMemory:
        return self._storage.memory()

    def reset(self) -> None:
        """Drop the contiguous buffer; the next step allocates another."""
        self._storage.reset()

    def close(self) -> None:
        """Free buffers, files and process groups."""
        self._storage.close()
        if self._partition is not None:
            self._partition.close()

    def _stored_nbytes(self, tensor: Tensor) -> int:
        numel = tensor.numel() if self._partition is None else self._partition.part_numel(tensor.numel())
        return numel * tensor.element_size()


class SavedInput:
    """An input that is stored elsewhere."""

    def __init__(
        self,
        tensor: Tensor,
        layout: TensorLayout,
        numel: int,
        stored: StoredValues,
        partition: InputPartition | None,
        previous: ReferenceType[SavedInput] | None,
    ) -> None:
        self._origin = ref(tensor)
        self._version = -1 if tensor.is_inference() else tensor._version
        self._saved_version = TensorVersion(tensor)
        self._layout, self._numel, self._stored, self._partition = layout, numel, stored, partition
        self._previous = previous

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it holds the current values of ``tensor``."""
        return self._origin() is tensor and self._version == (-1 if tensor.is_inference() else tensor._version)

    def unpack(self) -> Tensor:
        # Backward unpacks in the reverse order of saving: the input that was saved before this one is needed next, and
        # its copy or read overlaps the recomputation of this function.
        self._saved_version.check(self._layout.size)
        values = self._stored.fetch()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous._stored.prefetch()
        if self._partition is not None:
            values = self._partition.gather(values, self._numel)
        return self._layout.restore(values)


class InputInPlace:
    """An input that stays where it is."""

    def __init__(self, tensor: Tensor, counted: CountedBytes) -> None:
        self._tensor, self._counted = tensor, counted
        self._version = None if tensor.is_inference() else tensor._version

    def unpack(self) -> Tensor:
        if self._version is not None and self._tensor._version != self._version:
            raise _modified_error(self._tensor.shape, self._tensor._version, self._version)
        return self._tensor


def _new_storage(settings: ActivationSettings, all_ranks: Topology | None) -> FileInputStorage | MemoryInputStorage:
    if settings.tier is Tier.NVME:
        return FileInputStorage(settings, all_ranks)
    return MemoryInputStorage(
        is_on_host=settings.tier is Tier.CPU, has_arena=settings.has_arena, num_checkpoints=settings.num_checkpoints
    )
