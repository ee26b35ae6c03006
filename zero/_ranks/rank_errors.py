"""Raises an error of one rank on every rank: ranks that went on without the failed one would deadlock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from zcomm import LayoutError, StateError, Topology, ZcommError, control
from zcomm._transport.environment_check import compare_once

Result = TypeVar("Result")
T = TypeVar("T")


def on_every_rank(call: Callable[[], Result], ranks: Topology | dist.ProcessGroup | None, *, fact: str = "") -> Result:
    """Run ``call`` on every rank and return its result; if it raises on any rank, raise on all. Collective.

    Args:
        call: Must not communicate: on a rank where it raised early, the others would wait in its exchange.
        ranks: The ranks; None: all ranks of torch.distributed.
        fact: One line that must be the same on every rank, names first.

    Raises:
        Exception: On a rank where ``call`` raised, that error. On the others, zcomm's error of the same class, an
            OSError of the same errno and file, or else StateError, with the number of the first such rank and its text.
        LayoutError: The ranks' facts differ.
        ConfigError: Ranks run different versions, or have different switches: checked at the first call for a group.

    Cost for each rank: 8 bytes to every other rank; 512 more if there is an error.
    """
    if not isinstance(ranks, Topology):
        compare_once(ranks)
    failure, handled = None, sys.exc_info()[1]  # the caller may be handling an agreed error: that one does not count
    try:
        result = call()
    except Exception as error:
        # An agreement within ``call`` has raised this on every rank already: to agree again here would deadlock with
        # the ranks that have left.
        if is_agreed(error, handled=handled):
            raise
        failure = error
    mine = f"\n{fact}" if failure is None else _error_text(failure)
    with torch._C.DisableTorchFunction():  # a constructor may run under torch.device("meta")
        if control.are_equal(mine, ranks) and failure is None:  # all have failed, or none
            return result
        texts = control.gather_texts(mine, ranks)
    if failure is not None:
        try:
            raise _mark_agreed(failure)
        finally:
            del failure  # it refers to this frame: in a cycle with it, all frames' tensors would stay for the collector
    for rank, text in enumerate(texts):
        kind, _, reason = text.partition("\n")
        if kind:
            raise _mark_agreed(_error_from(rank, kind, reason))
    lines = [f"  rank {rank}: {text.strip()}" for rank, text in enumerate(texts)]
    raise _mark_agreed(LayoutError("every rank must do the same, in the same order:\n" + "\n".join(lines)))


def raise_on_every_rank(error: Exception, ranks: Topology | dist.ProcessGroup | None) -> NoReturn:
    """Raise ``error`` on this rank, and on the others, which are in :func:`on_every_rank`, with this rank's number."""

    def fail() -> NoReturn:
        raise error

    on_every_rank(fail, ranks)
    raise error


def raise_first(error: Exception | None, kind: type[Exception], topology: Topology) -> None:
    """If any rank has an error, raise a ``kind`` with the first such rank's text on every rank. Collective.

    Cost: one small exchange if no rank has an error.
    """
    if topology.world_size > 1:
        has_error = control.gather_float64(torch.tensor([float(error is not None)]), topology)
        ranks = [rank for rank, (value,) in enumerate(has_error.tolist()) if value]
        if ranks:
            raise kind(share_text(str(error or ""), ranks[0], topology)) from error
    if error is not None:
        raise error


def share_text(text: str, src: int, topology: Topology) -> str:
    """Rank ``src``'s text, on every rank. Cost: two small broadcasts."""
    data = text.encode(errors="surrogateescape")  # a path may not be UTF-8
    length = torch.tensor([len(data)])
    control.broadcast_(length, src, topology)
    buffer = torch.zeros(int(length.item()), dtype=torch.uint8)
    if topology.rank == src and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if buffer.numel():
        control.broadcast_(buffer, src, topology)
    return bytes(buffer.tolist()).decode(errors="surrogateescape")


def is_agreed(error: BaseException | None, *, handled: BaseException | None = None) -> bool:
    """Whether ``error`` or one of its causes was raised on every rank, up to ``handled``, which came before it."""
    while error is not None and error is not handled:
        if getattr(error, "is_agreed_by_ranks", False):
            return True
        error = error.__cause__ or error.__context__
    return False


def _error_text(error: Exception) -> str:
    """``error`` as it is sent to the other ranks: class, and errno if there is one; then its text."""
    name = type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        return f"{name} {error.errno}\n{error.filename or ''}\n{error.strerror}"
    return f"{name}\n{error}"


def _error_from(rank: int, kind: str, reason: str) -> Exception:
    """The exception for an error that ``rank`` sent."""
    name, _, number = kind.partition(" ")
    known: type[Exception] | None = {cls.__name__: cls for cls in descendants(ZcommError)}.get(name)
    if number:
        path, _, reason = reason.partition("\n")
        return (known or OSError)(int(number), f"rank {rank}: {reason}", path or None)
    return (known or StateError)(f"rank {rank}: {reason if known else f'{name}: {reason}'}")


def _mark_agreed(error: Exception) -> Exception:
    error.is_agreed_by_ranks = True  # type: ignore[attr-defined]
    return error


def descendants(cls: type[T]) -> Iterator[type[T]]:
    """The classes that inherit from ``cls``; some twice, if they do so in several ways."""
    for child in cls.__subclasses__():
        yield child
        yield from descendants(child)
