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
LIMIT_S = 30.0


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


def facts_at(place: Place) -> dict[str, str] | None:
    """What ``zcomm env`` says there, flat; nothing if it takes too long, None if the package cannot be imported."""
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


class Package:
    """Where steps find the package: as it is installed, or a copy of its source tree."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is where the source tree is copied to, if it has to be."""
        self._folder = folder
        self.is_installed = True
        self.facts: dict[str, str] = {}

    def find(self) -> Place:
        """Look once the package has had its chance to be installed; it takes seconds, as importing torch does."""
        facts = facts_at(Place(Path("/"), {}))
        place = Place(ROOT, {})
        if facts is None:
            self.is_installed = False
            copy_source(self._folder)
            place = Place(self._folder, {"PYTHONPATH": str(self._folder)})
            facts = facts_at(place)
        self.facts = facts or {}
        return place


def main() -> int:
    """Copy, and import the copy; 1 if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy_source(Path(folder))
        facts = facts_at(Place(Path(folder), {"PYTHONPATH": folder}))
    print(json.dumps({"copied": True, "facts": len(facts or ()), "num_wrong": int(facts is None)}))
    return int(facts is None)


if __name__ == "__main__":
    sys.exit(main())
