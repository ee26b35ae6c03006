"""The contenders by name, each imported when it is built."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from contenders.contender import Contender, Setup

__all__ = ["ENTRIES", "Entry", "available", "build"]


class Entry(NamedTuple):
    """One way to train."""

    stage: int
    """Of ZeRO: what of the training is sharded."""
    module: str
    options: dict[str, Any]
    needs: str = "torch"
    """The package that has to be installed."""


ENTRIES = {
    **{f"zero stage {n}": Entry(n, "zero_optimizer", {"stage": n}) for n in (1, 2, 3)},
    "fsdp2 reshard=False": Entry(2, "fsdp2", {"reshard_after_forward": False}),
    "fsdp2 reshard=True": Entry(3, "fsdp2", {"reshard_after_forward": True}),
    "ddp": Entry(0, "ddp", {"gradient_as_bucket_view": False}),
    "ddp bucket views": Entry(0, "ddp", {"gradient_as_bucket_view": True}),
    **{f"deepspeed stage {n}": Entry(n, "deepspeed_engine", {"stage": n}, "deepspeed") for n in (1, 2, 3)},
}


def available() -> list[str]:
    """The names of those that can be built here, in the order of :data:`ENTRIES`."""
    return [name for name, entry in ENTRIES.items() if find_spec(entry.needs) is not None]


def build(name: str, setup: Setup) -> Contender:
    """Import and build a contender. Collective."""
    entry = ENTRIES[name]
    contender: Contender = import_module(f"contenders.{entry.module}").build(setup, **entry.options)
    return contender
