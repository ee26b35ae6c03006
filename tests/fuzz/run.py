"""Coverage-guided fuzzing: ``python -m tests.fuzz.run --seconds 20 [--only TARGET ...]``.

C++ by libFuzzer with the address and undefined-behaviour sanitizers (clang 19 is needed, else that part is skipped),
Python by the loop below: an input that reaches a new pair of lines is kept and mutated further. The first inputs are
tests/fuzz/corpus. What fails is written to tests/fuzz/findings, and the exit status is 1; once it is fixed, the input
moves to the corpus, where test_corpus.py runs it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.fuzz.targets import Target, make_targets

ROOT = Path(__file__).parents[2]
CORPUS, FINDINGS = ROOT / "tests" / "fuzz" / "corpus", ROOT / "tests" / "fuzz" / "findings"
NATIVE = ("decode", "checked_file", "ulps")
BUILD = ROOT / "build-fuzz"
EMPTY = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
WORDS = [
    b"1e999", b"-1", b"NaN", b"null", b"[]", b"{}", b'""', b"true", b"9223372036854775808", b"1.5", b"[[[[",
    b'"../../x"', b'"/etc/passwd"', b"\\u0000", b"\xff", b"0", b"18446744073709551615", b'{"$":"tuple"}', b"--", b" ",
    b":", b",", b"inf",
]  # fmt: skip


class Coverage:
    """The pairs of consecutive lines that calls have reached in the libraries."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self._new = False
        self._last = 0
        self._prefixes = tuple(str(ROOT / package) for package in ("zero", "zcomm"))

    def of(self, target: Target, data: bytes) -> tuple[bool, str | None]:
        """Run one input; return whether it reached a new pair of lines, and the result of :func:`run_one`."""
        self._new, self._last = False, 0
        sys.settrace(self._enter)
        try:
            failure = run_one(target, data)
        finally:
            sys.settrace(None)
        return self._new, failure

    def _enter(self, frame: FrameType, *_: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self._prefixes) else None

    def _line(self, frame: FrameType, *_: Any) -> Any:
        edge = (frame.f_code.co_filename, self._last, frame.f_lineno)
        self._last = frame.f_lineno
        if edge not in self.seen:
            self.seen.add(edge)
            self._new = True
        return self._line


def mutated(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Return ``data`` with a few small changes, among them pieces of ``other``."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        kind = draw.randrange(7)
        if kind == 0 and out:
            out[at - 1] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del out[at : at + draw.randrange(1, 20)]
        elif kind == 2:
            out[at:at] = draw.choice(WORDS)
        elif kind == 3 and other:
            start = draw.randrange(len(other))
            out[at:at] = other[start : start + draw.randrange(1, 40)]
        elif kind == 4:
            _replace_value(out, at, draw)
        elif kind == 5:
            out[at : at + 1] = str(draw.randrange(-3, 70)).encode()
        else:
            out[at:at] = out[at : at + draw.randrange(1, 60)]
    return bytes(out[: 1 << 16])


def _replace_value(out: bytearray, at: int, draw: random.Random) -> None:
    """Replace one value of a document by a word."""
    colon = out.find(b":", at)
    ends = [end for end in (out.find(sign, colon) for sign in (b",", b"}", b"]")) if end > colon]
    if colon >= 0 and ends:
        out[colon + 1 : min(ends)] = draw.choice(WORDS)


def run_one(target: Target, data: bytes) -> str | None:
    """Return the unexpected error of ``target``; None if it accepted ``data`` or raised a named error."""
    try:
        target.run(data)
    except target.errors:
        return None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return traceback.format_exc()
    return None


def fuzz_python(name: str, target: Target, seconds: float, draw: random.Random) -> tuple[int, int, list[str]]:
    """Fuzz in Python; return runs, edges reached, and one finding for each place that raised an error."""
    inputs = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())] or [b""]
    coverage, failures, runs = Coverage(), dict[str, str](), 0
    stop = time.monotonic() + seconds
    while time.monotonic() < stop or runs < len(inputs):
        data = inputs[runs] if runs < len(inputs) else mutated(draw.choice(inputs), draw.choice(inputs), draw)
        runs += 1
        is_new, failure = coverage.of(target, data)
        if failure is not None:
            place = "".join(failure.splitlines()[-3:])
            if place not in failures:
                failures[place] = failure
                FINDINGS.mkdir(exist_ok=True)
                (FINDINGS / f"{name}_{len(failures)}").write_bytes(data)
        elif is_new and runs > len(inputs):
            inputs.append(data)
            runs += 1  # the new input has been run
    return runs, len(coverage.seen), list(failures.values())


def build_native() -> str | None:
    """Build the C++ fuzzers; return the reason if that is impossible."""
    if shutil.which("clang++-19") is None:
        return "there is no clang++-19"
    words = ["clang++-19", "-fsanitize=fuzzer,address", "-x", "c++", "-", "-o", os.devnull]
    if subprocess.run(words, input=EMPTY, text=True, capture_output=True, check=False).returncode != 0:
        return "clang++-19 cannot link a fuzzer: install libclang-rt-19-dev"
    options = {
        "CMAKE_CXX_COMPILER": "clang++-19", "ZCOMM_BUILD_FUZZERS": "ON",
        "CMAKE_BUILD_TYPE": "RelWithDebInfo", "CMAKE_CXX_FLAGS_RELWITHDEBINFO": "-O1 -g1",
        "ZCOMM_SANITIZE": "fuzzer-no-link;address;undefined", "ZCOMM_CUDA": "OFF",
    }  # fmt: skip
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), *(f"-D{name}={value}" for name, value in options.items())]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    targets = [f"fuzz_{name}" for name in NATIVE]
    subprocess.run(["cmake", "--build", str(BUILD), "-j", "2", "--target", *targets], check=True)
    return None


def fuzz_native(name: str, seconds: float) -> tuple[int, str]:
    """Return libFuzzer's exit status and last lines; inputs that add coverage are not kept."""
    FINDINGS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        binary = BUILD / "cpp" / "fuzz" / f"fuzz_{name}"
        limits = [f"-max_total_time={max(1, round(seconds))}", "-max_len=8192", "-timeout=20", "-rss_limit_mb=1024"]
        words = [str(binary), folder, str(CORPUS / name), *limits, f"-artifact_prefix={FINDINGS}/{name}_"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, "\n".join(done.stderr.splitlines()[-(1 if done.returncode == 0 else 40) :])


def main() -> int:
    """Fuzz every target for its share of the time."""
    parser = argparse.ArgumentParser(description="Fuzz decoders and readers.")
    parser.add_argument("--seconds", type=float, default=20, help="for all targets together (default 20)")
    parser.add_argument("--only", nargs="*", default=[], metavar="TARGET")
    parser.add_argument("--seed", type=int, default=None)
    chosen = parser.parse_args()
    seed = chosen.seed if chosen.seed is not None else int.from_bytes(os.urandom(4), "little")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        targets = make_targets(Path(folder))
        names = chosen.only or [*NATIVE, *targets]
        reason = build_native() if set(names) & set(NATIVE) else None
        share, num_found = chosen.seconds / len(names), 0
        print(f"seed {seed}, {share:.1f} s for each of {len(names)} targets")
        for name in names:
            if name in NATIVE:
                if reason is not None:
                    print(f"{name:14} skipped: {reason}")
                    continue
                code, text = fuzz_native(name, share)
                num_found += code != 0
                print(f"{name:14} {text}")
                continue
            runs, edges, failures = fuzz_python(name, targets[name], share, random.Random(seed))
            num_found += len(failures)
            print(
                f"{name:14} {runs} runs, {edges} edges, {len(failures)} found", *failures, sep="\n" if failures else ""
            )
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
