"""Many faults: ``python -m tests.faults --runs 450 --torchrun 50 --results FILE``. Goes on where FILE ends.

FILE has a line of JSON for each run; ``--table`` prints how they came out, by fault.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults.definition import CONFIGS, FAULTS, draw_spec
from tests.faults.elastic import run_elastic, run_on_two_machines
from tests.faults.forked import attempt_forked, run_forked, told
from tests.ranks import forkserver

RUN = {"forked": run_forked, "torchrun": run_elastic, "network": run_on_two_machines}
OUTCOMES = ("ok", "unnamed", "hang", "wrong", "lost")


def reference(config: str, fault: str = "", step: int = -1) -> str:
    """The digest of an undisturbed run, or of one that leaves out the update of a step."""
    spec = {**draw_spec(0, "forked"), "config": config, "fault": fault, "step": step, "async": False}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "files").mkdir()
        (folder / "spec.json").write_text(json.dumps(spec))
        assert attempt_forked(folder, 0)
        return str(told(folder, 0, "end")[0]["hash"])


class References:
    """Digests, each made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], str] = {}

    def of(self, spec: dict[str, Any]) -> str:
        if spec["fault"] == "huge value":
            return "any"
        is_skipped = spec["fault"] in ("NaN", "infinity")
        key = (spec["config"], "skip" if is_skipped else "", spec["step"] if is_skipped else -1)
        if key not in self._known:
            self._known[key] = reference(*key)
        return self._known[key]


def run_one(mode: str, seed: int, references: References) -> dict[str, Any]:
    """One run, in a folder of its own."""
    spec = draw_spec(seed, mode)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        line = RUN[mode](spec, folder, references.of(spec))
        if line["outcome"] == "hang":
            line["stacks"] = [path.read_text()[-4000:] for path in sorted(folder.glob("hang-*"))]
    return line


def table(lines: list[dict[str, Any]]) -> str:
    """By mode and fault: what must follow, and how often what came out."""
    rows = ["| fault | what is done | what must follow | runs | " + " | ".join(OUTCOMES) + " | error after (s) |",
            "|---|---|---|---|" + "---|" * (len(OUTCOMES) + 1)]  # fmt: skip
    for name, fault in FAULTS.items():
        for mode in fault.modes:
            mine = [line for line in lines if (line["fault"], line["mode"]) == (name, mode)]
            counts = Counter(line["outcome"] for line in mine)
            late = [line["error_after_s"] for line in mine if line.get("error_after_s") is not None]
            cells = [f"{name} ({mode})", fault.what, fault.must, len(mine), *(counts[o] for o in OUTCOMES)]
            rows.append("| " + " | ".join(map(str, cells)) + f" | {f'<= {max(late):.1f}' if late else '-'} |")
    counts = Counter(line["outcome"] for line in lines)
    rows.append(f"| all | | | {len(lines)} | " + " | ".join(str(counts[o]) for o in OUTCOMES) + " | |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=450, help="on forks")
    parser.add_argument("--torchrun", type=int, default=50, help="under torchrun")
    parser.add_argument("--network", type=int, default=4, help="under torchrun on two emulated machines")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    if not args.table:
        done = {(line["mode"], line["seed"]) for line in lines}
        wanted = [("network", i) for i in range(args.network)] + [("torchrun", i) for i in range(args.torchrun)]
        wanted += [("forked", i) for i in range(args.runs)]
        _run_all([one for one in wanted if one not in done], args, lines)
    sys.stdout.write(table(lines) + "\n")
    return int(any(line["outcome"] not in ("ok", "skipped") for line in lines))


def _run_all(wanted: list[tuple[str, int]], args: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    deadline, references = time.monotonic() + args.seconds, References()
    for config in CONFIGS:
        references.of({"config": config, "fault": "", "step": -1})

    def one(mode: str, seed: int) -> None:
        if time.monotonic() > deadline:
            return
        line = run_one(mode, seed, references)
        lines.append(line)
        with args.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if line["outcome"] != "ok":
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    forkserver()
    for mode, seed in wanted:
        if mode == "network":  # the namespaces have this process's number for a name
            one(mode, seed)
    with ThreadPoolExecutor(args.at_once) as pool:
        for future in [pool.submit(one, *each) for each in wanted if each[0] != "network"]:
            future.result()


if __name__ == "__main__":
    sys.exit(main())
