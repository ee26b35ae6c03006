"""What a folder of published weights holds: manifests, the layout of the weights, and their digests.

    FOLDER/publisher                    run, host and pid of the publisher, which holds a lock on it
    FOLDER/layout-SHA256.json           tensors, and the chunks that they are published in
    FOLDER/n0000000042/                 publication number 42, complete from the moment it has this name
        manifest.json                   version, run, the publication that its patch changes, digests
        patch-00003.bin                 rank 3's changed chunks: the messages of zcomm._kernels.ulps, one after another
        model.safetensors ...           the snapshot, if it has one, as transformers and vLLM read it

A chunk is at most CHUNK_NUMEL elements of one dtype: pieces of tensors, cut where the shards of the ranks are. Its
digest is the SHA-256 of its bytes. The root is the SHA-256 of the digests of all chunks: it tells the whole model's
bits, and each rank hashes only what has changed of its shard.

Readers trust nothing. Names of files follow from numbers and ranks, so no document leads out of the folder. The pieces
of a layout must cover every tensor exactly once. Sizes are bounded by the layout, and that by the reader's own tensors,
before memory is allocated.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zcomm._kernels import ulps
from zero._checkpoint.durability import open_own
from zero._storage.safetensors_file import CODES, DTYPES
from zero.errors import CheckpointError, PublicationError

CHUNK_NUMEL = 2**22
"""Elements: 8 MiB of bf16. Readers accept no larger chunks."""
CODED = frozenset({torch.bfloat16, torch.float16})
"""Dtypes whose changes are coded. Changed chunks of others are stored as they are."""
FORMAT, LAYOUT_FORMAT, FORMAT_VERSION = "zero-publication", "zero-publication-layout", 1
MANIFEST = "manifest.json"
MAX_DOCUMENT_NBYTES = 2**28
"""Of a document, whose tensors a reader does not know yet."""
MAX_NUMEL = 2**48
MAX_NUMBER = 10**10 - 1
NUMBERED = re.compile(r"n([0-9]{10})")
DIGEST = re.compile(r"[0-9a-f]{64}")
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""What reading a malformed document raises."""

Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of tensors, in the order of the model's state dict."""


class TensorPiece(NamedTuple):
    """Elements ``[start, stop)`` of the flat tensor ``name``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PublishedChunk:
    """Pieces of tensors of one dtype, which are coded and hashed together."""

    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]
    rank: int

    @property
    def numel(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    @property
    def max_nbytes(self) -> int:
        """The most bytes that its change takes."""
        return ulps.max_message_nbytes(self.numel) if self.dtype in CODED else self.numel * self.dtype.itemsize


def chunks_of(pieces: Iterable[TensorPiece], tensors: Described, rank: int) -> list[PublishedChunk]:
    """Divide the pieces that ``rank`` holds into chunks: small ones are put together, large ones are cut."""
    found: list[PublishedChunk] = []
    room = 0
    for name, start, stop in pieces:
        dtype = tensors[name][0]
        for at in range(start, stop, CHUNK_NUMEL):
            piece = TensorPiece(name, at, min(at + CHUNK_NUMEL, stop))
            numel = piece.stop - piece.start
            if found and numel <= room and found[-1].dtype is dtype:
                found[-1] = PublishedChunk(dtype, (*found[-1].pieces, piece), rank)
            else:
                found.append(PublishedChunk(dtype, (piece,), rank))
                room = CHUNK_NUMEL
            room -= numel
    return found


@dataclass(frozen=True)
class PublishedLayout:
    """The tensors of a model, and the chunks that cover them, those of one rank after those of another."""

    tensors: Described
    chunks: tuple[PublishedChunk, ...]

    @cached_property
    def data(self) -> bytes:
        """The layout as a document."""
        numbers = {name: number for number, name in enumerate(self.tensors)}
        content = {
            "tensors": [[name, CODES[dtype], list(shape)] for name, (dtype, shape) in self.tensors.items()],
            "chunks": [
                [chunk.rank, [[numbers[name], start, stop] for name, start, stop in chunk.pieces]]
                for chunk in self.chunks
            ],
        }
        return seal(LAYOUT_FORMAT, content)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(chunk.numel * chunk.dtype.itemsize for chunk in self.chunks)


def max_document_nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """The most bytes of a document for a reader with ``tensors``: parsing may take twenty times as many.

    A layout has each name, dtype and shape once, and pieces; a manifest has 100 to 200 bytes for a chunk. There is at
    most one more piece and chunk for every bucket and rank than the sizes need: those are in the constant.
    """
    of_tensors = sum(6 * len(name) + 32 * own.dim() + 256 for name, own in tensors.items())
    nbytes = sum(own.numel() * own.element_size() for own in tensors.values())
    return min(2**23 + of_tensors + nbytes // 2**10, MAX_DOCUMENT_NBYTES)


def layout_path(folder: Path, digest: str) -> Path:
    return folder / f"layout-{digest}.json"


def read_layout(folder: Path, digest: str, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> PublishedLayout:
    """Read the layout whose document has ``digest``, and at most ``max_nbytes``.

    Raises:
        PublicationError: It is missing, damaged or malformed.
    """
    path = layout_path(folder, digest)
    content = unseal(path, LAYOUT_FORMAT, max_nbytes)
    with reading(path):
        tensors = {str(name): (DTYPES[code], tuple(map(_size, shape))) for name, code, shape in content["tensors"]}
        if any(prod(shape) > MAX_NUMEL for _, shape in tensors.values()) or len(tensors) != len(content["tensors"]):
            raise ValueError("tensors have names of their own and a size")
        names, chunks = list(tensors), []
        for rank, pieces in content["chunks"]:
            of_chunk = tuple(TensorPiece(names[_size(i)], _size(a), _size(b)) for i, a, b in pieces)
            chunks.append(PublishedChunk(tensors[of_chunk[0].name][0], of_chunk, _size(rank)))
        layout = PublishedLayout(tensors, tuple(chunks))
        _check_coverage(layout)
    if layout.digest != digest:
        raise PublicationError(f"{path} is damaged: its digest is not that of its name")
    return layout


def _check_coverage(layout: PublishedLayout) -> None:
    """Raise ValueError unless the pieces cover every tensor exactly once."""
    spans: dict[str, list[tuple[int, int]]] = {name: [(0, 0)] for name in layout.tensors}
    for chunk in layout.chunks:
        if not 0 < chunk.numel <= CHUNK_NUMEL or len({layout.tensors[p.name][0] for p in chunk.pieces}) != 1:
            raise ValueError(f"a chunk has at most {CHUNK_NUMEL} elements of one dtype")
        for name, start, stop in chunk.pieces:
            spans[name].append((start, stop))
    if any(a.rank > b.rank for a, b in pairwise(layout.chunks)):
        raise ValueError("chunks are ordered by rank")
    for name, (_, shape) in layout.tensors.items():
        of_tensor = sorted(spans[name])
        if any(a[1] != b[0] or b[1] <= b[0] for a, b in pairwise(of_tensor)) or of_tensor[-1][1] != prod(shape):
            raise ValueError(f"pieces must cover {name!r} exactly once")


class ChangedChunk(NamedTuple):
    """A chunk that a patch changes: its number in the layout, the bytes of its change, the digest of the result."""

    number: int
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """One publication."""

    number: int
    version: int
    """What the training calls it: a step, for example."""
    run: str
    """Tells the publisher that wrote it."""
    layout: str
    """The digest of the layout."""
    root: str
    """The digest of the digests of all chunks."""
    time: int
    """Seconds since the epoch."""
    base: int | None = None
    """The publication that the patch changes; None: there is no patch."""
    changes: tuple[ChangedChunk, ...] = ()
    """Of the patch, in the order of the layout."""
    digests: tuple[str, ...] | None = None
    """Of all chunks, if there is a snapshot."""

    @property
    def patch_nbytes(self) -> int:
        return sum(change.nbytes for change in self.changes)

    @property
    def data(self) -> bytes:
        """The manifest as a document."""
        return seal(FORMAT, vars(self))


def read_manifest(folder: Path, number: int, max_nbytes: int = MAX_DOCUMENT_NBYTES) -> Manifest:
    """Read the manifest of publication ``number``, which has at most ``max_nbytes``.

    Raises:
        PublicationError: It is missing, damaged, malformed, or of another version of the format.
    """
    path = publication_path(folder, number) / MANIFEST
    content = unseal(path, FORMAT, max_nbytes)
    with reading(path):
        changes = tuple(ChangedChunk(_size(n), _size(nbytes), _digest(d)) for n, nbytes, d in content["changes"])
        if any(a.number >= b.number for a, b in pairwise(changes)):
            raise ValueError("changes are in the order of the layout")
        base, digests = content["base"], content["digests"]
        found = Manifest(
            number=_size(content["number"]),
            version=_size(content["version"]),
            run=str(content["run"]),
            layout=_digest(content["layout"]),
            root=_digest(content["root"]),
            time=_size(content["time"]),
            base=None if base is None else _size(base),
            changes=changes,
            digests=None if digests is None else tuple(map(_digest, digests)),
        )
        if found.number != number or (found.base is None and found.digests is None):
            raise ValueError(f"it is not that of publication {number}")
    return found


def root_of(digests: Sequence[str]) -> str:
    """The digest of the whole model, from those of its chunks."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def publication_path(folder: Path, number: int) -> Path:
    return folder / f"n{number:010d}"


def patch_name(rank: int) -> str:
    return f"patch-{rank:05d}.bin"


def patch_offsets(layout: PublishedLayout, manifest: Manifest) -> Iterator[tuple[ChangedChunk, PublishedChunk, int]]:
    """Yield the changes of a patch, their chunks, and where they start in the files of the chunks' ranks.

    Raises:
        PublicationError: The patch does not fit the layout.
    """
    if manifest.changes and manifest.changes[-1].number >= len(layout.chunks):
        raise PublicationError(f"publication {manifest.number} changes a chunk that its layout does not have")
    chunks = [layout.chunks[change.number] for change in manifest.changes]
    ends = [0, *accumulate(change.nbytes for change in manifest.changes)]
    starts: dict[int, int] = {}
    for change, chunk, at in zip(manifest.changes, chunks, ends, strict=False):
        if not 0 < change.nbytes <= chunk.max_nbytes:
            raise PublicationError(
                f"publication {manifest.number} has a change of {change.nbytes} bytes for a chunk of {chunk.numel} "
                f"elements, which takes at most {chunk.max_nbytes}"
            )
        yield change, chunk, at - starts.setdefault(chunk.rank, at)


def numbers_in(folder: Path) -> list[int]:
    """The numbers of the publications in ``folder``, ascending. Other names are ignored; links are not followed."""
    try:
        with os.scandir(folder) as entries:
            named = [(NUMBERED.fullmatch(e.name), e) for e in entries]
            return sorted(int(match[1]) for match, e in named if match and e.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PublicationError(f"{folder} cannot be read: {error.strerror}") from error


def seal(form: str, content: Any) -> bytes:
    """``content`` as a JSON document with a checksum, which :func:`unseal` reads."""
    return json.dumps(
        {"format": form, "version": FORMAT_VERSION, "crc32": _checksum(content), "content": content},
        allow_nan=False,
        separators=(",", ":"),
    ).encode()


def unseal(path: Path, form: str, max_nbytes: int) -> dict[str, Any]:
    """The content of a document of :func:`seal`. Nothing of one with more than ``max_nbytes`` is read.

    Raises:
        PublicationError: It cannot be read, is damaged, or is not a document of this format and version.
    """
    with reading(path), open_own(path) as file:
        if (nbytes := os.fstat(file.fileno()).st_size) > max_nbytes:
            raise ValueError(f"it has {nbytes} bytes, for the tensors of this reader it has at most {max_nbytes}")
        document = json.loads(file.read(max_nbytes))
        if document["format"] != form:
            raise ValueError(f"it is not a {form}")
        if document["version"] != FORMAT_VERSION:
            raise PublicationError(
                f"{path} has version {document['version']!r} of the format, this library reads {FORMAT_VERSION}: "
                "publisher and subscriber must use the same release, or the older one be updated"
            )
        content = document["content"]
        if document["crc32"] != _checksum(content) or not isinstance(content, dict):
            raise ValueError("its checksum does not match")
    return content


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within the block, everything that reading ``path`` may raise becomes a PublicationError."""
    try:
        yield
    except CheckpointError as error:
        raise PublicationError(str(error)) from error
    except OSError as error:
        raise PublicationError(f"{path} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise PublicationError(f"{path} is damaged: {error}") from error


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"a size or number is expected: {str(value)[:40]}")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise ValueError(f"a digest is expected: {str(value)[:80]}")
    return value
