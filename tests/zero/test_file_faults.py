"""Faults below a file store: each raises an exception with errno and path, and no read returns wrong bytes."""

# covers zero/_storage/swap_pipeline.py zero/_storage/staging_buffers.py

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.broken import mounted
from tests.file_faults import (
    FAULTS,
    PAGE,
    Fault,
    closed,
    cut_short,
    file_size_limit,
    flipped,
    full_device,
    read_only,
    small_limit,
)  # fmt: skip
from zcomm import IntegrityError
from zcomm._base import env
from zero._storage import file_store
from zero._storage.file_store import FileStore, StoredFile
from zero._storage.tier_settings import FileSettings

READ_FAILED = r"(read|checksum mismatch after) .*\d+ of \d+ bytes at offset \d+"


def _store(folder: Path) -> FileStore:
    return FileStore(folder, files=FileSettings(request_nbytes=4 * PAGE, num_requests=4), name="states", topology=None)


@pytest.fixture(params=["threads", "auto"])
def store(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileStore]:
    monkeypatch.setattr(
        env, "value", {**dict.fromkeys(env.VARIABLES, "auto"), "ZCOMM_FILES": request.param}.__getitem__
    )
    store = _store(tmp_path)
    yield store
    store.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "write_errno", "read_errno"),
    [
        (read_only, errno.EBADF, None),
        (full_device, errno.ENOSPC, errno.EBADMSG),
        (closed, errno.EBADF, errno.EBADF),
        (small_limit, errno.EFBIG, None),
        (cut_short, None, errno.ENODATA),
        (flipped, None, errno.EBADMSG),
    ],
)
def test_a_fault_is_an_error_with_path_bytes_and_free_space(
    store: FileStore, fault: Fault, write_errno: int | None, read_errno: int | None
) -> None:
    file = store.create("a", 10 * PAGE)
    data, back = store.buffer(10 * PAGE).random_(), store.buffer(10 * PAGE)
    store.write(file, 0, data).wait()
    with fault(file):
        if read_errno is not None:
            transfer = store.read(file, 0, back)
            with pytest.raises(OSError, match=READ_FAILED) as error:
                transfer.wait()
            _check(error.value, read_errno, file)
            with pytest.raises(OSError, match=r"read|checksum mismatch") as again:
                transfer.wait()
            assert again.value is error.value
        if write_errno is not None:
            transfer = store.write(file, 0, back.random_())
            with pytest.raises(OSError, match=r"wrote \d+ of \d+ bytes at offset \d+") as error:
                transfer.wait()
            _check(error.value, write_errno, file)
    if write_errno is not None:  # the file does not hold the data that was to be written
        with pytest.raises(IntegrityError):
            store.read(file, 0, back).wait()
    store.write(file, 0, data).wait()
    store.read(file, 0, back).wait()
    assert torch.equal(back, data)


def _check(error: OSError, number: int, file: StoredFile) -> None:
    assert (error.errno, error.filename) == (number, str(file.path))
    assert isinstance(error, IntegrityError) == (number == errno.EBADMSG)
    assert isinstance(error, IntegrityError) or "bytes are free" in str(error)


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, number in (("none", errno.ENOENT), ("file", errno.ENOTDIR), ("file/below", errno.ENOTDIR)):
        with pytest.raises(OSError, match="must exist and be writable") as error:
            _store(tmp_path / name)
        assert (error.value.errno, error.value.filename) == (number, str(tmp_path / name))
    (tmp_path / "file").unlink()
    store = _store(tmp_path)
    shutil.rmtree(store.folder)
    with pytest.raises(FileNotFoundError, match="states-rank0"):
        store.create("a", PAGE)
    store.close()
    store = _store(tmp_path)
    with pytest.raises(OSError, match=r"\d+ bytes are needed and \d+ are free") as error:
        store.create("a", 2**55)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(store.folder))
    with file_size_limit(2 * PAGE), pytest.raises(OSError, match=r"cannot reserve|bytes are needed") as error:
        store.create("a", 10 * PAGE)
    assert error.value.errno == errno.EFBIG
    assert [path.name for path in store.folder.iterdir()] == ["owner"]
    store.close()


def _fits(number: int, data: bytes) -> bool:
    try:
        return os.write(number, data) == len(data)
    except OSError:
        return False


def test_a_small_and_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "disk", 2**20) as disk:
        store = _store(disk)
        file = store.create("a", 100 * PAGE)
        with pytest.raises(OSError, match="are free") as error:  # each fits, but not both
            store.create_all({"b": 80 * PAGE, "c": 80 * PAGE})
        assert error.value.errno == errno.ENOSPC
        monkeypatch.setattr(file_store, "_check_space", lambda *_: None)  # another takes the space after the check
        with pytest.raises(OSError, match=r"\d{7} bytes are needed and \d{6} are free") as error:
            store.create("b", 2**20)
        assert error.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="are free"):
            store.create_all({"b": 80 * PAGE, "c": 80 * PAGE})
        assert {path.name for path in store.folder.iterdir()} == {"owner", "a"}
        filler = disk / "filler"
        number = os.open(filler, os.O_WRONLY | os.O_CREAT)
        while _fits(number, bytes(PAGE)):
            pass
        os.close(number)
        data, back = store.buffer(100 * PAGE).random_(), store.buffer(100 * PAGE)
        store.write(file, 0, data).wait()  # its space was reserved
        store.read(file, 0, back).wait()
        assert torch.equal(data, back)
        store.close()
        filler.unlink()
        assert not list(disk.iterdir())
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(OSError, match="must exist and be writable") as error:
            _store(disk)
        assert (error.value.errno, error.value.filename) == (errno.EROFS, str(disk))


# Many faults, and the known contents of every page


class _Known:
    """The possible contents of each page of a file."""

    def __init__(self, num_pages: int) -> None:
        self.pages = [bytes(PAGE)] * num_pages

    def __getitem__(self, pages: slice) -> bytes:
        return b"".join(self.pages[pages])

    def write(self, first: int, data: Tensor) -> None:
        whole = bytes(data.tolist())
        for at in range(0, len(whole), PAGE):
            self.pages[first + at // PAGE] = whole[at : at + PAGE]


def test_a_hundred_random_faults_give_no_wrong_result(store: FileStore) -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    num_pages = 8
    files = [store.create(f"file{i}", num_pages * PAGE) for i in range(3)]
    known = [_Known(num_pages) for _ in files]
    data, back = store.buffer(num_pages * PAGE), store.buffer(num_pages * PAGE)
    num_failed = num_right = 0
    errors: list[OSError] = []

    def read(which: int, first: int, stop: int) -> bool:
        """Whether the pages could be read; if so, their contents must be right."""
        target = back[: (stop - first) * PAGE].fill_(0xA5)
        try:
            store.read(files[which], first * PAGE, target).wait()
        except OSError as error:
            errors.append(error)
            return False
        assert bytes(target.tolist()) == known[which][first:stop]
        return True

    for _ in range(100):
        which = draw.randrange(len(files))
        first = draw.randrange(num_pages)
        stop = draw.randrange(first + 1, num_pages + 1)
        writes = draw.random() < 0.6
        failed = False
        with draw.choice(FAULTS)(files[which]):
            if writes:
                source = data[: (stop - first) * PAGE].random_()
                known[which].write(first, source)  # even if it fails: the pages hold this, or reading them is an error
                try:
                    store.write(files[which], first * PAGE, source).wait()
                except OSError as error:
                    errors.append(error)
                    failed = True
            failed |= not read(which, first, stop)
        failed |= not read(which, 0, num_pages)  # the fault is over, its effects are not
        num_failed, num_right = num_failed + failed, num_right + (not failed)
        assert all(read(other, 0, num_pages) for other in range(len(files)) if other != which)
        known[which].write(0, data.random_())  # as from a checkpoint
        store.write(files[which], 0, data).wait()
        assert read(which, 0, num_pages)
    assert all(error.errno and error.filename in {str(file.path) for file in files} for error in errors)
    assert num_failed >= 50
    assert num_right >= 5
