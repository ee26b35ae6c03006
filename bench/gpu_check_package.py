"""The package that the steps of gpu_check.py import: as it is installed, or else its source tree, copied as a package.

    python bench/gpu_check_package.py         copies it to a temporary folder, and says whether it can be imported

A source tree that was not built has no native module, and so no CUDA kernels, no CPU kernels and no communicator of its
own; with Triton and torch's NCCL it has everything else. Nothing here needs more than Python's standard library.
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
from typing import Any

from gpu_check_steps import Place

__all__ = ["Package", "copy_source"]

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "zcomm": "zcomm",
    "zero": "zero",
    "triton_kernels": "zcomm/triton_kernels",
    "bench": "bench",
    "tests": "tests",
}
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "results", "mutants")
LIMIT_S = 40.0


def copy_source(folder: Path) -> None:
    """Copy the source tree to ``folder`` in the places where a wheel has it, with a version for importlib.metadata."""
    shutil.rmtree(folder, ignore_errors=True)
    for source, target in FOLDERS.items():
        shutil.copytree(ROOT / source, folder / target, ignore=LEFT_OUT)
    project = (ROOT / "pyproject.toml").read_text()
    shutil.copy(ROOT / "pyproject.toml", folder)
    found = {name: re.search(rf'^{name} = "([^"]+)"$', project, re.MULTILINE) for name in ("name", "version")}
    name, version = (match[1] if match else "unknown" for match in found.values())
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def facts_at(place: Place) -> dict[str, Any]:
    """What ``zcomm env`` says there, flat; empty if the package cannot be imported."""
    command = [sys.executable, "-m", "zcomm", "env", "--json"]
    environment = {**os.environ, **place.environment}
    try:
        done = subprocess.run(
            command, cwd=place.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        found: dict[str, dict[str, str]] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return {}
    return {f"{section}: {name}": text for section in ("kernels", "torch") for name, text in found[section].items()}


class Package:
    """Where steps find the package, once it is known whether it is installed."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is where the source tree is copied to, if it has to be."""
        self._folder, self._place = folder, Place(ROOT, {})
        self.facts: dict[str, Any] = {}
        self.is_installed = False

    def find(self) -> Place:
        """As it is installed, or the copy; looked up again each time, for a step may have installed it."""
        self.facts = facts_at(Place(Path("/"), {}))
        self.is_installed = bool(self.facts)
        if not self.is_installed:
            copy_source(self._folder)
            self._place = Place(self._folder, {"PYTHONPATH": str(self._folder)})
            self.facts = facts_at(self._place)
        return self._place


def main() -> int:
    """Copy, and import the copy; 1 if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy_source(Path(folder))
        facts = facts_at(Place(Path(folder), {"PYTHONPATH": folder}))
    print(json.dumps({"copied": True, "facts": len(facts), "num_wrong": int(not facts)}))
    return int(not facts)


if __name__ == "__main__":
    sys.exit(main())
