"""What the definition of a configuration key consists of. Everything else about a key is derived from it.

zero_section.py, sections.py      dataclasses whose fields are the keys, one ``key(...)`` each
  -> read.py       parsing, nearest names               -> activity.py   what has an effect, and why not
  -> values.py     types and ranges
  -> explain.py    the effective settings                -> schema.py     the JSON schema of editors
  -> document.py   the table of docs                      -> plan.py       the settings of ZeroOptimizer
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigKey:
    """One key of the JSON, apart from its name, type and default."""

    doc: str
    false: str = ""
    """Of a boolean: what ``false`` does here."""
    aliases: tuple[str, ...] = ()
    """Other names, accepted with a warning."""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    """Of integers 2**63 - 1, if it is not given. Infinity: of what is only compared with, ``1e30`` is as good."""
    is_positive: bool = False
    """Greater than 0."""
    is_never_if_infinite: bool = False
    """Takes Infinity, as front ends write "never": as if it were absent."""
    options: Mapping[str, Definition] = field(default_factory=dict)
    """Of an object whose names depend on something else: what is known of them. Others are left as they are."""
    names: tuple[str, ...] = ()
    """Of an object that nothing reads: what may stand in it; a dot leads into an object. Empty: anything."""
    setting: str = ""
    """The field of :class:`zero.ZeroSettings` that it sets."""
    inactive: str = ""
    """Accepted and without effect: why."""
    unavailable: str = ""
    """Refused unless it is at its default: what is missing in this version."""
    active_if: str = ""
    """A name in :data:`zero._config.key_support.CONDITIONS`; without effect otherwise."""


def key(default: Any, doc: str, **facts: Any) -> Any:
    """A dataclass field that defines one key; ``facts`` are the fields of :class:`ConfigKey`."""
    metadata = {"key": ConfigKey(doc=doc, **facts)}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type, doc: str, **facts: Any) -> Any:
    """A dataclass field that holds a section, itself a dataclass of keys."""
    return dataclasses.field(default_factory=kind, metadata={"key": ConfigKey(doc=doc, **facts)})


class Definition(NamedTuple):
    """One key with its place."""

    path: str
    """As in the JSON, ``zero_optimization.stage``."""
    kind: Any
    """Its type."""
    default: Any
    key: ConfigKey

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def section_type(kind: Any) -> type | None:
    """The dataclass of a section; None for the type of a value."""
    for option in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        if option is not NoneType and is_dataclass(option):
            return option  # type: ignore[return-value]
    return None


@cache
def own_keys(cls: type) -> dict[str, Definition]:
    """The keys of one section, by name, without those of the sections in it."""
    hints = get_type_hints(cls)
    found = {}
    for one in fields(cls):
        default = one.default if one.default is not dataclasses.MISSING else None
        if default is None and one.default_factory is not dataclasses.MISSING:
            default = one.default_factory()
        found[one.name] = Definition(one.name, hints[one.name], default, one.metadata["key"])
    return found


def definitions(cls: type, prefix: str = "") -> Iterator[Definition]:
    """Every key under ``cls``, sections before what is in them, in the order of definition."""
    for name, definition in own_keys(cls).items():
        path = f"{prefix}{name}"
        yield definition._replace(path=path)
        nested = section_type(definition.kind)
        if nested is not None:
            yield from definitions(nested, f"{path}.")
