"""Calls into the native module: its import, and tensors and layouts as the plain arguments it takes."""

from __future__ import annotations

import platform
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._formats import formats
from zcomm._formats.message import MessageLayout
from zcomm._kernels.on_triton import ResidualBlocks
from zcomm.errors import MessageError

TAG = re.compile(r"cpython-(\d)(\d+)(t?)-(.+)")


class ImportFailure(NamedTuple):
    """Why the native module cannot be imported."""

    reason: str
    """Includes the remedy."""
    is_incompatible: bool
    """Whether it was built for another Python or machine: an error. A missing module only means slow kernels."""


def import_failure(error: ImportError, folders: Iterable[str]) -> ImportFailure:
    """Explain ``error``, raised when the native module was imported from the package's ``folders``."""
    files = sorted(file for folder in folders for file in Path(folder).glob("_native*.so"))
    fits = {f"_native.{_tag_here()}.so", "_native.abi3.so"}
    is_hidden = isinstance(error, ModuleNotFoundError) and any(file.name in fits for file in files)  # by an import hook
    if not files or is_hidden:
        reason = f"the native module is not built: {error}; install the package with `pip install .`"
        return ImportFailure(reason, is_incompatible=False)
    built = ", ".join(f"{file} is built for {_built_for(file.name)}" for file in files)
    libc = " ".join(platform.libc_ver()) or "a C library other than glibc"
    here = f"this is {_built_for(f'_native.{_tag_here()}.so')} with {libc}"
    remedy = "let pip choose the wheel for this machine: pip install --force-reinstall --no-deps zcomm-zero"
    return ImportFailure(f"the native module does not fit: {built}; {here} ({error}); {remedy}", is_incompatible=True)


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


try:
    from zcomm import _native
except ImportError as error:
    _native = None  # type: ignore[assignment]
    UNBUILT_REASON, IS_INCOMPATIBLE = import_failure(error, sys.modules["zcomm"].__path__)
else:
    UNBUILT_REASON, IS_INCOMPATIBLE = "", False


module: Any = _native
"""None if it cannot be imported."""
NUMBERS = {codec.name: codec.number for codec in formats.CODECS.values() if codec.dtype != torch.float64}
CODECS = NUMBERS if module is None else dict(NUMBERS.items() & module.CODECS.items())
"""Names and numbers of the codecs that it has. Where it cannot be imported, that is the reason to give, not a codec."""
RESIDUAL_BLOCK = 256
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def unavailable_reason(chosen: str = "auto") -> str:
    """Why the native kernels cannot be used here; empty if they can."""
    setting, chosen_by = env.kernels(chosen)
    return chosen_by if setting == "reference" else UNBUILT_REASON


def call(name: str, layout: MessageLayout, *arguments: Any) -> None:
    """Call operation ``name`` of the native module; its ValueError becomes a MessageError."""
    try:
        getattr(module, name)(*wire(layout), *arguments)
    except ValueError as error:
        raise MessageError(f"{layout.operation}, {layout.codec.name}, {layout.numel} elements: {error}") from error


def wire(layout: MessageLayout) -> tuple[int, int, bool]:
    """Codec, block, and whether blocks are rotated."""
    return layout.codec.number, layout.block, layout.is_rotated


def rows(layout: MessageLayout, num_messages: int) -> tuple[int, int, int]:
    """Messages, segments per message, elements per segment."""
    return num_messages, layout.num_segments, layout.segment_numel


def incoming(messages: Tensor, layout: MessageLayout) -> tuple[int, ...]:
    """Sizes, address, stride and hash of messages that are decoded."""
    return *rows(layout, messages.shape[0]), messages.data_ptr(), layout.nbytes, layout.hash


def array(tensor: Tensor) -> tuple[int, int]:
    """Dtype number and address. The caller keeps ``tensor`` alive during the call."""
    return DTYPE_NUMBERS[tensor.dtype], tensor.data_ptr()


def can_fuse_residual(layout: MessageLayout) -> bool:
    """Whether no block of the messages straddles two blocks of a residual."""
    return RESIDUAL_BLOCK % layout.block == 0 or layout.block % RESIDUAL_BLOCK == 0


def residual(blocks: ResidualBlocks) -> tuple[int, int, int, int, float]:
    """Address and stride of the codes, of the scales, and beta."""
    codes, scales, beta = blocks
    return codes.data_ptr(), codes.stride(0), scales.data_ptr(), scales.stride(0), beta
