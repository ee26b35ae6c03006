"""Stores flat values on the device or in host memory, allocated one by one or in one arena."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zero._activations.arena import Arena, ArenaSlot, LiveCheckpoint
from zero._activations.usage import ActivationMemory, ActivationUsage, CountedBytes
from zero._storage import transfer_counters
from zero._storage.host_memory import CopyStream


class DeviceCopy:
    """A copy in flight, and its result."""

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor, event: torch.cuda.Event | None) -> None:
        self._tensor, self._event = tensor, event

    def wait(self) -> Tensor:
        """The result; the current stream waits for the copy, the host does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
        return self._tensor


class Copies:
    """All copies of one device, on one stream and so in one order.

    With a stream for each direction, a buffer could be filled again before it was read: an arena reuses host memory as
    soon as its slot is dropped, when the copy out of it may only be queued.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, CopyStream] = {}

    def to_host(self, values: Tensor, host: Tensor) -> None:
        """Start copying ``values`` to ``host``. Until it ends ``values`` may be freed, but not changed."""
        stream = self._stream_of(values.device)
        with stream.on_stream():
            host.copy_(values, non_blocking=values.is_cuda)
        stream.uses(values)  # or the allocator would reuse their memory before the copy has read it

    def to_device(self, host: Tensor, device: torch.device) -> DeviceCopy:
        """Start copying ``host`` to ``device``, after all copies that were started before."""
        if device.type != "cuda":
            return DeviceCopy(host.data.to(device), None)
        values, stream = torch.empty_like(host, device=device), self._stream_of(device)
        with stream.on_stream():
            values.copy_(host, non_blocking=True)
        event = stream.event()
        stream.uses(values)  # they may be dropped unread, when a backward fails, with the copy still in flight
        return DeviceCopy(values, event)

    def _stream_of(self, device: torch.device) -> CopyStream:
        if device not in self._streams:
            self._streams[device] = CopyStream(device)
        return self._streams[device]


class StoredValues(Protocol):
    """Values that are stored; freed when this object is dropped."""

    def prefetch(self) -> None:
        """Start the copy or read that :meth:`fetch` will need."""

    def fetch(self) -> Tensor:
        """The values, on the device they came from."""


class MemoryInputStorage:
    """Stores inputs in device memory, or in host memory.

    Args:
        is_on_host: Host memory, page-locked if values come from CUDA.
        has_arena: One buffer for all.
        num_checkpoints: Checkpoints that it is first allocated for.
    """

    def __init__(self, *, is_on_host: bool, has_arena: bool = False, num_checkpoints: int | None = None) -> None:
        self.usage = ActivationUsage()
        self._is_on_host, self._has_arena, self._num_checkpoints = is_on_host, has_arena, num_checkpoints
        self._arena: Arena | None = None
        self._copies = Copies()

    def start_checkpoint(self, nbytes: int, device: torch.device) -> LiveCheckpoint | None:
        """Count a checkpoint of ``nbytes`` from ``device`` in the arena; None without an arena."""
        if self._has_arena and self._arena is None:
            is_pinned = self._is_on_host and device.type == "cuda"
            target = torch.device("cpu") if self._is_on_host else device
            self._arena = Arena(self._num_checkpoints, target, is_pinned=is_pinned)
        return None if self._arena is None else self._arena.start_checkpoint(nbytes)

    def store(self, values: Tensor, checkpoint: LiveCheckpoint | None) -> StoredValues:
        """Store a copy of ``values`` [n], in the arena if it has a free span that is large enough."""
        nbytes = values.numel() * values.element_size()
        counted = self.usage.count("host" if self._is_on_host else "device", nbytes)
        slot = None if checkpoint is None or self._arena is None else self._arena.allocate(nbytes, checkpoint)
        if slot is not None and slot.memory is not None:
            memory = slot.memory[:nbytes].view(values.dtype)
        else:
            self.usage.num_allocations += 1
            is_pinned = self._is_on_host and values.is_cuda
            target = torch.device("cpu") if self._is_on_host else values.device
            memory = torch.empty(values.numel(), dtype=values.dtype, device=target, pin_memory=is_pinned)
        if self._is_on_host:
            transfer_counters.record("activations", "to_host", nbytes)
            self._copies.to_host(values, memory)
            return _HostInput(memory, slot, counted, self._copies, values.device)
        memory.copy_(values)
        return _DeviceInput(memory, slot, counted)

    def memory(self) -> ActivationMemory:
        arena = self._arena
        arena_nbytes = 0 if arena is None else arena.nbytes  # may allocate the arena anew
        return self.usage.report(arena_nbytes, 0 if arena is None else arena.num_allocations)

    def reset(self) -> None:
        """Drop the arena; slots in use keep its memory until they are dropped."""
        if self._arena is not None:
            self.usage.num_allocations += self._arena.num_allocations
            self._arena = None

    close = reset


class _DeviceInput:
    def __init__(self, memory: Tensor, slot: ArenaSlot | None, counted: CountedBytes) -> None:
        self._memory, self._slot, self._counted = memory, slot, counted

    def prefetch(self) -> None:
        pass

    def fetch(self) -> Tensor:
        return self._memory.data  # an alias with a version counter of its own


class _HostInput:
    def __init__(
        self, memory: Tensor, slot: ArenaSlot | None, counted: CountedBytes, copies: Copies, device: torch.device
    ) -> None:
        self._memory, self._slot, self._counted = memory, slot, counted
        self._copies, self._device = copies, device
        self._pending: DeviceCopy | None = None

    def prefetch(self) -> None:
        if self._pending is None:
            transfer_counters.record("activations", "to_device", self._memory.numel() * self._memory.element_size())
            self._pending = self._copies.to_device(self._memory, self._device)

    def fetch(self) -> Tensor:
        self.prefetch()
        assert self._pending is not None, "prefetch starts a copy"
        pending, self._pending = self._pending, None
        return pending.wait()
