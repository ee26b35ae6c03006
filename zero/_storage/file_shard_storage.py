"""A shard that rests in a file of this rank.

    elements   | part 0          | part 1          | ... as the exchanges of a gather cut the shard
    file       | pages of part 0 | pages of part 1 | ...

An update that has written all of a part sends it on; what :meth:`FileShard.flush` finds half written it completes with
what the file has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero._storage.copy_stream import CopyStream
from zero._storage.file_store import StoredFile
from zero._storage.shard_storage import KIND, Elsewhere
from zero._storage.staging_buffers import PageRange, StagingBuffers
from zero._storage.transfer_counters import record

PAGE_NBYTES = 4096
HOST = torch.device("cpu")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def file_nbytes(cuts: Sequence[tuple[int, int]], itemsize: int) -> int:
    """Bytes of the file of a shard that is cut into ``cuts``."""
    return sum(_round_up((stop - start) * itemsize) for start, stop in cuts)


@dataclass(slots=True)
class _Written:
    """New values of a part that has not gone on yet."""

    buffer: Tensor
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """What is there, from the start of the shard."""


class FileShard(Elsewhere):
    """A shard in ``file``.

    Args:
        shard: Its tensor, without values.
        file: Of :func:`file_nbytes`.
        cuts: The parts, ``(start, stop)``.
        staging: Buffers.
        copies: To the device.
        gaps: Padding, zero, which no update needs to write.
        updates_on_host: Whether steps update its values on the host.
    """

    def __init__(
        self,
        shard: Tensor,
        file: StoredFile,
        cuts: Sequence[tuple[int, int]],
        staging: StagingBuffers,
        copies: CopyStream,
        *,
        gaps: Sequence[tuple[int, int]] = (),
        updates_on_host: bool = True,
    ) -> None:
        super().__init__(shard, copies.device, updates_on_host=updates_on_host)
        self._file, self._cuts, self._staging, self._copies = file, list(cuts), staging, copies
        self._gaps = gaps
        self._parts: dict[tuple[int, int], PageRange] = {}
        offset = 0
        for start, stop in cuts:
            nbytes = _round_up((stop - start) * shard.element_size())
            self._parts[start, stop] = PageRange(file, offset, nbytes)
            offset += nbytes
        self._written: dict[tuple[int, int], _Written] = {}
        self._targets: dict[tuple[int, int], Tensor] = {}
        """Memory of updates that is no view of a part's buffer."""
        self._crossing: set[tuple[int, int]] = set()
        self._sent: list[Tensor] = []

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The parts."""
        return self._cuts

    def parts(self, first: int = 0) -> list[PageRange]:
        """What the exchanges of a gather take from number ``first`` on."""
        return list(self._parts.values())[first:]

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Host memory; on the device if the update runs there and that has memory of its own."""
        on_host = self._runs_on_host(device)
        if not on_host:
            self._crossing.add((start, stop))
        if not on_host and self.device.type == "cuda":
            target = torch.empty(stop - start, dtype=self.shard.dtype, device=self.device)
        else:
            cut = next((cut for cut in self._cuts if cut[0] <= start and stop <= cut[1]), None)
            if cut is not None:
                return self._values(cut)[start - cut[0] : stop - cut[0]]
            target = torch.empty(stop - start, dtype=self.shard.dtype)
        self._targets[start, stop] = target
        return target

    def _values(self, cut: tuple[int, int]) -> Tensor:
        """The new values of a part, as far as they are there."""
        if cut not in self._written:
            self._staging.drop(self._parts[cut])
            written = self._written[cut] = _Written(self._staging.buffer(self._parts[cut].nbytes))
            written.buffer.zero_()
            written.ranges += [(max(a, cut[0]), min(b, cut[1])) for a, b in self._gaps if a < cut[1] and b > cut[0]]
        return self._as_values(self._written[cut].buffer, cut)

    def _as_values(self, buffer: Tensor, cut: tuple[int, int]) -> Tensor:
        return buffer.view(self.shard.dtype)[: cut[1] - cut[0]]

    def written(self, start: int, stop: int) -> None:
        """Parts that are complete begin to be written."""
        target = self._targets.pop((start, stop), None)
        if (start, stop) in self._crossing:
            self._crossing.remove((start, stop))
            record(KIND, "to_host", (stop - start) * self.shard.element_size())
        for cut in self._cuts:
            low, high = max(start, cut[0]), min(stop, cut[1])
            if low >= high:
                continue
            if target is not None:
                self._values(cut)[low - cut[0] : high - cut[0]].copy_(target[low - start : high - start])
            written = self._written[cut]
            written.ranges.append((low, high))
            if not self._missing(cut, written):
                self._send(cut)

    def _missing(self, cut: tuple[int, int], written: _Written) -> list[tuple[int, int]]:
        """Ranges of a part that no update has written."""
        at, missing = cut[0], []
        for start, stop in [*sorted(written.ranges), (cut[1], cut[1])]:
            if at < start:
                missing.append((at, start))
            at = max(at, stop)
        return missing

    def _send(self, cut: tuple[int, int]) -> None:
        self._staging.write(self._parts[cut], self._written.pop(cut).buffer)

    def _complete(self) -> None:
        for cut, written in list(self._written.items()):
            missing = self._missing(cut, written)
            if missing:
                old = self._staging.take(self._parts[cut])
                if old is not None:
                    values, before = self._as_values(written.buffer, cut), self._as_values(old, cut)
                    for start, stop in missing:
                        values[start - cut[0] : stop - cut[0]] = before[start - cut[0] : stop - cut[0]]
                    self._staging.give(old)
            self._send(cut)

    def flush(self) -> None:
        """Wait until all that was written is in the file.

        Raises:
            OSError: It is not: with path, errno, offset and bytes.
        """
        self._complete()
        self._staging.flush()
        self._staging.raise_error()

    def on_stream(self) -> AbstractContextManager[object]:
        """The stream of the copies."""
        return self._copies.on_stream()

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:
        """What was read; a part that cannot be read is NaN (:mod:`zero._storage.staging_buffers`)."""
        self._complete()
        self._staging.has_fetched = True
        buffer = self._staging.take(self._parts[start, stop])
        record(KIND, "to_device", row.numel() * row.element_size())
        if buffer is None:
            return row.fill_(float("nan"))
        values = self._as_values(buffer, (start, stop))
        if row.is_cuda:
            row.copy_(values, non_blocking=True)
            self._staging.give(buffer, self._copies.event())
            return row
        self._sent.append(buffer)
        return values

    def fetched(self) -> None:
        """Give the buffers back."""
        while self._sent:
            self._staging.give(self._sent.pop())

    def _read(self) -> Tensor:
        self._complete()
        values = torch.empty(self._empty.shape, dtype=self.shard.dtype)
        parts = dict(self._parts)
        for (start, stop), part in parts.items():
            buffer = self._staging.take(part)
            if buffer is None:
                self._staging.raise_error()
                raise OSError(f"{part.file.path} could not be read")
            values[start:stop] = self._as_values(buffer, (start, stop))
            self._staging.give(buffer)
        return values

    def keep(self) -> None:
        """Write all of it."""
        for start, stop in self._cuts:
            self.target(start, stop, HOST).copy_(self.shard[start:stop])
            self.written(start, stop)

    @property
    def nbytes(self) -> dict[str, int]:
        """Of the file."""
        return {"nvme": self._file.nbytes}
