"""DCP's planners for flat parts: a rank says which elements of which tensors it holds, or wants.

saving: parts -> chunks -> DCP keeps each chunk once (replicas) and balances the ranks' bytes
loading: parts -> DCP intersects them with the chunks that were stored, whatever ranks and stages wrote them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zero.checkpoints.index import CHUNK_NUMEL

__all__ = ["LoadPartsPlanner", "Part", "SavePartsPlanner"]


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``[offset, offset + len(values))`` of the flat tensor ``key``, which has ``numel`` of them."""

    key: str
    numel: int
    offset: int
    values: Tensor
    """Flat, of any dtype and device."""
    read: Callable[[int, int], Tensor] | None = None
    """Gives elements ``[start, stop)`` of the part, if ``values`` only stand for what is in a file."""

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> Part:
        """All of a tensor."""
        return cls(key, tensor.numel(), 0, tensor.detach().reshape(-1))

    def resolve(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)``, counted as :attr:`offset` is."""
        first, last = start - self.offset, stop - self.offset
        return self.values[first:last] if self.read is None else self.read(first, last)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The part cut on multiples of CHUNK_NUMEL: first element and end of each. An empty tensor has an empty one."""
        if not self.numel:
            yield 0, 0
        start, stop = self.offset, self.offset + self.values.numel()
        while start < stop:
            end = min(stop, (start // CHUNK_NUMEL + 1) * CHUNK_NUMEL)
            yield start, end
            start = end


class SavePartsPlanner(DefaultSavePlanner):
    """Plans the writing of ``parts``."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._chunks: dict[MetadataIndex, tuple[Part, int, int]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,  # noqa: FBT001
    ) -> None:
        """DCP's first call; what there is to save is in the parts."""
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item for every chunk."""
        items = []
        for part in self._parts:
            for start, stop in part.chunks():
                index = MetadataIndex(part.key, (start,))
                self._chunks[index] = (part, start, stop)
                chunk = ChunkStorageMetadata(torch.Size((start,)), torch.Size((stop - start,)))
                properties = TensorProperties(dtype=part.values.dtype)
                data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size((part.numel,)))
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a chunk."""
        part, start, stop = self._chunks[write_item.index]
        return part.resolve(start, stop)


class LoadPartsPlanner(DefaultLoadPlanner):
    """Plans the reading of ``parts``, into their values."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._values: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001
    ) -> None:
        """DCP's first call; where to load into is in the parts."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The stored chunks that each part touches."""
        assert self.metadata is not None, "DCP gives the metadata first"
        items: list[ReadItem] = []
        for part in self._parts:
            span = ChunkStorageMetadata(torch.Size((part.offset,)), torch.Size((part.values.numel(),)))
            stored: Any = self.metadata.state_dict_metadata[part.key]
            items += create_read_items_for_chunk_list(part.key, stored, [span])
            self._values[MetadataIndex(part.key, (part.offset,))] = part.values
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the elements of ``read_item`` go."""
        values = self._values[read_item.dest_index]
        return values.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])
