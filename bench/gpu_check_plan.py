"""The steps of gpu_check.py, and how what they print is read."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_check_machine import JOB_PACKAGES, TEST_PACKAGES, Machine, nvcc
from gpu_check_steps import FAIL, PASS, SKIP, Step

__all__ = ["BUILD", "Plan", "gpu_test_files", "make_steps", "read_kernels", "read_results", "read_tests"]

BUILD = "build"
CUDA_TESTS, TRITON_TESTS = "CUDA kernels against the reference", "Triton kernels against the reference"
KERNELS, RANKS = "tests/cuda/test_gpu.py", "tests/zcomm/test_nccl_gpu.py"
PYTHON = sys.executable
ROOT = Path(__file__).parents[1]
GOALS = {"quantize": 0.90, "decode": 0.90, "requantize": 0.85}
"""Of the rate of a copy, from ``GOAL_NBYTES`` up."""
GOAL_NBYTES = 64 * 2**20
EVERYWHERE = {
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
"""One machine, which may have no network; and what a step printed before it was stopped is wanted."""
SHARED = {"ZCOMM_KERNELS": "cuda", "ZCOMM_TEST_TIMEOUT_S": "110"}
"""The Triton kernels would be compiled on every rank; processes that share a GPU take turns, which takes time."""


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    machine: Machine
    is_quick: bool = False
    builds: bool = True
    output: Path = Path("runs/gpu_check")


def read_tests(text: str) -> tuple[str, str]:
    """Pytest's last line; skipped if no test has passed."""
    summaries = [
        line for line in text.splitlines() if re.search(r"\b\d+ (passed|failed|skipped|error|deselected)", line)
    ]
    note = summaries[-1].strip("= ").strip() if summaries else "no test was run"
    verdict = PASS if re.search(r"\d+ passed", note) else SKIP
    reasons = re.findall(r"^SKIPPED \[\d+\] [^:]+:\d+: (.*)$", text, re.MULTILINE)
    note += f" (skipped: {'; '.join(sorted(set(reasons)))[:160]})" if reasons else ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    note += f" (failed: {', '.join(failed[:3])})" if failed else ""
    return verdict, note


def _read_required_tests(text: str) -> tuple[str, str]:
    """The same, where it is a failure that no test has passed."""
    verdict, note = read_tests(text)
    return (FAIL if verdict == SKIP else verdict), note


def read_kernels(text: str) -> tuple[str, str]:
    """Of the rows from 64 MiB up: the worst share of the copy rate of each operation, and whether a goal is missed."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"operation"')]
    if not rows:
        return FAIL, "no rows"
    notes, missed = [], 0
    for kernels in sorted({row["kernels"] for row in rows}):
        shares: dict[str, float] = {}
        for row in rows:
            operation = row["operation"].split(" ")[0]
            if row["kernels"] == kernels and row["size"] >= GOAL_NBYTES and "over_copy" in row:
                shares[operation] = min(row["over_copy"], shares.get(operation, 9.0))
        missed += sum(share < GOALS.get(name, 0.0) for name, share in shares.items())
        if shares:
            notes.append(f"{kernels}: " + ", ".join(f"{name} {share:.2f}" for name, share in shares.items()))
    wrong = sum(row["num_wrong"] for row in rows)
    note = f"{len(rows)} rows, {wrong} wrong; least share of the copy rate from 64 MiB: {'; '.join(notes) or '-'}"
    return PASS, f"{note}; {missed} below the goal" if missed else note


def read_results(text: str) -> tuple[str, str]:
    """What the main job and the offload benchmark print for this."""
    wanted = r"^(?:RESULT (.*)|(tokens/s \(median step\)|peak GPU memory|held-out loss at end) +(\S+(?: MB)?).*)$"
    found = re.findall(wanted, text, re.MULTILINE)
    return PASS, "; ".join(whole or f"{name} {value}" for whole, name, value in found)


def make_steps(plan: Plan) -> list[Step]:
    """Every step, in order; those that cannot be begun say why."""
    built = (BUILD,) if plan.builds else ()
    steps = [_build(plan), *_tests(plan, built), *_sanitizers(plan, built), *_benchmarks(plan, built)]
    return [replace(step, environment={**EVERYWHERE, **step.environment}) for step in steps]


def _refusal(reason: str) -> list[str]:
    """A command that fails for ``reason``."""
    return [PYTHON, "-c", f"raise SystemExit({reason!r})"]


def _build(plan: Plan) -> Step:
    gpu = plan.machine.gpu
    assert gpu is not None, "there are no steps without a GPU"
    folder = f"build/gpu_check-{gpu.architecture}-{sys.version_info.major}{sys.version_info.minor}"
    command = [PYTHON, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "-v"]
    command += [f"-Cbuild-dir={folder}", "-e", "."]
    if problem := plan.machine.build_problem():
        command = _refusal(f"the package cannot be built: {problem}; --no-build uses the one that is installed")
    environment = {
        "ZCOMM_CUDA": "ON",
        "CUDAARCHS": f"{gpu.architecture}-real",
        "CUDACXX": nvcc(),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    reason = "" if plan.builds else "--no-build"
    return Step(BUILD, command, 80 if plan.is_quick else 140, environment, skip_reason=reason, read=_read_build)


def _read_build(text: str) -> tuple[str, str]:
    """For which GPU, and the first error of a compiler."""
    found = re.findall(r"zcomm: (CUDA .*)$", text, re.MULTILINE)[:1]
    return PASS, "; ".join(found + re.findall(r"^.*\berror: .*$", text, re.MULTILINE | re.IGNORECASE)[:1])


def _pytest(plan: Plan, *arguments: str, workers: int = 1) -> list[str]:
    """Pytest with a limit on each test, as far as its plugins are there; warnings are no errors here."""
    missing = plan.machine.missing(TEST_PACKAGES)
    if "pytest" in missing:
        return _refusal("pytest is not installed")
    # Strict about settings and markers, as addopts has it, pytest would refuse those of the plugins that are not there.
    command = [PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-rsfE", "-W", "default", "-o", "addopts="]
    if "pytest-timeout" not in missing:
        command += ["-o", "timeout=120"]
    if workers > 1 and "pytest-xdist" not in missing:
        command += ["-n", str(workers), "--dist=worksteal"]
    return [*command, *arguments]


def gpu_test_files() -> list[str]:
    """Files with tests marked ``gpu``; not all of tests/: others may need packages that are not there."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text())


def _tests(plan: Plan, built: Sequence[str]) -> list[Step]:
    gpu, quick = plan.machine.gpu, plan.is_quick
    assert gpu is not None, "there are no steps without a GPU"
    workers = max(1, min(len(os.sched_getaffinity(0)) - 1, gpu.nbytes // (4 * 2**30), 14))
    others = [path for path in gpu_test_files() if path not in (KERNELS, RANKS)]
    some = " and deltas" if quick else ""

    def step(name: str, budgets_s: tuple[float, float], *arguments: str, **options: Any) -> Step:
        environment = {"OMP_NUM_THREADS": "2", **options.get("environment", {})}
        command = _pytest(plan, *arguments, workers=options.get("workers", 1))
        read = _read_required_tests if name == CUDA_TESTS else read_tests
        return Step(name, command, budgets_s[not quick], environment, built, read=read)

    return [
        step(CUDA_TESTS, (25, 60), KERNELS, "-k", "not triton", workers=workers),
        step("ranks that share the GPU, over NCCL", (25, 90), RANKS, environment=SHARED),
        step("streams and host synchronizations", (20, 40), *others),
        step(TRITON_TESTS, (35, 140), KERNELS, "-k", f"triton{some}", workers=workers),
    ]


def _sanitizers(plan: Plan, built: Sequence[str]) -> list[Step]:
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    reason = "" if program else "compute-sanitizer is not on the PATH, nor under /usr/local/cuda"
    tests = _pytest(
        plan, KERNELS, "-k", "not triton and messages and dtype1 and (int8 or nf4) and not 1024 and not 512"
    )
    # Each tensor is an allocation of its own, whose ends the tool knows.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    steps = []
    for tool, budget_s in (("memcheck", 60), ("racecheck", 45), ("initcheck", 45)):
        command = [str(program), "--tool", tool, "--error-exitcode", "9", *tests]
        skipped = reason or ("--quick" if plan.is_quick and tool != "memcheck" else "")
        seconds = 35 if plan.is_quick else budget_s
        needs = (*built, CUDA_TESTS)
        steps.append(Step(f"compute-sanitizer {tool}", command, seconds, environment, needs, skipped, read=_read_tool))
    return steps


def _read_tool(text: str) -> tuple[str, str]:
    verdict, note = read_tests(text)
    summary = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY.*)$", text, re.MULTILINE)
    return verdict, f"{summary[-1] if summary else 'the tool printed no summary'}; {note}"


def _benchmarks(plan: Plan, built: Sequence[str]) -> list[Step]:
    quick, in_full = plan.is_quick, "--quick" if plan.is_quick else ""
    kernels = [PYTHON, "bench/gpu_kernels.py", "--json"]
    # The Triton kernels take half a minute to compile.
    few = ["--kernels", "cuda", "--sizes-mib", "64", "256", "--rounds", "7", "--budget-s", "15"]
    others = ["eager", *(["deepspeed"] if find_spec("deepspeed") else [])]
    rows = [*kernels, *(few if quick else ["--compare", *others, "--budget-s", "90"])]
    absent = plan.machine.missing(JOB_PACKAGES)
    reason = f"not installed: {', '.join(absent)}" if absent else ""
    job = [PYTHON, "bench/train_gpt.py", "--num-ranks", "1", "--output", str(plan.output / "train_gpt")]
    job += ["--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "1024"]
    job += ["--batch-size", "8", "--sample-bytes", "0", "--eval-interval", "1000"]
    job += ["--train-iters", "6" if quick else "20"]
    offload = [PYTHON, "bench/gpu_offload.py"]
    traced = ["--trace", str(plan.output / "offload_trace.json")]
    compiled = [*kernels, "--kernels", "cuda", "--formats", "int8", "--sizes-mib", "256", "--compare", "compiled"]
    steps = [
        ("kernels beside a copy", (30, 120), rows, "", read_kernels),
        ("the main job, 300 M parameters", (30, 50), job, reason, read_results),
        ("offload, 1.3 G parameters", (0, 60), [*offload, *traced], in_full, read_results),
        ("offload, the largest model", (0, 90), [*offload, "--largest"], in_full, read_results),
        ("kernels beside torch.compile", (0, 45), compiled, in_full, read_kernels),
    ]
    return [
        Step(name, command, budgets_s[not quick], {}, built, skipped, is_check=False, read=read)
        for name, budgets_s, command, skipped, read in steps
    ]
