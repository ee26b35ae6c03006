"""One value of a configuration, read as the type of its key: every value that anybody gives comes through here.

What does not fit is a ConfigError that names the key, whatever it is: JSON knows six types, but a configuration may be
a dict of a script, or what a YAML parser made of ``1e-4``, which is a string. A string is never taken for a number: who
wrote ``"0.9,0.95"`` meant two.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from zcomm import ConfigError, Format
from zero._config.keys import ConfigKey

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
"""A string that was meant to be a number, as YAML parsers leave some."""
LARGEST_INT = 2**63 - 1
"""What the counts of a tensor, and torch's own arithmetic with integers, can hold."""
MOST_BITS = 1023
"""Of an integer anywhere: more is beyond float64."""
MOST_LEVELS = 32
"""Of sections in sections; the deepest known key is on the sixth."""
MOST_VALUES = 1_000_000
MOST_COMPARED = 100
"""Characters of a name that is compared with known ones."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def check_document(raw: Mapping[Any, Any]) -> None:
    """Refuse what no key can hold, before any is looked at: then all that follows may recurse, compare and print.

    Raises:
        ConfigError: Names that are no strings, values that JSON does not have, more than 32 levels, a million values,
            or an integer beyond float64.
    """
    rest: list[tuple[str, Any, int]] = [("", raw, 0)]
    num_values = 0
    while rest:
        path, value, level = rest.pop()
        num_values += 1
        if level > MOST_LEVELS or num_values > MOST_VALUES:
            limit = f"{MOST_LEVELS} levels deep" if level > MOST_LEVELS else f"{MOST_VALUES} values"
            raise ConfigError(f"{path[:200]} must not be more than {limit}")
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise ConfigError(f"keys of {path or 'the configuration'} must be strings: got {shown(name)}")
                rest.append((f"{path}.{name}" if path else name, inner, level + 1))
        elif _is_list(value):
            rest.extend((path, item, level + 1) for item in value)
        elif isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise ConfigError(f"{path} must be a number that float64 can hold: got {value.bit_length()} bits")
        elif not isinstance(value, (str, Real, NoneType, Format)):  # a Format: from Python, where one is taken
            raise ConfigError(f"{path} must be a value that JSON has: got {shown(value)}")


def read_value(kind: Any, facts: ConfigKey, value: Any, path: str) -> Any:
    """``value`` as ``kind``; 5e8 is an integer, too.

    Raises:
        ConfigError: It does not fit, or is out of the range of ``facts``; names ``path``.
    """
    if facts.is_never_if_infinite and isinstance(value, float) and value == math.inf:
        return None
    try:
        converted = _convert(kind, value)
    except TypeError:
        raise ConfigError(f"{path} must be {type_name(kind)}: got {shown(value)}{_unquoted(value)}") from None
    for part in converted if isinstance(converted, tuple) else (converted,):
        _check_range(facts, part, path)
    return converted


def _unquoted(value: Any) -> str:
    """What to do about a number in a string."""
    if not isinstance(value, str) or not NUMBER.fullmatch(value[:MOST_COMPARED]):
        return ""
    return ", a string: write the number without quotes (YAML takes 1e-4 for a string, and 1.0e-4 for a number)"


def type_name(kind: Any) -> str:
    """A type in words."""
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return " or ".join(dict.fromkeys(words.get(o) or _container_name(o) for o in _options(kind) if o is not NoneType))


def _container_name(kind: Any) -> str:
    parts = get_args(kind)
    if get_origin(kind) is not tuple or parts[0] is str:
        return "an object" if get_origin(kind) is dict else "a list of strings"
    return "a list of numbers" if parts[-1] is Ellipsis else f"a list of {len(parts)} numbers"


def shown(value: object) -> str:
    """``value`` for a message: short, and never an error of its own."""
    try:
        return _REPR.repr(value)
    except Exception:  # a __repr__ of somebody's
        return f"a {type(value).__name__}"


def nearest(name: str, names: Any) -> str:
    """`` (did you mean 'x'?)`` if one of ``names`` is close to ``name``, else nothing."""
    close = closest(name, names)
    return f" (did you mean {close!r}?)" if close else ""


def closest(name: str, names: Any) -> str:
    """The one of ``names`` that is spelled most like ``name``; empty if none is close."""
    found = difflib.get_close_matches(name[:MOST_COMPARED], [str(n) for n in names], n=1)
    return found[0] if found else ""


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _convert(kind: Any, value: Any) -> Any:
    """TypeError if it does not fit."""
    if len(_options(kind)) > 1:
        for option in _options(kind):
            try:
                return _convert(option, value)
            except TypeError:
                continue
        raise TypeError
    if get_origin(kind) is tuple and _is_list(value):
        return _tuple(get_args(kind), value)
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return dict(value)
    if kind is int:
        return _integer(value)
    if kind is float:
        return _finite(value)
    if kind is str and (isinstance(value, Format) or (isinstance(value, str) and _is_text(value))):
        return str(value)
    if kind in (bool, NoneType) and type(value) is kind:
        return value
    raise TypeError


def _tuple(parts: tuple[Any, ...], value: Sequence[Any]) -> tuple[Any, ...]:
    if parts[-1] is Ellipsis:
        parts = parts[:1] * len(value)
    if len(parts) != len(value):
        raise TypeError
    return tuple(_convert(part, item) for part, item in zip(parts, value, strict=True))


def _number(value: Any) -> Any:
    """A number, also of NumPy; TypeError for anything else."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return value
    raise TypeError


def _integer(value: Any) -> int:
    number = _number(value)
    if not math.isfinite(number) or number != int(number):
        raise TypeError
    return int(number)


def _finite(value: Any) -> float:
    number = float(_number(value))
    if not math.isfinite(number):
        raise TypeError
    return number


def _is_text(value: str) -> bool:
    """What a file name can be made of: it has no null character, and is Unicode."""
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
