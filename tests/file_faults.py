"""Injects faults into an open file of the library, and removes them again."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zero._storage.file_store import StoredFile

PAGE = 4096


def _descriptor(file: StoredFile) -> int:
    """The file descriptor of the store, which the library does not expose."""
    for entry in Path("/proc/self/fd").iterdir():
        if os.path.realpath(entry) == str(file.path):
            return int(entry.name)
    raise AssertionError(file.path)


@contextmanager
def _instead(file: StoredFile, path: str, flags: int = os.O_RDWR) -> Iterator[None]:
    """Replace the store's open file by another one."""
    number = _descriptor(file)
    kept, other = os.dup(number), os.open(path, flags)
    os.dup2(other, number, inheritable=False)
    try:
        yield
    finally:
        os.dup2(kept, number, inheritable=False)
        os.close(kept)
        os.close(other)


@contextmanager
def read_only(file: StoredFile) -> Iterator[None]:
    with _instead(file, str(file.path), os.O_RDONLY | os.O_DIRECT):
        yield


@contextmanager
def full_device(file: StoredFile) -> Iterator[None]:
    with _instead(file, "/dev/full"):
        yield


@contextmanager
def empty_device(file: StoredFile) -> Iterator[None]:
    with _instead(file, "/dev/zero"):
        yield


@contextmanager
def closed(file: StoredFile) -> Iterator[None]:
    number = _descriptor(file)
    kept = os.dup(number)
    os.close(number)
    try:
        yield
    finally:
        os.dup2(kept, number, inheritable=False)
        os.close(kept)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Limit file sizes, also where SIGXFSZ would end the process because LLVM (Triton) has installed its handler."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN if handler is None else handler)


@contextmanager
def small_limit(file: StoredFile) -> Iterator[None]:
    """Fail writes beyond 3 pages of data; earlier pages are written."""
    with file_size_limit(4 * PAGE):
        yield


@contextmanager
def cut_short(file: StoredFile) -> Iterator[None]:
    length = file.path.stat().st_size
    os.truncate(file.path, 5 * PAGE)
    yield
    os.truncate(file.path, length)


@contextmanager
def flipped(file: StoredFile) -> Iterator[None]:
    flip(file, 2 * PAGE + 100)
    yield


@contextmanager
def lost(file: StoredFile) -> Iterator[None]:
    """Discard what is written: it never reaches the file."""
    before = file.path.read_bytes()
    yield
    number = os.open(file.path, os.O_RDWR)
    os.pwrite(number, before, 0)
    os.close(number)


def flip(file: StoredFile, at: int) -> None:
    """Flip one bit of a byte of the data."""
    number = os.open(file.path, os.O_RDWR)
    (byte,) = os.pread(number, 1, PAGE + at)
    os.pwrite(number, bytes([byte ^ 4]), PAGE + at)
    os.close(number)


Fault = Callable[[StoredFile], "contextmanager[None]"]
FAULTS = [read_only, full_device, empty_device, closed, small_limit, cut_short, flipped, lost]
