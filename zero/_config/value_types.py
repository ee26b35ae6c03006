"""Converts and checks one value of a configuration: every given value goes through this module.

A value that does not fit raises a ConfigError that names the key. Beyond the six types of JSON, a configuration may be
a dict of a script, with Enums, dtypes and paths, or the output of a YAML parser, which reads ``1e-4`` as a string. A
string is converted only where DeepSpeed converts it, and only if all of it is one number or one word for true or false.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Real
from pathlib import PurePath
from types import NoneType
from typing import Any, get_args, get_origin

import torch

from zcomm import ConfigError, Format
from zero._config.keys import ConfigKey, options_of

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""Strings that were meant to be numbers; YAML parsers leave some."""
INTEGER = re.compile(r"([+-]?\d+)(\.0*)?", re.ASCII)
TRUE, FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")
TEXT_SECTIONS = ("zero_optimization.", "fp16.", "bf16.", "comms_logger.")
"""DeepSpeed reads these with pydantic, which converts ``"true"`` and ``"16"``. In others ``"false"`` counts as true,
and ``"16"`` fails later."""
LARGEST_INT = 2**63 - 1
"""The limit of a tensor's sizes, and of torch's arithmetic with integers."""
MAX_INT_BITS = 1023
"""Of any integer: float64 cannot hold more."""
MAX_LEVELS = 32
"""Of nested objects and lists; the deepest known key is at level 6."""
MAX_VALUES = 1_000_000
MAX_COMPARED_LENGTH = 100
"""Characters of a name that are compared with known names."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def check_document(raw: Mapping[Any, Any]) -> None:
    """Refuse what no key can hold, so that parsing may safely recurse, compare and print.

    Raises:
        ConfigError: Names that are not strings, values that JSON does not have, more than 32 levels or a million
            values, or an integer beyond float64.
    """
    pending: list[tuple[str, Any, int]] = [("", raw, 0)]
    num_values = 0
    while pending:
        path, value, level = pending.pop()
        value = _plain(value)
        num_values += 1
        if level > MAX_LEVELS or num_values > MAX_VALUES:
            limit = f"{MAX_LEVELS} levels deep" if level > MAX_LEVELS else f"{MAX_VALUES} values"
            raise ConfigError(f"{path[:200]} must not be more than {limit}")
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise ConfigError(f"keys of {path or 'the configuration'} must be strings: got {shown(name)}")
                pending.append((f"{path}.{name}" if path else name, inner, level + 1))
        elif _is_list(value):
            pending.extend((path, item, level + 1) for item in value)
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise ConfigError(f"{path} must be a number that float64 can hold: got {value.bit_length()} bits")
        elif not isinstance(value, (str, Real, NoneType, Format)):  # in Python a Format may be given, too
            raise ConfigError(f"{path} must be a JSON value: got {shown(value)}")


def read_value(kind: Any, facts: ConfigKey, value: Any, path: str) -> Any:
    """``value`` converted to ``kind``; 5e8 counts as an integer, 1 and 0 as booleans.

    Raises:
        ConfigError: Wrong type, or out of the range of ``facts``; names ``path``.
    """
    value = _plain(value)
    if isinstance(value, str):
        value = _choice_or_list(kind, facts, value)
    if isinstance(value, str) and path.startswith(TEXT_SECTIONS):
        value = _from_text(kind, value)
    if facts.infinity_means_absent and isinstance(value, float) and value == math.inf:
        return None
    try:
        converted = _convert(kind, value)
    except TypeError:
        raise ConfigError(f"{path} must be {type_name(kind)}: got {shown(value)}{_unquoted(value)}") from None
    for part in converted if isinstance(converted, tuple) else (converted,):
        _check_range(facts, part, path)
    return converted


def _plain(value: Any) -> Any:
    """The value of an Enum's member, the name of a dtype, the text of a path; anything else as it is."""
    if isinstance(value, Enum):
        value = value.value
    return str(value) if isinstance(value, (torch.dtype, PurePath)) else value


def _choice_or_list(kind: Any, facts: ConfigKey, text: str) -> Any:
    """The choice that ``text`` names (also ``"torch.float16"`` and ``"FP16"``), or a list of it where one is meant."""
    name = text.removeprefix("torch.").lower()
    if name in facts.choices:
        return name
    return [text] if kind == tuple[str, ...] and "," not in text else text  # with a comma, several were meant


def _from_text(kind: Any, text: str) -> Any:
    """The boolean or number that ``text`` is; ``text`` itself if it is none."""
    if len(text) > MAX_COMPARED_LENGTH:
        return text
    if kind is bool and text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    if kind is float and NUMBER.fullmatch(text):
        return float(text)
    found = INTEGER.fullmatch(text) if kind is int else None
    return int(found[1]) if found else text


def _unquoted(value: Any) -> str:
    """The remedy for a number in a string."""
    if not isinstance(value, str) or not NUMBER.fullmatch(value[:MAX_COMPARED_LENGTH]):
        return ""
    return ", a string: write the number without quotes (YAML reads 1e-4 as a string, and 1.0e-4 as a number)"


def type_name(kind: Any) -> str:
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return " or ".join(dict.fromkeys(words.get(o) or _container_name(o) for o in options_of(kind) if o is not NoneType))


def _container_name(kind: Any) -> str:
    parts = get_args(kind)
    if get_origin(kind) is dict:
        return "an object"
    what = "strings" if parts[0] is str else "numbers"
    return f"a list of {what}" if parts[-1] is Ellipsis else f"a list of {len(parts)} {what}"


def shown(value: object) -> str:
    """``value`` as a short text for a message; it never raises."""
    try:
        return _REPR.repr(value)
    except Exception:  # from a __repr__ of the user's
        return f"a {type(value).__name__}"


def nearest(name: str, names: Any) -> str:
    """`` (did you mean 'x'?)`` if one of ``names`` is close to ``name``, else nothing."""
    close = closest(name, names)
    return f" (did you mean {close!r}?)" if close else ""


def closest(name: str, names: Any) -> str:
    """The most similar of ``names``; empty if none is close."""
    found = difflib.get_close_matches(name[:MAX_COMPARED_LENGTH], [str(n) for n in names], n=1)
    return found[0] if found else ""


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _convert(kind: Any, value: Any) -> Any:
    """``value`` as ``kind``; TypeError if it does not fit."""
    if len(options_of(kind)) > 1:
        return _first_that_fits(options_of(kind), value)
    if get_origin(kind) is tuple and _is_list(value):
        return _tuple(get_args(kind), value)
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return dict(value)
    if kind is int and _is_finite(value) and value == int(value):
        return int(value)
    if kind is float and _is_finite(value):
        return float(value)
    if kind is str and (isinstance(value, Format) or (isinstance(value, str) and _is_text(value))):
        return str(value)
    if kind is bool and isinstance(value, Real) and value in (0, 1):  # True and False are such numbers
        return bool(value)
    if kind is NoneType and value is None:
        return None
    raise TypeError


def _first_that_fits(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return _convert(kind, value)
        except TypeError:
            continue
    raise TypeError


def _tuple(parts: tuple[Any, ...], value: Sequence[Any]) -> tuple[Any, ...]:
    if parts[-1] is Ellipsis:
        parts = parts[:1] * len(value)
    if len(parts) != len(value):
        raise TypeError
    return tuple(_convert(part, item) for part, item in zip(parts, value, strict=True))


def _is_finite(value: Any) -> bool:
    """Whether ``value`` is a finite number, also one of NumPy."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: str) -> bool:
    """Whether it can be a file name: no null character, no lone surrogate."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _check_range(facts: ConfigKey, value: Any, path: str) -> None:
    if facts.choices and value not in facts.choices:
        near = nearest(value, facts.choices) if isinstance(value, str) else ""
        raise ConfigError(f"{path} must be one of {', '.join(map(str, facts.choices))}: {path}={shown(value)}{near}")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    maximum = facts.maximum if facts.maximum is not None or isinstance(value, float) else LARGEST_INT
    if facts.minimum is not None and value < facts.minimum:
        raise ConfigError(f"{path} must be at least {facts.minimum:g}: {path}={value!r}")
    if facts.is_positive and not value > 0:
        raise ConfigError(f"{path} must be greater than 0: {path}={value!r}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{path} must be at most {maximum}: {path}={value!r}")
