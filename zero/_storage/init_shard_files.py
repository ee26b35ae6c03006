"""Files for the shards of a model under ``zero.Init``, until a ZeroOptimizer copies them to files of its own."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from zcomm import Topology
from zero._storage.copy_stream import CopyStream
from zero._storage.file_shard_storage import FileShard, file_nbytes
from zero._storage.file_store import FileStore, StoredFile
from zero._storage.poison import placeholder
from zero._storage.shard_storage import KIND
from zero._storage.staging_buffers import StagingBuffers
from zero._storage.tier_settings import FileSettings

STAGED_NBYTES = 2**26
"""Bytes of writes in flight at most, but at least the largest shard; construction continues meanwhile."""


class InitFiles:
    """The files of one model construction. Creating it is collective.

    Args:
        folder: A folder on a fast disk.
        files: How files are read and written.
        topology: The ranks.

    Raises:
        OSError: On every rank: the folder is missing or read-only.
    """

    def __init__(self, folder: str, files: FileSettings, topology: Topology) -> None:
        self._store = FileStore(folder, files=files, name=KIND, topology=topology)
        self._staging = StagingBuffers(self._store, STAGED_NBYTES)
        self._copies = CopyStream(torch.device("cpu"))
        self._numbers = count()
        self._file_of: dict[FileShard, StoredFile] = {}

    def place(self, values: Tensor) -> FileShard:
        """Write flat ``values`` of this rank to a new file; the tensor itself is not kept.

        Raises:
            OSError: There is not enough space, or a write failed.
        """
        cuts = [(0, values.numel())]
        file = self._store.create(f"built{next(self._numbers)}", file_nbytes(cuts, values.element_size()))
        shard = FileShard(placeholder(values.numel(), values.dtype), file, cuts, self._staging, self._copies)
        self._file_of[shard] = file
        self.replace(shard, values)
        return shard

    def replace(self, shard: FileShard, values: Tensor) -> None:
        """Give a shard other values.

        Raises:
            OSError: A write since the last call failed.
        """
        shard.target(0, values.numel()).copy_(values)
        shard.written(0, values.numel())
        self._staging.raise_error()

    def remove(self, shard: FileShard) -> None:
        """Delete the file of a shard that is no longer needed."""
        self._staging.flush()  # a file with a transfer in flight must not be closed
        self._store.remove(self._file_of.pop(shard))
        self._staging.raise_error()

    def close(self) -> None:
        """Remove the remaining files."""
        self._staging.forget()
        self._store.close()
