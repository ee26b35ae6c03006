"""Pool of flat buffers for short-lived data: gathered parameters and unreduced gradients.

Resizing a storage takes three times as long as filling it, so the pool keeps buffers and hands them out again.

free --take--> the caller's --lend--> an exchange's --reclaim, which waits--> the caller's --give--> free
                  the caller's --set_aside--> still viewed by someone who must not see it change; free afterwards

Any other transition raises StateError: a buffer that an exchange reads or fills cannot be given back or lent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zcomm import DivergedError, StateError, Work
from zero._storage.poison import poison
from zero._storage.runtime_part import RuntimePart


def num_uses(tensor: Tensor) -> int:
    """The number of tensors that share memory with ``tensor``, itself and those that autograd keeps included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # minus this storage object


def storage_of(tensor: Tensor) -> int:
    """A key that tensors have in common if and only if they share memory, as long as any of them lives.

    Not the data pointer: that is 0 for every tensor without elements.
    """
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True, eq=False)
class ViewedBuffer:
    """A buffer that is out of use here, but that other tensors view."""

    buffer: Tensor
    of: object
    """The owner of the values that the views show; None: the values have changed since."""


class BufferPool(RuntimePart):
    """Buffers by dtype. ``take`` hands out the smallest that fits and is at most twice as large as needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self._owned: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        """Handed out at least once since the last :meth:`step_ended`."""
        self._out: set[int] = set()
        """Handed out now."""
        self._lent: dict[int, Sequence[Work | None]] = {}
        """Those of them that an exchange uses, with its works."""
        self._aside: list[ViewedBuffer] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer of ``numel`` elements; its contents are undefined."""
        if self._aside:
            self.viewed()
        free = self._free.setdefault(dtype, [])
        fitting = [i for i, buffer in enumerate(free) if numel <= buffer.numel() <= 2 * numel]
        if fitting:
            # Last in, first out: that buffer is in the cache, and buffers beyond what a step needs stay unused, so
            # that step_ended() finds them.
            buffer = free.pop(min(reversed(fitting), key=lambda i: free[i].numel()))
        else:
            with torch.inference_mode(mode=False):  # a buffer made in inference mode could not be used in training
                buffer = torch.empty(numel, dtype=dtype, device=self._device)
            self._owned[storage_of(buffer)] = buffer
        at = storage_of(buffer)
        self._taken.add(at)
        self._out.add(at)
        return buffer[:numel]

    def step_ended(self) -> None:
        """Free the buffers that were not taken since the last call: those of one-off uses, such as loading a model."""
        for free in self._free.values():
            for buffer in free.copy():
                at = storage_of(buffer)
                if at not in self._taken:
                    free[:] = [other for other in free if other is not buffer]
                    del self._owned[at]
        self._taken.clear()

    def clear(self) -> None:
        """Free every buffer that is not handed out."""
        for free in self._free.values():
            for buffer in free:
                del self._owned[storage_of(buffer)]
            free.clear()

    def lend(self, works: Sequence[Work | None], *buffers: Tensor) -> None:
        """Mark ``buffers`` as used by an exchange until ``works`` complete; the caller may append to ``works``.

        Raises:
            StateError: A buffer is not handed out, or already lent.
        """
        for buffer in buffers:
            self._lent[self._place_of(buffer, "lent to an exchange")] = works

    def reclaim(self, works: Sequence[Work | None], *buffers: Tensor) -> None:
        """Wait for ``works``; then the buffers that were lent to them are the caller's again.

        After DivergedError, which is raised when all works have ended, the buffers are free. After any other error an
        exchange may still write to them, so they are never handed out again.

        Raises:
            StateError: One of ``buffers`` is not lent to ``works``.
        """
        for buffer in buffers:
            if self._lent.get(storage_of(buffer)) is not works:
                raise StateError(f"a buffer can be reclaimed only from the exchange it is lent to: {_describe(buffer)}")
        diverged: DivergedError | None = None
        for work in works:  # all of them: after the first DivergedError others may still write to the buffer
            try:
                if work is not None:
                    work.wait()
            except DivergedError as error:
                diverged = error
        for buffer in buffers:
            self._lent.pop(storage_of(buffer), None)
        if diverged is not None:
            for buffer in buffers:
                self.give(buffer)
            raise diverged

    def give(self, buffer: Tensor) -> None:
        """Take back what :meth:`take` handed out.

        Raises:
            StateError: An exchange uses it, or it is not handed out, for instance because it was given back before.
        """
        at = self._place_of(buffer, "given back")
        self._out.discard(at)
        owned = self._owned[at]
        poison(owned)
        self._free[owned.dtype].append(owned)

    def set_aside(self, buffer: Tensor, of: object) -> None:
        """As :meth:`give`, but the buffer is not handed out while any other tensor views it; the views show ``of``.

        Raises:
            StateError: As for :meth:`give`.
        """
        at = self._place_of(buffer, "set aside")
        self._out.discard(at)
        self._aside.append(ViewedBuffer(self._owned[at], of))

    def viewed(self) -> list[ViewedBuffer]:
        """The buffers set aside that other tensors still view; frees those that are not viewed any more."""
        for each in self._aside.copy():
            if num_uses(each.buffer) == 1:
                self._aside.remove(each)
                poison(each.buffer)
                self._free[each.buffer.dtype].append(each.buffer)
        return self._aside

    def _place_of(self, buffer: Tensor, change: str) -> int:
        """The key of a buffer, which must be the caller's."""
        at = storage_of(buffer)
        if at in self._lent:
            raise StateError(
                f"a buffer cannot be {change} while an exchange uses it; call reclaim() first: {_describe(buffer)}"
            )
        if at not in self._out:
            raise StateError(
                f"a buffer can be {change} only between take() and give(); this one is free, or not of this pool: "
                f"{_describe(buffer)}"
            )
        return at

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer, free or handed out."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._owned.values())

    def held(self) -> dict[str, int]:
        return {"pool": self.nbytes}


def _describe(buffer: Tensor) -> str:
    return f"{buffer.numel()} elements of {buffer.dtype}"
