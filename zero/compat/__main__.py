"""``python -m zero.compat script.py ARGS`` and ``python -m zero.compat -m package ARGS``.

``--local_rank`` before the script passes it ``--local_rank=N`` of torchrun's environment, as DeepSpeed's launcher does.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

from zero.compat.door import as_deepspeed

CUDA_IS_MISSING = ("not compiled with CUDA", "_cuda_", "No CUDA GPUs", "no NVIDIA driver", "CUDA driver")
"""What torch's errors say where there is no GPU."""
NEEDS_CUDA = (
    "zero.compat: the script names CUDA, and there is no GPU: use deepspeed.get_accelerator().current_device_name() "
    "for devices, or run it where there is one"
)

USAGE = "usage: python -m zero.compat [--local_rank] [-m module | script.py] ARGS\n"


def main() -> int:
    """Run what the command line names, as ``python`` would; returns 2, with the usage, if it names nothing."""
    given = sys.argv[1:]
    passes_local_rank = given[:1] == ["--local_rank"]
    given = given[passes_local_rank:]
    is_module = given[:1] == ["-m"]
    asks_for_help = given[:1] in (["-h"], ["--help"])
    if asks_for_help or len(given) < 1 + is_module:
        (sys.stdout if asks_for_help else sys.stderr).write(USAGE)
        return 0 if asks_for_help else 2
    as_deepspeed()
    sys.argv = given[is_module:]
    if passes_local_rank:
        sys.argv.insert(1, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}")
    try:
        _run(is_module=is_module)
    except Exception as error:
        if not torch.cuda.is_available() and any(text in str(error) for text in CUDA_IS_MISSING):
            error.args = (f"{error}\n{NEEDS_CUDA}",)
        raise
    return 0


def _run(*, is_module: bool) -> None:
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as python does: it was the current folder
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
