"""DeepSpeed's class of asynchronous files, over the library's queue of files: contents compared with Python's own."""

# covers zero/compat/file_io.py

from __future__ import annotations

import errno
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import in_fork
from zcomm import IntegrityError, LayoutError, StateError
from zero.compat.op_builders import AsyncIOBuilder

PAGE = 4096
SEED = int(time.strftime("%Y%m%d"))


def _bytes(numel: int) -> Tensor:
    sys.stdout.write(f"seed {SEED}\n")
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(SEED + numel))


def _handle(**given: int) -> Any:
    return AsyncIOBuilder().load().aio_handle(**{"block_size": PAGE, "queue_depth": 2, **given})


@pytest.mark.parametrize("numel", [0, 1, 511, PAGE, PAGE + 1, 5 * PAGE - 3, 9 * PAGE])
@pytest.mark.parametrize("offset", [0, 1, 512, PAGE, 2 * PAGE - 1])
@pytest.mark.parametrize("shift", [0, 7])
def test_any_bytes_at_any_offset(tmp_path: Path, numel: int, offset: int, shift: int) -> None:
    given, before = _bytes(numel), _bytes(20 * PAGE).numpy().tobytes()
    handle = _handle()
    buffer = handle.new_cpu_locked_tensor(shift + numel, given)[shift:]
    buffer.copy_(given)
    path = tmp_path / "file"
    path.write_bytes(before)
    assert handle.sync_pwrite(buffer, str(path), offset) == 1
    expected = before[:offset] + given.numpy().tobytes() + before[offset + numel :]
    assert path.read_bytes() == expected
    buffer.zero_()
    assert handle.sync_pread(buffer, path, offset) == 1
    assert torch.equal(buffer, given)


def test_a_new_file_has_the_bytes_of_the_tensor_alone(tmp_path: Path) -> None:
    given = _bytes(3 * PAGE + 5)
    assert _handle().write(given, tmp_path / "file", True) == 0
    assert (tmp_path / "file").read_bytes() == given.numpy().tobytes()


def test_transfers_are_counted_when_they_have_ended(tmp_path: Path) -> None:
    handle = AsyncIOBuilder().load().aio_handle(1024, 2, True, False, 2)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1024, 2, 2)
    assert (handle.get_single_submit(), handle.get_overlap_events(), handle.get_thread_count()) == (True, False, 2)
    given = [_bytes(numel) for numel in (100, 7 * PAGE, 3 * PAGE + 1)]
    assert [handle.async_pwrite(one, tmp_path / str(n)) for n, one in enumerate(given)] == [0, 0, 0]
    assert (handle.wait(), handle.wait()) == (3, 0)
    read = [torch.empty_like(one) for one in given]
    assert [handle.async_pread(one, tmp_path / str(n)) for n, one in enumerate(read)] == [0, 0, 0]
    assert handle.wait() == 3
    assert all(map(torch.equal, read, given))


def test_dtypes_views_and_open_files(tmp_path: Path) -> None:
    handle = _handle()
    given = torch.randn(100, 90, generator=torch.Generator().manual_seed(SEED)).to(torch.bfloat16).T
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    assert handle.async_pwrite(buffer=given, fd=descriptor, file_offset=512) == 0
    assert handle.wait() == 1
    os.close(descriptor)
    expected = given.contiguous().view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "file").read_bytes()[512:] == expected
    read = torch.nn.Parameter(torch.zeros(100, 90, dtype=torch.bfloat16)).T
    assert handle.read(read, tmp_path / "file", True, 512) == 0
    assert torch.equal(read, given)
    assert handle.pread(read, str(tmp_path / "file"), False, True, 512) == 0
    assert handle.wait() == 1


@pytest.mark.parametrize("offset", [1, 2, PAGE - 1, 2 * PAGE - 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool])
def test_elements_need_not_begin_at_a_multiple_of_their_size(tmp_path: Path, offset: int, dtype: torch.dtype) -> None:
    handle = _handle()
    given = torch.arange(5000).to(dtype)
    for buffer in (given, given.view(50, 100).T):
        handle.sync_pwrite(buffer, tmp_path / "file", offset)
        read = torch.zeros_like(buffer)
        handle.sync_pread(read, tmp_path / "file", offset)
        assert torch.equal(read, buffer)


def test_a_fork_is_refused(tmp_path: Path) -> None:
    handle, given = _handle(), _bytes(2 * PAGE + 1)
    handle.async_pwrite(given, tmp_path / "file")

    def try_it() -> None:
        for call in (handle.wait, partial(handle.sync_pread, given, tmp_path / "file")):
            with pytest.raises(StateError, match="by the process that made it"):
                call()
        os._exit(0)

    assert in_fork(try_it) == 0
    assert handle.wait() == 1
    assert (tmp_path / "file").read_bytes() == given.numpy().tobytes()


def test_a_file_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = _bytes(3 * PAGE + 5)
    (tmp_path / "file").write_bytes(given.numpy().tobytes())
    handle, read = _handle(), torch.empty_like(given)
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    monkeypatch.setattr(os, "open", partial(_open_to_read, os.open))
    handle._queue = None
    assert handle.sync_pread(read, tmp_path / "file") == 1
    assert torch.equal(read, given)


def _open_to_read(real: Any, path: Any, flags: int, mode: int = 0o777) -> int:
    assert flags & os.O_ACCMODE == os.O_RDONLY
    return real(path, flags, mode)


def test_locked_tensors_are_freed_once() -> None:
    handle = _handle()
    made = handle.new_cpu_locked_tensor(10, torch.empty(0, dtype=torch.float32))
    assert (made.shape, made.dtype, made.data_ptr() % PAGE) == ((10,), torch.float32, 0)
    assert [handle.free_cpu_locked_tensor(one) for one in (torch.ones(3), made, made)] == [False, True, False]


def test_errors_name_the_file_and_leave_nothing_pending(tmp_path: Path) -> None:
    handle, buffer = _handle(), _bytes(2 * PAGE)
    for call in (handle.sync_pread, handle.async_pread):
        with pytest.raises(FileNotFoundError) as error:
            call(buffer, tmp_path / "none")
        assert error.value.filename == str(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        handle.sync_pwrite(buffer, tmp_path)
    (tmp_path / "short").write_bytes(b"12")
    with pytest.raises(
        LayoutError, match=r"short cannot be read there: file_offset=0, bytes of the tensor=8192, of the"
    ):
        handle.sync_pread(buffer, tmp_path / "short")
    with pytest.raises(LayoutError, match="cannot be written there: file_offset=-1"):
        handle.sync_pwrite(buffer, tmp_path / "short", -1)
    assert (tmp_path / "short").read_bytes() == b"12"
    with pytest.raises(LayoutError, match="'queue_depth': 0"):
        _handle(queue_depth=0)
    assert handle.wait() == 0


def test_a_failed_transfer_does_not_keep_the_others(tmp_path: Path) -> None:
    handle, given = _handle(), _bytes(2 * PAGE)
    (tmp_path / "cut").write_bytes(bytes(PAGE))
    handle.sync_pwrite(given, tmp_path / "whole")
    read, page = torch.empty_like(given), handle.new_cpu_locked_tensor(PAGE, given)
    handle.async_pread(read, tmp_path / "whole")
    file = handle._queue.open(str(tmp_path / "cut"))  # as if it had been cut after it was measured
    past_the_end = file, handle._queue.read(file, 4 * PAGE, page.data_ptr(), PAGE)
    handle._pending.insert(0, handle._pending[0]._replace(moving=past_the_end, end=pytest.fail))
    with pytest.raises(OSError, match="cut") as error:
        handle.wait()
    assert error.value.errno == errno.ENODATA
    assert handle.wait() == 0
    assert torch.equal(read, given)


def test_what_the_file_does_not_hold_is_found(tmp_path: Path) -> None:
    handle, given = _handle(), _bytes(PAGE)
    handle.pwrite(given, tmp_path / "file", True, True)
    handle._end_moving(*handle._pending[0].moving)  # written: then another writes there
    handle._pending[0] = handle._pending[0]._replace(moving=None)
    (tmp_path / "file").write_bytes(bytes(PAGE))
    with pytest.raises(IntegrityError, match="does not hold the tensor"):
        handle.wait()
