"""The flight recorder: what it says of a rank that leaves out an exchange, and what is left of ranks that are gone."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.ranks import forkserver, run_ranks
from zcomm import DivergedError, backend, env, flight_files, flight_record
from zcomm.calls import in_bucket
from zcomm.cli import main
from zcomm.ledger import NUM_KEPT, Call, Entry, Ledger
from zcomm.meeting import meet

TIMEOUT_S = 2


def _gather(t: zcomm.Topology, numel: int) -> None:
    zcomm.all_gather_single(torch.empty(2 * numel), torch.ones(numel), t, format="none")


def _check_skipped_exchange(rank: int) -> None:
    t = zcomm.Topology(ranks_per_node=2)
    t.companion  # noqa: B018  (made at the first use)
    t.watch.period_s = 0.1
    for _ in range(70):
        _gather(t, 8)
    record = flight_record(t)
    assert len(record) == 64
    last = t.world.ledger.num_started
    assert [flight.number for flight in record] == list(range(last - 63, last + 1))
    assert {(flight.operation, flight.nbytes, flight.state) for flight in record} == {("all_gather", 32, "ended")}
    assert {(flight.format, flight.bucket) for flight in record} == {("none", "")}
    with in_bucket("layer 3"):
        works = [
            zcomm.all_gather_single(torch.empty(128), torch.ones(64), t, format="int8", async_op=True) for _ in "ab"
        ]
    assert [work.wait() for work in works if work is not None] == [None, None]
    assert {flight[-2:] for flight in flight_record(t)[-1:]} == {("int8", "layer 3")}
    last = t.world.ledger.num_started
    assert all(flight.ranks == (0, 1) and 0 <= flight.age_s < 200 for flight in record)
    lags = (
        rf"rank 1 lags in the exchanges of ranks 0, 1: it has started {last} of {last + 1}, and not number {last + 1}"
    )
    with pytest.raises(DivergedError, match=rf"{lags}, all_gather of 64 bytes"):
        _gather(t if rank == 0 else t.companion, 16)  # rank 1 leaves one out
    _gather(t, 8)
    t.close()


def test_a_rank_that_leaves_out_an_exchange_is_named_with_it() -> None:
    run_ranks(2, _check_skipped_exchange)


def test_threads_do_not_disturb_one_another_in_a_ledger() -> None:
    ledger, told = Ledger(), list[int]()
    ledger.keep = lambda entry: told.append(entry.number)
    is_over, looks = threading.Event(), 0

    def start(thread: int) -> list[tuple[int, int]]:
        return [
            (ledger.start(Call("all_gather", 10_000 * thread + i, "cpu")), 10_000 * thread + i) for i in range(2000)
        ]

    def look() -> int:
        num_looks = 0
        while not is_over.is_set():
            numbers = [entry.number for entry in ledger.entries()]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
            num_started, _, recent, _ = ledger.account()
            assert len(recent) == min(num_started, NUM_KEPT)
            num_looks += 1
        return num_looks

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(5) as pool:
            looking = pool.submit(look)
            calls = [call for of_thread in pool.map(start, range(4)) for call in of_thread]
            is_over.set()
            looks = looking.result()
    finally:
        sys.setswitchinterval(before)
    assert sorted(number for number, _ in calls) == list(range(1, 8001)) == told
    assert looks > 0
    assert {(entry.number, entry.call.nbytes) for entry in ledger.entries()} <= set(calls)


def _leave_out(_: zcomm.Topology) -> None:
    time.sleep(600)


def _die(_: zcomm.Topology) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash(_: zcomm.Topology) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _gather_another(t: zcomm.Topology) -> None:
    with in_bucket("last"):
        _gather(t, 32)


def _meet(t: zcomm.Topology) -> None:
    meet([0, 1], "here", lane="test", timeout=backend.timeout_of(t.world.group))


def _make_topology(_: zcomm.Topology) -> None:
    zcomm.Topology(ranks_per_node=1)


WAYS: dict[str, tuple[Any, Any, str]] = {
    "a collective's own timeout": (_gather_another, _leave_out, "rank 1 lags: it has started 3 of 4"),
    "a peer that was killed": (_gather_another, _die, "rank 1 lags: it has started 3 of 4"),
    "a peer that crashed": (_gather_another, _crash, "rank 1 lags: it has started 3 of 4"),
    "a meeting": (_meet, _leave_out, "rank 0 ended with CommunicationError: of ranks 0, 1 not all came within 2 s: 1"),
    "a Topology": (_make_topology, _leave_out, "rank 0 ended with "),
}


def _live(rank: int, folder: Path, way: str) -> None:
    torch.set_num_threads(1)
    os.environ["ZCOMM_FLIGHT"] = str(folder)
    env.value.cache_clear()
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    logging.basicConfig(filename=folder / f"log{rank}", force=True)
    t = zcomm.Topology(ranks_per_node=2)
    for _ in range(3):
        _gather(t, 8)
    try:
        WAYS[way][rank](t)
    except Exception as error:
        (folder / f"error{rank}").write_text(repr(error))
    logging.shutdown()
    os._exit(0)


def _leave_older_job(folder: Path) -> None:
    """Of a rank of the new job's, and of a later start; one file in the way of a new one, and one that is none."""
    for start in (0, 3):
        place = folder / f"start{start}" / "rank1.9.flight"
        place.parent.mkdir()
        head = {"run": f"{time.time_ns() - 10**9:020d}-00", "rank": 1, "ranks": [0, 1], "copy": 5}
        flight_files._File(place, head).keep(Entry(900, Call("all_gather", 8, "cpu"), "none", "", 0.0))
    shutil.copy(folder / "start0" / "rank1.9.flight", folder / "start0" / "rank0.0.flight")
    (folder / "start0" / "rank7.0.flight").write_bytes(b"torn")


def test_however_an_exchange_fails_the_ranks_records_are_left_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = forkserver()
    jobs: dict[str, list[Any]] = {}
    for number, way in enumerate(WAYS):
        (tmp_path / str(number)).mkdir()
        _leave_older_job(tmp_path / str(number))
        jobs[way] = [context.Process(target=_live, args=(rank, tmp_path / str(number), way)) for rank in range(2)]
        for process in jobs[way]:
            process.start()
    try:
        for number, (way, (_, _, text)) in enumerate(WAYS.items()):
            folder = tmp_path / str(number)
            jobs[way][0].join(70)
            assert (folder / "error0").exists(), way
            log = (folder / "log0").read_text()
            assert text in log, (way, log)  # dumped and compared by itself
            assert "flight recorders in" in log
            assert main(["flight", str(folder)]) == 0  # and later
            said = capsys.readouterr().out
            assert text in said
            assert "; 2 files of earlier starts or jobs are left out" in said
            assert "group 5" not in log + said  # that is the older job's
            if WAYS[way][0] is _gather_another:
                assert "and not number 4, all_gather of 128 bytes, none, bucket last" in log
                assert "rank 0: all_gather of 128 bytes, none, bucket last, failed" in log.replace(
                    "waited for", "failed"
                )
    finally:
        for processes in jobs.values():
            for process in processes:
                process.kill()
                process.join()
    assert main(["flight", str(tmp_path / "none")]) == 2


def _check_no_place(rank: int, folder: Path) -> None:
    """On one rank only, of no folder and then of no space: it goes on without a record, and so do the others."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zcomm").addHandler(handler)
    os.environ["ZCOMM_FLIGHT"] = "/proc/no_place" if rank else str(folder)
    env.value.cache_clear()
    try:
        ledger = Ledger()
        flight_files.attach(ledger, (0, 1))
        ledger.start(Call("all_gather", 8, "cpu"))
        assert (ledger.keep is None) == bool(rank)
        assert [text for text in logged if "/proc/no_place: this rank's exchanges are not recorded" in text] or not rank
        os.environ["ZCOMM_FLIGHT"] = str(folder)
        env.value.cache_clear()
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if rank else usual[0], usual[1]))
        try:
            flight_files.attach(ledger, (0, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert (ledger.keep is None) == bool(rank)
        assert any("File too large" in text for text in logged) == bool(rank)
    finally:
        logging.getLogger("zcomm").removeHandler(handler)
        del os.environ["ZCOMM_FLIGHT"]
        env.value.cache_clear()


def _check_runs(rank: int, folder: Path) -> None:
    os.environ["ZCOMM_FLIGHT"] = str(folder)
    env.value.cache_clear()
    try:
        flight_files.attach(Ledger(), range(2000))
        flight_files.attach(Ledger(), (0, *range(5, 2000)))  # no room for these
    finally:
        del os.environ["ZCOMM_FLIGHT"]
        env.value.cache_clear()


def test_all_ranks_share_the_name_of_a_run_and_many_ranks_have_room(tmp_path: Path) -> None:
    run_ranks(2, _check_runs, tmp_path)
    files = sorted((tmp_path / "start0").iterdir())
    heads = [json.loads(path.read_bytes()[:512].rstrip(b"\0")) for path in files]
    assert [head["rank"] for head in heads] == [0, 1]
    assert len({head["run"] for head in heads}) == 1
    assert int(heads[0]["run"].split("-")[0]) < time.time_ns()
    for number, last in ((7, 10**15), (8, 10**30)):
        absurd = {"run": "9", "rank": 0, "ranks": {"first": 0, "last": last, "step": 1}, "copy": 0}
        flight_files._File(tmp_path / "start0" / f"rank0.{number}.flight", absurd)
    place, recorded, num_others = flight_files.read_newest(tmp_path)
    assert (place, num_others) == (tmp_path / "start0", 0)
    assert {one.ranks for one in recorded} == {tuple(range(2000))}


def test_a_folder_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    run_ranks(2, _check_no_place, tmp_path)
