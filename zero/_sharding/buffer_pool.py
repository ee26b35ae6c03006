"""Reused flat buffers for what lives for a moment: gathered parameters and unreduced gradients.

Resizing storages costs three times the fill itself, so buffers are kept and handed out again.

free --take--> the caller's --lend--> an exchange's --reclaim, which waits--> the caller's --give--> free
                  the caller's --set_aside--> viewed by somebody else, who must not see it change; then free

Any other way raises StateError: a buffer that an exchange still reads or fills can neither go back nor be lent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zcomm import DivergedError, StateError, Work
from zero._storage.poison import poison


def num_uses(tensor: Tensor) -> int:
    """How many tensors share the memory of ``tensor``, itself included; those that autograd keeps count, too."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # this storage object is a user


def storage_of(tensor: Tensor) -> int:
    """The same for all tensors that share memory, and no others, while any of them lives: without elements, too."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True, eq=False)
class Aside:
    """A buffer that somebody views still."""

    buffer: Tensor
    of: object
    """Whose values the views show; None: nobody's, for these have changed since."""


class BufferPool:
    """Buffers by dtype; the smallest that fits, at most twice as large as asked for, is handed out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self._owned: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        """Since the last :meth:`drop_unused`."""
        self._out: set[int] = set()
        """Handed out now."""
        self._lent: dict[int, Sequence[Work | None]] = {}
        """Of those, what an exchange uses, with its works."""
        self._aside: list[Aside] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer of ``numel`` elements; its contents are undefined."""
        if self._aside:
            self.viewed()
        free = self._free.setdefault(dtype, [])
        fitting = [i for i, buffer in enumerate(free) if numel <= buffer.numel() <= 2 * numel]
        if fitting:
            # The last to come back first: it is in the cache, and buffers beyond what a step needs lie idle.
            buffer = free.pop(min(reversed(fitting), key=lambda i: free[i].numel()))
        else:
            with torch.inference_mode(mode=False):  # it will serve training too
                buffer = torch.empty(numel, dtype=dtype, device=self._device)
            self._owned[storage_of(buffer)] = buffer
        at = storage_of(buffer)
        self._taken.add(at)
        self._out.add(at)
        return buffer[:numel]

    def drop_unused(self) -> None:
        """Free the buffers that nobody took since the last call: those of one-off uses, such as loading a model."""
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
        """An exchange uses ``buffers``, handed out here, until ``works`` have ended; more may be added to the list.

        Raises:
            StateError: One is not handed out, or already lent.
        """
        for buffer in buffers:
            self._lent[self._place_of(buffer, "lent to an exchange")] = works

    def reclaim(self, works: Sequence[Work | None], *buffers: Tensor) -> None:
        """Wait for ``works``; what was lent to them is the caller's again.

        After an error it is not: with DivergedError, which comes when all have ended, the buffers are free; with any
        other an exchange may go on using them, and nobody gets them any more.

        Raises:
            StateError: One of ``buffers`` is not lent to ``works``.
        """
        for buffer in buffers:
            if self._lent.get(storage_of(buffer)) is not works:
                raise StateError(f"a buffer can be reclaimed only from the exchange it is lent to: {_describe(buffer)}")
        diverged: DivergedError | None = None
        for work in works:
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
            StateError: An exchange still uses it, or it is not handed out: it was given back before, say.
        """
        at = self._place_of(buffer, "given back")
        self._out.discard(at)
        whole = self._owned[at]
        poison(whole)
        self._free[whole.dtype].append(whole)

    def set_aside(self, buffer: Tensor, of: object) -> None:
        """As :meth:`give`, but nobody gets it as long as anything else views its memory, which shows ``of``.

        Raises:
            StateError: As for :meth:`give`.
        """
        at = self._place_of(buffer, "set aside")
        self._out.discard(at)
        self._aside.append(Aside(self._owned[at], of))

    def viewed(self) -> list[Aside]:
        """What was set aside and is viewed still. The rest is free now."""
        for each in self._aside.copy():
            if num_uses(each.buffer) == 1:
                self._aside.remove(each)
                poison(each.buffer)
                self._free[each.buffer.dtype].append(each.buffer)
        return self._aside

    def _place_of(self, buffer: Tensor, change: str) -> int:
        """The storage of a buffer that is the caller's."""
        at = storage_of(buffer)
        if at in self._lent:
            raise StateError(
                f"a buffer cannot be {change} while an exchange uses it, which reclaim() ends: {_describe(buffer)}"
            )
        if at not in self._out:
            raise StateError(
                f"a buffer can be {change} only between take() and give(), and this one is free, or another's: "
                f"{_describe(buffer)}"
            )
        return at

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer, free or handed out."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._owned.values())


def _describe(buffer: Tensor) -> str:
    return f"{buffer.numel()} elements of {buffer.dtype}"
