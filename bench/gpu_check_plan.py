"""Define the steps of gpu_check.py: commands, time budgets, and parsers of their output."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from gpu_check_machine import TEST_PACKAGES, Machine, nvcc
from gpu_check_record import FAIL, PASS, SKIP
from gpu_check_steps import Step

__all__ = ["BUDGETS", "ENVIRONMENT", "PACKAGE", "Budget", "Mode", "Plan", "deadline_s", "gpu_test_files", "make_steps"]

Mode = Literal["full", "quick", "rehearsed"]
ENVIRONMENT, PACKAGE = "environment", "package"
CUDA_TESTS, TRITON_TESTS = "CUDA kernels against the reference", "Triton kernels against the reference"
KERNELS, RANKS, ULPS = "tests/cuda/test_gpu.py", "tests/zcomm/test_nccl_gpu.py", "tests/cuda/test_gpu_ulps.py"
TRAINING = "tests/zero/test_training_on_gpu.py"
PYTHON = sys.executable
ROOT = Path(__file__).parents[1]
GOALS = {"quantize": 0.90, "decode": 0.90, "requantize": 0.85}
"""Goals as shares of the rate of a copy, for arrays of ``GOAL_NBYTES`` and more."""
GOAL_NBYTES = 64 * 2**20
COMMON_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
"""One machine, possibly without a network; unbuffered, so that the output of a killed step is kept."""
ONE_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
"""Ranks share the first of several GPUs: the settings that allow this would make NCCL use sockets between GPUs."""
REHEARSAL_ENVIRONMENT = {"ZCOMM_NCCL": "emulated"}
"""Emulated NCCL, which takes host tensors."""
SHARED_GPU = {"ZCOMM_KERNELS": "cuda", "ZCOMM_TEST_TIMEOUT_S": "110"}
"""CUDA kernels, as every rank would compile the Triton kernels; a longer timeout, as the processes share the GPU."""


class Budget(NamedTuple):
    """Seconds of a step in each mode; 0: the step is left out."""

    full: float
    quick: float
    rehearsed: float


BUDGETS = {
    ENVIRONMENT: Budget(18, 11, 40),
    PACKAGE: Budget(45, 45, 20),
    "CUDA kernels beside a copy": Budget(25, 12, 40),
    "Triton kernels beside a copy": Budget(35, 0, 30),
    "changes in ulps beside a copy": Budget(10, 0, 20),
    "collectives, 1 rank": Budget(25, 10, 30),
    "collectives, 2 x 2 ranks": Budget(30, 10, 55),
    "training step, 1 rank": Budget(30, 10, 55),
    "training step, 2 x 2 ranks": Budget(35, 0, 60),
    "first call": Budget(20, 0, 35),
    "CUDA graphs": Budget(20, 8, 45),
    "offload, 1.3 G parameters": Budget(25, 0, 35),
    "every mode beside the CPU": Budget(60, 0, 40),
    CUDA_TESTS: Budget(40, 10, 13),
    "ranks that share the GPU, over NCCL": Budget(30, 0, 13),
    "streams and host synchronizations": Budget(20, 0, 13),
    "training": Budget(15, 0, 13),
    TRITON_TESTS: Budget(30, 0, 13),
    "compute-sanitizer memcheck": Budget(10, 0, 13),
    "compute-sanitizer racecheck": Budget(7, 0, 13),
    "compute-sanitizer initcheck": Budget(6, 0, 13),
}
"""In the order of the steps: measurements first. Time that a step does not use goes to those after it."""
OWN_S = 4.0
"""Seconds for the start and the end of gpu_check.py itself."""


def deadline_s(mode: Mode) -> float:
    """Return the seconds within which gpu_check.py ends."""
    return OWN_S + sum(getattr(budget, mode) for budget in BUDGETS.values())


@dataclass(frozen=True)
class Plan:
    """The machine and the options."""

    machine: Machine
    mode: Mode = "full"
    builds: bool = True
    output: Path = Path("runs/gpu_check")


def read_tests(text: str) -> tuple[str, str]:
    """Return verdict and summary line of pytest's output; the verdict is SKIP if no test passed."""
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
    """The same, but FAIL if no test passed."""
    verdict, note = read_tests(text)
    return (FAIL if verdict == SKIP else verdict), note


def read_kernels(text: str) -> tuple[str, str]:
    """Return the smallest share of the copy rate of each operation from 64 MiB up, and the number of missed goals."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"operation"')]
    shares: dict[str, float] = {}
    for row in rows:
        operation = row["operation"].split(" ")[0]
        if row["size"] >= GOAL_NBYTES and "over_copy" in row:
            shares[operation] = min(row["over_copy"], shares.get(operation, 9.0))
    missed = sum(share < GOALS.get(name, 0.0) for name, share in shares.items())
    note = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    note = f"smallest share of the copy rate from 64 MiB: {note or '-'}"
    return PASS, f"{note}; {missed} below the goal" if missed else note


def make_steps(plan: Plan) -> list[Step]:
    """Return every step of the plan's mode, in order; a step that cannot run has a reason."""
    steps = {step.name: step for step in (_build(plan), *_figures(plan), *_tests(plan), *_sanitizers(plan))}
    chosen = []
    for name, budget in BUDGETS.items():
        if name != ENVIRONMENT and (seconds := getattr(budget, plan.mode)):
            step = steps[name]
            environment = COMMON_ENVIRONMENT | (REHEARSAL_ENVIRONMENT if plan.mode == "rehearsed" else ONE_GPU)
            chosen.append(replace(step, budget_s=seconds, environment={**environment, **step.environment}))
    return chosen


def _refusal(reason: str) -> list[str]:
    """Return a command that fails with ``reason``."""
    return [PYTHON, "-c", f"raise SystemExit({reason!r})"]


def _build(plan: Plan) -> Step:
    if plan.mode == "rehearsed":
        return Step(PACKAGE, [PYTHON, "bench/gpu_check_package.py"], gives_figures=True)
    gpu = plan.machine.gpu
    assert gpu is not None, "there are no steps without a GPU"
    folder = f"build/gpu_check-{gpu.architecture}-{sys.version_info.major}{sys.version_info.minor}"
    command = [PYTHON, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "-v"]
    command += [f"-Cbuild-dir={folder}", "-e", "."]
    if problem := plan.machine.build_problem():
        command = _refusal(
            f"the package cannot be built: {problem}; --no-build uses the installed package or the source tree"
        )
    environment = {
        "ZCOMM_CUDA": "ON",
        "CUDAARCHS": f"{gpu.architecture}-real",
        "CUDACXX": nvcc(),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    reason = "" if plan.builds else "--no-build"
    return Step(PACKAGE, command, environment=environment, skip_reason=reason, read=_read_build)


def _read_build(text: str) -> tuple[str, str]:
    """Return the architecture that was built for, and the first compiler error."""
    found = re.findall(r"zcomm: (CUDA .*)$", text, re.MULTILINE)[:1]
    return PASS, "; ".join(found + re.findall(r"^.*\berror: .*$", text, re.MULTILINE | re.IGNORECASE)[:1])


class _Command(NamedTuple):
    """A script, its arguments in each mode, and its number of ranks."""

    script: str
    full: str
    quick: str
    rehearsed: str
    num_ranks: int = 0
    """0: it runs without a process group."""


LARGE = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --batch-size 32"
MIDDLE = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --batch-size 4"
TINY = "--device cpu --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --steps 1"
SOME_COLLECTIVES = "--device cpu --sizes-kib 16 --formats int8 --rounds 1 --collectives all_gather all_reduce"
COMMANDS = {
    "CUDA kernels beside a copy": _Command(
        "gpu_kernels.py", "--kernels cuda --sizes-mib 64 256 1024 16 1 4096 --compare eager",
        "--kernels cuda --sizes-mib 64 256 --rounds 7", "--device cpu --sizes-mib 0.25 --formats int8 --rounds 1",
    ),
    "Triton kernels beside a copy": _Command(
        "gpu_kernels.py", "--kernels triton --sizes-mib 64 256 1024 16 1",
        "", "--device cpu --sizes-mib 0.25 --formats int4 --rounds 1",
    ),
    "changes in ulps beside a copy": _Command("gpu_ulps.py", "", "", "--device cpu --sizes-mib 0.25 --rounds 1"),
    "collectives, 1 rank": _Command(
        "gpu_collectives.py", "--formats none int8 int4 nf4 fp8_e4m3 --sizes-kib 1024 64 16384",
        "--sizes-kib 1024", SOME_COLLECTIVES, num_ranks=1,
    ),
    "collectives, 2 x 2 ranks": _Command(
        "gpu_collectives.py", "--ranks-per-node 2 --sizes-kib 1024 64 16384 --rounds 7",
        "--ranks-per-node 2 --sizes-kib 1024 --rounds 5 --formats int8", f"{SOME_COLLECTIVES} --ranks-per-node 1",
        num_ranks=4,
    ),
    "training step, 1 rank": _Command(
        "gpu_training.py", LARGE, f"{LARGE} --contenders ddp zero~stage~1 zero~stage~3 --steps 3",
        f"{TINY} --contenders ddp zero~stage~1 fsdp2~reshard=True", num_ranks=1,
    ),
    "training step, 2 x 2 ranks": _Command(
        "gpu_training.py", f"--ranks-per-node 2 {MIDDLE}", "",
        f"{TINY} --ranks-per-node 1 --contenders ddp zero~stage~3 delta-hpz~exact deepspeed~stage~3",
        num_ranks=4,
    ),
    "first call": _Command("gpu_first_call.py", "", "", "--device cpu --formats int8 --numel 4096"),
    "CUDA graphs": _Command(
        "gpu_graph.py", "", "--formats int8 --rounds 5", "--device cpu --formats int8 --numel 4096 --rounds 1",
        num_ranks=2,
    ),
    "offload, 1.3 G parameters": _Command(
        "gpu_offload.py", "", "", TINY.replace("--num-attention-heads 2 ", ""),
    ),
    "every mode beside the CPU": _Command("gpu_modes.py", "", "", "--device cpu --only stage3-bf16 collective"),
}  # fmt: skip
"""The most important sizes and contenders come first: those that time does not allow are named, not measured."""
REHEARSED_RANKS = 2


def _figures(plan: Plan) -> list[Step]:
    steps = []
    for name, of in COMMANDS.items():
        ranks = min(of.num_ranks, REHEARSED_RANKS) if plan.mode == "rehearsed" else of.num_ranks
        launch = ["bench/gpu_ranks.py", str(ranks)] if ranks else []
        words = [word.replace("~", " ") for word in getattr(of, plan.mode).split()]
        command = [PYTHON, *launch, f"bench/{of.script}", "--json", *words]
        if "offload" in name:
            command += ["--trace", str(plan.output.resolve() / "offload_trace.json.gz")]
        read = read_kernels if of.script == "gpu_kernels.py" else Step.read
        steps.append(Step(name, command, gives_figures=True, read=read))
    return steps


def _pytest(plan: Plan, *arguments: str, workers: int = 1) -> list[str]:
    """Return a pytest command with a timeout for each test if the plugin is installed; warnings are not errors."""
    if plan.mode == "rehearsed":  # as fast as possible: only the step is rehearsed
        quick = ["--noconftest", "-p", "no:hypothesispytest", "-q", "-o", "addopts="]
        return [PYTHON, "-m", "pytest", *quick, "tests/test_documents.py", "-k", "version"]
    missing = plan.machine.missing(TEST_PACKAGES)
    if "pytest" in missing:
        return _refusal("pytest is not installed")
    # Without addopts: its strict settings and markers would refuse those of plugins that are not installed.
    command = [PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-rsfE", "-W", "default", "-o", "addopts="]
    if "pytest-timeout" not in missing:
        command += ["-o", "timeout=120"]
    if workers > 1 and "pytest-xdist" not in missing:
        command += ["-n", str(workers), "--dist=worksteal"]
    return [*command, *arguments]


def gpu_test_files() -> list[str]:
    """Return the files with tests marked ``gpu``; other files may import packages that are not installed."""
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text())


def _tests(plan: Plan) -> list[Step]:
    nbytes = plan.machine.gpu.nbytes if plan.machine.gpu else 0
    workers = max(1, min(len(os.sched_getaffinity(0)) - 1, nbytes // (4 * 2**30), 14))
    others = [path for path in gpu_test_files() if path not in (KERNELS, RANKS, ULPS, TRAINING)]
    shared = {"OMP_NUM_THREADS": "2"}

    def step(name: str, *arguments: str, workers: int = 1, environment: Mapping[str, str] | None = None) -> Step:
        command = _pytest(plan, *arguments, workers=workers)
        read = _read_required_tests if name == CUDA_TESTS and plan.builds else read_tests
        return Step(name, command, environment={**shared, **(environment or {})}, read=read)

    return [
        step(CUDA_TESTS, KERNELS, ULPS, "-k", "not triton", workers=workers),
        # All of the file: where there is no GPU, most of it runs over an emulated NCCL.
        step("ranks that share the GPU, over NCCL", RANKS, "-m", "", environment=SHARED_GPU),
        step("streams and host synchronizations", *others),
        step("training", TRAINING),
        step(TRITON_TESTS, KERNELS, "-k", "triton", workers=workers),
    ]


def _sanitizers(plan: Plan) -> list[Step]:
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    is_rehearsed = plan.mode == "rehearsed"
    reason = "" if program or is_rehearsed else "compute-sanitizer is not on the PATH, nor under /usr/local/cuda"
    few = "not triton and messages and dtype1 and (int8 or nf4) and not 1024 and not 512"
    tests = _pytest(plan, KERNELS, ULPS, "-k", f"({few}) or (the_cpus and 5000)")
    # No caching: each tensor is a separate allocation, so that the tool sees accesses beyond its ends.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    steps = []
    for tool in ("memcheck", "racecheck", "initcheck"):
        under = [] if is_rehearsed else [str(program), "--tool", tool, "--error-exitcode", "9"]
        name, command = f"compute-sanitizer {tool}", [*under, *tests]
        steps.append(Step(name, command, environment=environment, skip_reason=reason, read=_read_tool))
    return steps


def _read_tool(text: str) -> tuple[str, str]:
    verdict, note = read_tests(text)
    summary = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY.*)$", text, re.MULTILINE)
    return verdict, f"{summary[-1] if summary else 'the tool printed no summary'}; {note}"
