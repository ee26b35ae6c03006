"""Errors that only one rank would see, raised on all: a rank that goes on alone waits for the others for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist

from zcomm import StateError, Topology, ZcommError, control

__all__ = ["on_every_rank"]

Result = TypeVar("Result")


def on_every_rank(call: Callable[[], Result], ranks: Topology | dist.ProcessGroup | None) -> Result:
    """What ``call``, which must not communicate, returns; if it raises on any of ``ranks``, all raise. Collective.

    Raises:
        Exception: On a rank where ``call`` raised, that. On the others, zcomm's error of the same class, StateError if
            it is none of zcomm's, with the number of the first such rank and its text.

    Cost for each rank: 512 bytes to every other rank.
    """
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:
        failure = error
    mine = "" if failure is None else f"{type(failure).__name__}\n{failure}"
    texts = control.gather_texts(mine, ranks)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        name, _, reason = text.partition("\n")
        if name:
            known = {cls.__name__: cls for cls in _descendants(ZcommError)}.get(name)
            raise known(f"rank {rank}: {reason}") if known else StateError(f"rank {rank}: {name}: {reason}")
    return result


def _descendants(cls: type[ZcommError]) -> Iterator[type[ZcommError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)
