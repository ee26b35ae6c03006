"""Saved inputs in files of this rank: written behind the forward, read ahead of the backward.

    store    device -> buffer -> file        at most MAX_WRITES_IN_FLIGHT; then the oldest is waited for
    fetch    file -> buffer -> device        started while backward computes the function that comes before it

Files are reused for later inputs of the same size: after the first step none is created.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from zcomm import Topology
from zero._activations.activation_settings import ActivationSettings
from zero._activations.arena import LiveCheckpoint
from zero._activations.memory_storage import StoredValues
from zero._activations.usage import ActivationMemory, ActivationUsage
from zero._storage import transfer_counters
from zero._storage.file_store import FileStore, StoredFile, Transfer

MAX_WRITES_IN_FLIGHT = 4


class FileInputStorage:
    """Stores inputs in files below ``settings.path``.

    Args:
        settings: Folder, and how files are read and written.
        topology: Ranks that create their folders together; None: this process alone.

    Raises:
        OSError: On every rank, with path and errno: the folder is missing, not a folder, or read-only.
    """

    def __init__(self, settings: ActivationSettings, topology: Topology | None) -> None:
        assert settings.path is not None, "checked when the configuration was read"
        self.usage = ActivationUsage()
        self._store = FileStore(settings.path, files=settings.files, name="activations", topology=topology)
        self._free: dict[int, list[StoredFile]] = {}
        self._writes: deque[_PendingWrite] = deque()
        self.dropped: deque[tuple[StoredFile, _PendingWrite, tuple[Transfer, Tensor] | None]] = deque()
        """Files of inputs that are gone, with the transfers on them. A garbage collection may drop an input while this
        thread holds a lock of the store: what frees a file, which waits and takes that lock, cannot run in it."""

    def start_checkpoint(self, nbytes: int, device: torch.device) -> LiveCheckpoint | None:  # noqa: ARG002
        return None  # files need no arena

    def store(self, values: Tensor, checkpoint: LiveCheckpoint | None) -> StoredValues:  # noqa: ARG002
        """Start writing a copy of ``values`` [n].

        Raises:
            OSError: No space is left, or an earlier write has failed. With path, errno, bytes and free space.
        """
        self._free_dropped()
        nbytes = values.numel() * values.element_size()
        # Each write holds a buffer of host memory until it ends: without a limit, a forward faster than the disk would
        # collect all inputs in host memory.
        while len(self._writes) >= MAX_WRITES_IN_FLIGHT:
            self._writes.popleft().finish()
        file = self._take_file(nbytes)
        buffer = self._store.buffer(nbytes)
        buffer[:nbytes].view(values.dtype).copy_(values)
        transfer_counters.record("activations", "to_host", nbytes)
        write = _PendingWrite(self._store, self._store.write(file, 0, buffer), buffer)
        self._writes.append(write)
        return _FileInput(self, file, write, values)

    def memory(self) -> ActivationMemory:
        return self.usage.report(0, 0)

    def reset(self) -> None:
        """Delete the free files."""
        self._free_dropped()
        while self._free:
            for file in self._free.popitem()[1]:
                self._store.remove(file)

    def close(self) -> None:
        self._writes.clear()
        self.dropped.clear()
        self._free.clear()
        self._store.close()

    def read(self, file: StoredFile, nbytes: int) -> tuple[Transfer, Tensor]:
        buffer = self._store.buffer(nbytes)
        return self._store.read(file, 0, buffer), buffer

    def free_buffer(self, buffer: Tensor) -> None:
        self._store.give(buffer)

    def _free_dropped(self) -> None:
        while self.dropped:
            file, write, reading = self.dropped.popleft()
            # The file and the buffer may be reused only after the transfers on them have ended. Errors do not matter
            # here: nobody needs the values any more.
            with suppress(OSError):
                write.finish()
            if reading is not None:
                with suppress(OSError):
                    reading[0].wait()
                self.free_buffer(reading[1])
            self._free.setdefault(file.nbytes, []).append(file)

    def _take_file(self, nbytes: int) -> StoredFile:
        for free in self._free.values():
            if free and nbytes <= free[-1].nbytes <= nbytes + 4096:
                return free.pop()
        file = self._store.create(f"input{self.usage.num_allocations}", nbytes)
        self.usage.num_allocations += 1
        return file


class _PendingWrite:
    """A write in flight."""

    def __init__(self, store: FileStore, transfer: Transfer, buffer: Tensor) -> None:
        self._store, self._transfer = store, transfer
        self._buffer: Tensor | None = buffer

    def finish(self) -> None:
        """Wait for the write; raises OSError if it failed. Called again it does nothing."""
        self._transfer.wait()
        if self._buffer is not None:
            self._store.give(self._buffer)
            self._buffer = None


class _FileInput:
    """An input in a file."""

    def __init__(self, storage: FileInputStorage, file: StoredFile, write: _PendingWrite, values: Tensor) -> None:
        self._storage, self._file, self._write = storage, file, write
        self._numel, self._dtype, self._device = values.numel(), values.dtype, values.device
        self._nbytes = values.numel() * values.element_size()
        self._counted = storage.usage.count("files", self._nbytes)
        self._reading: tuple[Transfer, Tensor] | None = None

    def prefetch(self) -> None:
        if self._reading is None:
            self._write.finish()  # or the read could return the bytes of the input that had the file before
            self._reading = self._storage.read(self._file, self._nbytes)

    def fetch(self) -> Tensor:
        """The values, on their device.

        Raises:
            OSError: The read failed, or the write before it; IntegrityError if the checksum does not match.
        """
        self.prefetch()
        assert self._reading is not None, "prefetch starts the read"
        (transfer, buffer), self._reading = self._reading, None
        try:
            transfer.wait()
            values = buffer[: self._nbytes].view(self._dtype).to(self._device, copy=True)
        finally:
            self._storage.free_buffer(buffer)
        transfer_counters.record("activations", "to_device", self._nbytes)
        return values

    def __del__(self) -> None:
        self._storage.dropped.append((self._file, self._write, self._reading))
