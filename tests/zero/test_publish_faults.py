"""Kills, power failures, full disks and rivals: the last good weights stay, and errors are named."""

# covers zero/_publish/publisher.py zero/_publish/subscriber.py zero/_publish/manifest.py
# covers zero/_publish/snapshot_files.py

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.lost_power import Returned, disks, restore, watching
from tests.ranks import run_ranks
from tests.zero.delayed import CPU
from tests.zero.models import new_model
from tests.zero.publications import LAST, follow, model_at, publish, publish_all, values_of
from tests.zero.training import train, zero_optimizer
from zero._publish import manifest as manifests
from zero._publish import publisher as publishers
from zero._publish import subscriber as subscribers

SEED = int(time.strftime("%Y%m%d"))
sys.stdout.write(f"{SEED=}\n")


def _forked(call: Callable[[], None]) -> int:
    """Run ``call`` in a fork of this process; returns its pid."""
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _killed_at(number: int, folder: Path) -> None:
    """Publish, and end without any cleaning up at the file operation with this ``number``."""
    left = [number]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        is_ours = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open", "os.truncate")
        if is_ours and str(folder) in str(args[0]):
            tick()

    def tick() -> None:
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)

    fsync, pwrite = os.fsync, os.pwrite
    os.fsync = lambda *a: (tick(), fsync(*a))  # type: ignore[assignment]
    os.pwrite = lambda *a: (tick(), pwrite(*a))[1]  # type: ignore[assignment]
    sys.addaudithook(hook)
    publish_all(folder, done=lambda version: (folder.parent / "done").write_text(str(version)) and None)


def test_a_publisher_killed_at_any_file_operation_leaves_the_last_version(tmp_path: Path) -> None:
    codes, number = [9], 0
    while codes[-1] == 9:
        folder = tmp_path / str(number) / "weights"
        folder.parent.mkdir()
        pid = _forked(lambda at=number, to=folder: _killed_at(at, to))  # type: ignore[misc]
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        marked = folder.parent / "done"
        done = int(marked.read_text()) if marked.exists() else 0
        reached = follow(folder) or 0
        assert done <= reached <= done + 1, number
        ours = model_at(-1)
        follower = zero.Subscriber(folder, ours)
        follower.update()
        if number % 5 == 0:  # another publisher goes on where this one ended
            publish_all(folder, first=LAST)
            assert follower.update()
            assert (follower.version, values_of(ours)) == (LAST, [LAST])
            assert not list(folder.glob(".*"))
        number += 1
    assert codes[-1] == 0
    assert number > 60


def test_what_is_on_the_disk_when_the_power_fails_can_be_read(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with watching(root) as events:
        publish_all(root / "weights", done=lambda version: events.append(Returned(version)))
    done, seen = 0, dict[str, int]()
    for number, disk in disks(events):
        event = events[number]
        done = event.step if isinstance(event, Returned) else done
        key = repr(sorted(disk.items()))
        if key not in seen:
            after = tmp_path / "after"
            restore(disk, root, after)
            seen[key] = follow(after / "weights") or 0
        assert done <= seen[key] <= done + 1, events[max(number - 3, 0) : number + 1]
    assert set(seen.values()) == {0, 1, 2, 3}


def test_readers_killed_at_random_moments_disturb_nobody(tmp_path: Path) -> None:
    """What a subscriber knows is in its process: one that starts after a kill reads the newest version."""
    chance, model = random.Random(SEED), model_at()
    with zero.Publisher(model, tmp_path, snapshot_every=3, keep=2) as publisher:
        for version in range(1, 41):
            for param in model.parameters():
                nn.init.constant_(param, version)
            publisher.publish(version)

            def read() -> None:
                ours = model_at(-1)
                subscriber = zero.Subscriber(tmp_path, ours)
                while True:
                    subscriber.update()
                    assert values_of(ours) == [-1 if subscriber.version is None else subscriber.version]

            pid = _forked(read)
            time.sleep(chance.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it reads without an error until it is killed"
            publisher.wait()
            assert follow(tmp_path) == version


def test_an_interrupt_at_any_line_leaves_one_version(tmp_path: Path) -> None:
    """KeyboardInterrupt before each line of the subscriber, in turn; then it goes on."""
    publish_all(tmp_path)
    numbers = [1, 2, 3]
    assert manifests.numbers_in(tmp_path)[-1] == 3
    files = {subscribers.__file__}
    steps = interrupted = 0
    while interrupted == steps:
        ours, left = model_at(-1), [steps]
        subscriber = zero.Subscriber(tmp_path, ours)

        def trace(frame: Any, event: str, _: Any, left: list[int] = left) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            left[0] -= event == "line"
            if left[0] < 0 and event == "line":
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        try:
            sys.settrace(trace)
            subscriber.update()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert values_of(ours) in ([-1], *([number] for number in numbers)), steps
        subscriber.update()
        assert (subscriber.version, values_of(ours)) == (3, [3])
        steps += 1
    assert steps > 50


@contextmanager
def _held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread of publishers writes nothing until the event is set."""
    may_write, write = threading.Event(), publishers.Publisher._write

    def late(*args: Any) -> Any:
        assert may_write.wait(30)
        return write(*args)

    with monkeypatch.context() as changed:
        changed.setattr(publishers.Publisher, "_write", late)
        yield may_write
        may_write.set()


@contextmanager
def _interrupted() -> Iterator[None]:
    """Within the block, KeyboardInterrupt after a moment of waiting."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_wait_loses_no_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one would be compared with values that are not the last published ones."""
    model = model_at(1)
    with zero.Publisher(model, tmp_path) as publisher:
        publish(model, publisher, 1)
        with _held(monkeypatch) as may_write:
            for param in model.parameters():
                nn.init.constant_(param, 2)
            publisher.publish(2)
            for param in model.parameters():
                nn.init.constant_(param, 1)  # as in publication 1: equal to what is kept of it
            with _interrupted():
                publisher.publish(3)
            may_write.set()
            publisher.publish(3)
        publisher.wait()
        ours = model_at(-1)
        subscriber = zero.Subscriber(tmp_path, ours)
        subscriber.update()
        assert (subscriber.version, values_of(ours)) == (3, [1])


@pytest.mark.parametrize("closes", [False, True])
def test_an_interrupt_leaves_the_folder_only_when_nothing_is_written_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, closes: bool
) -> None:
    model = model_at(1)
    with _held(monkeypatch) as may_write:
        with _interrupted(), zero.Publisher(model, tmp_path) as publisher:
            publisher.publish(1)
            if not closes:
                publisher.wait()
        with pytest.raises(zero.PublicationError, match="has a publisher that runs"):
            zero.Publisher(model, tmp_path)
        may_write.set()
        for _ in range(300):
            if (tmp_path / "n0000000001").exists() and not publisher._values:
                break
            time.sleep(0.1)
    zero.Publisher(model, tmp_path).close()
    assert follow(tmp_path) == 1


def test_a_copy_that_fails_twice_is_completed_by_the_next_update(tmp_path: Path) -> None:
    ours = model_at(-1)
    subscriber = zero.Subscriber(tmp_path, ours)
    publish_all(tmp_path, last=1, snapshot_every=9)
    subscriber.update()
    with zero.Publisher(model := model_at(1), tmp_path, snapshot_every=9) as publisher:
        publisher.publish(1)
        publisher.wait()
        subscriber.update()
        publish(model, publisher, 2)
    copy, count = Tensor.copy_, [0]

    def failing(to: Tensor, values: Tensor) -> Tensor:
        count[0] += 1
        if count[0] in (3, 6):
            raise KeyboardInterrupt
        return copy(to, values)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(Tensor, "copy_", failing)
        with pytest.raises(KeyboardInterrupt):
            subscriber.update()
    assert len(values_of(ours)) == 2, "torn, after two interrupts"
    subscriber.update()
    assert (subscriber.version, values_of(ours)) == (2, [2])


@pytest.mark.parametrize("waits", [False, True])
def test_names_that_a_failed_update_has_written_are_returned_by_the_next(tmp_path: Path, *, waits: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(4, 4, bias=False))  # two chunks, by dtype
    subscriber = zero.Subscriber(tmp_path, {})
    with zero.Publisher(model, tmp_path) as publisher, torch.no_grad():
        _wait_for(publisher, 1)
        subscriber.update()
        for version, layer in enumerate(model, 2):
            layer.weight += 1
            _wait_for(publisher, version)
        unreadable = tmp_path / "n0000000003" / "patch-00000.bin"
        unreadable.rename(tmp_path / "away")
        with pytest.raises(zero.PublicationError, match="stay at version 2"):
            subscriber.update()
        if waits:  # returns them although there is nothing newer
            shutil.rmtree(tmp_path / "n0000000003")
            assert subscriber.wait(30) == ["0.weight"]
        else:
            (tmp_path / "away").rename(unreadable)
            assert sorted(subscriber.update()) == ["0.weight", "1.weight"]
        assert subscriber.update() == []


def test_a_killed_run_whose_ranks_still_write_does_not_write_into_another(tmp_path: Path) -> None:
    model, folders = model_at(), list[str]()
    for _ in range(2):  # the first rank of the first run is killed between the plan and the end
        with zero.Publisher(model, tmp_path) as publisher:
            assert publisher._first is not None
            pieces = [list(chunk.pieces) for chunk in publisher._chunks]
            (plan,) = publisher._first.plan([{"version": 1, "snapshot": True, "pieces": pieces}])
            folders.append(plan["folder"])
    assert folders[0] != folders[1]
    assert not Path(folders[0]).exists()


def test_a_publisher_killed_while_it_prunes_leaves_no_half_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers.shutil, "rmtree", lambda *_, **__: None)
    publish_all(tmp_path)
    assert manifests.numbers_in(tmp_path) == [3]
    assert len(list(tmp_path.glob(".pruned-*"))) == 2
    monkeypatch.undo()
    publish_all(tmp_path)
    assert not list(tmp_path.glob(".pruned-*"))


def test_two_publishers_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_at()
    with zero.Publisher(model, tmp_path) as publisher:
        publish(model, publisher, 1)
        with pytest.raises(zero.PublicationError, match=rf'has a publisher that runs.*"pid": {os.getpid()}.*close it'):
            zero.Publisher(model, tmp_path)
        pid = _forked(lambda: publish_all(tmp_path))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        with monkeypatch.context() as changed:  # a file system without locks
            changed.setattr(publishers.fcntl, "flock", _raises(OSError(errno.ENOLCK, "no locks")))
            with zero.Publisher(model, tmp_path) as other:
                publish(model, other, 2)
        with pytest.raises(zero.PublicationError, match="has another publisher, of run"):
            publish(model, publisher, 3)
        assert follow(tmp_path) == 2
    publish_all(tmp_path, first=3)
    assert follow(tmp_path) == 3


@contextmanager
def _small_files() -> Iterator[None]:
    """No file can have more than 100 kB."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN if handler is None else handler)


def _raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_a_restarted_publisher_goes_on_with_a_snapshot_and_may_go_back(tmp_path: Path) -> None:
    ours = model_at(-1)
    subscriber = zero.Subscriber(tmp_path, ours)
    for first in (1, 2, 1):  # training that resumes from an older checkpoint publishes older versions again
        publish_all(tmp_path, first=first, last=first + 1)
        subscriber.update()
        assert (subscriber.version, values_of(ours)) == (first + 1, [first + 1])
    assert manifests.numbers_in(tmp_path)[-1] == 6
    shutil.rmtree(tmp_path)
    publish_all(tmp_path, last=1)  # a folder that was deleted
    subscriber.update()
    assert (subscriber.version, values_of(ours)) == (1, [1])
    shutil.rmtree(tmp_path)
    publish_all(tmp_path, first=5, last=7, snapshot_every=9, keep=9)  # its only snapshot has the number of the old one
    subscriber.update()
    assert (subscriber.version, values_of(ours)) == (7, [7])


def test_a_full_disk_is_named_and_the_next_publication_has_everything(tmp_path: Path) -> None:
    model, ours = nn.Linear(300, 300, bias=False).bfloat16(), nn.Linear(300, 300, bias=False).bfloat16()
    subscriber = zero.Subscriber(tmp_path, ours)
    with zero.Publisher(model, tmp_path, snapshot_every=3) as publisher:
        publisher.publish(1)
        publisher.wait()
        subscriber.update()
        before = ours.weight.clone()
        for snapshot in (False, True):
            nn.init.normal_(model.weight)
            with _small_files():
                publisher.publish(2, snapshot=snapshot)
                with pytest.raises(zero.PublicationError, match=r"could not be written: .*GiB are free.*make room"):
                    publisher.wait()
            assert not list(tmp_path.glob(".*")), "what it had written would fill the disk"
        with _small_files():
            publisher.publish(2)
            with pytest.raises(zero.PublicationError, match="could not be written"):
                publisher.publish(3)  # the error of the one before
        assert subscriber.update() == []
        assert torch.equal(ours.weight, before)
        assert not list(tmp_path.glob(".*"))
        publisher.publish(3)
        publisher.wait()
        assert manifests.read_manifest(tmp_path, 2).base == 1, "the base is the last complete one"
        subscriber.update()
        assert torch.equal(ours.weight, model.weight)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_failed_fsync_is_raised_and_the_next_publication_is_right(
    tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last fsync is that after the rename: the publication is there, but not counted as one."""
    model, ours = model_at(), model_at(-1)
    subscriber = zero.Subscriber(tmp_path, ours)
    with zero.Publisher(model, tmp_path) as publisher:
        publish(model, publisher, 1)
        subscriber.update()
        fsync, left = os.fsync, [fails_at]

        def failing(number: int) -> None:
            left[0] -= 1
            if not left[0]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(number)

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(zero.PublicationError, match="could not be written: Input/output error"):
            publish(model, publisher, 2)
        subscriber.update()
        assert subscriber.version == (2 if fails_at == 4 else 1)
        publish(model, publisher, 3)
        subscriber.update()
        assert (subscriber.version, values_of(ours)) == (3, [3])
        assert follow(tmp_path) == 3


def _wait_for(publisher: zero.Publisher, version: int) -> None:
    publisher.publish(version)
    publisher.wait()


def _check_failing_rank(rank: int, folder: str, failing: int) -> None:
    model = new_model(torch.bfloat16)
    with zero_optimizer(model, stage=3) as optimizer, zero.Publisher(optimizer, folder) as publisher:
        fsync = os.fsync
        for version, call in enumerate([None, "fsync", None, "copy", None]):
            with pytest.MonkeyPatch.context() as changed:
                if rank == failing and call == "fsync":
                    changed.setattr(os, "fsync", lambda n: _raises(OSError(errno.EIO, f"rank {rank}, {n}"))())
                if rank == failing and call == "copy":
                    changed.setattr(publisher, "_changed", _raises(MemoryError(f"on rank {rank}")))
                for _, _, values in optimizer.master_pieces():
                    values.fill_(version)
                publisher.publish(version)
                if call is None:
                    publisher.wait()
                else:
                    with pytest.raises(zero.PublicationError, match=f"rank {failing}"):
                        publisher.wait()
        assert os.fsync is fsync
        with pytest.raises(zero.PublicationError, match=r"every rank must publish the same version: by rank \[0, 1\]"):
            _wait_for(publisher, rank)
        if rank == 0:
            read: dict[str, Tensor] = {}
            subscriber = zero.Subscriber(folder, read)
            subscriber.update()
            assert subscriber.version == 4
            assert {name: value.unique().tolist() for name, value in read.items()} == {name: [4] for name in read}
        zero.Publisher(optimizer, f"{folder}/other").close()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path, failing: int) -> None:
    run_ranks(2, _check_failing_rank, str(tmp_path), failing)


def _check_errors_within_collective_copies(rank: int, folder: str) -> None:
    """The copy exchanges where shards are in files, or an update is late: a rank with an error still takes part."""
    tier = {"device": "nvme", "nvme_path": folder}
    in_files = {"stage": 3, "offload_param": tier, "offload_optimizer": tier}
    for number, settings in enumerate([in_files, CPU | {"stage": 2}]):
        path, model = Path(folder) / str(number), new_model(torch.bfloat16)

        def failing(values: Iterator[Tensor]) -> None:
            next(values)
            raise MemoryError("in the loop")

        with zero_optimizer(model, **settings) as optimizer, zero.Publisher(optimizer, path) as publisher:
            train(model, optimizer, rank, steps=3)
            publisher.publish(1.5 if rank else 1)  # type: ignore[arg-type]
            with pytest.raises(zero.PublicationError, match=r"rank 1 could not copy.*whole number"):
                publisher.wait()
            train(model, optimizer, rank, steps=1)
            with pytest.MonkeyPatch.context() as changed:
                if rank:
                    changed.setattr(publisher, "_compared", failing)
                publisher.publish(2)
            with pytest.raises(zero.PublicationError, match=r"rank 1 could not copy.*in the loop"):
                publisher.wait()
            _wait_for(publisher, 3)
        if rank == 0:
            subscriber = zero.Subscriber(path, {})
            subscriber.update()
            assert subscriber.version == 3


def test_an_error_of_one_rank_does_not_leave_the_others_in_a_collective_copy(tmp_path: Path) -> None:
    run_ranks(2, _check_errors_within_collective_copies, str(tmp_path))


def _check_other_folder(rank: int, folder: str) -> None:
    """The second rank's folder is another one of the same name, as on another machine without a shared file system."""
    model = new_model(torch.bfloat16)
    with zero_optimizer(model, stage=3) as optimizer, zero.Publisher(optimizer, folder) as publisher:
        create = publishers.create_file
        for version, is_elsewhere in enumerate([False, True, False]):
            for _, _, values in optimizer.master_pieces():
                values.fill_(version)
            with pytest.MonkeyPatch.context() as changed:
                if rank == 1 and is_elsewhere:
                    Path(folder, "elsewhere").mkdir()
                    changed.setattr(
                        publishers, "create_file", lambda path: create(Path(folder, "elsewhere", path.name))
                    )
                if is_elsewhere:
                    with pytest.raises(zero.PublicationError, match=r"the first rank does not see .*patch-00001.bin"):
                        _wait_for(publisher, version)
                else:
                    _wait_for(publisher, version)
        if rank == 0:
            read: dict[str, Tensor] = {}
            subscriber = zero.Subscriber(folder, read)
            subscriber.update()
            assert (subscriber.version, {value.unique().item() for value in read.values()}) == (2, {2.0})


def test_a_folder_that_ranks_do_not_share_is_named(tmp_path: Path) -> None:
    run_ranks(2, _check_other_folder, str(tmp_path))
