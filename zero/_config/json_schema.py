"""Derives the JSON schema for editors and the table of docs/configuration.md from the definition of the keys."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_origin

from zero._config.key_support import CONDITIONS
from zero._config.keys import Definition, definitions, options_of, own_keys, section_type, unread_names
from zero._config.legacy import MOVED
from zero._config.sections import Config

TYPES = {int: "integer", float: "number", str: "string"}
BOOLEAN = {"enum": [False, True, 0, 1]}


def json_schema() -> dict[str, Any]:
    """A schema of draft 2020-12; it refuses unknown keys, too."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of zero, with DeepSpeed's keys",
        **_object(Config),
    }


def _object(cls: type) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, definition in own_keys(cls).items():
        properties[name] = _property(definition)
        for alias in definition.key.aliases:
            properties[alias] = {**properties[name], "deprecated": True}
    if cls is own_keys(Config)["zero_optimization"].kind:
        properties |= {name: {**BOOLEAN, "deprecated": True} for name in MOVED}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _property(definition: Definition) -> dict[str, Any]:
    nested = section_type(definition.kind)
    if nested is not None:
        return {**_object(nested), "description": definition.key.doc}
    facts = definition.key
    options = [_type(option, definition) for option in options_of(definition.kind)]
    found: dict[str, Any] = {"anyOf": [*options, {"const": "auto"}], "description": _description(definition)}
    default = definition.default
    return {**found, "default": list(default) if isinstance(default, tuple) else default} | (
        {"deprecated": True} if facts.inactive and not facts.active_if else {}
    )


def _type(kind: Any, definition: Definition) -> dict[str, Any]:
    facts = definition.key
    if kind is NoneType:
        return {"type": "null"}
    if kind is bool:
        return BOOLEAN
    if get_origin(kind) is tuple:
        return {"type": "array", "items": {"type": "string"}}
    if get_origin(kind) is dict:
        names = unread_names().get(definition.name)
        return _plain_object(names) if names else {"type": "object"}
    found: dict[str, Any] = {"type": TYPES[kind]}
    if facts.choices:
        return {"enum": list(facts.choices)}
    if facts.minimum is not None:
        found["minimum"] = facts.minimum
    if facts.is_positive:
        found["exclusiveMinimum"] = 0
    return found


def _plain_object(names: tuple[str, ...]) -> dict[str, Any]:
    """The schema of an object that nothing reads, by its names alone; a dot leads into an inner object."""
    properties: dict[str, Any] = {}
    for name in names:
        outer, dot, _ = name.partition(".")
        below = tuple(n.removeprefix(f"{outer}.") for n in names if n.startswith(f"{outer}."))
        properties[outer] = _plain_object(below) if dot else {}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _description(definition: Definition) -> str:
    facts = definition.key
    text = facts.doc if facts.doc != "-" else definition.name.replace("_", " ")
    if facts.inactive:
        text += f". Without effect: {facts.inactive}"
    if facts.unavailable:
        text += f". Not available in this version: {facts.unavailable}"
    return text


HEAD = "| key | if absent | what it does | if `false` |\n|---|---|---|---|\n"


def markdown_table() -> str:
    """Every key in the order of definition: default, meaning, when inactive or refused, what ``false`` does."""
    values = [d for d in definitions(Config) if section_type(d.kind) is None]
    return HEAD + "".join(_row(d) for d in values)


def _row(definition: Definition) -> str:
    facts = definition.key
    names = ", ".join(f"`{name}`" for name in (definition.path, *facts.aliases))
    return f"| {names} | {_default(definition.default)} | {_meaning(definition)} | {facts.false} |\n"


def _meaning(definition: Definition) -> str:
    facts = definition.key
    parts = [] if facts.doc == "-" else [facts.doc]
    if facts.inactive:
        parts.append(f"inactive: {facts.inactive}")
    elif facts.active_if:
        parts.append(f"inactive if {CONDITIONS[facts.active_if].otherwise}")
    if facts.unavailable:
        parts.append(f"**refused in this version**: {facts.unavailable}")
    return "; ".join(parts)


def _default(value: object) -> str:
    if value is None or value in ({}, (), ""):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value)
    if isinstance(value, int) and value >= 100_000:
        return "unlimited" if value == 2**63 - 1 else f"{value:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)
