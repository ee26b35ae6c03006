"""Mistakes in protocols, each of which the simulation must find: ``python -m tests.simulation.mutants [--only TEXT]``.

Each is made in a copy of the repository, where seeds are simulated until one fails, or the time is up. First the copy as
it is must pass for as long.

    caught      a property does not hold, or the job cannot run at all
    survived    the time is up
    late        the simulation itself does not end: says nothing
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutants.run import Copy

WATCH, GROUPS, STORE = (f"zcomm/_transport/{name}.py" for name in ("deadlock_watch", "groups", "store_exchange"))
TAGGED, LOG, WORK = (f"zcomm/_transport/{name}.py" for name in ("tagged", "collective_log", "work"))
ERRORS, CONTROL, DAEMON = "zero/_ranks/rank_errors.py", "zcomm/control.py", "zcomm/_base/daemon_threads.py"
REDUCER, GATHERER, WRITE_BACK = "zero/_gradients/reducer.py", "zero/_gather/gatherer.py", "zero/_runtime/write_back.py"
DELAYED, DURABLE, COMMIT = "zero/_optim/delayed_update.py", "zero/_checkpoint/durability.py", "zero/_checkpoint/dcp.py"
SAVE, FIRST_RANK = "zero/_checkpoint/collective_save.py", "zero/_ranks/first_rank.py"


class ProtocolMutant(NamedTuple):
    """One text of one file, replaced."""

    name: str
    file: str
    old: str
    new: str
    level: str = "protocols"


MUTANTS = (
    ProtocolMutant(
        "an agreement skipped: a rank without an error does not ask the others",
        ERRORS, "if control.are_equal(mine, ranks) and failure is None:", "if failure is None:",
    ),
    ProtocolMutant(
        "an error not shared: ranks that have none go on",
        ERRORS, "        if kind:\n            raise", "        if kind and rank < 0:\n            raise",
    ),
    ProtocolMutant(
        "the first peer only checked", ERRORS, "for rank, text in enumerate(texts):\n        kind", "for rank, text in enumerate(texts[:1]):\n        kind",
    ),
    ProtocolMutant(
        "a missing wait: only the first of several receives is waited for",
        TAGGED, "while self._works:  # gloo's sends and receives can be waited for only once\n                    self._works.pop(0).wait()",
        "if self._works:\n                    self._works.pop(0).wait()\n                    self._works = []",
    ),
    ProtocolMutant(
        "exchanges without numbers: leftovers match later ones",
        TAGGED, 'text = f"{number} {operation}', 'text = f"{operation}',
    ),
    ProtocolMutant(
        "a broadcast forgets the last child", TAGGED, "return parent, [(src + child) % size for child in children]",
        "return parent, [(src + child) % size for child in children[:-1] or children]",
    ),
    ProtocolMutant(
        "the outcome of a store exchange decided by each rank alone",
        STORE, 'outcome = self._client.compare_set(key, "", GO)', "outcome = GO.encode()",
    ),
    ProtocolMutant(
        "texts deleted before the others have read them",
        STORE, "if number > 1:  # every rank has arrived here, so every rank has read the texts of the exchange before\n            self._client.delete_key(f\"{self._places[name]}/{number - 1}/{self._rank}\")",
        "if number > 0:\n            self._client.delete_key(f\"{self._places[name]}/{number}/{self._rank}\")",
    ),
    ProtocolMutant(
        "a store exchange that does not go by its number", STORE, 'place = f"{self._places[name]}/{number}"', 'place = f"{self._places[name]}/1"',
    ),
    ProtocolMutant(
        "verdict: a rank completes exchanges before the others have heard of it",
        WATCH, 'while self._store.add(self._key("heard"), 0) < self._world_size:', 'while self._store.add(self._key("heard"), 0) < 1:',
    ),
    ProtocolMutant(
        "verdict: broken exchanges are not completed for the others",
        WATCH, "            works.append(backend.start_for_others(number, call, over))", "            pass",
    ),
    ProtocolMutant(
        "verdict: the waits are never told that the missing part has started",
        WATCH, "            for watched in hops.values():\n                watched.log.missing_started.set()", "            for watched in ():\n                watched.log.missing_started.set()",
    ),
    ProtocolMutant(
        "verdict: this rank's log is not marked", WATCH, "watched.log.mark_broken(known[key].until, reason)", "pass",
    ),
    ProtocolMutant(
        "watch: a rank that leaves does not say so, and closed hops are not watched",
        WATCH, "            self._closed[name] = {key: _closed(watched) for key, watched in watched_of(topology)}\n", "",
    ),
    ProtocolMutant(
        "watch: reports after one sample, whatever has changed since",
        WATCH, "if seen is None or seen != self._last_sample:", "if seen is None:",
    ),
    ProtocolMutant(
        "watch: decides without asking whether the exchanges will end",
        WATCH, "if not waits or will_end(world) or any(", "if not waits or any(",
    ),
    ProtocolMutant(
        "watch: the first rank decides before all have reported",
        WATCH, '0) == self._world_size:\n            self._decide()', '0) >= 1:\n            self._decide()',
    ),
    ProtocolMutant(
        "a broken exchange's result is used", LOG, "        is_broken = self._number <= self._log.last_broken", "        is_broken = False",
    ),
    ProtocolMutant(
        "a wait ends before the missing part has started", LOG, "            self._log.missing_started.wait()\n", "",
    ),
    ProtocolMutant(
        "shared groups: the ranks do not compare which group they have",
        GROUPS, "if known is None or set(numbers) != {known.number}:", "if known is None:",
    ),
    ProtocolMutant(
        "shared groups: channels numbered by each rank alone",
        GROUPS, "return known, known.num_channels", "return known, known.num_channels + len(known.users) % 2 * (dist.get_rank() % 2)",
    ),
    ProtocolMutant(
        "names of groups not levelled", GROUPS, "    while len(names) < wanted:\n        _take_group_name()\n", "",
    ),
    ProtocolMutant(
        "a lost wake-up: a queued collective that fails wakes nobody",
        WORK, "    def _end(self) -> None:\n        self.done.set()", "    def _end(self) -> None:\n        if self._error is None:\n            self.done.set()",
    ),
    ProtocolMutant(
        "a lost wake-up: a thread that was told to end takes no later call",
        DAEMON, "            if is_ending:\n                with self._lock:\n                    if self._calls.empty():\n                        self._is_running = False\n                        return",
        "            if is_ending:\n                return",
    ),
    ProtocolMutant(
        "two exchanges swapped: a rank agrees before it finishes what it has issued",
        REDUCER, "        if self.reduces_now:\n            self._agree_and_issue_rest()\n        self._finish(list(self._in_flight))", "        if self._topology.rank == 0:\n            self._finish(list(self._in_flight))\n        if self.reduces_now:\n            self._agree_and_issue_rest()\n        self._in_flight.clear()",
        "training",
    ),
    ProtocolMutant(
        "a mean is used before its reduction has ended", REDUCER, "            self._pool.reclaim(flight.works, *flight.borrowed)\n", "            self._pool._lent.clear()\n", "training",
    ),
    ProtocolMutant(
        "buckets are reduced in the order in which gradients arrive on each rank",
        REDUCER, "self._order = list(reversed(self.all))", "self._order = list(reversed(self.all)) if self._topology.rank else list(self.all)", "training",
    ),
    ProtocolMutant(
        "each rank decides alone what it reduces at the end of a backward",
        REDUCER, "control.agree(numbers, used + pending + late, self._agreeing)", "(numbers, numbers, used + pending + late)", "training",
    ),
    ProtocolMutant(
        "a gather is used before it has ended", GATHERER, "        self._issue(bucket)\n        self._wait(bucket)", "        self._issue(bucket)\n        self._pool._lent.clear()", "training",
    ),
    ProtocolMutant(
        "new parameters are not waited for", WRITE_BACK, "        for work in sent:\n            work.wait()\n", "", "training",
    ),
    ProtocolMutant(
        "the order of gathers is not compared", GATHERER, "        if bool((control.gather_float64(mine, self._ranks) != mine).any()):", "        if False:", "training",
    ),
    ProtocolMutant(
        "old values stay gathered after a step", GATHERER, "        self.release_all()\n        self.end_iteration(IterationKind.TRAINING)", "        self.end_iteration(IterationKind.TRAINING)", "training",
    ),
    ProtocolMutant(
        "a commit of what was not written: a delayed update is committed by each rank alone",
        DELAYED, "on_every_rank(future.result, self._topology)", "future.result() if self._topology.rank else on_every_rank(future.result, self._topology)", "training",
    ),
    ProtocolMutant(
        "a delayed update starts over what the last one still writes back",
        DELAYED, "bucket.staged = memory[-1] if self._finished.get(bucket) is memory[0] else memory[0]", "bucket.staged = memory[0]", "training",
    ),
    ProtocolMutant(
        "a file's name is used before its data is synced", DURABLE, "            file.flush()\n            os.fsync(file.fileno())\n", "            file.flush()\n", "checkpoints",
    ),
    ProtocolMutant(
        "a new name is not synced", DURABLE, "        remove_file(temporary)\n        raise\n    sync_folder(path.parent)\n", "        remove_file(temporary)\n        raise\n", "checkpoints",
    ),
    ProtocolMutant(
        "new folders are not synced", DURABLE, "    for path in missing:\n        sync_folder(path.parent)\n", "", "checkpoints",
    ),
    ProtocolMutant(
        "metadata before the names of the shards are durable", COMMIT, "        sync_folder(self._folder)\n        replace_file", "        replace_file", "checkpoints",
    ),
    ProtocolMutant(
        "old shards removed before the new metadata",
        COMMIT, "        sync_folder(self._folder)\n        replace_file(", "        sync_folder(self._folder)\n        remove_stale_shards(self._folder, set(files))\n        replace_file(", "checkpoints",
    ),
    ProtocolMutant(
        "`latest` names a checkpoint that is not complete yet",
        COMMIT, "        sync_folder(self._folder)\n        replace_file(", "        replace_file(self._folder.parent / LATEST, latest_line(self._folder.name), self.save_id + \"x\")\n        sync_folder(self._folder)\n        replace_file(", "checkpoints",
    ),
    ProtocolMutant(
        "a commit of what was not written: only the first rank's outcome counts",
        FIRST_RANK, "zip(texts, of_ranks, strict=True) if \"error\" in outcome]", "zip(texts[:1], of_ranks[:1], strict=True) if \"error\" in outcome]", "checkpoints",
    ),
)  # fmt: skip

RUN = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
sys.path.insert(0, ".")
from tests.simulation.__main__ import main
sys.exit(main())
"""


def outcome_of(mutant: ProtocolMutant, folder: Path, minutes: float, seed: int) -> tuple[str, str]:
    """Whether the simulation finds ``mutant``, made in the copy in ``folder``; and what it said."""
    path = folder / mutant.file
    before = path.read_text()
    if before.count(mutant.old) != 1:
        return "not applied", f"{before.count(mutant.old)} times"
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        return _simulated(folder, mutant.level, minutes, seed)
    finally:
        path.write_text(before)


def _simulated(folder: Path, level: str, minutes: float, seed: int) -> tuple[str, str]:
    words = ["--level", level, "--seed", str(seed), "--minutes", str(minutes), "--first"]
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-c", RUN, *words],
            cwd=folder, capture_output=True, text=True, check=False, timeout=60 * minutes + 120,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "late", "the simulation itself does not end"
    return ("survived" if done.returncode == 0 else "caught"), (done.stdout + done.stderr).strip()


def main() -> int:
    """Returns 1 if a mutant was not caught, or the copy as it is does not pass."""
    parser = argparse.ArgumentParser(description="Mistakes in protocols that the simulation must find.")
    parser.add_argument("--only", default="", help="mutants whose name has this text")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chosen, missed = [one for one in MUTANTS if arguments.only in one.name], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Copy(folder)
        for level in sorted({one.level for one in chosen}):
            outcome, text = _simulated(folder, level, arguments.minutes, arguments.seed)
            if outcome != "survived":
                print(f"{level} without a mistake: {outcome}\n{text}", flush=True)
                return 1
        for mutant in chosen:
            began = time.monotonic()
            outcome, text = outcome_of(mutant, folder, arguments.minutes, arguments.seed)
            missed += outcome != "caught"
            said = next((line for line in text.splitlines() if "FAILED" in line or "Error" in line), text[-200:])
            print(f"{outcome:>12} {time.monotonic() - began:6.1f} s  {mutant.name}: {said[:160]}", flush=True)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
