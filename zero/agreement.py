"""Errors that only one rank would see, raised on all: a rank that goes on alone waits for the others for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from zcomm import LayoutError, StateError, Topology, ZcommError, control

__all__ = ["is_agreed", "on_every_rank", "raise_on_every_rank"]

Result = TypeVar("Result")


def on_every_rank(call: Callable[[], Result], ranks: Topology | dist.ProcessGroup | None, *, fact: str = "") -> Result:
    """What ``call``, which must not communicate, returns; if it raises on any of ``ranks``, all raise. Collective.

    Args:
        call: What is to be done.
        ranks: Who does it; None: all ranks of torch.distributed.
        fact: What must be the same on every rank, in a line, names first.

    Raises:
        Exception: On a rank where ``call`` raised, that. On the others, zcomm's error of the same class, or an OSError
            of the same errno and file, else StateError, with the number of the first such rank and its text.
        LayoutError: The ranks' facts differ.

    Cost for each rank: 512 bytes to every other rank.
    """
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:
        if is_agreed(error):  # by an agreement inside ``call``, where each rank came to this point
            raise
        failure = error
    mine = f"\n{fact}" if failure is None else _told(failure)
    with torch._C.DisableTorchFunction():  # a constructor may run under torch.device("meta")
        texts = control.gather_texts(mine, ranks)
    if failure is not None:
        raise _agreed(failure)
    for rank, text in enumerate(texts):
        kind, _, reason = text.partition("\n")
        if kind:
            raise _agreed(_as_told(rank, kind, reason))
    if len(set(texts)) > 1:
        lines = [f"  rank {rank}: {text.strip()}" for rank, text in enumerate(texts)]
        raise _agreed(LayoutError("every rank must do the same, in the same order:\n" + "\n".join(lines)))
    return result


def raise_on_every_rank(error: Exception, ranks: Topology | dist.ProcessGroup | None) -> NoReturn:
    """Raise ``error`` here, and with this rank's number on the others, where they agree on something. Collective."""

    def fail() -> NoReturn:
        raise error

    on_every_rank(fail, ranks)
    raise error


def is_agreed(error: BaseException | None) -> bool:
    """Whether ``error``, or what it came from, was raised on every rank."""
    while error is not None:
        if getattr(error, "is_agreed_by_ranks", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _told(error: Exception) -> str:
    """``error`` for the other ranks: its class, and errno if it has one; then its text."""
    name = type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        return f"{name} {error.errno}\n{error.filename or ''}\n{error.strerror}"
    return f"{name}\n{error}"


def _as_told(rank: int, kind: str, reason: str) -> Exception:
    """The error that ``rank`` told."""
    name, _, number = kind.partition(" ")
    known: type[Exception] | None = {cls.__name__: cls for cls in _descendants(ZcommError)}.get(name)
    if number:
        path, _, reason = reason.partition("\n")
        return (known or OSError)(int(number), f"rank {rank}: {reason}", path or None)
    return (known or StateError)(f"rank {rank}: {reason if known else f'{name}: {reason}'}")


def _agreed(error: Exception) -> Exception:
    error.is_agreed_by_ranks = True  # type: ignore[attr-defined]
    return error


def _descendants(cls: type[ZcommError]) -> Iterator[type[ZcommError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)
