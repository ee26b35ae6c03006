"""Why the native module is not imported: it is not built, or built for another Python, processor or C library."""

from __future__ import annotations

import platform
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["ImportFailure", "import_failure"]

TAG = re.compile(r"cpython-(\d)(\d+)(t?)-(.+)")


class ImportFailure(NamedTuple):
    """Why there is no native module."""

    reason: str
    """With the remedy."""
    is_misfit: bool
    """Whether it is there, but not for this Python or machine. Then it is refused, not replaced by slow kernels."""


def import_failure(error: ImportError, folders: Iterable[str]) -> ImportFailure:
    """What ``error`` of importing the native module from the package's ``folders`` means."""
    files = sorted(file for folder in folders for file in Path(folder).glob("_native*.so"))
    fits = {f"_native.{_tag_here()}.so", "_native.abi3.so"}
    is_hidden = isinstance(error, ModuleNotFoundError) and any(file.name in fits for file in files)  # from imports
    if not files or is_hidden:
        reason = f"the native module is not built: {error}; install the package with `pip install .`"
        return ImportFailure(reason, is_misfit=False)
    built = ", ".join(f"{file} is built for {_built_for(file.name)}" for file in files)
    libc = " ".join(platform.libc_ver()) or "a C library other than glibc"
    here = f"this is {_built_for(f'_native.{_tag_here()}.so')} with {libc}"
    remedy = "let pip choose the wheel for this machine: pip install --force-reinstall --no-deps zcomm-zero"
    return ImportFailure(f"the native module does not fit: {built}; {here} ({error}); {remedy}", is_misfit=True)


def _tag_here() -> str:
    tag = str(sysconfig.get_config_var("SOABI"))
    return tag if TAG.fullmatch(tag) else f"{tag}-{platform.machine()}"


def _built_for(name: str) -> str:
    tag = name.split(".")[1]
    if tag == "abi3":
        return "CPython 3.12 or later"
    if found := TAG.fullmatch(tag):
        major, minor, threading, platform_tag = found.groups()
        return f"CPython {major}.{minor}{threading} on {platform_tag}"
    return tag
