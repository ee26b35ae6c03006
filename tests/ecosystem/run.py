"""Runs scripts of public repositories through zero.compat or with a line of ours, and prints a table.

    python tests/ecosystem/run.py                                   clones what it needs from GitHub
    python tests/ecosystem/run.py --source nanoGPT=/my/clone        uses a folder instead
    python tests/ecosystem/run.py --only cifar --out bench/results/ecosystem.md

No script is part of this repository, and none is changed but for the lines that the table counts. Data, tokenizers and
models are made on the spot (:mod:`tests.ecosystem.material`). Scripts for transformers 4 run with ``--transformers4``,
a folder made by ``pip install --target FOLDER --no-deps "transformers==4.57.*" "huggingface_hub<1" "datasets==4.4.*"
"tokenizers<0.23"``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.ecosystem import cases, changed_cases, material  # noqa: E402
from tests.ecosystem.case import INSTALLED, SOURCES, Case  # noqa: E402
from tests.ecosystem.ranks_of_scripts import FORK, Start  # noqa: E402

CASES = (*changed_cases.CASES, *cases.CASES)
TIMEOUT = 400.0
"""Seconds that one run may take."""
HEADER = (
    "| script or front end | lines | ranks | stage | loss, first and last | beside | ratio of bytes | "
    "loss with formats | seconds to the first step | result |\n|---|---|---|---|---|---|---|---|---|---|"
)
ABOUT = """# Scripts of others

By `python tests/ecosystem/run.py`, {date}: {cores} cores, {versions}; gloo on CPUs. Data, models and tokenizers are
made on the spot and small.

- lines: those that are changed for this library; in parentheses those that the run beside it needs as well: sizes, a
  CPU in place of CUDA, a loss that is printed. The rows without a line run through the door.
- stage: of ZeRO, or DDP or FSDP2 where a line installs formats there.
- beside: the same script, seed and data over torch's DistributedDataParallel or its own FSDP2.
- ratio of bytes: what a rank sends with the formats of ZeRO++ (`int8` weights, `int4` gradients; for the others the
  recipe `zeropp`) to what it sends without formats. Loss with formats: of that run.
- seconds to the first step: rank 0's processor time from the start of the script, with torch imported before, and
  in parentheses that of the run beside it.

"""
VERSIONS = ("torch", "transformers", "accelerate", "trl", "peft", "lightning", "timm", "torchvision")


@dataclass
class Run:
    """What one start of a script gave."""

    losses: list[float] = field(default_factory=list)
    first: float | None = None
    code: int | None = None
    lines: list[str] = field(default_factory=list)
    nbytes: int | None = None

    @property
    def error(self) -> str:
        """The last line that names an error."""
        found = [one for one in self.lines if re.search(r"^(\[rank\d\]: )?[\w.]*(Error|Exception)\b", one)]
        return (found or self.lines or ["no output"])[0 if found else -1].strip()[:160]

    @property
    def ends(self) -> str:
        """First and last loss."""
        return f"{self.losses[0]:.3f} → {self.losses[-1]:.3f}" if self.losses else "-"

    @property
    def is_falling(self) -> bool:
        """Whether the mean of the last third is below that of the first."""
        third = max(1, len(self.losses) // 3)
        return len(self.losses) > 1 and sum(self.losses[-third:]) < sum(self.losses[:third])


class Bench:
    """Copies of sources with made data, in one temporary folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.place = Path(options.work or tempfile.mkdtemp(prefix="ecosystem-"))
        shutil.rmtree(self.place / "run", ignore_errors=True)
        self.given = dict(one.split("=", 1) for one in options.source)
        self.plain: dict[Any, Run] = {}

    def source(self, name: str) -> Path:
        """The folder of a repository; cloned if it was not given."""
        if name in self.given:
            return Path(self.given[name]).resolve()
        if name in INSTALLED:
            found = importlib.util.find_spec(name)
            assert found is not None
            assert found.origin is not None
            return Path(found.origin).parent
        folder = self.place / "sources" / name
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", "--depth", "1", SOURCES[name], str(folder)], check=True)
        return folder

    def prepare(self, case: Case, stage: int | str, kind: str) -> tuple[Path, Path]:
        """A fresh copy of the case's repository, and in it the folder of the script with its data."""
        root = self.place / "run" / "".join(re.findall(r"\w+", case.name))
        made = root.with_name(root.name + ".made")
        if not made.exists():  # once: a tokenizer's training breaks ties anew each time
            shutil.copytree(self.source(case.source), made, ignore=shutil.ignore_patterns(".git"), symlinks=True)
            self._make(case, made / case.folder)
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(made, root, symlinks=True)
        self._change(case, root, stage, kind)
        return root, root / case.folder

    def _make(self, case: Case, folder: Path) -> None:
        """In a process of its own: here nothing may import transformers before a rank opens the door."""

        def make() -> None:
            for one in case.material:
                one(folder)

        process = FORK.Process(target=make)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{case.name}: its data could not be made")

    def _change(self, case: Case, root: Path, stage: int | str, kind: str) -> None:
        ours = {"own": case.own_changes, "compressed": (*case.changes, *case.compressed)}
        ours["uncompressed"] = (*case.changes, *case.uncompressed)
        for change in (*case.everywhere, *ours.get(kind, case.changes)):
            path = root / case.folder / change.file
            old, new = (one.replace("{stage}", str(stage)) for one in (change.old, change.new))
            text = path.read_text()
            if text.count(old) != 1:
                raise SystemExit(f"{case.name}: {change.file} is not as expected: {old!r}")
            path.write_text(text.replace(old, new))

    def beside(self, case: Case) -> Run:
        """The run without this library, once for all cases of one script."""
        if not case.beside:
            return Run(code=0)
        key = (case.source, case.folder, case.script, str(case.own_arguments or case.arguments), case.beside)
        if key not in self.plain:
            self.plain[key] = self.run(case, case.stages[0], case.beside)
        return self.plain[key]

    def run(self, case: Case, stage: int | str, kind: str = "") -> Run:
        """Start the script once: "", "plain", "own", "uncompressed" or "compressed"."""
        root, folder = self.prepare(case, stage, kind)
        out, config = root / "out", root / "ds.json"
        out.mkdir()
        if case.config is not None:
            formats = case.formats if kind == "compressed" else None
            section = {**case.config["zero_optimization"], "stage": stage, **(formats or {})}
            config.write_text(json.dumps({**case.config, "zero_optimization": section}))
        fill = {"stage": stage, "config": config, "out": out, "folder": folder, "root": root}
        given = case.arguments if kind != "own" or case.own_arguments is None else case.own_arguments
        arguments = [*(["--local_rank"] if case.local_rank else []), case.script, *shlex.split(given.format(**fill))]
        door = case.own_uses_door if kind == "own" else not case.changes
        how = kind if kind == "plain" else "door" if door else "direct"
        return self._start(
            case, Start(how, arguments, folder, self._environment(case, kind, fill), case.ranks, TIMEOUT)
        )

    def _environment(self, case: Case, kind: str, fill: dict[str, Any]) -> dict[str, str]:
        folder = Path(fill["folder"])
        given = case.environment if kind != "own" or case.own_environment is None else case.own_environment
        own = {key: one.format(**fill) for key, one in given.items()}
        paths = [own.pop("PYTHONPATH", ""), str(folder / "stand_in")]
        if material.torchvision_without_operators in case.material:
            paths.append(str(self.options.torchvision or ""))
        if case.old_transformers:
            paths.insert(0, str(self.options.transformers4))
        fixed = {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled",
            "HF_HOME": str(self.place / "hf"), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(one for one in paths if one), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        return {**os.environ, **fixed, **own}

    def _start(self, case: Case, start: Start) -> Run:
        run = Run()

        def take(rank: int, line: str, seconds: float) -> None:
            if self.options.verbose:
                sys.stdout.write(f"[{rank}] {line}\n")
            run.lines.append(line)
            if rank > 0:
                return
            if found := re.search(r"^bytes sent: (\d+)", line):
                run.nbytes = int(found.group(1))
            if found := re.search(case.loss, line):
                run.first = seconds if run.first is None else run.first
                if re.fullmatch(r"-?[0-9.]+", found.group(1)):
                    run.losses.append(float(found.group(1).rstrip(".")))

        run.code = start.run(take)
        return run


def missing(case: Case, bench: Bench) -> str:
    """Why a case cannot run here; "" if it can."""
    absent = [name for name in case.needs if importlib.util.find_spec(name) is None]
    if absent:
        return f"not run: pip install {' '.join(absent)}"
    if case.old_transformers and not bench.options.transformers4:
        return "not run: needs --transformers4"
    try:
        bench.source(case.source)
    except subprocess.CalledProcessError:
        return f"not run: no copy of {SOURCES[case.source]}"
    return ""


def rows(case: Case, bench: Bench) -> list[str]:
    """The case's rows of the table."""
    if why := missing(case, bench):
        return [f"| {case.name} | {case.num_lines} | {case.ranks} | - | - | - | - | - | - | {why} |"]
    beside = bench.beside(case)
    listed = []
    for stage in case.stages:
        run, ratio, compressed = bench.run(case, stage), "-", Run(code=0)
        if case.is_compared and stage == case.stages[-1] and run.code == 0:
            other = bench.run(case, stage, "uncompressed" if case.uncompressed else "compressed")
            full, compressed = (other, run) if case.uncompressed else (run, other)
            ratio = f"{compressed.nbytes / full.nbytes:.3f}" if compressed.nbytes and full.nbytes else "?"
        result = "runs" if run.is_falling or not case.falls else "loss does not fall"
        result = "runs, but sends nothing" if run.nbytes == 0 and case.sends(stage) else result
        result = result if run.code == 0 else f"fails: {run.error}"
        lost = [one for one in (beside, compressed) if one.code != 0]
        result += "".join(f"; {'beside' if one is beside else 'with formats'} fails: {one.error}" for one in lost)
        seconds = " (".join(f"{one.first:.1f}" for one in (run, beside) if one.losses)
        cells = (
            case.name, case.num_lines, case.ranks, stage if stage or case.falls else "-", run.ends, beside.ends, ratio,
            compressed.ends, (seconds + ")" * (" (" in seconds)) or "-", "; ".join(filter(None, (result, case.note))),
        )  # fmt: skip
        listed.append("| " + " | ".join(str(one).replace("|", "\\|") for one in cells) + " |")
        sys.stdout.write(listed[-1] + "\n")
        sys.stdout.flush()
    return listed


def about() -> str:
    """What stands above the table: when, where and with which versions it was made."""
    found = [name for name in VERSIONS if importlib.util.find_spec(name) is not None]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in found)
    date = datetime.datetime.now(tz=datetime.timezone.utc).date()
    return ABOUT.format(date=date, cores=len(os.sched_getaffinity(0)), versions=versions)


def main() -> int:
    """Run the cases that were asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER", help="use a local copy")
    parser.add_argument("--only", default="", help="cases whose name has this regular expression")
    parser.add_argument("--transformers4", metavar="FOLDER", help="where transformers 4 was installed to")
    parser.add_argument("--torchvision", metavar="FOLDER", help="where torchvision was installed to, if a CPU torch")
    parser.add_argument("--work", metavar="FOLDER", help="where to work, and leave everything")
    parser.add_argument("--out", metavar="FILE", help="write the table here, too")
    parser.add_argument("--verbose", action="store_true", help="print what the scripts print")
    options = parser.parse_args()
    bench = Bench(options)
    try:
        listed = [row for case in CASES if re.search(options.only, case.name) for row in rows(case, bench)]
    finally:
        if options.work is None:
            shutil.rmtree(bench.place, ignore_errors=True)
    table = "\n".join([HEADER, *listed]) + "\n"
    sys.stdout.write("\n" + table)
    if options.out:
        Path(options.out).write_text(about() + table)
    return int(any("| fails" in row for row in listed))


if __name__ == "__main__":
    sys.exit(main())
