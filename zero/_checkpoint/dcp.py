"""Planners and storage for torch.distributed.checkpoint (DCP), with safetensors shards and metadata.json.

    saving   parts -> chunks -> DCP keeps one of equal chunks (replicas) and balances the bytes of the ranks
             -> each rank writes its shard, with checksums, durably -> the first rank commits metadata.json
    loading  parts -> DCP intersects them with the stored chunks, whatever ranks and stages wrote these

The planners plan flat parts: a rank says which elements of which tensors it holds, or wants.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zero._checkpoint.durability import (
    LATEST,
    METADATA,
    create_file,
    latest_line,
    make_folder,
    remove_file,
    remove_stale_shards,
    replace_file,
    shard_name,
    sync_folder,
)
from zero._checkpoint.index import CHUNK_NUMEL, UNREADABLE, Index, StoredChunk, StoredTensor, read_index, write_index
from zero._storage.process_folder import locked
from zero._storage.safetensors_file import as_bytes, from_bytes, make_header
from zero.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Elements ``[offset, offset + len(values))`` of the flat tensor ``key``, which has ``numel`` of them."""

    key: str
    numel: int
    offset: int
    values: Tensor
    """Flat, of any dtype and device."""
    read: Callable[[int, int], Tensor] | None = None
    """Reads elements ``[start, stop)`` of the part from a file; ``values`` are placeholders then."""

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> FlatPart:
        """A part that is the full ``tensor``."""
        return cls(key, tensor.numel(), 0, tensor.detach().reshape(-1))

    def resolve(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the tensor, which must be in this part."""
        first, last = start - self.offset, stop - self.offset
        return self.values[first:last] if self.read is None else self.read(first, last)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Cut the part at multiples of CHUNK_NUMEL: start and stop of each chunk.

        Equal cuts on all ranks let DCP find replicas, and make the files independent of the ranks' shards. An empty
        tensor has one empty chunk, so that loading finds that it was saved.
        """
        if not self.numel:
            yield 0, 0
        start, stop = self.offset, self.offset + self.values.numel()
        while start < stop:
            end = min(stop, (start // CHUNK_NUMEL + 1) * CHUNK_NUMEL)
            yield start, end
            start = end


def write_item(key: str, start: int, numel: int, size: int, dtype: torch.dtype) -> WriteItem:
    """DCP's item for elements ``[start, start + numel)`` of the flat tensor ``key``, which has ``size`` of them."""
    chunk = ChunkStorageMetadata(torch.Size((start,)), torch.Size((numel,)))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=torch.Size((size,)))
    return WriteItem(index=MetadataIndex(key, (start,)), type=WriteItemType.SHARD, tensor_data=data)


class SavePartsPlanner(DefaultSavePlanner):
    """DCP's planner for saving ``parts``; the state dict that DCP takes is empty."""

    def __init__(self, parts: Sequence[FlatPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._chunks: dict[MetadataIndex, tuple[FlatPart, int, int]] = {}

    def create_local_plan(self) -> SavePlan:
        """Return one item for every chunk."""
        items = []
        for part in self._parts:
            for start, stop in part.chunks():
                items.append(write_item(part.key, start, stop - start, part.numel, part.values.dtype))
                self._chunks[items[-1].index] = (part, start, stop)
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        part, start, stop = self._chunks[write_item.index]
        return part.resolve(start, stop)


class LoadPartsPlanner(DefaultLoadPlanner):
    """DCP's planner for loading ``parts``, into their values; the state dict that DCP takes is empty."""

    def __init__(self, parts: Sequence[FlatPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._values: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """Return one item for every stored chunk that overlaps a part."""
        assert self.metadata is not None, "DCP gives the metadata first"
        items: list[ReadItem] = []
        for part in self._parts:
            span = ChunkStorageMetadata(torch.Size((part.offset,)), torch.Size((part.values.numel(),)))
            stored: Any = self.metadata.state_dict_metadata[part.key]
            items += create_read_items_for_chunk_list(part.key, stored, [span])
            self._values[MetadataIndex(part.key, (part.offset,))] = part.values
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        values = self._values[read_item.dest_index]
        return values.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])


SAVER = "saver"
"""Key in metadata.json: when the optimizer that saved was constructed or last loaded, and when it saved, in ns."""


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class FolderWriter(StorageWriter):
    """Writes one checkpoint.

    Args:
        folder: ``SAVE_DIR/TAG``.
        content: What metadata.json holds beside the tensors; the first rank's is written.
        moves_latest: Whether ``SAVE_DIR/latest`` names this checkpoint at the end.
        since_ns: When the optimizer that saves was constructed or last loaded, which identifies it.
        check: Called with the index as it was written; raises if the checkpoint could not be loaded.
    """

    def __init__(
        self,
        folder: Path,
        content: Mapping[str, Any],
        *,
        moves_latest: bool,
        since_ns: int,
        check: Callable[[Index], None],
    ) -> None:
        self._folder, self._content, self._moves_latest = folder, content, moves_latest
        self._since_ns, self._check = since_ns, check
        self.save_id = secrets.token_hex(4)
        """Part of the names of the files. The first rank's is used for all."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: ARG002, FBT001
        """Create the folder, on every rank: on file systems of their own each rank needs it."""
        try:
            make_folder(self._folder)
        except OSError as error:
            raise CheckpointError(f"the folder {self._folder} cannot be made: {error.strerror}") from error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank's plan the name of its file."""
        return [replace(plan, storage_data=shard_name(rank, self.save_id)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and fsync it."""
        path = self._folder / str(plan.storage_data)
        try:
            return _done(_write_shard(path, plan, planner))
        except FileExistsError as error:
            raise CheckpointError(f"{path} belongs to another save and is left unchanged: save again") from error
        except OSError as error:
            free = shutil.disk_usage(self._folder).free if self._folder.is_dir() else 0
            raise CheckpointError(
                f"{path} could not be written: {error.strerror} ({free / 2**30:.2f} GiB are free there): make room, or "
                "choose another folder; earlier checkpoints are unchanged"
            ) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, on the first rank, once all ranks have written: metadata.json, then ``latest``."""
        written = [result for of_rank in results for result in of_rank]
        chunks: dict[str, list[StoredChunk]] = {}
        files: dict[str, int] = {}
        headers: dict[str, tuple[int, int]] = {}
        for result in written:
            chunk, file_nbytes, headers[result.storage_data[0].file] = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(chunk)
            files[chunk.file] = file_nbytes
        tensors = {}
        for key, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), "parts are tensors"
            of_key = tuple(sorted(chunks[key], key=lambda chunk: chunk.offset))
            tensors[key] = StoredTensor(stored.properties.dtype, stored.size.numel(), of_key)
        content = {**self._content, "headers": headers}
        try:
            # Without the lock two saves under one tag could each delete the shards that the other's metadata refers to.
            # Where there are no locks, only _check_own protects.
            with locked(self._folder):
                self._check_own()
                self._check_visible(files)
                self._commit(tensors, files, content)
        except CheckpointError:  # raised before the commit: nothing refers to the new shards
            for name in files:
                remove_file(self._folder / name)
            raise

    def _commit(
        self, tensors: Mapping[str, StoredTensor], files: Mapping[str, int], content: Mapping[str, Any]
    ) -> None:
        """Make the new checkpoint count. The old one is untouched until ``latest`` names the new one, durably.

        The order is what a crash at any moment needs. First the shards' names are synced, or metadata.json could
        survive a crash that loses a shard. Then metadata.json replaces the old one, and the tag's folder is synced, or
        ``latest`` could name a folder that a crash loses. Then ``latest``. The old shards are deleted last.
        """
        data = write_index(tensors, files, {**content, SAVER: [self._since_ns, time.time_ns()]})

        def check(path: Path) -> None:
            self._check(read_index(path.parent, path.name))

        sync_folder(self._folder)
        replace_file(self._folder / METADATA, data, self.save_id, check)
        sync_folder(self._folder.parent)
        if self._moves_latest:
            replace_file(self._folder.parent / LATEST, latest_line(self._folder.name), self.save_id)
        remove_stale_shards(self._folder, set(files))

    def _check_own(self) -> None:
        """Raise if another optimizer has saved under this tag since this one was constructed.

        Otherwise two optimizers with one tag would silently overwrite each other's checkpoints.
        """
        try:
            since_ns, saved_ns = json.loads((self._folder / METADATA).read_bytes())["content"][SAVER]
        except (OSError, *UNREADABLE):
            return  # no complete checkpoint, or one of an older version
        if since_ns != self._since_ns and saved_ns > self._since_ns:
            raise CheckpointError(
                f"{self._folder} holds a checkpoint that another optimizer has saved since this one was constructed, "
                "and is left unchanged: two optimizers need tags, or folders, of their own"
            )

    def _check_visible(self, files: Mapping[str, int]) -> None:
        for name, nbytes in files.items():
            path = self._folder / name
            if not path.is_file() or path.stat().st_size != nbytes:
                raise CheckpointError(
                    f"the first rank does not see {path}, which another rank has written: the folder of a checkpoint "
                    "must be on a file system that all ranks share"
                )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """DCP does not choose this storage by itself."""
        return False


def _write_shard(path: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    layout = {}
    for item in plan.items:
        assert item.tensor_data is not None, "parts are tensors"
        numel = item.tensor_data.chunk.sizes[0]
        layout[_entry_name(item.index)] = (item.tensor_data.properties.dtype, (numel,))
    header, entries = make_header(layout)
    nbytes = max((entry.stop for entry in entries.values()), default=len(header))
    results, of_header = [], (len(header), zlib.crc32(header))
    with create_file(path) as file:
        file.write(header)
        for item in plan.items:
            values = planner.resolve_data(item)
            assert isinstance(values, Tensor), "parts are tensors"
            data = as_bytes(values)
            file.write(data)
            entry = entries[_entry_name(item.index)]
            assert item.index.offset is not None, "chunks have offsets"
            chunk = StoredChunk(item.index.offset[0], entry.shape[0], path.name, entry.start, zlib.crc32(data))
            results.append(WriteResult(item.index, len(data), (chunk, nbytes, of_header)))
    return results


def _entry_name(index: MetadataIndex) -> str:
    return f"{index.fqn}@{index.offset[0] if index.offset else 0}"


class FolderReader(StorageReader):
    """DCP's storage for reading the checkpoint of ``index``."""

    def __init__(self, index: Index) -> None:
        self._folder, self._metadata = index.folder, index.as_dcp()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: FBT001
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every chunk of the plan once, in the order of the files."""
        stored: dict[MetadataIndex, tuple[torch.dtype, StoredChunk]] = self._metadata.storage_data
        items: dict[MetadataIndex, list[Any]] = {}
        for item in plan.items:
            items.setdefault(MetadataIndex(item.storage_index.fqn, item.storage_index.offset), []).append(item)
        for index in sorted(items, key=lambda index: (stored[index][1].file, stored[index][1].position)):
            dtype, chunk = stored[index]
            values = read_chunk(self._folder, index.fqn, chunk, dtype)
            for item in items[index]:
                target = planner.resolve_tensor(item)
                target.copy_(values.narrow(0, item.storage_offsets[0], item.lengths[0]))
                planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """DCP does not choose this storage by itself."""
        return False


def read_chunk(folder: Path, key: str, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
    """Read one chunk of tensor ``key`` and verify its checksum.

    Raises:
        CheckpointError: The file cannot be read, or the checksum does not match.
    """
    path, data = folder / chunk.file, bytearray(chunk.numel * dtype.itemsize)
    try:
        with path.open("rb", buffering=0) as file:  # not open_own: a user's own weights may be links
            file.seek(chunk.position)
            _read_all(file.readinto, memoryview(data))
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read, for tensor {key!r}: {error}") from error
    if chunk.crc32 is not None and zlib.crc32(data) != chunk.crc32:
        raise CheckpointError(
            f"{path} is damaged: the checksum of tensor {key!r}, elements {chunk.offset} to "
            f"{chunk.offset + chunk.numel}, does not match; load another checkpoint"
        )
    return from_bytes(data, dtype)


def _read_all(read_into: Any, view: memoryview) -> None:
    while view:
        count = read_into(view)
        if not count:
            raise EOFError(f"the file ends {len(view)} bytes too early")
        view = view[count:]
