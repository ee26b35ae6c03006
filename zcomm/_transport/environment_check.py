"""Comparing the environment of all ranks before they exchange anything: library versions, switches and kernels.

Compared when a Topology is constructed, and once for each process group that :mod:`zero` starts with. Ranks of
different versions would send different messages and fail later, with an error that does not name the cause.

Cost: 8 bytes to every other rank; if ranks differ, also a store exchange (:mod:`zcomm._transport.store_exchange`).
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
from zcomm._transport.store_exchange import exchange_texts
from zcomm._transport.tagged_group import given
from zcomm.errors import BackendUnavailableError, ConfigError

SWITCHES = ("ZCOMM_CHECK", "ZCOMM_DEBUG", "ZERO_DEBUG")


def facts() -> dict[str, str]:
    """The facts of this process. Switches with invalid values are included as they are."""
    found = {"torch": str(torch.__version__), "byte order": sys.byteorder, "zcomm-zero": _own_version()}
    return found | {name: _setting(name) for name in SWITCHES} | {"usable kernels": _refusal() or "as set"}


def _refusal() -> str:
    """Why the requested kernels are unavailable in this process; empty if they are available."""
    try:
        return kernels.unavailable_reason()
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
    """Raise on every rank of ``group`` (None: all ranks) unless all have equal facts. Collective; a barrier.

    ``more`` are compared in addition to :func:`facts`.

    Raises:
        ConfigError: The facts differ. Names each difference and its ranks.
        BackendUnavailableError: The requested kernels are unavailable on all ranks.
    """
    text = json.dumps(facts() | more, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    if len(set(backend.gather_ints(int.from_bytes(digest, "little", signed=True), group))) == 1:
        for name in SWITCHES:
            env.value(name)  # raises for an invalid value: all ranks have the same one
        if reason := kernels.unavailable_reason():
            raise BackendUnavailableError(reason)
        return
    ranks = dist.get_process_group_ranks(given(group))
    texts = exchange_texts(ranks, text, lane="facts", timeout=backend.timeout_of(group))
    of_ranks = [json.loads(text) for text in texts]
    found = differing(dict(zip(ranks, of_ranks, strict=True)))
    raise ConfigError(f"every rank must run the same libraries with the same switches: {'; '.join(found)}")


def differing(of_ranks: Mapping[int, Mapping[str, str]]) -> list[str]:
    """One line for each fact that differs between ranks, with its values and their ranks."""
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
    """:func:`compare` at the first call for ``group``; nothing if this rank is alone."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    if given(group) not in _COMPARED:
        compare(group)
        _COMPARED.add(given(group))
