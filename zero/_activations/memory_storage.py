"""Where flat values rest: on the device or in host memory, each of its own or in one arena."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zero._activations.arena import Arena, ArenaSlot, Ticket
from zero._activations.copies import Arriving, Copies
from zero._activations.usage import ActivationMemory, ActivationUsage, Holding
from zero._storage import transfer_counters


class Rest(Protocol):
    """Values at rest; freed when this object is dropped."""

    def prefetch(self) -> None:
        """They will be asked for soon."""

    def fetch(self) -> Tensor:
        """They, on the device they came from."""


class InputStorage(Protocol):
    """Keeps values."""

    usage: ActivationUsage

    def admit(self, nbytes: int, device: torch.device) -> Ticket | None:
        """Room for a checkpoint of ``nbytes`` that come from ``device``, if there is one buffer for all."""

    def keep(self, values: Tensor, ticket: Ticket | None) -> Rest:
        """Keep a copy of ``values`` [n]."""

    def memory(self) -> ActivationMemory:
        """What is held."""

    def reset(self) -> None:
        """Drop buffers that are kept for later."""

    def close(self) -> None:
        """Drop everything."""


class MemoryPlace:
    """Device memory, or host memory.

    Args:
        is_on_host: Whether it is host memory, page-locked where values come from CUDA.
        has_arena: Whether there is one buffer for all.
        num_checkpoints: In it before the first step.
    """

    def __init__(self, *, is_on_host: bool, has_arena: bool = False, num_checkpoints: int | None = None) -> None:
        self.usage = ActivationUsage()
        self._is_on_host, self._has_arena, self._num_checkpoints = is_on_host, has_arena, num_checkpoints
        self._arena: Arena | None = None
        self._num_arena_allocations = 0
        self._copies = Copies()

    def admit(self, nbytes: int, device: torch.device) -> Ticket | None:
        """See :meth:`Arena.admit`; None without an arena."""
        if self._has_arena and self._arena is None:
            is_pinned = self._is_on_host and device.type == "cuda"
            place = torch.device("cpu") if self._is_on_host else device
            self._arena = Arena(self._num_checkpoints, place, is_pinned=is_pinned)
        return None if self._arena is None else self._arena.admit(nbytes)

    def keep(self, values: Tensor, ticket: Ticket | None) -> Rest:
        """Keep a copy of ``values`` [n], in the arena if there is a ticket and room."""
        nbytes = values.numel() * values.element_size()
        holding = self.usage.hold("host" if self._is_on_host else "device", nbytes)
        slot = None if ticket is None or self._arena is None else self._arena.take(nbytes, ticket)
        if slot is not None and slot.memory is not None:
            memory = slot.memory[:nbytes].view(values.dtype)
        else:
            self.usage.num_allocations += 1
            is_pinned = self._is_on_host and values.is_cuda
            place = torch.device("cpu") if self._is_on_host else values.device
            memory = torch.empty(values.numel(), dtype=values.dtype, device=place, pin_memory=is_pinned)
        if self._is_on_host:
            transfer_counters.record("activations", "to_host", nbytes)
            self._copies.to_host(values, memory)
            return _HostInput(memory, slot, holding, self._copies, values.device)
        memory.copy_(values)
        return _OnDevice(memory, slot, holding)

    def memory(self) -> ActivationMemory:
        """What is held."""
        arena = self._arena
        made = self._num_arena_allocations + (0 if arena is None else arena.num_allocations)
        return self.usage.report(0 if arena is None else arena.nbytes, made)

    def reset(self) -> None:
        """Drop the arena; slots in use keep its memory."""
        if self._arena is not None:
            self._num_arena_allocations += self._arena.num_allocations
            self._arena = None

    close = reset


class _OnDevice:
    """Values in device memory."""

    def __init__(self, memory: Tensor, slot: ArenaSlot | None, holding: Holding) -> None:
        self._memory, self._slot, self._holding = memory, slot, holding

    def prefetch(self) -> None:
        """They are there."""

    def fetch(self) -> Tensor:
        return self._memory.data


class _HostInput:
    """Values in host memory."""

    def __init__(
        self, memory: Tensor, slot: ArenaSlot | None, holding: Holding, copies: Copies, device: torch.device
    ) -> None:
        self._memory, self._slot, self._holding = memory, slot, holding
        self._copies, self._device = copies, device
        self._arriving: Arriving | None = None

    def prefetch(self) -> None:
        if self._arriving is None:
            transfer_counters.record("activations", "to_device", self._memory.numel() * self._memory.element_size())
            self._arriving = self._copies.to_device(self._memory, self._device)

    def fetch(self) -> Tensor:
        self.prefetch()
        assert self._arriving is not None, "prefetch starts a copy"
        arriving, self._arriving = self._arriving, None
        return arriving.wait()
