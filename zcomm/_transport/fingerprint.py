"""What every process of a job must have in common before it exchanges anything: libraries, and switches that change
what is sent. Compared when a topology is made, and once for each process group that :mod:`zero` begins with.

Cost: 8 bytes to every other rank; where ranks differ a meeting in torch.distributed's store (:mod:`zcomm._transport.store_exchange`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from zcomm._base import env
from zcomm._kernels import kernels
from zcomm._transport import backend
from zcomm._transport.store_exchange import meet
from zcomm.errors import BackendUnavailableError, ConfigError

SWITCHES = ("ZCOMM_CHECK", "ZCOMM_DEBUG", "ZERO_DEBUG")


def facts() -> dict[str, str]:
    """Of this process; switches as they are set, also wrongly."""
    found = {"torch": str(torch.__version__), "byte order": sys.byteorder, "zcomm-zero": _own_version()}
    return found | {name: _setting(name) for name in SWITCHES} | {"usable kernels": _refusal() or "as set"}


def _refusal() -> str:
    """Why this process has not the kernels that it was told to use."""
    try:
        return kernels.refusal()
    except ConfigError as error:
        return str(error)


def _setting(name: str) -> str:
    try:
        return env.value(name)
    except ConfigError:
        return os.environ[name]


@cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("zcomm-zero")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def compare(group: dist.ProcessGroup | None, **more: str) -> None:
    """Raise ConfigError on every rank of ``group``, with what differs and where, unless all have equal facts.

    BackendUnavailableError, on every rank too, where all lack the kernels that they were told to use.

    Collective, and a barrier. None: all ranks. ``more`` are facts beside those of every process.
    """
    text = json.dumps(facts() | more, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    if len(set(backend.gather_ints(int.from_bytes(digest, "little", signed=True), group))) == 1:
        for name in SWITCHES:
            env.value(name)  # wrong on all ranks, if on any
        if reason := kernels.refusal():
            raise BackendUnavailableError(reason)
        return
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    of_ranks = [json.loads(told) for told in meet(ranks, text, lane="facts", timeout=backend.timeout_of(group))]
    found = differing(dict(zip(ranks, of_ranks, strict=True)))
    raise ConfigError(f"every rank must run the same libraries with the same switches: {'; '.join(found)}")


def differing(of_ranks: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Of each fact that is not the same on all ranks, a line with its values and their ranks."""
    lines = []
    for name in sorted({name for one in of_ranks.values() for name in one}):
        by_value: dict[str, list[int]] = {}
        for rank, one in of_ranks.items():
            by_value.setdefault(one.get(name, "not given"), []).append(rank)
        if len(by_value) > 1:
            parts = [f"{value} on rank {', '.join(map(str, its))}" for value, its in by_value.items()]
            lines.append(f"{name} is {' and '.join(parts)}")
    return lines


_COMPARED: weakref.WeakSet[Any] = weakref.WeakSet()


def compare_once(group: dist.ProcessGroup | None) -> None:
    """:func:`compare`, at the first call for ``group``; nothing for this rank alone."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    whole = dist.group.WORLD if group is None else group
    if whole not in _COMPARED:
        compare(group)
        _COMPARED.add(whole)
