"""A shard stored in a file of this rank.

    elements   | part 0          | part 1          | ... one for each exchange of a gather
    file       | pages of part 0 | pages of part 1 | ...

A part goes to the file as soon as updates have written all of it. :meth:`FileShard.flush` fills in a part that is only
partly written with the values in the file, for a file is written in whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero._storage.file_store import StoredFile, pages
from zero._storage.host_memory import CopyStream
from zero._storage.shard_storage import KIND, OnDemandShard
from zero._storage.staging_buffers import PageRange, StagingBuffers
from zero._storage.transfer_counters import record

HOST = torch.device("cpu")


def file_nbytes(cuts: Sequence[tuple[int, int]], itemsize: int) -> int:
    """Bytes of the file for a shard that is divided at ``cuts``."""
    return sum(_part_nbytes(cut, itemsize) for cut in cuts)


def _part_nbytes(cut: tuple[int, int], itemsize: int) -> int:
    """At least one page: a rank whose shard is empty reads and writes as many parts as the others."""
    return pages(max((cut[1] - cut[0]) * itemsize, 1))


@dataclass(slots=True)
class _Written:
    """New values of a part that is not complete yet."""

    buffer: Tensor
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """The ranges written so far, counted from the start of the shard."""


class FileShard(OnDemandShard):
    """A shard in ``file``.

    Args:
        shard: Its tensor, without values.
        file: Has :func:`file_nbytes` bytes.
        cuts: The parts, ``(start, stop)``.
        staging: Host buffers between the file and exchanges.
        copies: The stream of copies to the device.
        gaps: Ranges of padding: they are zero, and no update writes them.
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
        self.file, self._cuts, self._staging, self._copies = file, list(cuts), staging, copies
        self._gaps = gaps
        self._parts: dict[tuple[int, int], PageRange] = {}
        offset = 0
        for start, stop in cuts:
            nbytes = _part_nbytes((start, stop), shard.element_size())
            self._parts[start, stop] = PageRange(file, offset, nbytes)
            offset += nbytes
        self._written: dict[tuple[int, int], _Written] = {}
        self._targets: dict[tuple[int, int], Tensor] = {}
        """Memory that updates write to, where that is not a view of a part's buffer."""
        self._crossing: set[tuple[int, int]] = set()
        self._sent: list[Tensor] = []

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The parts, ``(start, stop)``."""
        return self._cuts

    def parts(self, first: int = 0) -> list[PageRange]:
        """The pages that the exchanges of a gather read, from exchange number ``first`` on."""
        return list(self._parts.values())[first:]

    def target(self, start: int, stop: int, device: torch.device | None = None) -> Tensor:
        """Host memory; device memory if the update runs on a GPU."""
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
        """The buffer for new values of a part."""
        if cut not in self._written:
            # What was read ahead of this part is out of date from here on.
            self._staging.drop(self._parts[cut])
            written = self._written[cut] = _Written(self._staging.buffer(self._parts[cut].nbytes))
            written.buffer.zero_()
            written.ranges += [(max(a, cut[0]), min(b, cut[1])) for a, b in self._gaps if a < cut[1] and b > cut[0]]
        return self._as_values(self._written[cut].buffer, cut)

    def _as_values(self, buffer: Tensor, cut: tuple[int, int]) -> Tensor:
        return buffer.view(self.shard.dtype)[: cut[1] - cut[0]]

    def written(self, start: int, stop: int) -> None:
        """Start writing the parts that are complete now."""
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
        """The ranges of a part that no update has written."""
        at, missing = cut[0], []
        for start, stop in [*sorted(written.ranges), (cut[1], cut[1])]:
            if at < start:
                missing.append((at, start))
            at = max(at, stop)
        return missing

    def _send(self, cut: tuple[int, int]) -> None:
        self._staging.write(self._parts[cut], self._written.pop(cut).buffer)

    def _complete(self) -> None:
        """Write the parts that are only partly updated, with the old values of the rest."""
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
        """Wait until everything written is in the file.

        Raises:
            OSError: A write failed; with path, errno, offset and bytes.
        """
        self._complete()
        self._staging.flush()
        self._staging.raise_error()

    def on_stream(self) -> AbstractContextManager[object]:
        """The copy stream."""
        return self._copies.on_stream()

    def join(self) -> None:
        """Let the current stream wait for the copy stream."""
        self._copies.join()

    def fetch(self, start: int, stop: int, row: Tensor) -> Tensor:
        """The values of a part; NaN if it cannot be read, so that the exchange takes place on every rank (B3)."""
        self._complete()
        self._staging.has_fetched = True
        buffer = self._staging.take(self._parts[start, stop])
        record(KIND, "to_device", row.numel() * row.element_size())
        if buffer is None:
            return row.fill_(float("nan"))
        values = self._as_values(buffer, (start, stop))
        if row.is_cuda:
            row.copy_(values, non_blocking=True)
            # Given back at once, the next read would overwrite the buffer while the copy reads it
            # (tests/zero/test_copy_streams.py).
            self._staging.give(buffer, self._copies.event())
            return row
        self._sent.append(buffer)  # the exchange reads it: see fetched()
        return values

    def fetched(self) -> None:
        """Give back the buffers that the exchanges have read."""
        while self._sent:
            self._staging.give(self._sent.pop())

    def _read(self) -> Tensor:
        self._complete()
        values = torch.empty(self._empty.shape, dtype=self.shard.dtype)
        for (start, stop), part in self._parts.items():
            buffer = self._staging.take(part)
            if buffer is None:
                self._staging.raise_error()
                raise OSError(f"a shard's file cannot be read: path={part.file.path}")
            values[start:stop] = self._as_values(buffer, (start, stop))
            self._staging.give(buffer)
        return values

    def store(self, values: Tensor) -> None:
        """Start writing ``values`` of the full shard to the file."""
        for start, stop in self._cuts:
            self.target(start, stop, HOST).copy_(values[start:stop])
            self.written(start, stop)

    def keep(self) -> None:
        """Write the full shard to the file."""
        self.store(self.shard)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the file."""
        return {"nvme": self.file.nbytes}
