"""A rank's files: reads return what was written, damage is found, and no file remains."""

# covers zero/_storage/file_store.py zero/_storage/process_folder.py zero/_storage/tier_settings.py

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.processes import in_fork, run_python
from tests.ranks import run_ranks, topology
from zcomm import IntegrityError, LayoutError, StateError, Topology, ZcommError
from zcomm._kernels import kernels
from zero._storage.file_store import FileStore, Transfer
from zero._storage.process_folder import ClaimedFolder
from zero._storage.tier_settings import FileSettings
from zero._storage.transfer_buffers import HostBuffers
from zero._storage.transfer_counters import moved

KIB = 1024
FILES = FileSettings(request_nbytes=16 * KIB, num_requests=4)


def _store(folder: Path, *, ranks: Topology | None = None) -> FileStore:
    return FileStore(folder, files=FILES, name="states", topology=ranks)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = _store(tmp_path)
    files = store.create_all({"a": 100 * KIB, "b": 3})
    assert (files["a"].nbytes, files["b"].nbytes) == (100 * KIB, 4 * KIB)
    data, back = store.buffer(100 * KIB).random_(), store.buffer(100 * KIB)
    with moved() as counted:
        store.write(files["a"], 0, data).wait()
        parts = [store.read(files["a"], at * KIB, back[at * KIB :][: 20 * KIB]) for at in (60, 0, 80, 20, 40)]
        for part in parts:
            part.wait()
            assert part.is_done
            part.wait()
    assert torch.equal(back, data)
    assert counted.bytes(kind="states", link="write") == counted.bytes(link="read") == 100 * KIB
    assert (counted.calls(link="write"), counted.calls(link="read"), counted.bytes(kind="gradients")) == (1, 5, 0)
    assert f"{'states':<18}{'write':<12}{1:>10}{100 * KIB:>18}" in str(counted)
    everything = [store.folder, *store.folder.iterdir()]
    assert len(everything) == 4
    assert all(path.stat().st_mode & 0o077 == 0 for path in everything), "others may read it"
    store.remove(files["b"])
    assert store.create("b", 5).nbytes == 4 * KIB
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(StateError, match="closed"):
        store.create("c", 1)


def test_the_file_itself_tells_whether_it_is_whole(tmp_path: Path) -> None:
    store = _store(tmp_path)
    file = store.create("a", 8 * KIB)
    data = store.buffer(8 * KIB).random_()
    store.write(file, 0, data).wait()
    store.sync(file)
    raw = file.path.read_bytes()
    assert raw[:8] == b"ZEROFILE"
    assert int.from_bytes(raw[16:24], "little") == 8 * KIB
    assert raw[4 * KIB : 12 * KIB] == bytes(data.tolist())
    queue = kernels.native().FileQueue(1, 4 * KIB)  # a fresh process
    back = store.buffer(8 * KIB)
    other = queue.open(str(file.path), is_checked=True)
    queue.wait(queue.read(other, 0, back.data_ptr(), 8 * KIB))
    assert torch.equal(back, data)
    store.close()


def test_misuse_is_named(tmp_path: Path) -> None:
    store = _store(tmp_path)
    file, buffer = store.create("a", 8 * KIB), store.buffer(8 * KIB)
    for name in ("a", "owner", "../b", "c/d", ""):
        with pytest.raises(LayoutError, match="name must be"):
            store.create(name, 1)
    for tensor, offset, what in (
        (buffer, 4 * KIB, "must be in the file"),
        (buffer, -4 * KIB, "must be in the file"),
        (buffer[:100], 0, "must be multiples"),
        (buffer[1 : 4 * KIB + 1], 0, "must be multiples"),
        (buffer, 512, "must be multiples"),
        (buffer.view(torch.int32), 0, "uint8"),
        (buffer[::2], 0, "contiguous"),
    ):
        for start in (store.read, store.write):
            with pytest.raises(LayoutError, match=what):
                start(file, offset, tensor)
    transfer = store.read(file, 0, buffer)
    with pytest.raises(StateError, match="before giving it back"):
        store.give(buffer)
    transfer.wait()
    store.give(buffer)
    with pytest.raises(LayoutError, match="can be given back, once"):
        store.give(buffer)
    store.close()


def test_buffers_are_used_again() -> None:
    buffers = HostBuffers()
    first, second = buffers.take(100 * KIB), buffers.take(10)
    assert (second.numel(), second.data_ptr() % 4096, buffers.nbytes) == (4 * KIB, 0, 104 * KIB)
    where = first.data_ptr()
    buffers.give(first)
    small = buffers.take(8 * KIB)  # the free one would be wasted on it
    assert small.data_ptr() != where
    assert buffers.take(60 * KIB).data_ptr() == where
    buffers.give(small)
    buffers.clear()
    assert buffers.nbytes == 104 * KIB
    with pytest.raises(MemoryError, match=str(2**60)):
        buffers.take(2**60)


# Lifetime of folders and files


def test_the_next_store_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    def die() -> None:
        store = _store(tmp_path)
        store.create("a", 100 * KIB)
        os.kill(os.getpid(), signal.SIGKILL)

    living = _store(tmp_path)
    file = living.create("mine", 4 * KIB)
    assert in_fork(die) == signal.SIGKILL
    (left,) = set(tmp_path.iterdir()) - {living.folder}
    assert (left / "a").stat().st_size > 100 * KIB
    elsewhere = tmp_path / "zero-of-another-host"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text(json.dumps({"host": "far", "boot": "other", "pid": 1, "start_time": "1"}))
    (tmp_path / "zero-notes").mkdir()
    (tmp_path / "zero-file").write_text("")
    store = _store(tmp_path)
    kept = {living.folder, elsewhere, tmp_path / "zero-notes", tmp_path / "zero-file", store.folder}
    assert set(tmp_path.iterdir()) == kept
    buffer = living.buffer(4 * KIB)
    living.read(file, 0, buffer).wait()
    living.close()
    store.close()
    assert set(tmp_path.iterdir()) == kept - {living.folder, store.folder}


def test_a_process_number_that_is_used_again_protects_nothing(tmp_path: Path) -> None:
    folder = ClaimedFolder(tmp_path, "x")
    owner = json.loads((folder.path / "owner").read_text())
    left = tmp_path / "zero-left"
    left.mkdir()
    (left / "owner").write_text(json.dumps(owner | {"start_time": owner["start_time"] + "0"}))
    ClaimedFolder(tmp_path, "y").remove()
    assert set(tmp_path.iterdir()) == {folder.path}
    folder.remove()


def test_a_lock_that_is_held_protects_a_folder_of_another_process_namespace(tmp_path: Path) -> None:
    folder = ClaimedFolder(tmp_path, "x")
    owner = folder.path / "owner"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"pid": 2**22 + 1}))
    ClaimedFolder(tmp_path, "y").remove()
    assert folder.path.exists()
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_a_store_goes_with_its_last_reference_and_not_with_a_fork(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    gc.collect()
    gc.freeze()  # other garbage must not be collected in the fork: its finalizers may wait for threads
    request.addfinalizer(gc.unfreeze)
    stores = [_store(tmp_path)]
    file = stores[0].create("b", 4 * KIB)
    transfers = [stores[0].read(file, 0, stores[0].buffer(4 * KIB))]

    def try_it() -> None:
        assert transfers[0].is_done, "its wait() raises at once"
        with pytest.raises(StateError, match="by the process that started it"):
            transfers[0].wait()
        with pytest.raises(StateError, match="by the process that opened it"):
            stores[0].create("a", 1)
        stores[0].close()
        stores.clear()
        gc.collect()
        os._exit(0)

    assert in_fork(try_it) == 0
    assert stores[0].folder.exists()
    transfers[0].wait()
    transfers.clear()
    stores.clear()
    gc.collect()
    assert not list(tmp_path.iterdir())


def _wait(transfer: Transfer, errors: list[BaseException]) -> None:
    try:
        transfer.wait()
    except BaseException as error:
        errors.append(error)


def test_close_beside_a_thread_that_waits(tmp_path: Path) -> None:
    for is_done_before in (True, *[False] * 10):  # False: which of the two is first is chance
        store = _store(tmp_path)
        file, buffer, errors = store.create("a", 4096 * KIB), store.buffer(4096 * KIB).zero_(), list[BaseException]()
        transfer = store.write(file, 0, buffer)
        if is_done_before:
            store._open.queue.wait(transfer._ticket)  # as another thread has, just before it says so
        waiting = threading.Thread(target=_wait, args=(transfer, errors))
        waiting.start()
        if is_done_before:
            waiting.join()
            assert errors
            assert transfer.is_done
        store.close()
        waiting.join()
        assert not list(tmp_path.iterdir())
        assert all(type(error) is StateError and "must stay open" in str(error) for error in errors), errors


@pytest.mark.timeout(400)  # imports torch in a new process
def test_nothing_is_left_at_the_end_of_the_interpreter_or_after_a_failed_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
from pathlib import Path
from tests.zero.test_file_store import _store
store = _store(Path({str(tmp_path)!r}))
file, buffer = store.create("a", 2**24), store.buffer(2**24)
transfers = [store.write(file, 0, buffer)]
print(store.folder.exists(), flush=True)
raise RuntimeError("the end")
"""
    done = run_python(script)
    assert (done.stdout, done.returncode) == ("True\n", 1), done.stderr
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="num_requests=0"):
        FileStore(tmp_path, files=FileSettings(num_requests=0), name="states", topology=None)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "write", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        _store(tmp_path)
    assert not list(tmp_path.iterdir())


def _check_ranks_agree(rank: int, folder: Path) -> None:
    ranks = topology(2)
    with pytest.raises(FileNotFoundError) as missing:
        _store(folder / ("none" if rank == 1 else "."), ranks=ranks)
    assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, str(folder / "none"))
    assert "must exist and be writable" in str(missing.value)
    store = _store(folder, ranks=ranks)
    with pytest.raises(OSError, match="bytes are needed and") as full:
        store.create_all({"small": KIB, "large": 2**55 if rank == 0 else KIB})
    assert full.value.errno == errno.ENOSPC
    assert str(folder) in str(full.value.filename)
    needed, free = (int(number) for number in re.findall(r"(\d+) (?:bytes|are free)", str(full.value)))
    assert needed >= 2**55 > free > 0
    assert [path.name for path in store.folder.iterdir()] == ["owner"]
    files = store.create_all({"small": KIB, "large": KIB})
    jobs = {path.name.rpartition("-")[0] for path in folder.iterdir()}
    assert len(jobs) == 1
    assert store.folder.name.endswith(f"-states-rank{rank}")
    buffer = store.buffer(KIB).fill_(rank)
    store.write(files["small"], 0, buffer).wait()
    store.read(files["small"], 0, buffer).wait()
    assert bool((buffer == rank).all())
    store.close()


def test_ranks_share_a_path_and_fail_together(tmp_path: Path) -> None:
    run_ranks(2, _check_ranks_agree, tmp_path)
    assert not list(tmp_path.iterdir())


# Errors of the class that callers catch


def test_integrity_errors_are_os_errors_of_the_project() -> None:
    assert issubclass(IntegrityError, OSError)
    assert issubclass(IntegrityError, ZcommError)
