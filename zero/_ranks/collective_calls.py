"""Public calls that all ranks make together: their exchanges meet no other call's, and errors name them.

    @collective("param")      the call's name is that of the function, with these arguments
    with calling_over(topology, "state_dict()"):

Exchanges over NCCL have no tags: there, a call outside of training begins with a small exchange between hosts, which
meets only its like. Ranks that make other calls wait in theirs, between hosts too, and are told.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from zcomm import Topology, control
from zcomm._transport.call_context import calling, here

P = ParamSpec("P")
Result = TypeVar("Result")
Class = TypeVar("Class")


@contextmanager
def calling_over(topology: Topology | None, name: str) -> Iterator[None]:
    """Inside, exchanges belong to the public call ``name`` of all ranks of ``topology``."""
    is_outermost = not here().depth
    with calling(name):
        if is_outermost and topology is not None and topology.world_size > 1 and not topology.meets_by_tag:
            control.are_equal(name, topology)
        yield


def on_exit(stack: ExitStack, topology: Topology, name: str) -> Callable[[], None]:
    """Let what ``stack`` gets from here on end in the public call ``name``; call what is returned when it has all."""
    ending = calling_over(topology, name)

    def has_all() -> None:
        stack.callback(ending.__enter__)
        is_complete[0] = True

    def end() -> None:
        if is_complete[0]:
            ending.__exit__(None, None, None)

    is_complete = [False]
    stack.callback(end)
    return has_all


def collective(
    *facts: str, of: Callable[[Any], Topology | None] | None = None, alone: bool = False
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorates a function that all ranks call together, with equal ``facts``, names of arguments.

    Args:
        facts: What must be equal.
        of: From its first argument, the ranks of a call outside of training.
        alone: Threads make it one after the other.
    """

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        name, signature = function.__qualname__, inspect.signature(function)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> Result:
            topology = None if of is None else of(args[0] if args else next(iter(kwargs.values())))
            with ExitStack() as stack:
                if alone and topology is not None:
                    stack.enter_context(topology.turn)
                stack.enter_context(calling_over(topology, f"{name}({_given(signature, facts, args, kwargs)})"))
                return function(*args, **kwargs)

        return called

    return decorate


def collective_methods(*names: str) -> Callable[[type[Class]], type[Class]]:
    """Decorates a class: its methods ``names`` are collective."""

    def decorate(of: type[Class]) -> type[Class]:
        for name in names:
            setattr(of, name, collective()(getattr(of, name)))
        return of

    return decorate


def _given(signature: inspect.Signature, facts: tuple[str, ...], args: Any, kwargs: Any) -> str:
    if not facts:
        return ""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return ", ".join(f"{fact}={_told(bound.arguments[fact])}" for fact in facts)


def _told(value: Any) -> str:
    """A parameter by its name, anything else as it is."""
    info = getattr(value, "zero_shard", None)
    return repr(value) if info is None else str(info.name)
