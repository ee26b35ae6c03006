"""Runs scripts of public repositories through zero.compat, and prints a table.

    python tests/ecosystem/run.py                                   clones what it needs from GitHub
    python tests/ecosystem/run.py --source nanoGPT=/my/clone        uses a folder instead
    python tests/ecosystem/run.py --only cifar --out results.md

No script is part of this repository, and none is changed but for the lines that the table counts. Data, tokenizers and
models are made on the spot (:mod:`tests.ecosystem.material`). Scripts for transformers 4 run with ``--transformers4``,
a folder made by ``pip install --target FOLDER --no-deps "transformers==4.57.*" "huggingface_hub<1" "datasets==4.4.*"
"tokenizers<0.23" "accelerate==1.10.*"``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.ecosystem.cases import CASES, SOURCES, Case, Change  # noqa: E402

TIMEOUT = 300.0
"""Seconds that one run may take."""
HEADER = (
    "| script or front end | lines changed | ranks | stage | loss, first and last | beside DDP | bytes with formats | "
    "seconds to first step | result |\n|---|---|---|---|---|---|---|---|---|"
)


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

    def source(self, name: str) -> Path:
        """The folder of a repository; cloned if it was not given."""
        if name in self.given:
            return Path(self.given[name]).resolve()
        folder = self.place / "sources" / name
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", "--depth", "1", SOURCES[name], str(folder)], check=True)
        return folder

    def prepare(self, case: Case, kind: str) -> tuple[Path, Path]:
        """A fresh copy of the case's repository, and in it the folder of the script with its data."""
        root = self.place / "run" / "".join(re.findall(r"\w+", case.name))
        made = root.with_name(root.name + ".made")
        if not made.exists():  # once: a tokenizer's training breaks ties anew each time
            shutil.copytree(self.source(case.source), made, ignore=shutil.ignore_patterns(".git"), symlinks=True)
            for make in case.material:
                make(made / case.folder)
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(made, root, symlinks=True)
        self._change(case, root, case.own_changes if kind == "own" else case.changes)
        return root, root / case.folder

    def _change(self, case: Case, root: Path, changes: Sequence[Change]) -> None:
        for change in changes:
            path = root / case.folder / change.file
            text = path.read_text()
            if text.count(change.old) != 1:
                raise SystemExit(f"{case.name}: {change.file} is not as expected: {change.old!r}")
            path.write_text(text.replace(change.old, change.new))

    def run(self, case: Case, stage: int, kind: str = "door", formats: dict[str, Any] | None = None) -> Run:
        """Start the script once. ``kind`` is "door", "counted", "plain" or "own"."""
        root, folder = self.prepare(case, kind)
        out, config = root / "out", root / "ds.json"
        out.mkdir()
        if case.config is not None:
            section = {**case.config["zero_optimization"], "stage": stage, **(formats or {})}
            config.write_text(json.dumps({**case.config, "zero_optimization": section}))
        fill = {"stage": stage, "config": config, "out": out, "folder": folder, "root": root}
        return self._start(case, self._command(case, kind, fill), folder, self._environment(case, kind, fill))

    def _command(self, case: Case, kind: str, fill: dict[str, Any]) -> list[str]:
        start = {
            "door": ["-m", "zero.compat", *(["--local_rank"] if case.local_rank else [])],
            "counted": [str(ROOT / "tests/ecosystem/counted.py"), *(["--local_rank"] if case.local_rank else [])],
            "plain": [str(ROOT / "tests/ecosystem/plain_ddp.py"), *(["--local_rank"] if case.local_rank else [])],
            "own": ["-m", "zero.compat"] if case.own_uses_door else [],
            "direct": [],
        }[kind]
        given = case.own_arguments if kind == "own" else case.arguments
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
        return [sys.executable, *torchrun, *start, case.script, *shlex.split(given.format(**fill))]

    def _environment(self, case: Case, kind: str, fill: dict[str, Any]) -> dict[str, str]:
        folder = Path(fill["folder"])
        own = {key: one.format(**fill) for key, one in case.environment.items()}
        if kind == "own":
            own = {key: one.format(**fill) for key, one in case.own_environment.items()}
        paths = [own.pop("PYTHONPATH", ""), str(folder / "stand_in")]
        if case.old_transformers:
            paths.insert(0, str(self.options.transformers4))
        fixed = {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled",
            "HF_HOME": str(self.place / "hf"), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(one for one in paths if one), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        return {**os.environ, **fixed, **own}

    def _start(self, case: Case, command: list[str], folder: Path, environment: dict[str, str]) -> Run:
        run, began = Run(), time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._read(case, run, process, began)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        run.code = process.wait()
        return run

    def _read(self, case: Case, run: Run, process: subprocess.Popen[bytes], began: float) -> None:
        """Take lines until the process ends, or for TIMEOUT seconds."""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        rest = ""
        while time.monotonic() < began + TIMEOUT:
            ended = process.poll() is not None
            rest += (process.stdout.read() or b"").decode(errors="replace")
            *lines, rest = re.split(r"[\r\n]+", rest)
            for line in lines:
                self._take(case, run, line, time.monotonic() - began)
            if ended:
                return
            time.sleep(0.02)
        run.lines.append(f"TimeoutError: {TIMEOUT:.0f} s")

    def _take(self, case: Case, run: Run, line: str, now: float) -> None:
        if self.options.verbose:
            sys.stdout.write(line + "\n")
        run.lines.append(line)
        if found := re.search(r"^bytes sent: (\d+)", line):
            run.nbytes = max(run.nbytes or 0, int(found.group(1)))
        if found := re.search(case.loss, line):
            run.first = now if run.first is None else run.first
            if re.fullmatch(r"[0-9.]+", found.group(1)):
                run.losses.append(float(found.group(1).rstrip(".")))


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
    changed = str(sum(one.num_lines for one in case.changes))
    if why := missing(case, bench):
        return [f"| {case.name} | {changed} | {case.ranks} | - | - | - | - | - | {why} |"]
    beside = bench.run(case, case.stages[0], case.beside) if case.beside else None
    listed = []
    for stage in case.stages:
        run, ratio = bench.run(case, stage, "direct" if case.changes else "door"), "-"
        if case.formats is not None and stage == case.stages[-1] and run.code == 0:
            full = bench.run(case, stage, "counted").nbytes
            few = bench.run(case, stage, "counted", case.formats).nbytes
            ratio = f"{few / full:.3f}" if few and full else "?"
        good = run.code == 0 and (run.is_falling or not case.falls)
        result = "runs" if good else ("loss does not fall" if run.code == 0 else f"fails: {run.error}")
        other = "-" if beside is None else (beside.ends if beside.code == 0 else f"fails: {beside.error[:60]}")
        first = "-" if run.first is None else f"{run.first:.1f}"
        note = f"; {case.note}" if case.note else ""
        stage_text = str(stage) if stage or case.falls else "-"
        cells = (case.name, changed, case.ranks, stage_text, run.ends, other, ratio, first, result + note)
        listed.append("| " + " | ".join(str(one).replace("|", "\\|") for one in cells) + " |")
        sys.stdout.write(listed[-1] + "\n")
        sys.stdout.flush()
    return listed


def main() -> int:
    """Run the cases that were asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER", help="use a local copy")
    parser.add_argument("--only", default="", help="cases whose name has this regular expression")
    parser.add_argument("--transformers4", metavar="FOLDER", help="where transformers 4 was installed to")
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
        Path(options.out).write_text(table)
    return int(any("| fails" in row for row in listed))


if __name__ == "__main__":
    sys.exit(main())
