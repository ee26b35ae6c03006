"""Saved inputs in files of this rank: written behind the forward, read ahead of the backward.

    keep     device -> buffer -> file        at most MAX_WRITES on their way; then the oldest is waited for
    fetch    file -> buffer -> device        begun while what comes before it in backward is computed

Files are kept for later inputs of the same size: after the first step none is made.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from zcomm import StateError, Topology
from zero._activations.activation_settings import ActivationSettings
from zero._activations.arena import Ticket
from zero._activations.memory_storage import Rest
from zero._activations.usage import ActivationMemory, ActivationUsage
from zero._storage import transfer_counters
from zero._storage.file_store import FileStore, StoredFile, Transfer

MAX_WRITES = 4


class FilePlace:
    """The files below ``settings.path``.

    Args:
        settings: Folder, and how files are read and written.
        topology: Ranks that make their places together; None: this process alone.

    Raises:
        OSError: On every rank, with path and errno: the folder is missing, no folder, or read-only.
    """

    def __init__(self, settings: ActivationSettings, topology: Topology | None) -> None:
        assert settings.path is not None, "checked when the configuration was read"
        self.usage = ActivationUsage()
        self._store = FileStore(settings.path, files=settings.files, name="activations", topology=topology)
        self._free: dict[int, list[StoredFile]] = {}
        self._writes: deque[_Write] = deque()

    def admit(self, nbytes: int, device: torch.device) -> Ticket | None:  # noqa: ARG002
        """None: files need no common buffer."""
        return None

    def keep(self, values: Tensor, ticket: Ticket | None) -> Rest:  # noqa: ARG002
        """Begin to write a copy of ``values`` [n].

        Raises:
            OSError: There is no space for it; or a write before it has failed. With path, errno, bytes and free space.
        """
        nbytes = values.numel() * values.element_size()
        while len(self._writes) >= MAX_WRITES:
            self._writes.popleft().finish()
        file = self._take_file(nbytes)
        buffer = self._store.buffer(nbytes)
        buffer[:nbytes].view(values.dtype).copy_(values)
        transfer_counters.record("activations", "to_host", nbytes)
        write = _Write(self._store, self._store.write(file, 0, buffer), buffer)
        self._writes.append(write)
        return _FileInput(self, file, write, values)

    def memory(self) -> ActivationMemory:
        """What is held."""
        return self.usage.report(0, 0)

    def reset(self) -> None:
        """Delete the files that are free."""
        while self._free:
            for file in self._free.popitem()[1]:
                self._store.remove(file)

    def close(self) -> None:
        """Delete all files."""
        self._writes.clear()
        self._free.clear()
        self._store.close()

    def read(self, file: StoredFile, nbytes: int) -> tuple[Transfer, Tensor]:
        """Begin to read."""
        buffer = self._store.buffer(nbytes)
        return self._store.read(file, 0, buffer), buffer

    def give_buffer(self, buffer: Tensor) -> None:
        """It is free."""
        self._store.give(buffer)

    def give_file(self, file: StoredFile) -> None:
        """It is free."""
        self._free.setdefault(file.nbytes, []).append(file)

    def _take_file(self, nbytes: int) -> StoredFile:
        for free in self._free.values():
            if free and nbytes <= free[-1].nbytes <= nbytes + 4096:
                return free.pop()
        file = self._store.create(f"input{self.usage.num_allocations}", nbytes)
        self.usage.num_allocations += 1
        return file


class _Write:
    """A write on its way."""

    def __init__(self, store: FileStore, transfer: Transfer, buffer: Tensor) -> None:
        self._store, self._transfer = store, transfer
        self._buffer: Tensor | None = buffer

    def finish(self) -> None:
        """Wait for it."""
        self._transfer.wait()
        if self._buffer is not None:
            self._store.give(self._buffer)
            self._buffer = None


class _FileInput:
    """Values in a file."""

    def __init__(self, place: FilePlace, file: StoredFile, write: _Write, values: Tensor) -> None:
        self._place, self._file, self._write = place, file, write
        self._numel, self._dtype, self._device = values.numel(), values.dtype, values.device
        self._nbytes = values.numel() * values.element_size()
        self._holding = place.usage.hold("files", self._nbytes)
        self._reading: tuple[Transfer, Tensor] | None = None

    def prefetch(self) -> None:
        """Begin to read."""
        if self._reading is None:
            self._write.finish()
            self._reading = self._place.read(self._file, self._nbytes)

    def fetch(self) -> Tensor:
        """The values.

        Raises:
            OSError: Reading, or the write before it, has failed; IntegrityError if other bytes came back.
        """
        self.prefetch()
        assert self._reading is not None, "prefetch begins to read"
        (transfer, buffer), self._reading = self._reading, None
        transfer.wait()
        values = buffer[: self._nbytes].view(self._dtype).to(self._device, copy=True)
        transfer_counters.record("activations", "to_device", self._nbytes)
        self._place.give_buffer(buffer)
        return values

    def __del__(self) -> None:
        with suppress(OSError, StateError):  # the values are dropped; or the files are gone
            self._write.finish()
            if self._reading is not None:
                transfer, buffer = self._reading
                transfer.wait()
                self._place.give_buffer(buffer)
            self._place.give_file(self._file)
