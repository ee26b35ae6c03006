"""Run a job many times with random faults: ``python -m tests.faults --runs 450 --torchrun 50 --network 6``.

The log has a line of JSON for each run: what was drawn, how it came out, every rank's error, seconds. The tables of
bench/results/faults.md are made from it, at the end or with ``--table`` alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults.definition import CONFIGS, FAULTS, draw_spec
from tests.faults.elastic import ROOT, run_elastic, run_on_two_machines
from tests.faults.forked import attempt_forked, read_reports, run_forked
from tests.ranks import forkserver

RUN = {"forked": run_forked, "torchrun": run_elastic, "network": run_on_two_machines}
OUTCOMES = ("ok", "unnamed", "hang", "wrong", "lost")
PAGE = ROOT / "bench" / "results" / "faults.md"
LOG = PAGE.with_suffix(".jsonl.xz")
MARKED = re.compile(r"(?<=<!-- from the log -->\n).*(?=<!-- end -->)", re.DOTALL)

Line = dict[str, Any]


class References:
    """Digests of undisturbed runs, and of runs that skip the update of one step; each is computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], str] = {}
        self._locks = {name: threading.Lock() for name in CONFIGS}

    def of(self, spec: dict[str, Any]) -> str:
        """The digest with which a run of ``spec`` must end."""
        if spec["fault"] == "huge value":
            return "any"
        left_out = spec["step"] if spec["fault"] in ("NaN", "infinity") else -1
        key = (spec["config"], left_out)
        with self._locks[spec["config"]]:
            if key not in self._known:
                self._known[key] = _reference(*key)
            return self._known[key]


def _reference(config: str, left_out: int) -> str:
    kind = "skip" if left_out >= 0 else ""
    spec = {**draw_spec(0, "forked"), "config": config, "fault": kind, "step": left_out, "async": False}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "files").mkdir()
        (folder / "spec.json").write_text(json.dumps(spec))
        assert attempt_forked(spec, folder, 0), f"an undisturbed run hangs: {config}"
        ends, errors = read_reports(folder, 0, "end"), read_reports(folder, 0, "error")
        assert not errors, f"an undisturbed run fails: {config}: {errors}"
        return str(ends[0]["hash"])


def run_one(mode: str, seed: int, references: References) -> Line:
    spec = draw_spec(seed, mode)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = RUN[mode](spec, folder, references.of(spec))
        if line["outcome"] == "hang":
            line["stacks"] = [path.read_text()[-4000:] for path in sorted(folder.glob("hang-*"))]
    line = {"errors": {}, "problems": [line["outcome"]], **line}
    return {**line, "at": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%MZ}", "source": source()}


@cache
def source() -> str:
    found = hashlib.sha256()
    for path in sorted(p for top in ("zcomm", "zero", "cpp") for p in (ROOT / top).rglob("*")):
        if path.suffix in (".py", ".cc", ".h"):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:12]


def read_log(path: Path) -> list[Line]:
    """Return the runs in the log, the last one of each seed."""
    if not path.exists():
        return []
    with lzma.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    return list({(line["mode"], line["seed"]): line for line in lines}.values())


def write_log(path: Path, lines: Sequence[Line]) -> None:
    """Write all runs, in the order of modes and seeds."""
    with lzma.open(path, "wt", preset=9) as file:
        for line in sorted(lines, key=lambda line: (line["mode"], line["seed"])):
            file.write(json.dumps(line) + "\n")


def tables(lines: Sequence[Line]) -> str:
    """The outcomes by fault and by configuration, and which errors the unaffected ranks raised."""
    head = " | runs | " + " | ".join(OUTCOMES) + " |"
    rows = ["| fault | what is done | what must follow" + head + " error after (s) |", "|---|---|---|" + "---|" * 7]
    for name, fault in FAULTS.items():
        for mode in fault.modes:
            mine = [line for line in lines if (line["fault"], line["mode"]) == (name, mode)]
            late = [line["error_after_s"] for line in mine if line.get("error_after_s") is not None]
            seconds_text = f"<= {max(late):.1f}" if late else "-"
            rows.append(f"| {name} ({mode}) | {fault.what} | {fault.must} | {_counted(mine)} | {seconds_text} |")
    rows += [f"| all | | | {_counted(lines)} | |", "", "| configuration | ranks" + head, "|---|---|" + "---|" * 6]
    for name, config in CONFIGS.items():
        mine = [line for line in lines if line["config"] == name]
        rows.append(f"| {name} | {config.ranks} | {_counted(mine)} |")
    told_by = Counter(
        (error, FAULTS[line["fault"]].is_felt_by_peers)
        for line in lines
        for rank, (error, _) in line.get("errors", {}).items()
        if int(rank) != line["victim"]
    )
    rows += ["", "| error of a rank that suffered nothing | times, a peer is gone | times, else |", "|---|---|---|"]
    for error in sorted({error for error, _ in told_by}):
        rows.append(f"| {error} | {told_by[error, True]} | {told_by[error, False]} |")
    return "\n".join([*rows, "", *_said(lines)])


def _counted(lines: Sequence[Line]) -> str:
    counts = Counter(line["outcome"] for line in lines)
    return " | ".join(map(str, [len(lines), *(counts[outcome] for outcome in OUTCOMES)]))


def _said(lines: Sequence[Line]) -> Iterable[str]:
    modes, sources = Counter(line["mode"] for line in lines), Counter(line["source"] for line in lines)
    newest = {line["source"]: line["at"] for line in sorted(lines, key=lambda line: str(line["at"]))}
    yield "Runs: " + ", ".join(f"{modes[mode]} {mode}" for mode in RUN) + "."
    by_source = ", ".join(f"{sources[one]} of {one} (until {at})" for one, at in newest.items())
    yield f"By digest of the library's source, oldest first: {by_source}."
    late = sum(FAULTS[line["fault"]].is_felt_by_peers and not line["errors"] for line in lines)
    yield f"In {late} of them nobody needed the lost rank any more: the others ended without an error."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=450, help="on forks")
    parser.add_argument("--torchrun", type=int, default=50, help="under torchrun")
    parser.add_argument("--network", type=int, default=6, help="under torchrun on two emulated machines")
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so long")
    parser.add_argument("--again", action="store_true", help="also what was run with another source of the library")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    if not args.table:
        run_all(wanted(args, read_log(args.log)), args.log, args.at_once, args.seconds, References())
    lines = read_log(args.log)
    write_log(args.log, lines)
    if args.log == LOG:
        PAGE.write_text(MARKED.sub(lambda _: tables(lines) + "\n", PAGE.read_text()))
    sys.stdout.write(tables(lines) + "\n")
    return int(any(line["outcome"] != "ok" for line in lines))


def wanted(args: argparse.Namespace, lines: Sequence[Line]) -> list[tuple[str, int]]:
    """Modes and seeds that ``lines`` lacks, or that failed with another version of the library's source."""
    now = source()
    is_done = [line["source"] == now or (line["outcome"] == "ok" and not args.again) for line in lines]
    done = {(line["mode"], line["seed"]) for line, holds in zip(lines, is_done, strict=True) if holds}
    numbers = {"network": args.network, "torchrun": args.torchrun, "forked": args.runs}
    return [one for mode, number in numbers.items() for seed in range(number) if (one := (mode, seed)) not in done]


def run_all(runs: Sequence[tuple[str, int]], log: Path, at_once: int, seconds: float, references: References) -> None:
    """Run them, append one line each to ``log`` (as a separate compressed stream), and print failures."""
    deadline, lock = time.monotonic() + seconds, threading.Lock()

    def one(mode: str, seed: int) -> None:
        if time.monotonic() > deadline:
            return
        line = run_one(mode, seed, references)
        if line["outcome"] != "ok":
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        if line["outcome"] in OUTCOMES:
            with lock, lzma.open(log, "at") as file:
                file.write(json.dumps(line) + "\n")

    forkserver()
    for mode, seed in runs:
        if mode == "network":  # the namespaces have this process's number for a name
            one(mode, seed)
    with ThreadPoolExecutor(at_once) as pool:
        for future in [pool.submit(one, *each) for each in runs if each[0] != "network"]:
            future.result()


if __name__ == "__main__":
    sys.exit(main())
