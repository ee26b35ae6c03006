"""The table of keys in docs/configuration.md, from the same definition as the parser."""

from __future__ import annotations

from zero.config.activity import CONDITIONS
from zero.config.keys import Definition, definitions, section_type
from zero.config.sections import Config

__all__ = ["markdown_table"]

HEAD = "| key | if absent | what it does | if `false` |\n|---|---|---|---|\n"


def markdown_table() -> str:
    """Every key in the order of definition: default, meaning, what ``false`` means for booleans, and its standing."""
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
        parts.append(f"inactive where {CONDITIONS[facts.active_if].otherwise}")
    if facts.unavailable:
        parts.append(f"**refused in this version**: {facts.unavailable}")
    return "; ".join(parts)


def _default(value: object) -> str:
    if value is None or value in ({}, ()):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 100_000:
        return "unlimited" if value == 2**63 - 1 else f"{value:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)
