"""Which public call a thread is in: exchanges are matched by it, and errors name it.

    with public_call("state_dict"):       only the outermost call counts: what it calls belongs to it

A collective driven by a queue's thread keeps the context of the thread that called it (:func:`use_context`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial
from itertools import count
from typing import NamedTuple

from zcomm._base.rank_context import PerRank


class Context(NamedTuple):
    """What a thread's exchanges belong to: exchanges of different contexts never match."""

    call: str = ""
    """The outermost public call; empty in forward, in backward and outside of the library."""
    bucket: str = ""
    """The bucket that is exchanged."""
    depth: int = 0
    within: str = ""
    """A public call that errors name although exchanges are not matched by it."""
    overlaps: bool = False
    """Whether the exchange overlaps the caller's computation: made with ``async_op=True``, not in waiting_next()."""
    waits_next: bool = False


class _ThreadContext(threading.local):
    context = Context()


_THREAD = _ThreadContext()
_BOUNDARIES = PerRank(partial(count, 1))
_LAST_BOUNDARY = PerRank(lambda: [0])
"""The number of starts and ends of outermost public calls so far; each invalidates what was noted before."""
_ACTIVITIES: dict[int, tuple[int, Callable[[], str]]] = {}
"""By thread: the boundary after which it was noted, and what the thread is about to do."""


def current_context() -> Context:
    return _THREAD.context


class _Block:
    """A block in a context. Every exchange enters some, and a generator's takes twice as long."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before, _THREAD.context = _THREAD.context, self._context

    def __exit__(self, *_: object) -> None:
        _THREAD.context = self._before


def use_context(context: Context) -> AbstractContextManager[None]:
    """Exchanges inside belong to ``context``, usually that of another thread."""
    return _Block(context)


def in_bucket(name: str) -> AbstractContextManager[None]:
    """Collectives called inside are for bucket ``name`` on every rank. They never match those of another bucket."""
    return use_context(_THREAD.context._replace(bucket=name))


def waiting_next() -> AbstractContextManager[None]:
    """Exchanges inside are waited for before the caller computes again, also those with ``async_op=True``.

    So its own thread sends: a background thread would only start later and compete with it for a core.
    """
    return use_context(_THREAD.context._replace(waits_next=True))


def outside_public_call() -> AbstractContextManager[None]:
    """Exchanges inside belong to forward and backward, whatever public call this thread is in."""
    context = _THREAD.context
    return use_context(Context(bucket=context.bucket, within=context.call or context.within))


class public_call(ContextDecorator):  # noqa: N801  (a context manager)
    """Context manager and decorator: exchanges inside belong to the public call ``name``.

    Exchanges of different calls never match. ``name`` is the same on every rank that makes the same call; it includes
    the arguments that must be equal.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        context = _THREAD.context
        if context.depth == 0:
            _LAST_BOUNDARY()[0] = next(_BOUNDARIES())
        _THREAD.context = context._replace(call=context.call or self._name, depth=context.depth + 1)

    def __exit__(self, *_: object) -> None:
        context = _THREAD.context
        if context.depth == 1:
            _LAST_BOUNDARY()[0] = next(_BOUNDARIES())
        _THREAD.context = context._replace(call=context.call if context.depth > 1 else "", depth=context.depth - 1)


def note_activity(doing: Callable[[], str]) -> None:
    """Note what this thread is about to do. ``doing`` is evaluated only if a deadlock is found."""
    _ACTIVITIES[threading.get_ident()] = _LAST_BOUNDARY()[0], doing


def noted_activity(thread: int) -> str:
    """The valid note of ``thread``; empty if there is none."""
    boundary, doing = _ACTIVITIES.get(thread, (-1, str))
    return doing() if boundary == _LAST_BOUNDARY()[0] else ""
