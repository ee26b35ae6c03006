"""Where NCCL is found: torch's own first, then the wheel nvidia-nccl-cu12 or -cu13, then the system's.

It is loaded when first asked for; nothing of it is needed to build or import this package. ``ZCOMM_NCCL`` names one
library, and then no other is looked for; ``emulated`` names our own stand-in, for tests: processes of one machine, CPU
tensors (``cpp/emulated``).
"""

from __future__ import annotations

import atexit
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from zcomm import env, kernels
from zcomm.errors import BackendUnavailableError, ConfigError

__all__ = ["is_emulated", "nccl_description", "nccl_library"]

EMULATED = "emulated"


def _candidates() -> list[str]:
    """Libraries of installed wheels."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of NVIDIA's at all
        spec = None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec is not None else []
    return [str(path) for folder in folders if (path := folder / "lib" / "libnccl.so.2").is_file()]


@cache
def nccl_library() -> Any:
    """The ``NcclLibrary`` of this process, loaded and checked at the first call.

    Raises:
        BackendUnavailableError: There is none (every place that was looked at is named), it is too old, or it lacks a
            function that is used; or the native module is not built.
    """
    try:
        native, path = kernels.native(), env.value("ZCOMM_NCCL")
        if path == EMULATED:
            path = str(Path(native.__file__).with_name("_emulated_nccl.so"))
        return native.load_nccl(path, _candidates())
    except RuntimeError as error:
        remedy = "install the extra zcomm-zero[nccl-cu12] or [nccl-cu13], whichever torch's CUDA is, or set ZCOMM_NCCL"
        raise BackendUnavailableError(f"{error}\n{remedy}") from error


atexit.register(nccl_library.cache_clear)  # what is still held when the interpreter ends is reported as leaked


def is_emulated() -> bool:
    """Whether the NCCL of this process is the emulation, which takes CPU tensors and no others."""
    return env.value("ZCOMM_NCCL") != "" and bool(nccl_library().is_emulated)


def nccl_description() -> str:
    """Version and path, or why there is none."""
    try:
        library = nccl_library()
    except (BackendUnavailableError, ConfigError) as error:
        return f"none: {str(error).splitlines()[0].rstrip(':')}"
    if library.is_emulated:
        return f"emulated in host memory, for tests alone: {library.path}"
    registered = "buffers can be registered" if library.can_register else "too old to register buffers"
    return f"{library.version}, {library.path}, {registered}"
