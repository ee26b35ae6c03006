"""``AsyncIOBuilder().load()``: DeepSpeed's asynchronous files over :class:`zcomm._native.FileQueue`.

```
 offset                                                                  offset + nbytes
   | head, to the next page | body: whole pages, past the page cache | tail |
```

The body is moved by the queue, from and to the tensor itself if that is contiguous in host memory and its body starts
at a page, else over a copy that does. Head and tail, less than a page each, go through the page cache at once; so does
all of a file that this process may only read, which the queue does not open.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zcomm import IntegrityError, LayoutError, StateError
from zcomm._kernels import kernels
from zero._storage.file_store import MAX_REQUESTS, PAGE
from zero._storage.transfer_buffers import aligned_bytes


class _FileMove(NamedTuple):
    moving: tuple[int, int] | None  # the queue's file and ticket; None: there are no whole pages
    data: Tensor  # uint8 [nbytes] in host memory, which the queue reads or writes
    end: Callable[[], None]


class aio_handle:  # noqa: N801  (DeepSpeed's name)
    """Reads and writes tensors of any device, dtype and number of bytes. Not thread-safe.

    Methods that DeepSpeed lets return -1 raise. A file that is written is created if there is none, and keeps what
    the tensor does not cover. ``validate`` compares the file with the tensor afterwards.

    Args:
        block_size: Bytes per request, rounded up to whole pages.
        queue_depth: Requests in flight for each of ``intra_op_parallelism``; at most 256 together.
        single_submit: Only for :meth:`get_single_submit`.
        overlap_events: Only for :meth:`get_overlap_events`.
        intra_op_parallelism: See ``queue_depth``.

    Raises:
        LayoutError: A number is not positive. From a read: the file ends before ``file_offset`` + the tensor's bytes.
        OSError: The operating system refuses something, with errno and path. From :meth:`wait`: a transfer failed.
        BackendUnavailableError: There are no native kernels.
        StateError: From reads, writes and :meth:`wait`: this is a fork of the process that made it.
    """

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        numbers = {
            "block_size": block_size, "queue_depth": queue_depth, "intra_op_parallelism": intra_op_parallelism
        }  # fmt: skip
        if bad := {name: value for name, value in numbers.items() if value < 1}:
            raise LayoutError(f"aio_handle takes positive numbers: {bad}")
        # The first attribute, so the first to be freed: it ends transfers before their memory goes.
        self._queue = kernels.file_queue(
            min(queue_depth * intra_op_parallelism, MAX_REQUESTS), -(-block_size // PAGE) * PAGE
        )
        self._pid = os.getpid()
        self._numbers, self._single_submit, self._overlap_events = numbers, single_submit, overlap_events
        self._pending: list[_FileMove] = []
        self._locked: dict[int, Tensor] = {}

    def get_block_size(self) -> int:
        """``block_size``, as given."""
        return self._numbers["block_size"]

    def get_queue_depth(self) -> int:
        """``queue_depth``, as given."""
        return self._numbers["queue_depth"]

    def get_single_submit(self) -> bool:
        """``single_submit``, which changes nothing."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """``overlap_events``, which changes nothing: transfers overlap."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """``intra_op_parallelism``, as given."""
        return self._numbers["intra_op_parallelism"]

    get_thread_count = get_intra_op_parallelism

    def get_alignment(self) -> int:
        """1: tensors and offsets may be of any number of bytes."""
        return 1

    def async_pread(self, buffer: Tensor, filename: Any, file_offset: int = 0) -> int:
        """Begin to read ``buffer``, whose contents are undefined until :meth:`wait`. Returns 0."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Tensor, filename: Any = None, file_offset: int = 0, *, fd: int | None = None) -> int:
        """Begin to write ``buffer``, to be left alone until :meth:`wait`, to a path or an open ``fd``. Returns 0."""
        return self.pwrite(buffer, filename if fd is None else fd, False, True, file_offset)

    def sync_pread(self, buffer: Tensor, filename: Any, file_offset: int = 0) -> int:
        """Read ``buffer``. Returns what :meth:`wait` does."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: Any, file_offset: int = 0) -> int:
        """Write ``buffer``. Returns what :meth:`wait` does."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def read(self, buffer: Tensor, filename: Any, validate: bool = False, file_offset: int = 0) -> int:
        """Read ``buffer``. Returns 0."""
        return 0 * self.pread(buffer, filename, validate, False, file_offset)

    def write(self, buffer: Tensor, filename: Any, validate: bool = False, file_offset: int = 0) -> int:
        """Write ``buffer``. Returns 0."""
        return 0 * self.pwrite(buffer, filename, validate, False, file_offset)

    def pread(self, buffer: Tensor, filename: Any, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """:meth:`async_pread` or :meth:`sync_pread`."""
        self._begin("read", buffer, filename, file_offset, validate=validate)
        return 0 if is_async else self.wait()

    def pwrite(self, buffer: Tensor, filename: Any, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """:meth:`async_pwrite` or :meth:`sync_pwrite`."""
        self._begin("write", buffer, filename, file_offset, validate=validate)
        return 0 if is_async else self.wait()

    def wait(self) -> int:
        """Return when all transfers have ended: how many there were. After an error none is left, either."""
        self._check_process()
        pending, self._pending, failed = self._pending, [], list[Exception]()
        for one in pending:
            try:
                if one.moving is not None:
                    self._end_moving(*one.moving)
                one.end()
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return len(pending)

    def _end_moving(self, file: int, ticket: int) -> None:
        try:
            self._queue.wait(ticket)
        finally:
            self._queue.close(file)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor [num_elem] of the dtype of ``example_tensor``, at a page; page-locked where there is CUDA."""
        nbytes = num_elem * example_tensor.element_size()
        made = aligned_bytes(nbytes, is_pinned=torch.cuda.is_available()).view(example_tensor.dtype)
        self._locked[made.data_ptr()] = made
        return made

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Let go of a tensor of :meth:`new_cpu_locked_tensor`; its memory goes with its last use. Whether it was."""
        return self._locked.pop(tensor.data_ptr(), None) is not None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # a fork has none of the queue's threads
            raise StateError(f"an aio_handle must be used by the process that made it: made by pid={self._pid}")

    def _begin(self, verb: str, buffer: Tensor, filename: Any, offset: int, *, validate: bool) -> None:
        self._check_process()
        path = f"/proc/self/fd/{filename}" if isinstance(filename, int) else os.fspath(filename)
        nbytes, is_read = buffer.nbytes, verb == "read"
        head = min(-offset % PAGE, nbytes)
        is_queued = not is_read or os.access(path, os.W_OK)
        body = (nbytes - head) // PAGE * PAGE if is_queued else 0
        descriptor = os.open(path, os.O_RDONLY if is_read else os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if offset < 0 or (is_read and offset + nbytes > size):
                raise LayoutError(
                    f"{path} cannot be {'read' if is_read else 'written'} there: file_offset={offset}, bytes of the "
                    f"tensor={nbytes}, of the file={size}"
                )
            data = _in_host_memory(buffer, head, is_filled=not is_read)
            for start, stop in ((0, head), (head + body, nbytes)):
                _move_at_once(descriptor, offset + start, data[start:stop], is_read=is_read)
        finally:
            os.close(descriptor)

        def end() -> None:
            if is_read and data.data_ptr() != buffer.data_ptr():
                # view() takes bytes that begin at a whole element of their memory.
                whole = data if data.storage_offset() % buffer.element_size() == 0 else data.clone()
                buffer.detach().copy_(whole.view(buffer.dtype).view(buffer.shape))
            if validate and not np.array_equal(np.fromfile(path, np.uint8, nbytes, offset=offset), data.numpy()):
                raise IntegrityError(errno.EBADMSG, "the file does not hold the tensor", str(path))

        moving = None
        if body:
            file = self._queue.open(str(path))
            moving = file, getattr(self._queue, verb)(file, offset + head, data.data_ptr() + head, body)
        self._pending.append(_FileMove(moving, data, end))


def _in_host_memory(buffer: Tensor, head: int, *, is_filled: bool) -> Tensor:
    """The bytes of ``buffer`` [nbytes], from ``head`` on at a page: itself, or memory that has its values if wanted."""
    own = buffer.detach()
    if own.device.type == "cpu" and own.is_contiguous() and (own.data_ptr() + head) % PAGE == 0:
        return own.view(-1).view(torch.uint8)
    start = -head % PAGE
    data = aligned_bytes(start + own.nbytes)[start:]
    if is_filled:
        data.copy_(own.contiguous().view(-1).view(torch.uint8))
    return data


def _move_at_once(descriptor: int, offset: int, data: Tensor, *, is_read: bool) -> None:
    """Move through the page cache."""
    move: Any = os.preadv if is_read else os.pwritev
    while data.numel():
        if not (moved := move(descriptor, [data.numpy()], offset)):
            raise OSError(errno.EIO, f"{data.numel()} bytes were not moved at offset {offset}")
        data, offset = data[moved:], offset + moved
