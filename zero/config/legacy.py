"""Old spellings that are more than another name: each is rewritten before parsing, with a note that is a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zcomm import ConfigError

__all__ = ["MOVED", "modernize"]


def _offload(section: str) -> Callable[[dict[str, Any], Any], str]:
    def move(zero: dict[str, Any], value: Any) -> str:
        _check_bool(value)
        zero[section] = {"device": "cpu" if value else "none"} | dict(zero.get(section) or {})
        return f"zero_optimization.{section}.device"

    return move


def _pin(zero: dict[str, Any], value: Any) -> str:
    _check_bool(value)
    zero["offload_optimizer"] = {"pin_memory": value} | dict(zero.get("offload_optimizer") or {})
    return "zero_optimization.offload_optimizer.pin_memory"


def _check_bool(value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"must be true or false: got {value!r}")


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
    if not isinstance(zero, dict):
        return raw, notes, origins
    zero = dict(zero)
    for name, move in MOVED.items():
        if name in zero:
            old = f"zero_optimization.{name}"
            try:
                new = move(zero, zero.pop(name))
            except ConfigError as error:
                raise ConfigError(f"{old} {error}") from None
            origins[new] = old
            notes.append(f"{old} is deprecated: write {new}")
    return {**raw, "zero_optimization": zero}, notes, origins
