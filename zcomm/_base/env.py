"""Every environment variable of zcomm and zero: name, default, meaning. Read once."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from zcomm.errors import ConfigError


class Variable(NamedTuple):
    """One environment variable."""

    default: str
    choices: tuple[str, ...]
    """Empty: any text."""
    meaning: str


SWITCH = ("0", "1")
VARIABLES = {
    "ZCOMM_CHECK": Variable("0", SWITCH, "1: every message has a checksum, verified before it is used"),
    "ZCOMM_DEBUG": Variable("0", SWITCH, "1: compare the calls of all ranks before each exchange"),
    "ZCOMM_DIVERGED_AFTER_S": Variable(
        "30", (), "seconds in one call of torch.distributed after which a rank that others wait for counts as waiting"
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
        "what carries file I/O; auto: io_uring if it was found at build time and the kernel allows it",
    ),
    "ZCOMM_NCCL": Variable(
        "",
        (),
        "path of an NCCL library; default: torch's, a wheel's, the system's; emulated: over CPU tensors, for tests",
    ),
    "ZERO_DEBUG": Variable("0", SWITCH, "1: zero fills what it gives back with NaN, and finds lost changes of values"),
}


@cache
def value(name: str) -> str:
    """The setting of variable ``name``; ConfigError if it is not one of the choices."""
    variable = VARIABLES[name]
    setting = os.environ.get(name) or variable.default
    if variable.choices and setting not in variable.choices:
        raise ConfigError(f"{name} must be one of {', '.join(c for c in variable.choices if c)}: {name}={setting}")
    return setting


def is_set(name: str) -> bool:
    """Whether the switch ``name`` is on."""
    return value(name) == "1"


def kernels(chosen: str) -> tuple[str, str]:
    """The kernels that a choice means, ``"auto"`` being ``ZCOMM_KERNELS``; and what said so, for messages."""
    setting = value("ZCOMM_KERNELS") if chosen == "auto" else chosen
    return setting, f"ZCOMM_KERNELS={setting}" if chosen == "auto" else f"kernels={chosen!r}"


def of_torchrun(variable: str, default: int, *, at_least: int = 0) -> int:
    """What torchrun has set ``variable`` to, an integer of at least ``at_least``; ``default`` if it has not.

    Raises:
        ConfigError: It is something else.
    """
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(
            f"{variable} must be an integer of at least {at_least}, as torchrun sets it: {variable}={text}"
        )
    return int(text)
