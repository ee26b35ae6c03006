"""Every environment variable of zcomm and zero: name, default, meaning. Each is read once per process."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from zcomm.errors import ConfigError


class Variable(NamedTuple):
    default: str
    choices: tuple[str, ...]
    """Accepted values; empty: any text."""
    meaning: str


SWITCH = ("0", "1")
VARIABLES = {
    "ZCOMM_CHECK": Variable("0", SWITCH, "1: every message has a checksum, verified before decoding"),
    "ZCOMM_DEBUG": Variable(
        "0", SWITCH, "1: compare the calls of all ranks before each exchange, and raise where they differ"
    ),
    "ZCOMM_DIVERGED_AFTER_S": Variable(
        "30",
        (),
        "seconds that all ranks wait, one in a torch.distributed call (a barrier), before that counts as a deadlock",
    ),
    "ZCOMM_KERNELS": Variable(
        "auto",
        ("auto", "native", "triton", "cuda", "reference"),
        "kernels; auto: native for CPU tensors if built, for CUDA tensors Triton if installed, else CUDA if built",
    ),
    "ZCOMM_PROBE": Variable("", (), "file of `zcomm probe`, for format=auto; default: in the user's cache folder"),
    "ZCOMM_ISA": Variable("", ("", "avx512", "avx2", "baseline"), "highest instruction set of the native kernels"),
    "ZCOMM_FILES": Variable(
        "auto",
        ("auto", "io_uring", "threads"),
        "engine of file I/O; auto: io_uring if liburing was found at build time and the kernel allows it",
    ),
    "ZCOMM_NCCL": Variable(
        "",
        (),
        "path of an NCCL library; default: torch's, a wheel's, the system's; emulated: in host memory, for tests",
    ),
    "ZERO_DEBUG": Variable(
        "0", SWITCH, "1: zero fills released memory with NaN, and detects writes to parameters that would be lost"
    ),
}


@cache
def value(name: str) -> str:
    """The value of variable ``name``, or its default; ConfigError if it is not one of the choices."""
    variable = VARIABLES[name]
    setting = os.environ.get(name) or variable.default
    if variable.choices and setting not in variable.choices:
        raise ConfigError(f"{name} must be one of {', '.join(c for c in variable.choices if c)}: {name}={setting}")
    return setting


@cache
def is_set(name: str) -> bool:
    return value(name) == "1"


def forget() -> None:
    """Read the variables again at their next use. For tests, which change them."""
    value.cache_clear()
    is_set.cache_clear()


def kernels(chosen: str) -> tuple[str, str]:
    """The kernels that ``chosen`` means (``"auto"``: those of ZCOMM_KERNELS), and the setting as text for errors."""
    setting = value("ZCOMM_KERNELS") if chosen == "auto" else chosen
    return setting, f"ZCOMM_KERNELS={setting}" if chosen == "auto" else f"kernels={chosen!r}"


def torchrun_variable(variable: str, default: int, *, at_least: int = 0) -> int:
    """An integer variable that torchrun sets, such as LOCAL_WORLD_SIZE; ``default`` if it is not set.

    Raises:
        ConfigError: It is not an integer of at least ``at_least``.
    """
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(
            f"{variable} must be an integer of at least {at_least}, as torchrun sets it: {variable}={text}"
        )
    return int(text)
