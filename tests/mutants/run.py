"""Which of the mistakes in listed.py the tests notice: ``python -m tests.mutants.run [--only TEXT] [--seconds N]``.

Each is made in a copy of the repository, and its tests run there. Outcomes are kept in tests/mutants/outcomes.json, by
the text of the mutant: a later call goes on where this one stopped. ``--table`` prints them for README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from tests.mutants.listed import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
OUTCOMES = Path(__file__).parent / "outcomes.json"
# An editable install has a finder that would find the repository instead of the copy.
SITE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
"""
TIMEOUT_S = 280


def key_of(mutant: Mutant) -> str:
    """Another one if anything of the mutant changes."""
    return f"{zlib.crc32(repr(mutant).encode()):08x}"


def copy_to(folder: Path) -> None:
    """The tracked files, and the compiled module."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    find = "import zcomm._native; print(zcomm._native.__file__)"
    native = subprocess.run([sys.executable, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    (folder / "zcomm" / Path(native).name).symlink_to(native)
    (folder / "zcomm" / "triton_kernels").symlink_to(folder / "triton_kernels")
    (folder / "sitecustomize.py").write_text(SITE)


def outcome_of(mutant: Mutant, folder: Path) -> dict[str, str]:
    """Run the tests of ``mutant`` in the copy until one fails."""
    path = folder / mutant.file
    before = path.read_text()
    if before.count(mutant.old) != 1:
        return {"outcome": "not applied", "by": f"{before.count(mutant.old)} places in {mutant.file}"}
    path.write_text(before.replace(mutant.old, mutant.new))
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "ZCOMM_TEST_TIMEOUT_S": "60",
    }
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *mutant.tests]
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "caught", "by": "a hang"}
    finally:
        path.write_text(before)
    failed = [line.removeprefix("FAILED ").removeprefix("ERROR ") for line in done.stdout.splitlines()]
    failed = [line.split(" - ")[0] for line in failed if line.startswith("tests/")]
    if done.returncode == 1 and failed:
        return {"outcome": "caught", "by": failed[0]}
    return {"outcome": "survived" if done.returncode == 0 else "unclear", "by": done.stdout.strip().splitlines()[-1]}


def table(outcomes: dict[str, dict[str, str]]) -> str:
    """All mutants and what became of them, as Markdown."""
    rows = ["| Mutant | File | Outcome | By |", "|---|---|---|---|"]
    for mutant in MUTANTS:
        said = outcomes.get(key_of(mutant), {"outcome": "not run", "by": ""})
        rows.append(f"| {mutant.name} | `{mutant.file}` | {said['outcome']} | {said['by'].replace('|', '/')} |")
    return "\n".join(rows)


def main() -> int:
    """Run what has no outcome yet."""
    parser = argparse.ArgumentParser(description="Run the mutants that have no outcome yet.")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name has it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other after so long")
    parser.add_argument("--table", action="store_true", help="print the outcomes, run nothing")
    chosen = parser.parse_args()
    outcomes = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    if chosen.table:
        print(table(outcomes))
        return 0
    stop = time.monotonic() + chosen.seconds
    with tempfile.TemporaryDirectory() as name:
        copy_to(Path(name))
        for mutant in MUTANTS:
            if key_of(mutant) in outcomes or chosen.only not in mutant.name or time.monotonic() > stop:
                continue
            said = outcomes[key_of(mutant)] = outcome_of(mutant, Path(name))
            OUTCOMES.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
            print(f"{said['outcome']:12} {mutant.name}: {said['by']}", flush=True)
    return 1 if any(said["outcome"] == "survived" for said in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
