"""The definition of one configuration key. Parsing, checks, schema and documentation are derived from it.

setting_keys.py, zero_section.py, sections.py    dataclasses whose fields are the keys, one ``key(...)`` each
  -> parse.py        parsing, nearest names              -> key_support.py   what takes effect, and why not
  -> value_types.py  types and ranges                    -> resolved.py      the settings of ZeroOptimizer
  -> explain.py      the effective settings              -> json_schema.py   schema for editors, table of the docs
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key of the JSON, apart from its name, type and default."""

    doc: str
    false: str = ""
    """For a boolean: what ``false`` does here; "off" if the key does not say."""
    aliases: tuple[str, ...] = ()
    """Other names, accepted with a warning."""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    """If not given, 2**63 - 1 for integers. Infinity for limits: see :func:`limit`."""
    is_positive: bool = False
    """Greater than 0."""
    infinity_means_absent: bool = False
    """Infinity, which front ends write for "never", reads as if the key were absent."""
    options: Mapping[str, Definition] = field(default_factory=dict)
    """For an object of options: those whose type is known. Other options are passed on as they are."""
    inactive: str = ""
    """Why it is accepted and has no effect."""
    unavailable: str = ""
    """What this version does not have; any value but the default is refused."""
    active_if: str = ""
    """A name in :data:`zero._config.key_support.CONDITIONS`: the key takes effect if that condition holds."""


def key(default: Any, doc: str, **facts: Any) -> Any:
    """A dataclass field that defines one key; ``facts`` are the fields of :class:`ConfigKey`."""
    if isinstance(default, bool):
        facts.setdefault("false", "off")
    metadata = {"key": ConfigKey(doc=doc, **facts)}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def ignored(default: bool, doc: str, why: str, **facts: Any) -> Any:  # noqa: FBT001
    """A boolean key that is accepted and has no effect."""
    return key(default, doc, false="the same as true", inactive=why, **facts)


def limit(default: int, doc: str, *, minimum: int = 0, **facts: Any) -> Any:
    """A key that sizes are only compared with: it may be larger than any of them, such as ``1e30``."""
    return key(default, doc, minimum=minimum, maximum=math.inf, **facts)


def section(kind: type, doc: str, **facts: Any) -> Any:
    """A dataclass field that holds a section, itself a dataclass of keys."""
    return dataclasses.field(default_factory=kind, metadata={"key": ConfigKey(doc=doc, **facts)})


class Definition(NamedTuple):
    """One key and where it is in the JSON."""

    path: str
    """For example ``zero_optimization.stage``."""
    kind: Any
    """The type of its value."""
    default: Any
    key: ConfigKey

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def options_of(kind: Any) -> tuple[Any, ...]:
    """The types in a union; ``kind`` alone if it is none."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


@cache
def section_type(kind: Any) -> type | None:
    """The dataclass of a section; None if ``kind`` is the type of a value."""
    return next((option for option in options_of(kind) if is_dataclass(option)), None)  # type: ignore[return-value]


@cache
def unread_names() -> Mapping[str, tuple[str, ...]]:
    """Names of DeepSpeed's keys in objects that nothing here reads, by the object's name, so that misspelled ones are
    found. A dot leads into an inner object; values are not checked."""
    path = Path(__file__).with_name("unread_names.json")
    return {name: tuple(" ".join(lines).split()) for name, lines in json.loads(path.read_text()).items()}


@cache
def own_keys(cls: type) -> dict[str, Definition]:
    """The keys of one section by name, without those of inner sections."""
    hints = get_type_hints(cls)
    found = {}
    for one in fields(cls):
        if "key" not in one.metadata:
            continue
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        kind, facts = hints[one.name], one.metadata["key"]
        if get_origin(kind) is Literal:
            kind, facts = str, dataclasses.replace(facts, choices=get_args(kind))
        found[one.name] = Definition(one.name, kind, default, facts)
    return found


@cache
def definitions(cls: type, prefix: str = "") -> tuple[Definition, ...]:
    """Every key under ``cls`` in the order of definition, a section before its keys."""
    found = list[Definition]()
    for name, definition in own_keys(cls).items():
        path = f"{prefix}{name}"
        nested = section_type(definition.kind)
        found += definition._replace(path=path), *(definitions(nested, f"{path}.") if nested else ())
    return tuple(found)
