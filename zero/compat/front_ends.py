"""The versions of front ends that the door is tested with."""

from __future__ import annotations

import importlib.metadata
import logging
import re

from zcomm import ConfigError

logger = logging.getLogger("zero")
TESTED = {
    "accelerate": ("1.15", "1.15"),
    "lightning": ("2.6", "2.6"),
    "peft": ("0.21", "0.21"),
    "transformers": ("4.57", "5.23"),
    "trl": ("1.16", "1.16"),
}
"""The first and the last version of each."""


def check_version(name: str) -> None:
    """Called when front end ``name`` is imported: warn if it is later than tested.

    Raises:
        ConfigError: It is older than those tested, or of a later major version.
    """
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return
    first, last = TESTED[name]
    text = f"{name} {installed} (tested: {first if first == last else f'{first} to {last}'})"
    if _release(installed) < _release(first) or _release(installed)[0] > _release(last)[0]:
        raise ConfigError(f"zero.compat cannot serve {text}: install a tested version")
    if _release(installed) > _release(last):
        logger.warning("zero.compat: %s is later than tested", text)


def _release(version: str) -> tuple[int, int]:
    major, minor = (int(number) for number in [*re.findall(r"\d+", version), "0"][:2])
    return major, minor
