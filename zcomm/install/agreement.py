"""Ranks compare what they install before anything is installed: formats that differ would be a hang, or worse.

Compared are the settings as they were given, formats looked up: ``"int8"`` and ``"int8/256"`` are the same. What a
rank learns in one group it passes on in the next, so ranks of several groups (shards, replicas) all know the same.

Cost: a meeting in torch.distributed's store for each group (:mod:`zcomm.meeting`); no collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch.distributed as dist

from zcomm import backend
from zcomm.adaptive import AdaptivePrecision
from zcomm.errors import ConfigError
from zcomm.formats import Format, get_format
from zcomm.install.choices import Override
from zcomm.meeting import meet
from zcomm.recipes import Recipe, get_recipe
from zcomm.topology import Topology

__all__ = ["agree", "settings_of"]

Settings = dict[str, str]
OF_NO_EFFECT = ("name", "error", "description")


def settings_of(
    recipe: str | Recipe,
    overrides: Mapping[str, Override] | None,
    adaptive: AdaptivePrecision | Mapping[str, Any] | bool | None,  # noqa: FBT001
    topology: Topology | None,
    **others: object,
) -> Settings:
    """By name, what ranks must agree on; what does not exist is kept as it was given, to be refused later."""
    named = {"recipe": recipe, **{f"overrides[{name!r}]": value for name, value in (overrides or {}).items()}}
    found: Settings = {}
    for name, value in named.items():
        found |= dict(_fields_of(name, value))
    found["topology"] = "torchrun's" if topology is None else f"{topology.num_nodes} nodes x {topology.ranks_per_node}"
    found |= {name: str(value) for name, value in others.items()}
    try:
        chosen = AdaptivePrecision.of(adaptive)
    except ConfigError:
        return {**found, "adaptive": repr(adaptive)}
    if chosen is not None:
        found |= {f"adaptive.{one.name}": str(getattr(chosen, one.name)) for one in fields(chosen)}
    return found


def _fields_of(name: str, value: object) -> Iterator[tuple[str, str]]:
    if name == "recipe" and isinstance(value, str):
        with suppress(ConfigError):
            value = get_recipe(value)
    if isinstance(value, Recipe):
        for one in fields(value):
            if one.name not in OF_NO_EFFECT:
                yield f"{name}.{one.name}", _text(getattr(value, one.name))
    else:
        yield name, _text(value)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_text(part) for part in value)
    try:
        return str(get_format(value)) if isinstance(value, (str, Format)) else repr(value)
    except ValueError:
        return repr(value)


def agree(call: str, settings: Settings, groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise ConfigError on every rank of ``groups`` unless all call ``call`` with equal ``settings``.

    Raises:
        ConfigError: Names each setting that differs, the ranks and their values.
        CommunicationError: Ranks made no such call within the timeout of a group.
    """
    known: dict[str, list[int]] = {json.dumps(settings, sort_keys=True): [dist.get_rank()]}
    met = set()
    for group in groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1 and ranks not in met:
            met.add(ranks)
            said = json.dumps({"call": call, "known": known})
            known = _merged(meet(ranks, said, lane="install", timeout=backend.timeout_of(group)))
    differing = _differing(known)
    if differing:
        raise ConfigError(f"{call} must get the same settings on every rank: {'; '.join(differing)}")


def _merged(texts: Iterable[str]) -> dict[str, list[int]]:
    known: dict[str, set[int]] = {}
    for text in texts:
        for settings, ranks in json.loads(text)["known"].items():
            known.setdefault(settings, set()).update(ranks)
    return {settings: sorted(known[settings]) for settings in sorted(known)}


def _differing(known: Mapping[str, list[int]]) -> list[str]:
    of_ranks = [(json.loads(settings), ranks) for settings, ranks in known.items()]
    texts = []
    for name in sorted({name for settings, _ in of_ranks for name in settings}):
        by_value: dict[str, list[int]] = {}
        for settings, ranks in of_ranks:
            by_value.setdefault(settings.get(name, "not given"), []).extend(ranks)
        if len(by_value) > 1:
            parts = [
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
                for value, ranks in sorted(by_value.items(), key=lambda item: min(item[1]))
            ]
            texts.append(f"{name} is {', '.join(parts)}")
    return texts
