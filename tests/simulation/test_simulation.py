"""Simulated ranks: replays are equal, waits that cannot end are found, and today's seeds keep the properties."""

# covers zcomm/testing/disk.py zcomm/testing/file_queue.py zcomm/testing/network.py
# covers zcomm/testing/scheduler.py zcomm/testing/simulation.py zcomm/testing/threads.py

from __future__ import annotations

import errno
import gc
import re
import secrets
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from tests.simulation.definition import Fault, Scenario
from tests.simulation.mutants import MUTANTS
from tests.simulation.scenarios import draw, minimised, run
from tests.variables import variables
from zcomm import CommunicationError, DivergedError, control
from zcomm._base.rank_context import clock, threads
from zcomm._transport.backend import ints_over
from zcomm._transport.deadlock_watch import DeadlockWatch
from zcomm._transport.store_exchange import exchange_texts
from zcomm.testing import Deadlock, Simulation
from zero._sharding.bucket import Bucket
from zero._storage.file_store import FileStore
from zero._storage.tier_settings import FileSettings

ROOT = Path(__file__).parents[2]
TODAY = int(datetime.now(timezone.utc).strftime("%Y%m%d")) * 1_000_000
SECONDS = {"protocols": 10.0, "training": 13.0, "checkpoints": 7.0}


@pytest.mark.parametrize("level", ["protocols", "training", "checkpoints"])
def test_seeds_of_today(level: str) -> None:
    torch.set_num_threads(1)
    began, seed = time.monotonic(), TODAY
    while time.monotonic() - began < SECONDS[level]:
        scenario = draw(level, seed)
        result = run(scenario)
        assert not result.problem, f"{result.problem}\nrun({scenario})"
        if seed % 10 == 0:
            assert run(scenario) == result, f"a replay differs: run({scenario})"
        seed += 1
    assert seed > TODAY + 5, "hardly anything was run"


def _waits_for_the_other(rank: int) -> None:
    tensor = torch.zeros(4)
    group: Any = dist.group.WORLD
    group.recv([tensor], 1 - rank, 0).wait()


def test_a_deadlock_is_found_at_once() -> None:
    """Both ranks receive first; the group's timeout is longer than the simulation's limit."""
    began = time.monotonic()
    outcomes = Simulation(2, seed=1, timeout_s=1e9, limit_s=1e6).run(_waits_for_the_other)
    assert [type(one.error) for one in outcomes] == [Deadlock, Deadlock]
    assert "rank 0 main waits for recv; rank 1 main waits for recv" in str(outcomes[0].error)
    assert time.monotonic() - began < 30


def test_a_deadlock_ends_daemons_too_and_so_does_a_job_that_goes_round_in_a_circle() -> None:
    def program(rank: int) -> None:
        topology = zcomm.Topology(ranks_per_node=1)  # its watch runs in a thread that never ends
        if rank == 0:
            threads().Event().wait()
        while True:
            clock().sleep(0.01)
        topology.close()

    outcomes = Simulation(2, seed=1, limit_events=5000).run(program)
    assert ["no end after 5000 events" in str(one.error) for one in outcomes] == [True, True]


def _flips(number: int) -> Callable[[torch.Tensor], None]:
    messages: list[int] = []

    def flip(received: torch.Tensor) -> None:
        if received.numel() >= 500:
            messages.append(received.numel())
            if len(messages) == number:
                received[100] ^= 4

    return flip


@pytest.mark.parametrize("number", [1, 5])
def test_a_flipped_bit_is_found_on_every_rank(number: int) -> None:
    simulation = Simulation(4, seed=number)
    simulation.network.flip = _flips(number)
    with variables(ZCOMM_CHECK="1"):
        outcomes = simulation.run(_program)
    assert [type(one.error) for one in outcomes] == [zcomm.DamagedError] * 4


def test_a_bit_that_flips_in_any_message_is_named_or_changes_nothing() -> None:
    """Found by seed 20261126000987: numbers of ranks had no checksum; by 20261126000063 (training): one rank alone
    believed a verdict that was itself damaged."""
    for message in range(1, 60):
        result = run(Scenario("protocols", 1, 2, 1, ("ints", "gather"), fault=Fault("flips", 0, message)))
        assert not result.problem, f"message {message}: {result.problem}"


def test_ranks_that_one_has_left_alone_close_at_once_and_start_again() -> None:
    """Found by seed 20261126000525: they waited for the timeout in collectives that stood in their queues."""
    for seed in range(20):
        result = run(Scenario("protocols", seed, 4, 2, ("async", "agree"), fault=Fault("closes", 3, 0)))
        assert not result.problem, f"seed {seed}: {result.problem}"


def test_a_rank_outside_of_a_broken_exchange_starts_none_before_it_has_the_number_of_the_others() -> None:
    """Found by seed 20261126000477: the broadcast's rank was through before the watch of a rank in the store."""
    for seed in (20261126000477, *range(1, 41, 4)):  # which of the calls is one too many: the broadcast
        scenario = Scenario("protocols", seed, 4, 1, ("background", "background", "agree"), fault=Fault("extra", 2, 1))
        result = run(scenario)
        assert not result.problem, f"{scenario}: {result.problem}"


def test_what_is_queued_after_a_deadlock_is_broken_is_not_cancelled_with_it() -> None:
    """Found by seed 20261129654651: the watch of a rank that the store released cancelled its next collectives."""
    for seed in (20261129654651, *range(3, 41, 4)):  # which of the calls is one too many: an all-reduce of two hops
        scenario = Scenario("protocols", seed, 4, 2, ("companion", "async"), fault=Fault("extra", 3, 0))
        result = run(scenario)
        assert not result.problem, f"{scenario}: {result.problem}"


def test_a_rank_that_dies_while_a_deadlock_is_broken_leaves_the_others_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They waited for ever for it to read that there is one."""
    simulation, breaks = Simulation(2, seed=1, timeout_s=100.0), DeadlockWatch._break_deadlock

    def dies(watch: Any, *arguments: Any) -> None:
        if watch._rank == 1:
            simulation.kill(1)
            clock().sleep(1.0)
        breaks(watch, *arguments)

    def program(rank: int) -> None:
        topology = zcomm.Topology(ranks_per_node=1)
        zcomm.all_reduce(torch.ones(4 + rank), group=topology)

    monkeypatch.setattr(DeadlockWatch, "_break_deadlock", dies)
    outcomes = simulation.run(program)
    assert outcomes[1].is_killed
    assert isinstance(outcomes[0].error, (CommunicationError, DivergedError))
    assert simulation.scheduler.now_s < 200


def test_a_rank_that_has_left_a_call_the_watch_does_not_log_is_not_reported() -> None:
    """Found by seed 20261127504803 of 5,000: its report, that it waits there, was not taken back yet."""
    result = run(draw("protocols", 20261127504803))
    assert not result.problem, result.problem

    def program(rank: int, late_s: float) -> bool:
        topology = zcomm.Topology(ranks_per_node=1)
        clock().sleep(40.0 if rank == 0 else 0.0)
        exchange_texts([0, 1], "like a barrier", lane="test", timeout=timedelta(seconds=100))
        clock().sleep(late_s if rank == 1 else 0.0)  # rank 0 waits for it in the next exchange
        found = control.any_(torch.tensor(rank == 1), topology)
        topology.close()
        return bool(found)

    with variables(ZCOMM_DIVERGED_AFTER_S="5"):
        for late in range(25):
            outcomes = Simulation(2, seed=late).run(partial(program, late_s=0.1 * late))
            assert [one.error for one in outcomes] == [None, None], f"{0.1 * late} s"


@pytest.mark.parametrize(
    ("per_node", "call", "kind"),
    [(2, "any", "swaps"), (1, "broadcast", "skips"), (2, "async", "differs"), (2, "gather", "extra")],
)
def test_with_checksums_ranks_go_on_after_one_was_alone(per_node: int, call: str, kind: str) -> None:
    """Found by seeds 3000202 and 3000034 with ZCOMM_CHECK=1, as every third seed has: calls of one pair number that
    differ were not started where no rank had made them, and a broadcast waits for the verdict of all ranks."""
    for seed in range(1, 13, 3):
        scenario = Scenario("protocols", seed, 4, per_node, (call, "any", "gather"), fault=Fault(kind, 1, 0))
        result = run(scenario)
        assert not result.problem, f"{scenario}: {result.problem}"


def test_a_report_of_a_topology_that_was_closed_since_is_no_deadlock() -> None:
    """Found by seed 4000008: on a slow network a rank that had closed and made a topology was given up."""
    for seed in (8, 33, 50, 56, 57, 58, 63, 72):
        scenario = Scenario(
            "protocols", 4000000 + seed, 3, 1, ("agree", "close", "background"), fault=Fault("slow", 0, 0)
        )
        result = run(scenario)
        assert not result.problem, f"{scenario}: {result.problem}"


def test_what_a_rank_has_started_for_others_is_complete_before_it_closes() -> None:
    """Found by seed 3000547, with ZCOMM_CHECK=1."""
    for seed in range(1, 31, 3):
        scenario = Scenario("protocols", seed, 4, 2, ("companion", "part"), fault=Fault("differs", 0, 0))
        result = run(scenario)
        assert not result.problem, f"{scenario}: {result.problem}"


def test_a_number_that_is_started_for_others_exchanges_no_checksums() -> None:
    """They would wait for their other half, and close the connections of the group with its timeout."""

    def program(rank: int) -> list[str]:
        topology, results = zcomm.Topology(ranks_per_node=1), list[str]()
        for call, seconds in ((rank == 0, 5.0), (False, 200.0), (False, 0.0)):
            try:
                ints_over(5, topology.world) if call else zcomm.control.any_(torch.tensor(data=False), topology)
                results.append("right")
            except DivergedError:
                results.append("diverged")
            clock().sleep(seconds)
        topology.close()
        return results

    with variables(ZCOMM_CHECK="1"):
        outcomes = Simulation(2, seed=3, timeout_s=100.0).run(program)
    assert [one.result for one in outcomes] == [["diverged", "right", "right"]] * 2, outcomes


def test_the_values_of_live_ranks_are_compared_with_their_own() -> None:
    """The first rank dies among the last events, and the other one ends with results."""
    scenario = Scenario("training", 2, 2, 1, ("step", "step"), "stage 1")
    num_events = run(scenario).num_events
    for at in range(num_events - 14, num_events, 2):
        result = run(scenario.with_fault("dies", 0, at))
        assert not result.problem, result.problem


def test_a_rank_that_is_stopped_goes_on_later() -> None:
    def program(rank: int) -> float:
        for _ in range(3):
            clock().sleep(1.0)
        return clock().monotonic()

    simulation = Simulation(2, seed=1)
    simulation.scheduler.after(0.5, lambda: simulation.stop(1, 10.0))
    outcomes = simulation.run(program)
    assert [one.result for one in outcomes] == [3.0, 12.5]


def test_an_interrupt_ends_a_wait_of_python_but_not_one_of_gloo() -> None:
    received = torch.zeros(4)

    def program(rank: int) -> float:
        if rank == 0:
            clock().sleep(5.0)
            dist.group.WORLD.send([torch.ones(4)], 1, 0).wait()
            clock().sleep(5.0)
            return 0.0
        ended = list[float]()
        for wait in (lambda: dist.group.WORLD.recv([received], 0, 0).wait(), threads().Event().wait):
            with pytest.raises(KeyboardInterrupt):
                wait()
            ended.append(round(clock().monotonic()))
            simulation.scheduler.after(2.0, lambda: simulation.interrupt(1))
        return ended

    simulation = Simulation(2, seed=1)
    simulation.scheduler.after(1.0, lambda: simulation.interrupt(1))
    outcomes = simulation.run(program)
    assert received.tolist() == [1.0] * 4
    assert outcomes[1].result == [5, 7], outcomes[1].error


def test_a_job_that_starts_again_finds_the_keys_of_its_dead_ranks() -> None:
    def program(rank: int) -> str:
        store = dist.distributed_c10d._get_default_store()
        found = bool(store.check(["mine"]))
        store.set("mine", "1")
        clock().sleep(1.0)
        return f"{found} {secrets.token_hex(8)}"

    first = Simulation(1, seed=1)
    second = Simulation(1, seed=1, after=first)
    texts = [simulation.run(program)[0].result.split() for simulation in (first, second)]
    assert [found for found, _ in texts] == ["False", "True"]
    assert texts[0][1] != texts[1][1]


def test_files_are_written_when_the_clock_says_so_and_no_sooner(tmp_path: Path) -> None:
    def program(rank: int) -> list[object]:
        store = FileStore(tmp_path, files=FileSettings(request_nbytes=4096, num_requests=4), name="test", topology=None)
        file, buffer = store.create("a", 8192), store.buffer(4096)
        buffer.fill_(1)
        writing = store.write(file, 0, buffer)
        found: list[object] = [writing.is_done]
        buffer.fill_(2)  # too early: the write has not happened
        writing.wait()
        read = store.buffer(4096)
        store.read(file, 0, read).wait()
        found.append(read.unique().tolist())
        simulation.files_fail_after[rank] = 0
        for call in (lambda: store.create("b", 4096), lambda: store.write(file, 0, buffer).wait(),
                     lambda: store.read(file, 0, read).wait()):  # fmt: skip
            with pytest.raises(OSError, match=r".") as error:
                call()
            found.append(errno.errorcode[error.value.errno])
        store.read(file, 4096, read).wait()
        store.close()
        return found

    simulation = Simulation(1, seed=1)
    assert simulation.run(program)[0].result == [False, [2], "ENOSPC", "EIO", "EBADMSG"]


def test_a_wait_ends_with_the_timeout_of_its_group() -> None:
    simulation = Simulation(2, seed=1, timeout_s=600.0)
    outcomes = simulation.run(_waits_for_the_other)
    assert all("Timed out waiting 600000ms" in str(one.error) for one in outcomes)
    assert 600 <= simulation.scheduler.now_s < 700


def _program(rank: int) -> list[float]:
    topology = zcomm.Topology(ranks_per_node=2)
    output = torch.empty(4 * 512)
    zcomm.all_gather_single(output, torch.arange(512.0) * (rank + 1), group=topology, format="int8")
    topology.close()
    return output[:: 100 + rank].tolist()


def test_equal_seeds_give_equal_runs_and_others_another_order() -> None:
    runs = []
    for seed in (5, 5, 6):
        simulation = Simulation(4, seed)
        outcomes = simulation.run(_program)
        assert all(one.error is None for one in outcomes)
        runs.append((simulation.scheduler.digest, [one.result for one in outcomes]))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert runs[0][1] == runs[2][1]


def test_a_killed_rank_closes_its_connections() -> None:
    simulation = Simulation(3, seed=2, timeout_s=100.0)

    def program(rank: int) -> None:
        if rank == 1:
            simulation.kill(1)
            clock().sleep(1.0)
        zcomm.control.any_(torch.tensor(data=False), zcomm.Topology(ranks_per_node=1))

    outcomes = simulation.run(program)
    assert outcomes[1].is_killed
    assert all(isinstance(outcomes[rank].error, (CommunicationError, DivergedError)) for rank in (0, 2))


def test_threads_of_a_rank_wait_for_each_other() -> None:
    def program(rank: int) -> list[str]:
        of_rank, found = threads(), list[str]()
        lock, ready, items = of_rank.Lock(), of_rank.Event(), of_rank.SimpleQueue()

        def serve() -> None:
            with lock:
                found.append(f"thread of {rank}")
                ready.set()
                clock().sleep(2.0)
            items.put("done")

        thread = of_rank.Thread(target=serve, name="serve", daemon=True)
        thread.start()
        assert ready.wait(5.0)
        with lock:
            found.append(f"after {clock().monotonic():.0f} s")
        found.append(items.get())
        executor = of_rank.Executor(1, thread_name_prefix="pool")
        found.append(str(executor.submit(lambda: rank + 1).result()))
        executor.shutdown(wait=True)
        thread.join()
        return found

    outcomes = Simulation(2, seed=3).run(program)
    assert [one.result for one in outcomes] == [
        ["thread of 0", "after 2 s", "done", "1"],
        ["thread of 1", "after 2 s", "done", "2"],
    ]


@pytest.mark.parametrize("call", ["step", "gather", "state_dict", "no_sync"])
def test_ranks_that_another_one_leaves_alone_end_alike(call: str) -> None:
    for at in range(3):
        fault = Fault("raises", rank=1, at=at)
        result = run(Scenario("training", 1, 2, 1, (call, "step"), "stage 3", fault))
        assert not result.problem, result.problem


def test_ranks_may_learn_of_it_in_the_next_call() -> None:
    """Seed 20261128700124: those of the other node were in "uneven" by then, which expects a DivergedError."""
    fault = Fault("raises", rank=1, at=1)
    calls = ("evaluate", "evaluate", "uneven", "step")
    result = run(Scenario("training", 20261128700124, 4, 2, calls, "delta_hpz", fault))
    assert not result.problem, result.problem


def test_nothing_of_a_simulation_is_kept() -> None:
    """A campaign of many schedules kept all of them, and became ever slower."""
    kept: list[weakref.ref[dist.ProcessGroup]] = []

    def program(rank: int) -> None:
        topology = zcomm.Topology(ranks_per_node=1)  # never closed
        zcomm.all_reduce(torch.ones(3), group=topology)
        group = dist.group.WORLD
        assert group is not None
        kept.append(weakref.ref(group))

    for seed in range(4):
        Simulation(2, seed).run(program)
    gc.collect()
    assert [group() for group in kept[:4]] == [None] * 4, "that of the last runs may wait for its threads to end"


def test_nothing_of_a_training_that_failed_is_kept() -> None:
    """Graphs, hooks and errors refer to each other, also through C++, where Python's collector does not look."""

    def buckets() -> int:
        gc.collect()
        gc.collect()
        return sum(type(thing) is Bucket for thing in gc.get_objects())

    before = buckets()
    for kind, mode in (("raises", "files"), ("dies", "all in files"), ("dies", "offloaded"), ("interrupted", "delta")):
        result = run(Scenario("training", 1, 2, 1, ("step", "step"), mode, Fault(kind, rank=0, at=1)))
        assert not result.problem, result.problem
    assert buckets() <= before


def test_the_text_of_each_mutant_stands_in_its_file_once() -> None:
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.name


def test_a_failing_scenario_is_reduced_to_what_makes_it_fail() -> None:
    scenario = Scenario("protocols", 1, 4, 2, ("any", "agree", "texts", "ints"), fault=Fault("raises", 0, 1))
    fails: Callable[[Scenario], bool] = lambda one: "texts" in one.calls and one.world_size > 2  # noqa: E731
    least = minimised(scenario, fails)
    assert (least.world_size, least.calls, least.fault) == (3, ("texts",), None)


def _lone_calls(*words: str) -> list[str]:
    command = [sys.executable, "-m", "tests.simulation.lone_calls", "--count", "6", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    return re.findall(r": (\w+)", done.stdout) or [done.stderr]


def test_a_call_of_one_rank_alone_is_named() -> None:
    assert _lone_calls() == ["named"] * 3


def test_a_call_of_one_rank_alone_aborted_before_its_mend() -> None:
    if subprocess.run(["git", "cat-file", "-e", "6aae586~1"], cwd=ROOT, check=False).returncode:
        pytest.skip("needs the history of the repository")
    assert _lone_calls("--at", "6aae586~1") == ["aborted"] * 3
