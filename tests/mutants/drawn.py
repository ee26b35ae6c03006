"""Mutants drawn at random from the whole source: ``python -m tests.mutants.drawn --number 150 --seed 20260101``.

Every line of code of zcomm, zero, triton_kernels and the C++ (cpp/src, cpp/nccl, and what of cpp/cuda runs on the
host) has the same chance: a file is drawn by its lines, then one of the rules of rules.py that applies to it, then a
place. The nearest tests are run first, then others, a file at a time, until one fails; imports and names decide which
are near. A failure counts only if the same test passes without the mistake.
Outcomes are kept in drawn.json by the text of the mutant, as those of the listed ones; ``--table`` counts them, and
README.md has a verdict on each survivor.

    caught      a test failed         survived    all passed that were run
    late        some took too long, the others passed: says nothing         broken    nothing can be imported
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from tests.mutants.listed import Mutant
from tests.mutants.rules import Place, places
from tests.mutants.run import BROKEN, FAILED, PRELOADED, ROOT, Copy, Outcome, is_late, key_of

__all__ = ["draw", "nearest", "sources", "survivors_without_verdict"]

OUTCOMES = Path(__file__).parent / "drawn.json"
README = Path(__file__).parent / "README.md"
PACKAGES = ("zcomm", "zero", "triton_kernels")
CPP = ("cpp/src", "cpp/nccl", "cpp/cuda")
NOT_BUILT_HERE = re.compile(r"\.cuh?$|/cuda_device\.(cc|h)$|/CMakeLists\.txt$")
CHANGES_THE_MACHINE = "zcomm/_bench/emulated_nodes.py"
"""Excluded: as root it makes network namespaces, and kills the processes in them."""
NOT_NEAR = re.compile(r"^tests/((end_to_end|faults|fuzz|mutants|cuda)/|test_\w+\.py)")
NUM_NEAREST, NUM_FILES = 4, 12
"""The number of test files that are run first, and in total."""
SELECTED = ("-m", "not slow and not long and not gpu")
A_DAY = 20


def _tracked(*folders: str) -> list[str]:
    words = ["git", "ls-files", *folders]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).exists()]


@cache
def sources() -> dict[str, int]:
    """The files that are mutated, each with its number of non-empty lines."""
    files = [name for name in _tracked(*PACKAGES) if name.endswith(".py") and name != CHANGES_THE_MACHINE]
    files += [name for name in _tracked(*CPP) if not NOT_BUILT_HERE.search(name)]
    return {name: sum(bool(line.strip()) for line in (ROOT / name).read_text().splitlines()) for name in files}


def draw(seed: int, number: int) -> list[Mutant]:
    """Draw so many different mutants, the same for the same seed and source."""
    random_, files, chosen = random.Random(f"mutants {seed}"), sources(), dict[str, Mutant]()
    while len(chosen) < number:
        (file,) = random_.choices(list(files), list(files.values()))
        text = (ROOT / file).read_text()
        by_rule: dict[str, list[Place]] = {}
        for place in places(file, text):
            by_rule.setdefault(place.rule, []).append(place)
        if by_rule:
            place = random_.choice(by_rule[random_.choice(sorted(by_rule))])
            mutant = _mutant(file, text, place)
            if mutant.old != mutant.new:
                chosen.setdefault(key_of(mutant), mutant)
    return list(chosen.values())


def _mutant(file: str, text: str, place: Place) -> Mutant:
    """Make a mutant as listed.py has them: full lines, with enough context to be unique in the file."""
    start = text.rfind("\n", 0, place.start) + 1
    stop = text.find("\n", place.stop) + 1 or len(text)
    while text.count(text[start:stop]) > 1:
        start = text.rfind("\n", 0, max(start - 1, 0)) + 1
        stop = text.find("\n", stop) + 1 or len(text)
    new = text[start : place.start] + place.new + text[place.stop : stop]
    line = text.count("\n", 0, place.start) + 1
    return Mutant(f"{place.rule}, line {line}", file, text[start:stop], new, ())


@cache
def _tests() -> dict[str, str]:
    names = (name for name in _tracked("tests") if Path(name).name.startswith("test_") and name.endswith(".py"))
    return {name: (ROOT / name).read_text() for name in names if not NOT_NEAR.match(name)}


def _words(name: str) -> set[str]:
    words = re.split(r"[/_.]", name.removesuffix(".py").removesuffix(".cc").removesuffix(".h"))
    return {word.removesuffix("s") for word in words} - {"test", ""}


@cache
def _importers(module: str) -> tuple[str, ...]:
    """The modules of the library that import ``module``."""
    pattern = re.compile(rf"^(?:from {re.escape(module)} import|import {re.escape(module)}\b)", re.MULTILINE)
    files = (name for name in sources() if name.endswith(".py"))
    return tuple(name for name in files if pattern.search((ROOT / name).read_text()))


def nearest(file: str) -> list[str]:
    """Test files for ``file``, the nearest first: by name, by what they import, and by the names they use."""
    return _nearest_python(file) if file.endswith(".py") else _nearest_cpp(file)


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _nearest_python(file: str) -> list[str]:
    module = _module(file)
    package, words = file.split("/")[0], _words(Path(file).stem)
    text = (ROOT / file).read_text()
    names = set(re.findall(r"^(?:class|def) ([A-Za-z]\w+)", text, re.MULTILINE))
    users = [(2.0, name) for name in _importers(module)]
    users += [(1.0, name) for _, user in users for name in _importers(_module(user))]
    named = [(weight, _words(Path(name).stem)) for weight, name in dict.fromkeys(users)]
    imports = re.compile(rf"(?:from {re.escape(module)} import|import {re.escape(module)}\b|{re.escape(file)})")

    def score(test: str) -> float:
        of_test, text = _words(test.split("/", 1)[1]) - {package}, _tests()[test]
        covers = re.search(r"^# covers .*$", text, re.MULTILINE)
        near = 10.0 * (of_test == words) + 10.0 * (covers is not None and file in covers[0].split())
        near += 4.0 * len(of_test & words) / len(words | of_test)
        near += 6.0 * bool(imports.search(text)) + min(4, sum(bool(re.search(rf"\b{n}\b", text)) for n in names))
        near += max((w * len(of_test & user) / len(user | of_test) for w, user in named if user), default=0.0)
        return near + 0.5 * test.startswith(f"tests/{package}/")

    ranked = sorted(_tests(), key=lambda test: (-score(test), len(_tests()[test]), test))
    chosen = ranked[:NUM_FILES]
    wide = ["tests/differential/test_drawn.py", "tests/zero/test_exactness.py"] if package == "zero" else []
    return [*chosen, *(test for test in wide if test in _tests() and test not in chosen)]


@cache
def _includes(file: str) -> frozenset[str]:
    """The project's files that ``file`` includes, and those they do."""
    found = set[str]()
    for name in re.findall(r'#include "([^"]+)"', (ROOT / file).read_text()):
        for folder in (str(Path(file).parent), "cpp/include", "cpp/src", "cpp/nccl", "cpp/cuda"):
            path = f"{folder}/{name}"
            if (ROOT / path).exists() and path not in found:
                found |= {path, *_includes(path)}
    return frozenset(found)


def _nearest_cpp(file: str) -> list[str]:
    """A source is reached where its header is, or that of any source that includes ``file``."""
    cpp = [name for name in _tracked("cpp") if name.endswith((".cc", ".h"))]
    reached = {name for name in cpp if name == file or file in _includes(name)}
    stems = {Path(name).stem.removesuffix("_impl") for name in reached}
    tests = [name for name in cpp if name.endswith("_test.cc") and "declarations" not in name]

    def score(test: str) -> float:
        of_test = _words(Path(test).stem)
        named = max(len(of_test & _words(stem)) / len(of_test | _words(stem)) for stem in stems)
        return 4.0 * (test in reached) + 3.0 * named + bool(stems & {Path(n).stem for n in _includes(test)})

    ranked = sorted(tests, key=lambda test: (-score(test), test))
    near = [test for test in ranked[:NUM_FILES] if score(test) > 0.5]
    return [f"{test}::" for test in near or ranked]  # included by a macro: anything may use it


def outcome_of(mutant: Mutant, copy: Copy, passed: set[str]) -> Outcome:
    """Run test files in the copy until one fails that passes without the mistake; ``passed`` remembers those."""
    before, num_late, ran = copy.read(mutant.file), 0, 0
    copy.write(mutant.file, before.replace(mutant.old, mutant.new))
    try:
        for test in nearest(mutant.file):
            options = () if test.startswith("cpp/") else SELECTED
            code, text = copy.run([*options, test])
            ran += 1
            if is_late(code, text):
                num_late += 1
                continue
            if code in (0, 5):
                continue
            failed = FAILED.search(text)
            if failed is None or BROKEN.search(text):
                return {"outcome": "broken", "by": (text.strip().splitlines() or ["no output"])[-1][:200]}
            copy.write(mutant.file, before)
            if _passes(copy, failed[1], passed):
                return {"outcome": "caught", "by": failed[1]}
            copy.write(mutant.file, before.replace(mutant.old, mutant.new))
    finally:
        copy.write(mutant.file, before)
    counts = f"{ran} test files, {num_late} of them late"
    return {"outcome": "late" if num_late else "survived", "by": counts}


def _passes(copy: Copy, test: str, passed: set[str]) -> bool:
    """Whether ``test`` passes in the copy as it is."""
    if test not in passed:
        code, _ = copy.run([test])
        if code == 0:
            passed.add(test)
    return test in passed


def load() -> dict[str, Outcome]:
    """Load the known outcomes, by the key of the mutant."""
    return json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}


def run(mutants: Sequence[Mutant], seconds: float = float("inf")) -> dict[str, Outcome]:
    """Run the mutants that have no outcome yet, save each outcome, and return all."""
    outcomes, passed, stop = load(), set[str](), time.monotonic() + seconds
    missing = [mutant for mutant in mutants if outcomes.get(key_of(mutant), {"outcome": "late"})["outcome"] == "late"]
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in PRELOADED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as name:
        copy = Copy(Path(name))
        for mutant in missing:
            if time.monotonic() > stop:
                break
            started = time.monotonic()
            outcome = outcome_of(mutant, copy, passed)
            found = {**outcome, "name": mutant.name, "file": mutant.file, "change": _change(mutant)}
            outcomes = load() | {key_of(mutant): found}  # others may run theirs meanwhile
            written = OUTCOMES.with_name(f"{OUTCOMES.name}.{os.getpid()}")
            written.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
            written.replace(OUTCOMES)
            took = time.monotonic() - started
            print(f"{outcome['outcome']:9} {mutant.file} {mutant.name}: {_change(mutant)}", flush=True)
            print(f"          {outcome['by']} ({took:.0f} s)", flush=True)
    return outcomes


def _change(mutant: Mutant) -> str:
    """The changed lines, before and after, on one line."""
    old, new = mutant.old.splitlines(), mutant.new.splitlines()
    while old and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    short = [" ".join(" ".join(lines).split())[:160] for lines in (old, new)]
    return f"{short[0]} -> {short[1]}"


def survivors_without_verdict(outcomes: dict[str, Outcome], mutants: Sequence[Mutant]) -> list[str]:
    """The mutants whose key is not in README.md."""
    readme = README.read_text()
    keys = (key_of(mutant) for mutant in mutants)
    return [
        f"{key}: {outcomes[key]['file']} {outcomes[key]['name']}: {outcomes[key]['change']}"
        for key in keys
        if outcomes.get(key, {}).get("outcome") == "survived" and f"`{key}`" not in readme
    ]


def main() -> int:
    """Return 1 if a survivor has no verdict."""
    parser = argparse.ArgumentParser(description="Draw mistakes by rule, and run those that have no outcome yet.")
    today = int(datetime.now(timezone.utc).strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="default: today, in UTC")
    parser.add_argument("--number", type=int, default=A_DAY, help="how many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no other after so long")
    parser.add_argument("--parts", type=int, default=1, help="divide them over so many commands, run at once")
    parser.add_argument("--part", type=int, default=0, help="which of these this command is")
    parser.add_argument("--show", action="store_true", help="print what is drawn, run nothing")
    parser.add_argument("--table", action="store_true", help="count all outcomes, list the survivors")
    chosen = parser.parse_args()
    mutants = draw(chosen.seed, chosen.number)
    if chosen.show:
        for mutant in mutants:
            print(f"{key_of(mutant)} {mutant.file} {mutant.name}: {_change(mutant)}")
            print(f"         {' '.join(nearest(mutant.file)[:NUM_NEAREST])}")
        return 0
    outcomes = load() if chosen.table else run(mutants[chosen.part :: chosen.parts], chosen.seconds)
    if chosen.table:
        print(dict(Counter(one["outcome"] for one in outcomes.values())))
        for key, one in sorted(outcomes.items()):
            if one["outcome"] == "survived":
                print(f"| `{key}` | `{one['file']}` | {one['name']}: `{one['change']}` | |")
        return 0
    left = survivors_without_verdict(outcomes, mutants)
    print(
        f"seed {chosen.seed}: {dict(Counter(outcomes[k]['outcome'] for m in mutants if (k := key_of(m)) in outcomes))}"
    )
    print("\n".join(["survivors without a verdict in README.md:", *left]) if left else "no survivor without a verdict")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
