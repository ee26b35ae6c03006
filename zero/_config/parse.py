"""Parses a JSON file or a dict into a checked :class:`Config`, with the origin of every given value."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from zcomm import ConfigError
from zero._config.keys import Definition, definitions, own_keys, section_type, unread_names
from zero._config.legacy import modernize
from zero._config.sections import Config
from zero._config.value_types import check_document, closest, nearest, read_value, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A checked configuration and where it came from."""

    values: Config
    source: str
    """The name of a file, or ``dict``."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """For each given key, by path: the source, and the alias under which it was given."""
    notes: tuple[str, ...] = ()
    """Warnings: aliases, deprecated keys, "auto"."""

    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """As it was given."""

    def given(self, path: str) -> bool:
        return path in self.origins


Source = Mapping[str, Any] | str | os.PathLike[str]


def read_source(config: Source, keywords: Mapping[str, Any] | None = None) -> Configuration:
    """Read a dict or a file of JSON or HJSON; ``keywords``, of the same form, override it.

    Raises:
        ConfigError: The file cannot be read, is neither JSON nor HJSON or repeats a key; or see :func:`parse`.
    """
    if isinstance(config, Mapping):
        raw, source = dict(config), "dict"
    elif isinstance(config, (str, os.PathLike)):
        raw, source = read_file(Path(config)), Path(config).name
    else:
        raise ConfigError(f"config must be a dict or the path of a JSON file: got {shown(config)}")
    if not keywords:
        return parse(raw, source)
    added = parse(keywords, "keyword")
    both = parse(_merged(raw, keywords), source)
    return replace(both, origins={**both.origins, **dict.fromkeys(added.origins, "keyword")})


def _merged(raw: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` overridden by ``over``, section by section."""
    merged = dict(raw)
    for name, value in over.items():
        own = merged.get(name)
        are_sections = isinstance(value, Mapping) and isinstance(own, Mapping)
        merged[name] = _merged(own, value) if are_sections else value  # type: ignore[arg-type]
    return merged


def read_file(path: Path) -> dict[str, Any]:
    """The object in ``path``, JSON or HJSON; ConfigError for anything else, and for a repeated key."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"keys must be unique: {path} has {', '.join(map(repr, twice))} twice")
        return dict(pairs)

    try:
        raw = _decode(path.read_text(), without_duplicates)
    except OSError as error:
        raise ConfigError(f"config must be a readable JSON file: {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"config must be JSON: {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config must be a JSON object: {path} holds {type(raw).__name__}")
    return raw


def _decode(text: str, make: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> Any:
    """The value in ``text``; ValueError if it is neither JSON nor, as far as that can be read here, HJSON."""
    try:
        return json.loads(text, object_pairs_hook=make)
    except json.JSONDecodeError as error:
        try:
            import hjson
        except ImportError:
            raise ValueError(f"{error}; for comments and the rest of HJSON: pip install hjson") from error
        try:
            found = hjson.loads(text, object_pairs_hook=make)
        except (ConfigError, RecursionError):
            raise
        except Exception as failure:  # its decoder raises other errors, too: OverflowError for 1e999
            raise ValueError(f"{type(failure).__name__}: {failure}") from failure
        if not found:  # to hjson a file that was cut off to nothing is an object
            raise
        return found


def parse(raw: Mapping[str, Any], source: str) -> Configuration:
    """Check ``raw`` against the definition of keys.

    Raises:
        ConfigError: Unknown keys (all of them, each with the nearest known one), or a value of a wrong type or range.
            No other error is raised, whatever ``raw`` holds.
    """
    check_document(raw)
    modern, notes, moved = modernize(dict(raw))
    reader = _Reader(source, notes)
    values = reader.section(Config, modern, "")
    if reader.unknown:
        raise ConfigError(f"unknown keys in {source}: " + "; ".join(reader.unknown))
    if values.fp16.enabled and values.bf16.enabled:
        raise ConfigError("fp16.enabled and bf16.enabled must not both be true")
    for new, old in moved.items():
        reader.origins[new] = f"{source}: {old}"
    return Configuration(values=values, source=source, origins=reader.origins, notes=tuple(reader.notes), raw=raw)


def read_options(known: Mapping[str, Definition], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` without "auto", with the options of ``known`` converted to their types.

    Raises:
        ConfigError: A value of a wrong type or range; names its path.
    """
    check_document(given)
    read = _Reader("", []).options(known, given)
    return {name: value for name, value in read.items() if not _is_auto(value)}


class _Reader:
    """Parses one configuration, and collects origins, notes and unknown keys."""

    def __init__(self, source: str, notes: list[str]) -> None:
        self.source, self.notes = source, notes
        self.origins: dict[str, str] = {}
        self.unknown: list[str] = []

    def section(self, cls: type, raw: Any, prefix: str) -> Any:
        """An instance of ``cls`` with the values of ``raw``."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{prefix.rstrip('.') or 'config'} must be an object: got {shown(raw)}")
        known = own_keys(cls)
        names = {alias: name for name, definition in known.items() for alias in definition.key.aliases}
        values: dict[str, Any] = {}
        written: dict[str, str] = {}
        for given, value in raw.items():
            name = names.get(given, given)
            path = f"{prefix}{name}"
            if name not in known:
                self.unknown.append(f"{prefix}{given}{_hint(given, [*known, *names])}")
                continue
            if name in values:
                raise ConfigError(f"{prefix}{written[name]} and {prefix}{given} are the same key: give one of them")
            if given != name:
                self.notes.append(f"{prefix}{given} is read as {path}")
            written[name] = given
            values[name] = self.value(known[name], value, path)
            if value is not None and not _is_auto(value) and section_type(known[name].kind) is None:
                self.origins[path] = self.source if given == name else f"{self.source}: {given}"
        return cls(**values)

    def value(self, definition: Definition, value: Any, path: str) -> Any:
        """``value`` converted to the type of the key at ``path``."""
        nested = section_type(definition.kind)
        if nested is not None:
            return nested() if value is None or _is_auto(value) else self.section(nested, value, f"{path}.")
        if _is_auto(value):
            self.notes.append(f"{path}: 'auto' is {definition.default!r} here")
            return definition.default
        if value is None:
            return definition.default
        facts = definition.key
        converted = read_value(definition.kind, facts, value, path)
        if names := unread_names().get(definition.name):
            self._check_names(names, converted, f"{path}.")
        return self.options(facts.options, converted) if facts.options else converted

    def options(self, known: Mapping[str, Definition], given: Mapping[str, Any]) -> dict[str, Any]:
        """``given`` with known options converted. null means the default, unless the option may be None."""
        read: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known or _is_auto(value):
                read[name] = value
            elif value is not None:
                read[name] = self.value(known[name], value, known[name].path)
            elif NoneType in get_args(known[name].kind):
                read[name] = None
        return read

    def _check_names(self, names: tuple[str, ...], value: Mapping[str, Any], prefix: str) -> None:
        """Collect unknown names of an object that nothing else reads."""
        for given, inner in value.items():
            below = tuple(name.removeprefix(f"{given}.") for name in names if name.startswith(f"{given}."))
            if below and isinstance(inner, Mapping):
                self._check_names(below, inner, f"{prefix}{given}.")
            elif given not in names and not below:
                here = sorted({name.partition(".")[0] for name in names})
                self.unknown.append(f"{prefix}{given}{nearest(given, here)}")


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


FOREIGN_NAMES = {
    "optimizer.params.lr": "lr learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.betas": "betas adam_betas",
    "scheduler.params.warmup_num_steps": "warmup_steps num_warmup_steps",
    "scheduler.params.total_num_steps": "num_training_steps max_steps total_steps",
    "train_batch_size": "batch_size global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size per_device_train_batch_size",
    "gradient_accumulation_steps": "accumulate_grad_batches grad_accum_steps accumulation_steps",
    "gradient_clipping": "max_grad_norm clip_grad_norm grad_clip gradient_clip_val",
    "fp16.enabled' or 'bf16.enabled": "mixed_precision precision half",
}
"""Names that other programs use for one of our keys, by its path."""


def _hint(given: str, here: list[str]) -> str:
    """A hint for an unknown key: the section it belongs in, our name for it, or the nearest key."""
    everywhere = [d.path for d in definitions(Config)]
    elsewhere = [p for p in everywhere if p.rpartition(".")[2] == given]
    if elsewhere:
        return f" (it belongs in {elsewhere[0].rpartition('.')[0] or 'the top level'!r})"
    ours = [path for path, names in FOREIGN_NAMES.items() if given in names.split()]
    if ours:
        return f" (did you mean '{ours[0]}'?)"
    if options := [d.path for d in definitions(Config) if given in d.key.options]:
        return f" (it belongs in {options[0]!r})"
    close = closest(given, sorted({*here, *(p.rpartition(".")[2] for p in everywhere)}))
    if not close:
        return ""
    path = close if close in here else next(p for p in everywhere if p.rpartition(".")[2] == close)
    return f" (did you mean {path!r}?)"
