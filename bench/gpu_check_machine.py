"""Describe this machine for gpu_check.py: GPU, versions, tools, missing packages. Needs only the standard library."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["GPU", "TEST_PACKAGES", "Machine", "look", "nvcc"]

BUILD_PACKAGES = ("scikit-build-core", "nanobind")
TEST_PACKAGES = {"pytest": "pytest", "pytest-timeout": "pytest_timeout", "pytest-xdist": "xdist"}
"""Distribution -> module; only pytest is required."""
VERSIONS = ("torch", "triton", "numpy", "nanobind", "scikit-build-core", "pytest", "deepspeed")
ROOT = Path(__file__).parents[1]
PROBE_LIMIT_S = 60


@dataclass(frozen=True)
class GPU:
    """The first GPU, as torch reports it."""

    name: str
    capability: tuple[int, int]
    nbytes: int
    driver: str

    @property
    def architecture(self) -> str:
        """The architecture in the notation of CMake."""
        return "".join(map(str, self.capability))


@dataclass(frozen=True)
class Machine:
    """The GPU and the facts of this machine."""

    gpu: GPU | None
    reason: str
    """Why no GPU can be used; empty if one can."""
    facts: dict[str, str] = field(default_factory=dict)

    def missing(self, packages: dict[str, str]) -> list[str]:
        """Return those of ``packages`` (distribution -> module) that cannot be imported."""
        return [name for name, module in packages.items() if importlib.util.find_spec(module) is None]

    def build_problem(self) -> str:
        """Return why the package cannot be built here without network access; empty if it can."""
        absent = [name for name in BUILD_PACKAGES if not _version(name)]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if shutil.which("cmake") is None:
            return "cmake is not on the PATH: pip install cmake"
        if shutil.which("ninja") is None and shutil.which("make") is None:
            return "neither ninja nor make is on the PATH: pip install ninja"
        return "" if nvcc() else "nvcc is not on the PATH, nor under CUDA_HOME or /usr/local/cuda"


def nvcc() -> str:
    """Return the path of the CUDA compiler; empty if there is none."""
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    places = [os.environ.get("CUDACXX", ""), shutil.which("nvcc") or ""]
    places += [f"{home}/bin/nvcc" for home in (*homes, "/usr/local/cuda") if home]
    return next((path for path in places if path and os.access(path, os.X_OK)), "")


def look(commit: str = "") -> Machine:
    """Inspect this machine; ``commit`` is reported if the tree is not a git repository."""
    found = _probe()
    reason, gpu = found.pop("reason"), None
    if "gpu" in found:
        name, (major, minor), nbytes = found.pop("gpu")
        gpu = GPU(name, (major, minor), nbytes, _driver() or "unknown")
    facts = {
        "GPU": f"{gpu.name}, sm_{gpu.architecture}, {gpu.nbytes / 2**30:.0f} GiB" if gpu else f"none: {reason}",
        "driver": gpu.driver if gpu else _driver() or "none",
        "CPU": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}, {sys.executable}",
        "nvcc": _last_line([nvcc(), "--version"]) if nvcc() else "none",
        "tools": ", ".join(
            f"{name} {shutil.which(name) or 'missing'}" for name in ("cmake", "ninja", "compute-sanitizer")
        ),
        "packages": ", ".join(f"{name} {_version(name) or 'missing'}" for name in VERSIONS),
        **found,
        "commit": commit or _commit(),
    }
    return Machine(gpu, reason, facts)


PROBE = """
import json
try:
    import torch
except ImportError as error:
    print(json.dumps({"reason": f"torch cannot be imported: {error}"}))
    raise SystemExit
found = {"CUDA of torch": str(torch.version.cuda), "reason": ""}
if torch.version.cuda is None:
    found["reason"] = f"torch {torch.__version__} is built without CUDA"
else:
    try:
        found["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        found["NCCL of torch"] = f"none: {error}"
    try:
        of = torch.cuda.get_device_properties(0)
        found["gpu"] = [of.name, [of.major, of.minor], of.total_memory]
    except Exception as error:
        found["reason"] = (str(error).splitlines() or [repr(error)])[0].rstrip(".")
print(json.dumps(found))
"""
"""Runs in a separate process: this one must not hold the GPU, and must survive a crash in a library."""


def _probe() -> dict[str, Any]:
    try:
        command = [sys.executable, "-c", PROBE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"reason": f"torch did not report a GPU within {PROBE_LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"reason": f"the process that asks torch for a GPU ended with exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _last_line(query) if shutil.which("nvidia-smi") else ""


def _last_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[-1] if lines and not done.returncode else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    return _last_line(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]) or "unknown"
