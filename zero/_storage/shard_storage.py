"""Storage of one bucket's shard between uses: how a gather fetches it, and how an update writes it.

    gather    fetch --> what the exchange sends, on the device      fetched: the exchanges are complete
    update    target --> memory to write into; written --> the write is started; flush --> it is complete
    access    in_memory: within the block, the shard has its values; keep: store values changed there

    InMemoryShard    exchanges read the shard where it is                device
    HostShard        host memory, copied to the device for each gather   cpu
    FileShard        in file_shard.py                            nvme
    QuantizedShard   INT8 codes of frozen parameters                     device, cpu

The update of a step may write a shard in pieces, in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from zcomm import EncodedShard, StateError, Topology, Work
from zero._storage.host_memory import CopyStream
from zero._storage.poison import placeholder
from zero._storage.staging_buffers import PageRange
from zero._storage.transfer_counters import record

KIND = "parameters"
"""What transfers of shards are counted under: see transfer_counters.py."""


class ShardStorage(ABC):
    """The storage of one shard. Elements are counted from the shard's start.

    Args:
        shard: The tensor of the shard; a placeholder if its values are not in memory.
        device: Where the parameters are used.
        updates_on_host: Whether steps update its values on the host.
    """

    is_on_device = False
    """Whether ``shard`` is on the device where the parameters are used."""
    is_in_memory = True
    """Whether ``shard`` always has its values."""
    format = "none"
    """The wire format in which the values are stored. Another one than "none": :meth:`gather` sends them so."""

    def __init__(self, shard: Tensor, device: torch.device, *, updates_on_host: bool) -> None:
        self.shard, self.device = shard, device
        self._updates_on_host = updates_on_host

    def _runs_on_host(self, device: torch.device | None) -> bool:
        """Whether an update on ``device`` runs on the host; without a GPU the device does not tell."""
        if device is None or self.device.type == "cpu":
            return self._updates_on_host
        return device.type == "cpu"

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Ranges that cover the shard, and for which :meth:`target` needs no copy."""
        return [(0, self.shard.numel())]

    @abstractmethod
    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Memory for new values of elements ``[start, stop)``, in the parameters' dtype; its contents are undefined.

        Pass each range to :meth:`written` before an overlapping one is requested again.

        Args:
            start: First element.
            stop: End of the range.
            device: Where the update of these elements runs; default: where steps run.
        """

    def written(self, start: int, stop: int) -> None:  # noqa: B027  (as below: not every storage has to do this)
        """The memory that :meth:`target` returned for this range is filled: start storing it."""

    def flush(self) -> None:  # noqa: B027
        """Wait until everything written is stored.

        Raises:
            OSError: A write failed.
        """

    def on_stream(self) -> AbstractContextManager[object]:
        """The stream on which to call :meth:`fetch` and the exchange that sends its result.

        On another stream the exchange would not wait for the copy, and send what was in the buffer before.
        """
        return nullcontext()

    def join(self) -> None:  # noqa: B027
        """Let the current stream wait for what was enqueued in :meth:`on_stream`.

        Call it after a synchronous exchange, which returns no work to wait for.
        """

    @abstractmethod
    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:
        """Elements ``[start, stop)`` on the device, for an exchange; ``row`` is their place in the full parameters."""

    def gather(self, cut: tuple[int, int], columns: Tensor, *, async_op: bool) -> Work | None:
        """Fill ``columns`` [world_size, n] of part ``cut`` from every rank, as they are stored. Collective."""
        raise NotImplementedError

    def parts(self, first: int = 0) -> Sequence[PageRange]:  # noqa: ARG002
        """The pages of files that a gather reads, from exchange number ``first`` on."""
        return ()

    def fetched(self) -> None:  # noqa: B027
        """The exchanges that send what :meth:`fetch` returned are complete: its buffers may be reused."""

    def settle(self) -> None:  # noqa: B027
        """Wait until no copy in flight reads ``shard``, before the host writes there. :meth:`target` calls it."""

    def in_memory(self) -> AbstractContextManager[None]:
        """Within the block, ``shard`` has its values."""
        return nullcontext()

    def read(self) -> Tensor:
        """The values; do not change them."""
        with self.in_memory():
            return self.shard.detach()

    def keep(self) -> None:  # noqa: B027
        """Store the values of ``shard``, which are in memory and were changed."""

    @property
    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes stored, by tier."""


class OnDemandShard(ShardStorage):
    """A shard that has its values only within :meth:`in_memory`, which may be nested."""

    is_in_memory = False

    def __init__(self, shard: Tensor, device: torch.device, *, updates_on_host: bool) -> None:
        super().__init__(shard, device, updates_on_host=updates_on_host)
        self._empty = shard.data
        self._depth = 0

    @abstractmethod
    def _read(self) -> Tensor:
        """All values, in newly allocated memory."""

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Read the full shard into memory.

        Raises:
            OSError: Its file cannot be read.
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


class InMemoryShard(ShardStorage):
    """A shard whose values stay in one tensor, here in device memory.

    An update on the other side (on the host) writes into memory of its own, which ``written`` copies. Nobody has to
    wait for the copy: later kernels are on the same stream.
    """

    is_on_device = True
    tier = "device"
    link = "to_device"
    """The direction in which values are copied that were updated on the other side."""

    def __init__(self, shard: Tensor, *, updates_on_host: bool = False) -> None:
        super().__init__(shard, shard.device, updates_on_host=updates_on_host)
        self._staged: dict[tuple[int, int], Tensor | None] = {}
        """Ranges that are updated on the other side, with the memory there; None: in the same memory."""

    def _crosses(self, *, on_host: bool) -> bool:
        return on_host

    def _other_side(self) -> torch.device | None:
        """The device of an update on the other side; None: in the same memory."""
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
        """Copy what was staged. The host does not wait: later work of the same stream runs after the copy."""
        if (start, stop) not in self._staged:
            return
        staged, own = self._staged.pop((start, stop)), self.shard[start:stop]
        record(KIND, self.link, own.numel() * own.element_size())
        if staged is not None:
            own.copy_(staged, non_blocking=own.is_cuda)

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:  # noqa: ARG002
        """Elements of the shard itself."""
        return self.shard[start:stop]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the tensor."""
        return {self.tier: self.shard.numel() * self.shard.element_size()}


class HostShard(InMemoryShard):
    """A shard in host memory, page-locked where there is CUDA, and copied to the device for each gather."""

    is_on_device = False
    tier = "cpu"
    link = "to_host"

    def __init__(self, shard: Tensor, copies: CopyStream, *, updates_on_host: bool = True) -> None:
        super().__init__(shard, updates_on_host=updates_on_host)
        self.device, self._copies = copies.device, copies
        self._last_fetch: torch.cuda.Event | None = None

    def _crosses(self, *, on_host: bool) -> bool:
        return not on_host

    def _other_side(self) -> torch.device | None:
        return self.device if self.device.type == "cuda" else None

    def on_stream(self) -> AbstractContextManager[object]:
        """The copy stream."""
        return self._copies.on_stream()

    def join(self) -> None:
        """Let the current stream wait for the copy stream."""
        self._copies.join()

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:
        """Fill ``row`` from host memory."""
        record(KIND, "to_device", row.numel() * row.element_size())
        row.copy_(self.shard[start:stop], non_blocking=True)
        self._last_fetch = self._copies.event()
        return row

    def settle(self) -> None:
        """Wait for the last copy to the device. A step ends after its copies; an evaluation may end before them."""
        if self._last_fetch is not None:
            self._last_fetch.synchronize()
            self._last_fetch = None

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Elements of the shard itself, which the host may write now, unless the update runs on the device."""
        if not self._crosses(on_host=self._runs_on_host(device)):
            self.settle()
        return super().target(start, stop, device)


class QuantizedShard(OnDemandShard):
    """A shard of frozen parameters in INT8: one :class:`zcomm.EncodedShard` for each exchange of a gather.

    No step updates it. If values are changed by hand, the parts with a changed value are encoded again; the others keep
    their bits.

    Args:
        values: The shard's values on the device; the tensor is not kept.
        cuts: The parts, one for each exchange of a gather.
        topology: The ranks.
        keeps_on: Where the codes are stored.
    """

    format = "int8"

    def __init__(
        self, values: Tensor, cuts: Sequence[tuple[int, int]], topology: Topology, *, keeps_on: torch.device
    ) -> None:
        super().__init__(placeholder(values.numel(), values.dtype), values.device, updates_on_host=False)
        self._tier = "device" if keeps_on == values.device else "cpu"
        self._parts = {
            (start, stop): EncodedShard(values[start:stop], topology, device=keeps_on) for start, stop in cuts
        }

    def gather(self, cut: tuple[int, int], columns: Tensor, *, async_op: bool) -> Work | None:
        """Fill ``columns`` [world_size, n] of part ``cut`` from every rank. Collective."""
        return self._parts[cut].gather(columns, numbering="local", async_op=async_op)

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:  # noqa: ARG002
        """Refuse: no step updates frozen parameters."""
        raise StateError("frozen parameters stored in INT8 cannot be updated")

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:  # noqa: ARG002
        """A part, decoded."""
        return self._parts[start, stop].decode(self.device)

    def _read(self) -> Tensor:
        return torch.cat([part.decode(self.device) for part in self._parts.values()])

    def keep(self) -> None:
        """Encode the parts with changed values again."""
        for (start, stop), part in self._parts.items():
            values = self.shard[start:stop].detach()
            if not torch.equal(part.decode(self.device), values):
                part.set(values)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of codes and scales."""
        return {self._tier: sum(part.nbytes for part in self._parts.values())}
