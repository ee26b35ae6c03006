"""Shards of a model that is being built, in files of this rank until a ZeroOptimizer takes them over."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from zcomm import Topology
from zero._storage.copy_stream import CopyStream
from zero._storage.file_shard_storage import FileShard, file_nbytes
from zero._storage.file_store import FileStore, StoredFile
from zero._storage.shard_storage import KIND
from zero._storage.staging_buffers import StagingBuffers
from zero._storage.tier_settings import FileSettings

STAGED_NBYTES = 2**26
"""On the way to files at most, but for the largest shard: what is built next goes on meanwhile."""


class InitFiles:
    """The files of one construction.

    Args:
        folder: On a fast disk.
        files: How they are read and written.
        topology: The ranks; collective.

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
        """Flat ``values`` of this rank, which are not kept themselves, in a new file.

        Raises:
            OSError: The space does not suffice, or it could not be written.
        """
        cuts = [(0, values.numel())]
        file = self._store.create(f"built{next(self._numbers)}", file_nbytes(cuts, values.element_size()))
        nothing = torch.full((), float("nan"), dtype=values.dtype).expand(values.numel())
        rest = FileShard(nothing, file, cuts, self._staging, self._copies)
        self._file_of[rest] = file
        self.replace(rest, values)
        return rest

    def replace(self, rest: FileShard, values: Tensor) -> None:
        """Give a shard other values.

        Raises:
            OSError: Something could not be written since the last call.
        """
        rest.target(0, values.numel()).copy_(values)
        rest.written(0, values.numel())
        self._staging.raise_error()

    def remove(self, rest: FileShard) -> None:
        """A shard that nobody needs any more."""
        self._staging.flush()
        self._store.remove(self._file_of.pop(rest))
        self._staging.raise_error()

    def close(self) -> None:
        """Remove what is left."""
        self._staging.forget()
        self._store.close()
