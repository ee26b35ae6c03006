"""Public collective calls: their exchanges never match another call's, and errors name the call.

    @collective("param")      the call is named after the function, with these arguments
    with calling_over(topology, "state_dict()"):

NCCL matches exchanges by order alone; they carry no tags. So a call outside of training first compares its name with
the other ranks in a small control exchange. Without it, a rank in ``state_dict()`` and a rank in ``save_checkpoint()``
would exchange each other's tensors, or deadlock on the device where no watch can see which call each is in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from zcomm import Topology, control
from zcomm._transport.call_context import current_context, public_call

P = ParamSpec("P")
Result = TypeVar("Result")
Class = TypeVar("Class")


@contextmanager
def calling_over(topology: Topology | None, name: str) -> Iterator[None]:
    """Within the block, exchanges belong to the public call ``name`` of all ranks of ``topology``."""
    is_outermost = not current_context().depth
    with public_call(name):
        # Only the outermost call compares: nested calls follow from it on every rank alike.
        if is_outermost and topology is not None and topology.world_size > 1 and not topology.meets_by_tag:
            control.are_equal(name, topology)
        yield


def on_exit(stack: ExitStack, topology: Topology, name: str) -> Callable[[], None]:
    """Run the callbacks that ``stack`` gets from here on within the public call ``name``.

    Returns:
        A function to call after the last callback was added. If it is never called, because an error came first, the
        callbacks run outside of any call: the other ranks may not make it.
    """
    ending = calling_over(topology, name)

    # A stack unwinds last in, first out: `has_all` pushes the start of the call on top, `end` lies below everything.
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
    """Decorate a function that all ranks call together.

    Args:
        facts: Names of arguments that must be equal on every rank.
        of: Maps the first argument to the topology of a call outside of training.
        alone: Threads of a rank make the call one after the other: two at once could start in another order on
            another rank, and deadlock.
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
    """Decorate a class: its methods ``names`` are collective."""

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
    return ", ".join(f"{fact}={_text_of(bound.arguments[fact])}" for fact in facts)


def _text_of(value: Any) -> str:
    """``value`` as it is shown: a parameter by its name, since its repr has values that differ between ranks."""
    info = getattr(value, "zero_shard", None)
    return repr(value) if info is None else str(info.name)
