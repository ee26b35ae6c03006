"""DCP's storage: safetensors shards and metadata.json, written durably and read chunk by chunk with checksums.

DCP's planners for flat parts: a rank says which elements of which tensors it holds, or wants.

saving: parts -> chunks -> DCP keeps each chunk once (replicas) and balances the ranks' bytes
loading: parts -> DCP intersects them with the chunks that were stored, whatever ranks and stages wrote them
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
    StorageMeta,
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
    locked,
    make_folder,
    remove_file,
    remove_stale_shards,
    replace_file,
    shard_name,
    sync_folder,
)
from zero._checkpoint.index import CHUNK_NUMEL, UNREADABLE, Index, StoredChunk, StoredTensor, read_index, write_index
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
    """Gives elements ``[start, stop)`` of the part, if ``values`` only stand for what is in a file."""

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> FlatPart:
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

    def __init__(self, parts: Sequence[FlatPart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts
        self._chunks: dict[MetadataIndex, tuple[FlatPart, int, int]] = {}

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

    def __init__(self, parts: Sequence[FlatPart]) -> None:
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


SAVER = "saver"
"""In metadata.json: since when the optimizer that saved was what it was, and when it saved; of time.time_ns()."""


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class FolderWriter(StorageWriter):
    """Writes one checkpoint.

    Args:
        folder: ``SAVE_DIR/TAG``.
        content: What metadata.json holds beside the tensors; the first rank's is written.
        moves_latest: Whether ``SAVE_DIR/latest`` names it in the end.
        since_ns: When the optimizer that saves was constructed, or last loaded; it is told apart from others by that.
        check: Raises if what it is given, the index as it was written, cannot be loaded.
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
        """In the names of the files; the first rank's counts, which names them all."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer is one checkpoint: nothing to do."""

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: ARG002, FBT001
        """Every rank makes the folder, or finds it."""
        try:
            make_folder(self._folder)
        except OSError as error:
            raise CheckpointError(f"the folder {self._folder} cannot be made: {error.strerror}") from error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the ranks' files."""
        return [replace(plan, storage_data=shard_name(rank, self.save_id)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, and wait until it is on the disk."""
        path = self._folder / str(plan.storage_data)
        try:
            return _done(_write_shard(path, plan, planner))
        except FileExistsError as error:
            raise CheckpointError(f"{path} is another save's, and is left as it is: save again") from error
        except OSError as error:
            free = shutil.disk_usage(self._folder).free if self._folder.is_dir() else 0
            raise CheckpointError(
                f"{path} could not be written: {error.strerror} ({free / 2**30:.2f} GiB are free there): make room or "
                "choose another folder; the checkpoints before are untouched"
            ) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, once all ranks have written: metadata.json, if it can be loaded, and then ``latest``."""
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
            with locked(self._folder):
                self._check_own()
                self._check_visible(files)
                self._publish(tensors, files, content)
        except CheckpointError:  # before anything was published
            for name in files:
                remove_file(self._folder / name)
            raise

    def _publish(
        self, tensors: Mapping[str, StoredTensor], files: Mapping[str, int], content: Mapping[str, Any]
    ) -> None:
        """Nothing that was there before is touched until the new one is named, durably."""
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
        """Two optimizers that save under one tag would each replace what the other has saved, and say nothing."""
        try:
            since_ns, saved_ns = json.loads((self._folder / METADATA).read_bytes())["content"][SAVER]
        except (OSError, *UNREADABLE):
            return  # nothing that counts, or of an older version
        if since_ns != self._since_ns and saved_ns > self._since_ns:
            raise CheckpointError(
                f"{self._folder} holds what another optimizer has saved since this one was constructed, and is left as "
                "it is: two optimizers need tags, or folders, of their own"
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
    """Reads what ``index`` says."""

    def __init__(self, index: Index) -> None:
        self._folder, self._metadata = index.folder, index.as_dcp()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader is one checkpoint: nothing to do."""

    def read_metadata(self) -> Metadata:
        """What there is."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: FBT001
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every chunk that the plan touches once, in the order of the files."""
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
    """The values of one chunk of tensor ``key``, checked.

    Raises:
        CheckpointError: The file cannot be read, or the bytes are not those that were written.
    """
    path, data = folder / chunk.file, bytearray(chunk.numel * dtype.itemsize)
    try:
        with path.open("rb", buffering=0) as file:  # a user's own weights may be links; see open_own
            file.seek(chunk.position)
            _read_all(file.readinto, memoryview(data))
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read, for tensor {key!r}: {error}") from error
    if chunk.crc32 is not None and zlib.crc32(data) != chunk.crc32:
        raise CheckpointError(
            f"{path} is damaged: the checksum of tensor {key!r}, elements {chunk.offset} to "
            f"{chunk.offset + chunk.numel}, does not fit; load another checkpoint"
        )
    return from_bytes(data, dtype)


def _read_all(read_into: Any, view: memoryview) -> None:
    while view:
        count = read_into(view)
        if not count:
            raise EOFError(f"the file ends {len(view)} bytes too early")
        view = view[count:]
