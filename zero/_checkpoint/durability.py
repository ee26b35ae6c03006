"""Names and durability: which files a checkpoint consists of, and how a file comes to be whole or not at all.

    SAVE_DIR/latest                          checksum and tag of the newest complete checkpoint
    SAVE_DIR/TAG/metadata.json               what there is and where; a checkpoint is complete once this file is there
    SAVE_DIR/TAG/shard_RANK_ID.safetensors   what one rank wrote; ID is that of the save

``latest`` is one line, ``crc32=1a2b3c4d TAG``; a tag alone, written by hand or by an older release, is taken as it is.

Saving under a tag that exists writes new shards beside the old ones, replaces metadata.json, and then deletes the old
ones: at every moment one complete checkpoint is there.
"""

from __future__ import annotations

import fcntl
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
SEALED = re.compile(r"crc32=[0-9a-f]{8} (.+)", re.DOTALL)
"""What ``latest`` holds."""
SHARD = re.compile(r"shard_\d{5,}_[0-9a-f]{8}\.safetensors")


def shard_name(rank: int, save_id: str) -> str:
    """The file of one rank in one save."""
    return f"shard_{rank:05d}_{save_id}.safetensors"


def is_shard_name(name: str) -> bool:
    """Whether ``name`` is one that :func:`shard_name` gives, so a file of the checkpoint's own folder."""
    return SHARD.fullmatch(name) is not None


def check_tag(tag: str) -> str:
    """``tag``, if it is the name of a folder.

    Raises:
        CheckpointError: It is not.
    """
    if not tag or tag in (".", "..", LATEST) or any(c in tag for c in "/\\\0\n") or len(tag.encode()) > 200:
        raise CheckpointError(f"tag must be the name of a folder, of at most 200 bytes, and not 'latest': tag={tag!r}")
    return tag


def tags_in(folder: Path) -> list[str]:
    """The complete checkpoints of ``folder``, the newest last."""
    found = [(path.stat().st_mtime_ns, path.parent.name) for path in folder.glob(f"*/{METADATA}")]
    return [name for _, name in sorted(found)]


def latest_line(tag: str) -> bytes:
    """What ``latest`` holds to name ``tag``. The checksum comes first: a line that was cut off has a wrong one."""
    return f"crc32={zlib.crc32(tag.encode()):08x} {tag}".encode()


def read_latest(folder: Path) -> str | None:
    """The tag that ``latest`` names; None if there is no such file.

    Raises:
        CheckpointError: It names nothing that is a tag, is damaged, or cannot be read.
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
    sealed = SEALED.fullmatch(line.decode(errors="replace"))
    if sealed is None:
        return check_tag(line.decode(errors="replace").strip())
    if line != latest_line(sealed[1]):
        raise CheckpointError(
            f"{path} is damaged: it has not the checksum it was written with. Pass tag=, or write one into it, alone; "
            f"complete checkpoints are {tags_in(folder)[-5:]}"
        )
    return check_tag(sealed[1])


def open_own(path: Path) -> BinaryIO:
    """A file of a checkpoint for reading, unbuffered: one that stands there itself, no link to somewhere else, no pipe.

    Raises:
        CheckpointError: It is a link, or no plain file. OSError: It cannot be opened.
    """
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which could lead to any file: copy the checkpoint with its files (cp -rL)"
        )
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CheckpointError(f"{path} is no plain file, so no part of a checkpoint")
    return os.fdopen(number, "rb", buffering=0)


def make_folder(folder: Path) -> None:
    """Make ``folder``, and those above that are not there yet, durably: a new folder is a name in the one above it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else who asks, thread or process, is in here for ``folder``: saves under one tag take turns to end."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make names that were added to ``folder``, or replaced in it, durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> None:
    """Delete ``path`` if that is possible: what is left over harms nobody."""
    with suppress(OSError):
        path.unlink()


@contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, which is durable at the end; after an error it is gone.

    Raises:
        FileExistsError: There is one, which is left as it is.
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
    """A file that is ``path`` at the end, durably; after an error, or a crash, that is what was there before."""
    temporary = path.with_name(f".{path.name}.{save_id}")
    with create_file(temporary) as file:
        yield file
    try:
        temporary.replace(path)
    except OSError:
        remove_file(temporary)
        raise
    sync_folder(path.parent)


def replace_file(path: Path, data: bytes, save_id: str, check: Callable[[Path], None] | None = None) -> None:
    """Let ``path`` hold ``data``, durably; a crash leaves what was there before.

    ``check`` is given the file under its temporary name, and may raise: ``path`` stays as it was then.
    """
    with replacing(path, save_id) as file:
        file.write(data)
        if check is not None:
            file.flush()
            check(Path(file.name))


def remove_stale_shards(folder: Path, kept: set[str]) -> None:
    """Delete the shards of earlier saves under the same tag, and of saves that were cut short."""
    for path in folder.iterdir():
        is_left_over = path.name.startswith(f".{METADATA}.")
        if is_left_over or (is_shard_name(path.name) and path.name not in kept):
            remove_file(path)
