"""Emulates, without a GPU, a rank of a job that has only ``init_process_group("nccl")``.

Every process group says that it takes tensors on GPUs alone, but those that are made as gloo groups. An exchange of
host tensors over any other asks for the current GPU, which is an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest

from zcomm._transport import backend, groups, topology

__all__ = ["nccl_alone"]


@contextmanager
def nccl_alone() -> Iterator[WeakSet[Any]]:
    """Make every group look like an NCCL group; yields those that were created for host tensors."""
    of_hosts: WeakSet[Any] = WeakSet()
    new_group = groups.new_group

    def new(*args: Any, backend: str | None = None, **options: Any) -> Any:
        group = new_group(*args, backend=backend, **options)
        if backend == "gloo":
            of_hosts.add(group)
        return group

    def backend_of(group: Any) -> str:
        return "gloo" if group in of_hosts else "cuda:nccl"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "backend_of", lambda _: "gloo")  # what groups really are
        patch.setattr(groups, "new_group", new)
        patch.setattr(backend, "backend_of", backend_of)
        patch.setattr(topology, "backend_of", backend_of)
        patch.setattr(topology, "_HOPS", {})  # what is known of groups, their backend among it
        yield of_hosts
