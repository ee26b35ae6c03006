"""Ranks compare their settings before anything is installed: different formats would deadlock, or decode garbage.

Each rank sends its settings and, if ``check`` has raised on it, the error. So no rank installs where another cannot,
which would deadlock in the first backward. Settings are compared as given, with formats looked up: ``"int8"`` and
``"int8/256"`` are equal. A rank forwards in each group what it has received in the groups before. So ranks that share
only some groups (shards, replicas) end with the same statements.

Cost: one exchange through torch.distributed's store for each group (:mod:`zcomm._transport.store_exchange`). It is not
a collective, so a rank that is elsewhere is not disturbed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zcomm import errors
from zcomm._formats.formats import Format, get_format
from zcomm._formats.recipes import AUTO_RECIPE, Recipe, get_recipe
from zcomm._transport import backend
from zcomm._transport.environment_check import facts
from zcomm._transport.store_exchange import exchange_texts
from zcomm._transport.topology import Topology
from zcomm.errors import CommunicationError, ConfigError, ZcommError
from zcomm.install.choices import Overrides

Settings = dict[str, str]
Result = TypeVar("Result")
Statements = dict[str, list[int]]
"""From a statement (settings and error, as JSON) to the ranks that have made it."""

WAIT_FOR_UNKNOWN = timedelta(seconds=10)
"""Timeout for a rank whose model has no process group: it asks all ranks, then raises its own error alone."""
MAX_REPORTED = 4
"""Different errors that a message gives in full."""
IGNORED_FIELDS = ("name", "error", "description")


def settings_of(
    recipe: str | Recipe, overrides: Overrides | None, topology: Topology | None, **others: object
) -> Settings:
    """Return by name what must be equal on all ranks. An unknown recipe or format is kept as text; check refuses it."""
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
            if one.name not in IGNORED_FIELDS:
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
    """Return the result of ``check`` if ``settings`` are equal on all ranks of ``groups`` and ``check`` raises on none.

    Args:
        call: The calling function's name, for messages.
        settings: This rank's settings, from :func:`settings_of`.
        groups: The groups whose ranks must agree. Empty if the model has no process group: then all ranks are asked,
            for ``WAIT_FOR_UNKNOWN``.
        check: Raises if this rank cannot install. It must not communicate or change anything.

    Raises:
        ConfigError: Settings differ; the message gives the ranks and their values.
        ZcommError: ``check`` has raised on some rank; every rank raises it, with the ranks unless all have the same.
        CommunicationError: Some ranks made no such call within the timeout of a group.
    """
    if not dist.is_initialized():
        return check()
    result, failure = None, None
    try:
        result = check()
    except Exception as error:
        failure = error
    try:
        failure = _error_of_all(call, settings, list(groups), failure)
        if failure is not None:
            raise failure
    finally:
        del failure  # it refers to this frame: in a cycle with it, the model would stay until the collector runs
    return result  # type: ignore[return-value]


def _error_of_all(
    call: str, settings: Settings, groups: list[dist.ProcessGroup], mine: Exception | None
) -> Exception | None:
    """Exchange the settings and this rank's error ``mine``; return the error that every rank raises, if any."""
    error_text = None if mine is None else [type(mine).__name__, str(mine)]
    statements: Statements = {json.dumps([settings, error_text], sort_keys=True): [dist.get_rank()]}
    try:
        statements = _exchanged(call, statements, groups)
    except CommunicationError:
        if mine is None:
            raise
        return mine
    if differing := _differing(statements):
        error: Exception = ConfigError(f"{call} must get the same settings on every rank: {'; '.join(differing)}")
    elif failures := sorted((ranks, *told) for text, ranks in statements.items() if (told := json.loads(text)[1])):
        if mine is not None and len(statements) == 1:
            return mine
        error = _failure_of_some(call, failures)
    else:
        return None
    error.__cause__ = mine
    return error


def _exchanged(call: str, statements: Statements, groups: list[dist.ProcessGroup]) -> Statements:
    """Send ``statements`` in each group in turn, and return all that were received."""
    timeout, world = None if groups else WAIT_FOR_UNKNOWN, dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    done = set()  # the same ranks, or one rank alone, have nothing new to say
    for group in groups or [world]:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1 and ranks not in done:
            done.add(ranks)
            text = json.dumps({"call": call, "known": statements})
            wait = timeout or backend.timeout_of(group)
            statements = _merged(exchange_texts(ranks, text, lane="install", timeout=wait))
    return statements


def _merged(texts: Iterable[str]) -> Statements:
    merged: dict[str, set[int]] = {}
    for text in texts:
        for statement, ranks in json.loads(text)["known"].items():
            merged.setdefault(statement, set()).update(ranks)
    # Sorted: all ranks then raise errors with the same text, whatever the order in which they received the parts.
    return {statement: sorted(merged[statement]) for statement in sorted(merged)}


def _failure_of_some(call: str, failures: Sequence[tuple[list[int], str, str]]) -> ZcommError:
    """One error for ``failures``: ranks, class and text of each."""
    parts = [f"on {_ranks_text(ranks)}: {text}" for ranks, _, text in failures[:MAX_REPORTED]]
    if len(failures) > MAX_REPORTED:
        others = [rank for ranks, *_ in failures[MAX_REPORTED:] for rank in ranks]
        parts.append(f"and others on {_ranks_text(others)}")
    kind = getattr(errors, failures[0][1], ConfigError)
    assert issubclass(kind, ZcommError), f"an error of this library: {kind}"
    return kind(f"{call} fails {'; '.join(parts)}")


def _ranks_text(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _differing(statements: Statements) -> list[str]:
    """A text for each setting that differs, with the values and their ranks."""
    of_ranks = [(json.loads(statement)[0], ranks) for statement, ranks in statements.items()]
    texts = []
    for name in sorted({name for settings, _ in of_ranks for name in settings}):
        by_value: dict[str, list[int]] = {}
        for settings, ranks in of_ranks:
            by_value.setdefault(settings.get(name, "not given"), []).extend(ranks)
        if len(by_value) > 1:
            by_rank = sorted(by_value.items(), key=lambda item: min(item[1]))
            parts = [f"{value} on {_ranks_text(ranks)}" for value, ranks in by_rank]
            texts.append(f"{name} is {', '.join(parts)}")
    return texts
