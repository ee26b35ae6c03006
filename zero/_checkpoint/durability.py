"""The files of a checkpoint, and how they become durable: fsync, atomic rename, and the commit by ``latest``.

    SAVE_DIR/latest                          checksum and tag of the newest complete checkpoint
    SAVE_DIR/TAG/metadata.json               the index; a checkpoint is complete once this file exists
    SAVE_DIR/TAG/shard_RANK_ID.safetensors   what one rank wrote; ID is that of the save

``latest`` is one line, ``crc32=1a2b3c4d TAG``. A tag without a checksum, written by hand or by an older release, is
accepted.

Saving under a tag that exists writes new shards beside the old ones, replaces metadata.json, and then deletes the old
shards, so that a complete checkpoint exists at every moment. A rename is durable only after an fsync of the folder; the
order of these calls is tested by tests/zero/test_checkpoint_power.py, which replays them on a disk that loses power.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from zero.errors import CheckpointError

LATEST = "latest"
METADATA = "metadata.json"
CHECKSUMMED = re.compile(r"crc32=[0-9a-f]{8} (.+)", re.DOTALL)
"""The content of ``latest``, if it has a checksum."""
SHARD = re.compile(r"shard_\d{5,}_[0-9a-f]{8}\.safetensors")


def shard_name(rank: int, save_id: str) -> str:
    """The file of one rank in one save."""
    return f"shard_{rank:05d}_{save_id}.safetensors"


def is_shard_name(name: str) -> bool:
    """Whether :func:`shard_name` could have returned ``name``: such a file is in the checkpoint's own folder."""
    return SHARD.fullmatch(name) is not None


def check_tag(tag: str) -> str:
    """Return ``tag`` if it can be the name of a folder, else raise CheckpointError."""
    if not tag or tag in (".", "..", LATEST) or any(c in tag for c in "/\\\0\n") or len(tag.encode()) > 200:
        raise CheckpointError(f"tag must be the name of a folder, of at most 200 bytes, and not 'latest': tag={tag!r}")
    return tag


def tags_in(folder: Path) -> list[str]:
    """The tags of the complete checkpoints in ``folder``, the newest last."""
    found = [(path.stat().st_mtime_ns, path.parent.name) for path in folder.glob(f"*/{METADATA}")]
    return [name for _, name in sorted(found)]


def latest_line(tag: str) -> bytes:
    """The content of ``latest`` for ``tag``. The checksum comes first, so that it detects a truncated line."""
    return f"crc32={zlib.crc32(tag.encode()):08x} {tag}".encode()


def read_latest(folder: Path) -> str | None:
    """Return the tag that ``latest`` names, or None if there is no such file.

    Raises:
        CheckpointError: The file cannot be read, its checksum is wrong, or what it names is not a valid tag.
    """
    path = folder / LATEST
    try:
        with open_own(path) as file:
            line = file.read(1000)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    line = line.rstrip(b"\n")
    sealed = CHECKSUMMED.fullmatch(line.decode(errors="replace"))
    if sealed is None:
        return check_tag(line.decode(errors="replace").strip())
    if line != latest_line(sealed[1]):
        raise CheckpointError(
            f"{path} is damaged: checksum mismatch. Pass tag=, or write a tag into the file, alone; complete "
            f"checkpoints are {tags_in(folder)[-5:]}"
        )
    return check_tag(sealed[1])


def open_own(path: Path) -> BinaryIO:
    """Open a file of a checkpoint for reading, unbuffered. Symbolic links and pipes are refused.

    A checkpoint from somebody else could otherwise make this process read any file, or hang on a pipe.

    Raises:
        CheckpointError: The path is a link, or no regular file.
        OSError: The file cannot be opened.
    """
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which could lead to any file: copy the checkpoint with its files (cp -rL)"
        )
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CheckpointError(f"{path} must be a regular file to be part of a checkpoint")
    return os.fdopen(number, "rb", buffering=0)


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # A new folder is an entry of its parent. Without an fsync of the parent, a power failure loses the folder with all
    # that was synced inside it.
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make entries that were added to ``folder``, or renamed in it, durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> None:
    """Delete ``path`` if possible. A leftover file costs disk space and is never read."""
    with suppress(OSError):
        path.unlink()


@contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """Create a file whose content is durable when the block ends; after an error the file is deleted.

    Its name is durable only after :func:`sync_folder`.

    Raises:
        FileExistsError: The file exists; it is left unchanged.
    """
    with path.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            remove_file(path)
            raise


@contextmanager
def replacing(path: Path, save_id: str) -> Iterator[BinaryIO]:
    """Write a file that replaces ``path``, durably, when the block ends; an error or crash leaves the old file."""
    temporary = path.with_name(f".{path.name}.{save_id}")
    with create_file(temporary) as file:
        yield file
    # The content is synced before the rename: else a crash could leave the new name with an empty file.
    try:
        temporary.replace(path)
    except OSError:
        remove_file(temporary)
        raise
    sync_folder(path.parent)


def replace_file(path: Path, data: bytes, save_id: str, check: Callable[[Path], None] | None = None) -> None:
    """Replace the content of ``path`` by ``data``, durably; a crash leaves the old content.

    ``check`` is called with the temporary file before the rename. If it raises, ``path`` is unchanged.
    """
    with replacing(path, save_id) as file:
        file.write(data)
        if check is not None:
            file.flush()  # check reads the file by its name
            check(Path(file.name))


def remove_stale_shards(folder: Path, kept: set[str]) -> None:
    """Delete the shards of earlier saves under the same tag, and of interrupted saves.

    Only after metadata.json is durable: until then the old metadata, which refers to the old shards, may come back.
    """
    for path in folder.iterdir():
        is_left_over = path.name.startswith(f".{METADATA}.")
        if is_left_over or (is_shard_name(path.name) and path.name not in kept):
            remove_file(path)
