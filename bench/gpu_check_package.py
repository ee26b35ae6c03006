"""Find the package for the steps of gpu_check.py: the installed one, or else a copy of the source tree.

    python bench/gpu_check_package.py         copy it to a temporary folder, and report whether it can be imported

The source tree without a build has no native module: no CUDA kernels, CPU kernels or NCCL communicator of zcomm.
Everything else works, with Triton and torch's NCCL. This module needs only Python's standard library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check_steps import Place

__all__ = ["Package", "copy_source"]

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "zcomm": "zcomm",
    "zero": "zero",
    "triton_kernels": "zcomm/triton_kernels",
    "bench": "bench",
    "tests": "tests",
    "tools": "tools",
}
BESIDE_PACKAGE = ("bench", "tests", "tools")
IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "results", "mutants")
LIMIT_S = 30.0


def copy_source(folder: Path, *, has_package: bool = True) -> None:
    """Copy the source tree to ``folder`` in the layout of a wheel, with metadata for importlib.metadata.

    Without ``has_package`` copy only what a wheel has not.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for source, target in FOLDERS.items():
        if has_package or source in BESIDE_PACKAGE:
            shutil.copytree(ROOT / source, folder / target, ignore=IGNORED)
    project = (ROOT / "pyproject.toml").read_text()
    for file in ("pyproject.toml", "CHANGELOG.md"):  # what tests read
        shutil.copy(ROOT / file, folder)
    if not has_package:
        return
    found = {name: re.search(rf'^{name} = "([^"]+)"$', project, re.MULTILINE) for name in ("name", "version")}
    name, version = (match[1] if match else "unknown" for match in found.values())
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def facts_at(place: Place) -> dict[str, str] | None:
    """Return the output of ``zcomm env``, flat; {} on a timeout, None if the package cannot be imported."""
    command = [sys.executable, "-m", "zcomm", "env", "--json"]
    environment = {**os.environ, **place.environment}
    try:
        done = subprocess.run(
            command, cwd=place.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        found: dict[str, dict[str, str]] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {}
    except ValueError:
        return None
    return {f"{section}: {name}": text for section in ("kernels", "torch") for name, text in found[section].items()}


def _is_editable() -> bool:
    command = [sys.executable, "-c", "import zcomm; print(zcomm.__file__)"]
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0 or Path(done.stdout.strip()).is_relative_to(ROOT)


class Package:
    """The package for the steps: the installed one, or a copy of the source tree."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the target of the copy, if one is needed."""
        self._folder = folder
        self.is_installed = True
        self.facts: dict[str, str] = {}

    def find(self) -> Place:
        """Find the package; call it after the build. Takes seconds, as it imports torch."""
        facts = facts_at(Place(Path("/"), {}))
        place = Place(ROOT, {})
        if facts is not None and not _is_editable():  # pytest would import the sources of ROOT, which are not built
            copy_source(self._folder, has_package=False)
            place = Place(self._folder, {})
        if facts is None:
            self.is_installed = False
            copy_source(self._folder)
            place = Place(self._folder, {"PYTHONPATH": str(self._folder)})
            facts = facts_at(place)
        self.facts = facts or {}
        return place


def main() -> int:
    """Copy the source tree and import the copy; return 1 if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy_source(Path(folder))
        facts = facts_at(Place(Path(folder), {"PYTHONPATH": folder}))
    print(json.dumps({"copied": True, "facts": len(facts or ()), "num_wrong": int(facts is None)}))
    return int(facts is None)


if __name__ == "__main__":
    sys.exit(main())
