"""Files of one rank with checksums, read and written asynchronously by direct I/O (past the page cache).

    PATH/zero-JOB-NAME-rankR/FILE    mode 600 in a folder of mode 700; layout in cpp/include/zcomm/checked_file.h

F1 Space is reserved when a file is created: a later write cannot run out of it.
F2 Every page read is compared with the checksum of what was written there; a mismatch raises IntegrityError.
F3 A write that failed is never reported as done. Reading its pages raises IntegrityError, unless they have the bytes
   that were to be written.
F4 The folder is removed when the store is closed or the interpreter exits. The next store at the same path removes the
   folder of a process that was killed.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from zcomm import IntegrityError, LayoutError, StateError, Topology, control
from zcomm._base.rank_context import threads
from zcomm._kernels import kernels
from zero._ranks.rank_errors import on_every_rank
from zero._storage import transfer_counters
from zero._storage.process_folder import ClaimedFolder
from zero._storage.tier_settings import FileSettings, Tiers
from zero._storage.transfer_buffers import HostBuffers

Result = TypeVar("Result")
MAX_REQUESTS = 256  # in flight
PAGE = 4096


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a store."""

    path: Path
    nbytes: int
    """Room for data: the requested bytes, rounded up to whole pages of 4096 bytes."""
    number: int = field(repr=False)


@dataclass
class _OpenStore:
    """The state of an open store. Its finalizer and its transfers refer to this, not to the store itself.

    A finalizer that referred to the store would keep it alive for good.
    """

    queue: Any
    folder: ClaimedFolder
    pid: int
    files: dict[str, StoredFile] = field(default_factory=dict)
    in_flight: dict[int, Tensor] = field(default_factory=dict)
    """Buffers by ticket: a buffer freed before its transfer ends would be written to by the kernel's I/O."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        # A forked process has none of the queue's threads: a wait would deadlock, and the folder is the parent's.
        if os.getpid() != self.pid or self.queue is None:
            return
        try:
            for ticket in list(self.in_flight):
                with suppress(OSError, ValueError):  # the data are discarded; another thread may have waited for it
                    self.queue.wait(ticket)
            self.in_flight.clear()
        finally:
            self.queue = None
            self.folder.remove()


class Transfer:
    """A transfer in flight between a buffer and a file. Thread-safe."""

    def __init__(self, store: _OpenStore, ticket: int, file: StoredFile) -> None:
        self._store = store
        self._ticket: int | None = ticket
        self._file = file
        self._error: OSError | None = None
        self._lock = threads().Lock()  # held while it waits

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return or raise at once."""
        with self._lock:
            queue = self._store.queue
            if self._ticket is None or queue is None or os.getpid() != self._store.pid:
                return True
            try:
                return bool(queue.is_done(self._ticket))
            except ValueError:  # close() has just waited for it
                return True

    def wait(self) -> None:
        """Wait until all bytes are transferred. Call it before the buffer is used or given back; repeated calls agree.

        Raises:
            IntegrityError: Checksum mismatch: the pages read are not what was written.
            OSError: The system refused a request, or moved fewer bytes. It has errno and path; its text has offset and
                bytes, and the free space if that was the reason.
            StateError: The store was closed meanwhile.
        """
        with self._lock:
            if self._ticket is not None:
                self._end(self._ticket)
            if self._error is not None:
                raise self._error

    def _closed(self) -> StateError:
        return StateError(f"a store must stay open until its transfers complete: path={self._file.path}")

    def _end(self, ticket: int) -> None:
        queue = self._store.queue  # close() may take it away at any moment
        if queue is None:
            raise self._closed()
        if os.getpid() != self._store.pid:  # a forked process has no thread that completes it
            raise StateError(f"a transfer must be waited for by the process that started it: path={self._file.path}")
        try:
            queue.wait(ticket)
        except OSError as error:
            self._error = _explained(error, self._file.path)
        except ValueError:  # close() has waited for it
            raise self._closed() from None
        self._ticket = None
        with self._store.lock:
            self._store.in_flight.pop(ticket, None)


class FileStore:
    """The files of this rank below ``folder``. Thread-safe.

    Ranges of one file that are in flight at the same time must not overlap.

    Args:
        folder: An existing folder on a fast disk; ranks and jobs may share it.
        files: Bytes per request, and requests in flight.
        name: Kind of the data, under which transfers are counted (transfer_counters.py).
        topology: The ranks that construct their stores together (collective); None: this process alone.
        pins_memory: Page-lock buffers where there is CUDA.

    Raises:
        OSError: On every rank of ``topology``, with path and errno: the folder is missing, not a folder, or read-only.
    """

    def __init__(
        self, folder: str | Path, *, files: FileSettings, name: str, topology: Topology | None, pins_memory: bool = True
    ) -> None:
        self.name = name
        self.buffers = HostBuffers(pins_memory=pins_memory)
        self._topology = topology
        job, rank = secrets.token_hex(4), 0
        if topology is not None:
            job, rank = control.gather_texts(job, topology)[0], topology.rank
        opened: list[_OpenStore] = []
        try:
            self._on_every_rank(lambda: opened.append(_open_store(Path(folder), f"{job}-{name}-rank{rank}", files)))
        except BaseException:  # from this rank, or from another: then this rank's folder must go, too
            for store in opened:
                store.close()
            raise
        (self._open,) = opened
        self.folder = self._open.folder.path
        self._finalizer = weakref.finalize(self, self._open.close)

    def _on_every_rank(self, call: Callable[[], Result]) -> Result:
        return call() if self._topology is None else on_every_rank(call, self._topology)

    def create(self, name: str, nbytes: int) -> StoredFile:
        """Create a file of ``nbytes`` zeros. Not collective.

        Raises:
            OSError: With path and errno. If there is not enough space (ENOSPC), with the bytes needed and free.
            LayoutError: The store has a file of this name, or the name is not a plain file name.
        """
        store = self._opened()
        path = self.folder / name
        if name in store.files or path.parent != self.folder or name == "owner":
            raise LayoutError(f"name must be that of a new file, without folders: name={name!r}")
        needed = _needed_nbytes(nbytes)
        _check_space(self.folder, needed)
        try:
            number = store.queue.create(str(path), nbytes, is_checked=True)
        except OSError as error:  # another process took the space since the check, or a quota is smaller
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(self.folder, needed) from error
            raise
        file = store.files[name] = StoredFile(path, int(store.queue.size(number)), number)
        return file

    def create_all(self, nbytes_of: Mapping[str, int]) -> dict[str, StoredFile]:
        """Create files by name, on every rank of the topology or on none. Collective.

        Raises:
            OSError: On every rank, if :meth:`create` failed on any; the bytes needed are those of all files together.
        """
        created: dict[str, StoredFile] = {}

        def create() -> None:
            self._opened()
            _check_space(self.folder, sum(_needed_nbytes(nbytes) for nbytes in nbytes_of.values()))
            for name, nbytes in nbytes_of.items():
                created[name] = self.create(name, nbytes)

        try:
            self._on_every_rank(create)
        except BaseException:
            for file in created.values():
                self.remove(file)
            raise
        return created

    def sync(self, file: StoredFile) -> None:
        """Make what was written durable, together with its checksums, which are only in memory before.

        Raises:
            OSError: With path and errno.
        """
        # fsync: direct I/O bypasses the page cache, not the disk's own cache or the file's metadata.
        self._opened().queue.sync(file.number)

    def remove(self, file: StoredFile) -> None:
        """Close and delete a file that has no transfer in flight."""
        store = self._opened()
        store.queue.close(file.number)
        del store.files[file.path.name]
        file.path.unlink()

    def buffer(self, nbytes: int) -> Tensor:
        """Memory for transfers: uint8, ``nbytes`` rounded up to whole pages; its contents are undefined.

        Raises:
            MemoryError: There is not enough host memory.
        """
        return self.buffers.take(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Take back what :meth:`buffer` returned.

        Raises:
            StateError: A transfer of it is in flight: it would write into the buffer of its next user.
        """
        start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()
        with self._open.lock:
            if any(start <= moving.data_ptr() < stop for moving in self._open.in_flight.values()):
                raise StateError("wait for the transfers of a buffer before giving it back")
        self.buffers.give(buffer)

    def write(self, file: StoredFile, offset: int, buffer: Tensor) -> Transfer:
        """Start writing ``buffer``, a uint8 tensor of whole pages, at ``offset``, a multiple of 4096."""
        return self._start_transfer("write", file, offset, buffer)

    def read(self, file: StoredFile, offset: int, buffer: Tensor) -> Transfer:
        """Start reading into ``buffer``, a uint8 tensor of whole pages, from ``offset``, a multiple of 4096."""
        return self._start_transfer("read", file, offset, buffer)

    def _start_transfer(self, verb: str, file: StoredFile, offset: int, buffer: Tensor) -> Transfer:
        transfer_counters.record(self.name, verb, buffer.numel())
        store = self._opened()
        page = int(kernels.native().FILE_ALIGNMENT)
        if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise LayoutError(f"buffer must be contiguous uint8 in host memory: {buffer.dtype}, {buffer.device}")
        if buffer.data_ptr() % page or buffer.numel() % page or offset % page:
            raise LayoutError(
                f"offset, nbytes and address must be multiples of {page}: offset={offset}, nbytes={buffer.numel()}"
            )
        if not 0 <= offset <= file.nbytes - buffer.numel():
            raise LayoutError(
                f"offset + nbytes must be in the file: offset={offset}, nbytes={buffer.numel()}, file={file.nbytes}"
            )
        with store.lock:  # give() must not see the transfer without its buffer
            ticket = getattr(store.queue, verb)(file.number, offset, buffer.data_ptr(), buffer.numel())
            store.in_flight[ticket] = buffer
        return Transfer(store, ticket, file)

    def close(self) -> None:
        """Wait for transfers in flight, and remove the files. A second call does nothing."""
        self._finalizer()
        self.buffers.clear()

    def _opened(self) -> _OpenStore:
        if self._open.queue is None:
            raise StateError(f"the store is closed: {self.folder}")
        if os.getpid() != self._open.pid:
            raise StateError(
                f"a store must be used by the process that opened it: opened by pid={self._open.pid}: {self.folder}"
            )
        return self._open


def store_with(
    path: str | None, nbytes_of: Mapping[str, int], tiers: Tiers, *, name: str, topology: Topology
) -> tuple[FileStore, dict[str, StoredFile]]:
    """Open the store of ``name`` below ``path`` with these files, on every rank or on none. Collective."""
    assert path is not None, f"{name} in files without a folder"
    store = FileStore(path, files=tiers.files, name=name, topology=topology, pins_memory=tiers.pins_memory)
    try:
        return store, store.create_all(nbytes_of)
    except BaseException:
        store.close()
        raise


def _open_store(parent: Path, name: str, files: FileSettings) -> _OpenStore:
    page = int(kernels.native().FILE_ALIGNMENT)
    request_nbytes = -(-files.request_nbytes // page) * page
    try:
        folder = ClaimedFolder(parent, name)
    except OSError as error:
        reason = f"the folder for files must exist and be writable: {error.strerror}"
        raise type(error)(error.errno, reason, str(parent)) from error
    try:
        return _OpenStore(
            kernels.file_queue(min(files.num_requests, MAX_REQUESTS), request_nbytes), folder, os.getpid()
        )
    except BaseException:
        folder.remove()
        raise


def _needed_nbytes(nbytes: int) -> int:
    return int(kernels.native().checked_file_nbytes(nbytes))


def _free_nbytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _check_space(folder: Path, needed: int) -> None:
    if needed > _free_nbytes(folder):
        raise _no_space(folder, needed)


def _no_space(folder: Path, needed: int) -> OSError:
    return OSError(errno.ENOSPC, f"{needed} bytes are needed and {_free_nbytes(folder)} are free", str(folder))


def _explained(error: OSError, path: Path) -> OSError:
    """The exception to raise for ``error`` of a transfer: with the free space, or as IntegrityError."""
    if error.errno == errno.EBADMSG:
        return IntegrityError(error.errno, error.strerror, str(path))
    text = error.strerror or ""
    with suppress(OSError):  # the folder may be gone, too
        text += f"; {_free_nbytes(path.parent)} bytes are free"
    return OSError(error.errno, text, str(path))
