"""Ranks compare what they install before anything is installed: formats that differ would be a hang, or worse.

Compared are the settings as they were given, formats looked up: ``"int8"`` and ``"int8/256"`` are the same; and with
them goes what this rank's model is refused for, so that no rank installs, or waits, where another one cannot. What a
rank learns in one group it passes on in the next, so ranks of several groups (shards, replicas) all know the same.

Cost: a meeting in torch.distributed's store for each group (:mod:`zcomm._transport.store_exchange`); no collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zcomm import errors
from zcomm._formats.formats import Format, get_format
from zcomm._formats.recipes import AUTO_RECIPE, Recipe, get_recipe
from zcomm._transport import backend
from zcomm._transport.fingerprint import facts
from zcomm._transport.store_exchange import meet
from zcomm._transport.topology import Topology
from zcomm.errors import CommunicationError, ConfigError, ZcommError
from zcomm.install.choices import Override

Settings = dict[str, str]
Result = TypeVar("Result")
Known = dict[str, list[int]]
"""By settings and error, as JSON: the ranks that have said so."""

WAIT_FOR_UNKNOWN = timedelta(seconds=10)
"""How long a rank whose model does not say with whom it communicates waits before it raises its error alone."""
MAX_TOLD = 4
"""Different errors that are told in full."""
OF_NO_EFFECT = ("name", "error", "description")


def settings_of(
    recipe: str | Recipe,
    overrides: Mapping[str, Override] | None,
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
    return found | facts()


def _fields_of(name: str, value: object) -> Iterator[tuple[str, str]]:
    if name == "recipe" and isinstance(value, str) and value != AUTO_RECIPE.name:
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


def agree(call: str, settings: Settings, groups: Iterable[dist.ProcessGroup], check: Callable[[], Result]) -> Result:
    """What ``check`` returns, on every rank of ``groups``, if all call ``call`` with equal ``settings`` and none fails.

    Args:
        call: The function, for messages.
        settings: Of this rank: :func:`settings_of`.
        groups: Who must agree. None at all, where the model is not what it should be: all ranks are asked for a while.
        check: Raises if this rank cannot install; must not communicate or change anything.

    Raises:
        ConfigError: Names each setting that differs, the ranks and their values.
        ZcommError: What ``check`` has raised on any rank, on every rank: unless all have the same, with the ranks.
        CommunicationError: Ranks made no such call within the timeout of a group.
    """
    if not dist.is_initialized():
        return check()
    result, failure = None, None
    try:
        result = check()
    except Exception as error:
        failure = error
    told = None if failure is None else [type(failure).__name__, str(failure)]
    known: Known = {json.dumps([settings, told], sort_keys=True): [dist.get_rank()]}
    try:
        known = _exchanged(call, known, list(groups))
    except CommunicationError:
        if failure is None:
            raise
        raise failure from None
    if differing := _differing(known):
        raise ConfigError(f"{call} must get the same settings on every rank: {'; '.join(differing)}") from failure
    _raise_failures(call, known, failure)
    return result  # type: ignore[return-value]


def _exchanged(call: str, known: Known, groups: list[dist.ProcessGroup]) -> Known:
    patience, world = None if groups else WAIT_FOR_UNKNOWN, dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    met = set()
    for group in groups or [world]:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1 and ranks not in met:
            met.add(ranks)
            said = json.dumps({"call": call, "known": known})
            known = _merged(meet(ranks, said, lane="install", timeout=patience or backend.timeout_of(group)))
    return known


def _merged(texts: Iterable[str]) -> Known:
    known: dict[str, set[int]] = {}
    for text in texts:
        for said, ranks in json.loads(text)["known"].items():
            known.setdefault(said, set()).update(ranks)
    return {said: sorted(known[said]) for said in sorted(known)}


def _raise_failures(call: str, known: Known, mine: Exception | None) -> None:
    """Raise the same on every rank, if any has said an error: this rank's own where that is everybody's."""
    told = sorted((ranks, *error) for said, ranks in known.items() if (error := json.loads(said)[1]))
    if not told:
        return
    if mine is not None and len(known) == 1:
        raise mine
    parts = [f"on {_named(ranks)}: {text}" for ranks, _, text in told[:MAX_TOLD]]
    if len(told) > MAX_TOLD:
        parts.append(f"and others on {_named([rank for ranks, *_ in told[MAX_TOLD:] for rank in ranks])}")
    kind = getattr(errors, told[0][1], ConfigError)
    assert issubclass(kind, ZcommError), "told by name"
    raise kind(f"{call} fails {'; '.join(parts)}") from mine


def _named(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _differing(known: Known) -> list[str]:
    of_ranks = [(json.loads(said)[0], ranks) for said, ranks in known.items()]
    texts = []
    for name in sorted({name for settings, _ in of_ranks for name in settings}):
        by_value: dict[str, list[int]] = {}
        for settings, ranks in of_ranks:
            by_value.setdefault(settings.get(name, "not given"), []).extend(ranks)
        if len(by_value) > 1:
            parts = [
                f"{value} on {_named(ranks)}"
                for value, ranks in sorted(by_value.items(), key=lambda item: min(item[1]))
            ]
            texts.append(f"{name} is {', '.join(parts)}")
    return texts
