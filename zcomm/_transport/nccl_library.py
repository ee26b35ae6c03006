"""Finding and loading NCCL: torch's own first, then the wheel nvidia-nccl-cu12 or -cu13, then the system's.

NCCL is loaded at the first use and is not needed to build or import this package. ``ZCOMM_NCCL`` names one library, and
no other is tried. ``ZCOMM_NCCL=emulated`` is an emulation for tests, for CPU tensors of processes on one machine
(``cpp/emulated``). Two NCCL libraries in one process are an error: each has its own threads, proxies and view of the
GPU, and their kernels can deadlock.
"""

from __future__ import annotations

import atexit
import importlib.util
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zcomm._base import env
from zcomm._kernels import kernels
from zcomm.errors import BackendUnavailableError, ConfigError

EMULATED = "emulated"

TESTED_NCCL = ((2, 14), (2, 32))
"""The oldest version, which has all functions that are used, and the newest that was tested."""
MAPS = Path("/proc/self/maps")


def _candidates() -> list[str]:
    """NCCL libraries in installed wheels."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        spec = None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    return [str(path) for folder in folders if (path := folder / "lib" / "libnccl.so.2").is_file()]


def _remedy() -> str:
    extra = f"nccl-cu{(torch.version.cuda or '13').partition('.')[0]}"
    return f"install it with pip install 'zcomm-zero[{extra}]', or set ZCOMM_NCCL to the path of one"


@cache
def _loaded() -> Any:
    native, path = kernels.native(), env.value("ZCOMM_NCCL")
    if path == EMULATED:
        path = str(Path(native.__file__).with_name("_emulated_nccl.so"))
    try:
        library = native.load_nccl(path, _candidates())
    except RuntimeError as error:
        raise BackendUnavailableError(f"{error}\n{_remedy()}") from error
    if not library.is_emulated:  # the emulation has no threads or kernels that could conflict with an NCCL
        _refuse_another(library.path)
    return library


def _refuse_another(path: str) -> None:
    mapped = {words[5] for line in MAPS.read_text().splitlines() if len(words := line.split(maxsplit=5)) == 6}
    used = str(Path(path).resolve())
    others = sorted(other for other in mapped if Path(other).name.startswith("libnccl.so") and other != used)
    if others:
        raise BackendUnavailableError(
            f"two NCCL libraries are loaded in this process: {', '.join(others)}, and {used} for backend='nccl'. Use "
            f"one for both: unset ZCOMM_NCCL, or start with LD_PRELOAD={used}, which torch then uses too"
        )


@cache
def nccl_library() -> Any:
    """The ``NcclLibrary`` of this process, loaded and checked at the first call.

    Warns on one rank if it is newer than the newest tested version.

    Raises:
        BackendUnavailableError: NCCL was not found (names every place that was tried), is too old or lacks a function,
            another NCCL is loaded in this process, or the native module is not built.
    """
    library = _loaded()
    if (text := _untested(library)) and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(f"NCCL {library.version}, {library.path}, {text}", RuntimeWarning, stacklevel=2)
    return library


def _untested(library: Any) -> str:
    newest = TESTED_NCCL[1]
    if tuple(map(int, library.version.split(".")[:2])) <= newest:
        return ""
    return f"newer than the newest tested, {newest[0]}.{newest[1]}"


def _forget() -> None:
    nccl_library.cache_clear()
    _loaded.cache_clear()


atexit.register(_forget)  # nanobind reports objects that are alive when the interpreter exits as leaks


def is_emulated() -> bool:
    """Whether the NCCL of this process is the emulation, which supports CPU tensors only."""
    return env.value("ZCOMM_NCCL") == EMULATED


def nccl_description() -> str:
    """Version and path; or why NCCL is unavailable, and the command that installs it."""
    try:
        library = _loaded()
    except (BackendUnavailableError, ConfigError) as error:
        first, *others = str(error).splitlines()
        return "; ".join([f"none: {first.rstrip(':')}", *others[-1:]])
    if library.is_emulated:
        return f"emulated in host memory, for tests only: {library.path}"
    registered = "buffers can be registered" if library.can_register else "too old to register buffers"
    return ", ".join(filter(None, [library.version, library.path, registered, _untested(library)]))
