"""Many hops over one gloo process group, whose exchanges are kept apart by their tags (tagged.py).

A gloo group has three threads and a connection to every other rank. With groups of its own for each hop, a stage-3
optimizer on several nodes would have nine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

CPU = torch.device("cpu")


class TaggedGroup:
    """Some ranks of a gloo process group whose sends and receives match only those of the same ``name``, by their tags.

    It stands for a process group in exchanges: so many hops share the connections and threads of one group.

    Args:
        group: The process group.
        ranks: Ranks in ``group``, in the order of the hop.
        name: The same on all these ranks, and of no other hop over ``group``.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], name: str) -> None:
        self.group, self._ranks, self.group_name = group, tuple(ranks), f"{group.group_name}/{name}"
        of_group = dist.get_process_group_ranks(group)
        self._gloo: Any = group._get_backend(CPU)
        self._global_ranks = [of_group[rank] for rank in ranks]
        self._mask = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFC

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._gloo.send(tensors, self._ranks[peer], tag ^ self._mask)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._gloo.recv(tensors, self._ranks[peer], tag ^ self._mask)

    def global_ranks(self) -> list[int]:
        return self._global_ranks

    def get_group_store(self) -> Any:
        return distributed_c10d.PrefixStore(self.group_name, self.group.get_group_store())


Group = dist.ProcessGroup | TaggedGroup


def given(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``; None is that of all ranks."""
    process_group = dist.group.WORLD if group is None else group
    assert process_group is not None, "torch.distributed is initialized"
    return process_group


def is_open(group: Group) -> bool:
    """Whether ``group`` was not destroyed, by itself or with all others by ``destroy_process_group()``."""
    return (group.group if isinstance(group, TaggedGroup) else group) in distributed_c10d._world.pg_map


def ranks_of(group: Group | None) -> list[int]:
    """The global ranks of ``group``; None: of the job."""
    return group.global_ranks() if isinstance(group, TaggedGroup) else dist.get_process_group_ranks(group)
