"""Where the shard of one bucket rests between uses: how it gets to an exchange, and how new values get there.

    gather    fetch --> what the exchange sends, on the device      fetched: the exchanges have ended
    update    target --> memory to write into, written --> on the way, flush --> there
    access    in_memory: inside, the shard has its values; keep: somebody has changed them there

    InPlace   the shard is where exchanges take it from            device
    OnHost    host memory, copied to the device for each gather    cpu
    (zero._storage.file_shard_storage) InFile                                  nvme

The update of a step may write a shard in pieces, in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from zcomm import EncodedShard, StateError, Topology, Work
from zero._storage.copy_stream import CopyStream
from zero._storage.transfer_counters import record

KIND = "parameters"
"""In :mod:`zero._storage.transfer_counters`."""


class ShardRest(ABC):
    """The resting place of one shard. Elements are counted from the shard's start.

    Args:
        shard: The tensor of the shard: where that is not in memory, its memory is one NaN.
        device: Where the parameters are used.
        updates_on_host: Whether steps update its values on the host.
    """

    is_on_device = False
    """Whether ``shard`` is where the parameters are used."""
    is_in_memory = True
    """Whether ``shard`` has its values all the time."""

    def __init__(self, shard: Tensor, device: torch.device, *, updates_on_host: bool) -> None:
        self.shard, self.device = shard, device
        self._updates_on_host = updates_on_host

    def _runs_on_host(self, device: torch.device | None) -> bool:
        """Whether an update on ``device`` is one of the host, which without a GPU no device says."""
        if device is None or self.device.type == "cpu":
            return self._updates_on_host
        return device.type == "cpu"

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Ranges that together are all of it, and for which :meth:`target` costs no copy."""
        return [(0, self.shard.numel())]

    @abstractmethod
    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Memory for the new values of elements ``[start, stop)``, in the parameters' dtype, its contents undefined.

        Args:
            start: First element.
            stop: End of the range.
            device: Where the update of these elements runs; default: where steps run.

        Each range is to be passed to :meth:`written` before it, or another that overlaps it, is asked for again.
        """

    @abstractmethod
    def written(self, start: int, stop: int) -> None:
        """The values of a range that :meth:`target` gave are there: they go on to where the shard rests."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all that was written has arrived.

        Raises:
            OSError: It has not.
        """

    def on_stream(self) -> AbstractContextManager[object]:
        """Where :meth:`fetch` and the exchange that sends what it returns are to be called."""
        return nullcontext()

    @abstractmethod
    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:
        """Elements ``[start, stop)`` on the device, to be sent; ``row`` is their place in the full parameters."""

    @abstractmethod
    def fetched(self) -> None:
        """The exchanges that send what :meth:`fetch` returned have ended."""

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside, ``shard`` has its values."""
        yield

    def read(self) -> Tensor:
        """Its values, not to be changed."""
        with self.in_memory():
            return self.shard.detach()

    @abstractmethod
    def keep(self) -> None:
        """The values of ``shard``, which are in memory now, were changed."""

    @property
    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes that rest, by tier."""


class Elsewhere(ShardRest):
    """The shard has its values only inside :meth:`in_memory`, however often that is entered."""

    is_in_memory = False

    def __init__(self, shard: Tensor, device: torch.device, *, updates_on_host: bool) -> None:
        super().__init__(shard, device, updates_on_host=updates_on_host)
        self._empty = shard.data
        self._depth = 0

    @abstractmethod
    def _read(self) -> Tensor:
        """All values, in memory of their own."""

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Bring all of it.

        Raises:
            OSError: It is in a file that cannot be read.
        """
        if not self._depth:
            self.shard.data = self._read()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.shard.data = self._empty


class InPlace(ShardRest):
    """The shard is a tensor that stays where it is: in device memory.

    An update on the other side, host or device, writes into memory of its own, and ``written`` copies that.
    """

    is_on_device = True
    tier = "device"
    link = "to_device"
    """How values get here that were not updated here."""

    def __init__(self, shard: Tensor, *, updates_on_host: bool = False) -> None:
        super().__init__(shard, shard.device, updates_on_host=updates_on_host)
        self._staged: dict[tuple[int, int], Tensor | None] = {}
        """Ranges that cross from one side to the other, with memory there if that is not the same memory."""

    def _crosses(self, *, on_host: bool) -> bool:
        return on_host

    def _other_side(self) -> torch.device | None:
        """Where an update that crosses runs; None: in the same memory."""
        return torch.device("cpu") if self.shard.is_cuda else None

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Elements of the shard itself, unless the update runs on the other side."""
        own = self.shard[start:stop]
        if not self._crosses(on_host=self._runs_on_host(device)):
            return own
        there, staged = self._other_side(), None
        if there is not None:
            staged = torch.empty(stop - start, dtype=own.dtype, device=there, pin_memory=there.type == "cpu")
        self._staged[start, stop] = staged
        return own if staged is None else staged

    def written(self, start: int, stop: int) -> None:
        """Copy what was staged. The host may go on: later work of the device waits for the copy."""
        if (start, stop) not in self._staged:
            return
        staged, own = self._staged.pop((start, stop)), self.shard[start:stop]
        record(KIND, self.link, own.numel() * own.element_size())
        if staged is not None:
            own.copy_(staged, non_blocking=own.is_cuda)

    def flush(self) -> None:
        """Nothing is left to do: the device's queue keeps the order."""

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:  # noqa: ARG002
        """Elements of the shard itself."""
        return self.shard[start:stop]

    def fetched(self) -> None:
        """Nothing was taken."""

    def keep(self) -> None:
        """They are where they rest."""

    @property
    def nbytes(self) -> dict[str, int]:
        """All of them where it is."""
        return {self.tier: self.shard.numel() * self.shard.element_size()}


class HostShard(InPlace):
    """The shard is in host memory, page-locked where there is CUDA, and copied to its row for each gather."""

    is_on_device = False
    tier = "cpu"
    link = "to_host"

    def __init__(self, shard: Tensor, copies: CopyStream, *, updates_on_host: bool = True) -> None:
        super().__init__(shard, updates_on_host=updates_on_host)
        self.device, self._copies = copies.device, copies

    def _crosses(self, *, on_host: bool) -> bool:
        return not on_host

    def _other_side(self) -> torch.device | None:
        return self.device if self.device.type == "cuda" else None

    def on_stream(self) -> AbstractContextManager[object]:
        """The stream of the copies."""
        return self._copies.on_stream()

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:
        """The row, filled."""
        record(KIND, "to_device", row.numel() * row.element_size())
        return row.copy_(self.shard[start:stop], non_blocking=True)


class Encoded(Elsewhere):
    """One :class:`zcomm.EncodedShard` for each exchange of a gather.

    No step updates it. Where somebody changes its values, an exchange's part with any new value is rounded anew, the
    others keep their bits.

    Args:
        values: The shard's values on the device; not kept.
        cuts: How the exchanges of a gather cut it.
        topology: The ranks.
        keeps_on: Where the codes rest.
    """

    def __init__(
        self, values: Tensor, cuts: Sequence[tuple[int, int]], topology: Topology, *, keeps_on: torch.device
    ) -> None:
        nothing = torch.full((), float("nan"), dtype=values.dtype).expand(values.numel())
        super().__init__(nothing, values.device, updates_on_host=False)
        self._tier = "device" if keeps_on == values.device else "cpu"
        self._parts = {
            (start, stop): EncodedShard(values[start:stop], topology, device=keeps_on) for start, stop in cuts
        }

    def gather(self, cut: tuple[int, int], columns: Tensor, *, async_op: bool) -> Work | None:
        """Fill ``columns`` [world_size, n], those of ``cut``, from every rank. Collective."""
        return self._parts[cut].gather(columns, numbering="local", async_op=async_op)

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        """Not for frozen parameters."""
        raise StateError("frozen parameters at rest in INT8 have no update")

    def written(self, start: int, stop: int) -> None:
        """Nothing: there is no target."""

    def flush(self) -> None:
        """Nothing is on its way."""

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:  # noqa: ARG002
        """The decoded values of a part."""
        return self._parts[start, stop].decode(self.device)

    def fetched(self) -> None:
        """Nothing was taken."""

    def _read(self) -> Tensor:
        """Decoded, on the device."""
        return torch.cat([part.decode(self.device) for part in self._parts.values()])

    def keep(self) -> None:
        """Encode the parts that have new values."""
        for (start, stop), part in self._parts.items():
            values = self.shard[start:stop].detach()
            if not torch.equal(part.decode(self.device), values):
                part.set(values)

    @property
    def nbytes(self) -> dict[str, int]:
        """Of codes and scales."""
        return {self._tier: sum(part.nbytes for part in self._parts.values())}
