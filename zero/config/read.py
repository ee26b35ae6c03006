"""From a file or a dict to a checked :class:`Config`, with the origin of every value that was given."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from zcomm import ConfigError
from zero.config.keys import Definition, Key, definitions, own_keys, section_type
from zero.config.legacy import modernize
from zero.config.sections import Config

__all__ = ["Configuration", "Source", "parse", "read_file", "read_source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A checked configuration and where it came from."""

    values: Config
    source: str
    """A file's name, or ``dict``."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """By the path of a key that was given: where, and under which name."""
    notes: tuple[str, ...] = ()
    """Warnings of the reading: other names, deprecated forms, "auto"."""

    def given(self, path: str) -> bool:
        """Whether the key was given a value."""
        return path in self.origins


Source = Mapping[str, Any] | str | os.PathLike[str]


def read_source(config: Source, keywords: Mapping[str, Any] | None = None) -> Configuration:
    """Read a dict, or the JSON file of that name; ``keywords``, of the same form, win over it.

    Raises:
        ConfigError: The file cannot be read, is not JSON or has a key twice; or see :func:`parse`.
    """
    if isinstance(config, Mapping):
        raw, source = dict(config), "dict"
    elif isinstance(config, (str, os.PathLike)):
        raw, source = read_file(Path(config)), Path(config).name
    else:
        raise ConfigError(f"config must be a dict or the path of a JSON file: got {config!r}")
    if not keywords:
        return parse(raw, source)
    added = parse(keywords, "keyword")
    both = parse(_merged(raw, keywords), source)
    return replace(both, origins={**both.origins, **dict.fromkeys(added.origins, "keyword")})


def _merged(raw: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with what ``over`` says, section by section."""
    merged = dict(raw)
    for name, value in over.items():
        below = merged.get(name)
        both_open = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[name] = _merged(below, value) if both_open else value  # type: ignore[arg-type]
    return merged


def read_file(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ConfigError for anything else, and for a key that stands there twice."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"every key may stand once: {path} has {', '.join(map(repr, twice))} twice")
        return dict(pairs)

    try:
        raw = json.loads(path.read_text(), object_pairs_hook=without_duplicates)
    except OSError as error:
        raise ConfigError(f"config must be a readable JSON file: {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"config must be JSON: {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config must be a JSON object: {path} holds {type(raw).__name__}")
    return raw


def parse(raw: Mapping[str, Any], source: str) -> Configuration:
    """Check ``raw`` against the definition.

    Raises:
        ConfigError: Unknown keys (all of them, each with the nearest known one), or values of a wrong type or range.
    """
    modern, notes, moved = modernize(dict(raw))
    reader = _Reader(source, notes)
    values = reader.section(Config, modern, "")
    if reader.unknown:
        raise ConfigError(f"unknown keys in {source}: " + "; ".join(reader.unknown))
    if values.fp16.enabled and values.bf16.enabled:
        raise ConfigError("fp16.enabled and bf16.enabled must not both be true")
    for new, old in moved.items():
        reader.origins[new] = f"{source}: {old}"
    return Configuration(values=values, source=source, origins=reader.origins, notes=tuple(reader.notes))


class _Reader:
    """One reading: collects origins, notes and unknown keys on the way down."""

    def __init__(self, source: str, notes: list[str]) -> None:
        self.source, self.notes = source, notes
        self.origins: dict[str, str] = {}
        self.unknown: list[str] = []

    def section(self, cls: type, raw: Any, prefix: str) -> Any:
        """An instance of ``cls`` with the values of ``raw``."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{prefix.rstrip('.') or 'config'} must be an object: got {raw!r}")
        known = own_keys(cls)
        names = {alias: name for name, definition in known.items() for alias in definition.key.aliases}
        values: dict[str, Any] = {}
        for given, value in raw.items():
            name = names.get(given, given)
            path = f"{prefix}{name}"
            if name not in known:
                self.unknown.append(f"{prefix}{given}{_hint(given, [*known, *names])}")
                continue
            if name in values:
                raise ConfigError(f"{path} and {prefix}{given} are the same key: give one of them")
            if given != name:
                self.notes.append(f"{prefix}{given} is read as {path}")
            values[name] = self._value(known[name], value, path)
            if value is not None and value != "auto" and section_type(known[name].kind) is None:
                self.origins[path] = self.source if given == name else f"{self.source}: {given}"
        return cls(**values)

    def _value(self, definition: Definition, value: Any, path: str) -> Any:
        nested = section_type(definition.kind)
        if nested is not None:
            return nested() if value is None else self.section(nested, value, f"{path}.")
        if value == "auto":
            self.notes.append(f"{path}: 'auto' is {definition.default!r} here")
            return definition.default
        if value is None:
            return definition.default
        try:
            converted = _convert(definition.kind, value)
        except TypeError:
            raise ConfigError(f"{path} must be {type_name(definition.kind)}: got {value!r}") from None
        _check_range(definition.key, converted, path)
        if definition.key.names:
            self._check_names(definition.key.names, converted, f"{path}.")
        return converted

    def _check_names(self, names: tuple[str, ...], value: Mapping[str, Any], prefix: str) -> None:
        """Of an object that nothing reads."""
        for given, inner in value.items():
            below = tuple(name.removeprefix(f"{given}.") for name in names if name.startswith(f"{given}."))
            if below and isinstance(inner, Mapping):
                self._check_names(below, inner, f"{prefix}{given}.")
            elif given not in names and not below:
                here = sorted({name.partition(".")[0] for name in names})
                self.unknown.append(f"{prefix}{given}{nearest(given, here)}")


def type_name(kind: Any) -> str:
    """A type in words."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    names = [words.get(o, "an object" if get_origin(o) is dict else "a list") for o in options if o is not NoneType]
    return " or ".join(dict.fromkeys(names))


def _convert(kind: Any, value: Any) -> Any:
    """``value`` as ``kind``; 5e8 is an integer, too. TypeError if it does not fit."""
    if get_origin(kind) in (Union, UnionType):
        for option in get_args(kind):
            try:
                return _convert(option, value)
            except TypeError:
                continue
        raise TypeError
    if get_origin(kind) in (tuple, dict):
        return _convert_container(get_origin(kind), value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is NoneType or type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise TypeError
    return value


def _convert_container(kind: Any, value: Any) -> Any:
    is_container = isinstance(value, (list, tuple) if kind is tuple else Mapping)
    if is_container and all(isinstance(item, str) for item in value):
        return kind(value)
    raise TypeError


def _check_range(facts: Key, value: Any, path: str) -> None:
    if facts.choices and value not in facts.choices:
        near = nearest(value, facts.choices) if isinstance(value, str) else ""
        raise ConfigError(f"{path} must be one of {', '.join(map(str, facts.choices))}: {path}={value!r}{near}")
    if facts.minimum is not None and value is not None and value < facts.minimum:
        raise ConfigError(f"{path} must be at least {facts.minimum:g}: {path}={value!r}")
    if facts.is_positive and not value > 0:
        raise ConfigError(f"{path} must be greater than 0: {path}={value!r}")


def nearest(name: str, names: Iterable[Any]) -> str:
    """`` (did you mean 'x'?)`` if one of ``names`` is close to ``name``, else nothing."""
    close = difflib.get_close_matches(name, [str(n) for n in names], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _hint(given: str, here: list[str]) -> str:
    """Where the key belongs, or the nearest name: of this level, or with its path."""
    everywhere = [d.path for d in definitions(Config)]
    elsewhere = [p for p in everywhere if p.rpartition(".")[2] == given]
    if elsewhere:
        return f" (it belongs in {elsewhere[0].rpartition('.')[0] or 'the top level'!r})"
    close = difflib.get_close_matches(given, sorted({*here, *(p.rpartition(".")[2] for p in everywhere)}), n=1)
    if not close:
        return ""
    elsewhere = [p for p in everywhere if p.rpartition(".")[2] == close[0]]
    path = close[0] if close[0] in here else elsewhere[0]
    return f" (did you mean {path!r}?)"
