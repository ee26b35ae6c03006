"""Old spellings that are more than another name: each is rewritten before parsing, with a note that is a warning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zcomm import ConfigError
from zero.config.values import shown

__all__ = ["MOVED", "modernize"]


def _offload(section: str) -> Callable[[dict[str, Any], Any], str]:
    def move(zero: dict[str, Any], value: Any) -> str:
        _check_bool(value)
        _put(zero, section, {"device": "cpu" if value else "none"})
        return f"zero_optimization.{section}.device"

    return move


def _pin(zero: dict[str, Any], value: Any) -> str:
    _check_bool(value)
    _put(zero, "offload_optimizer", {"pin_memory": value})
    return "zero_optimization.offload_optimizer.pin_memory"


def _put(zero: dict[str, Any], section: str, values: dict[str, Any]) -> None:
    """Below what the section says itself; a section that is none is left to be refused."""
    below = zero.get(section)
    if below is None or isinstance(below, Mapping):
        zero[section] = {**values, **(below or {})}


def _check_bool(value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"must be true or false: got {shown(value)}")


MOVED: dict[str, Callable[[dict[str, Any], Any], str]] = {
    "cpu_offload": _offload("offload_optimizer"),
    "cpu_offload_param": _offload("offload_param"),
    "cpu_offload_params": _offload("offload_param"),
    "cpu_offload_use_pin_memory": _pin,
}
"""Keys of ``zero_optimization`` that live in a section of it now."""


def modernize(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Rewrite old spellings of ``raw``, which is not changed.

    Returns:
        The rewritten dict; a warning for each; the old path by the new one.
    """
    notes: list[str] = []
    origins: dict[str, str] = {}
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        notes.append(f"zero_optimization: {str(zero).lower()} is deprecated: write {{'stage': {int(zero)}}}")
        return {**raw, "zero_optimization": {"stage": int(zero)}}, notes, {}
    if not isinstance(zero, Mapping):
        return raw, notes, origins
    zero = dict(zero)
    for name, move in MOVED.items():
        if name in zero:
            old, value = f"zero_optimization.{name}", zero.pop(name)
            if value is None or (isinstance(value, str) and value == "auto"):
                continue
            try:
                new = move(zero, value)
            except ConfigError as error:
                raise ConfigError(f"{old} {error}") from None
            origins[new] = old
            notes.append(f"{old} is deprecated: write {new}")
    return {**raw, "zero_optimization": zero}, notes, origins
