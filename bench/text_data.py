"""Load real text as bytes, split into training and held-out parts.

    files, by a hash of their names -> the first ``max_bytes`` bytes -> [ training ... | held-out, the last 5 % ]

Without a path the text is the source code of Python's standard library, which every machine has. The order by hash
mixes the folders, so that the held-out tail is of the same kind as the training text.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_PART = 20  # one byte of this many is held out
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3"}


@dataclass(frozen=True)
class Text:
    """Training and held-out bytes, uint8 [numel] each."""

    source: str
    train: Tensor
    held_out: Tensor


def load_text(path: Path | None, *, max_bytes: int, seq_length: int) -> Text:
    """Read a file, a folder, or (None) the standard library's ``.py`` files.

    Raises:
        FileNotFoundError: There is no such path.
        ValueError: The text is too short to cut one held-out window from it.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(_files_below(root, "*.py" if path is None else "*"), key=lambda f: _name_hash(f, root))
    else:
        raise FileNotFoundError(f"no such file or folder: {root}")
    content = _read_up_to(files, max_bytes)
    split = len(content) - len(content) // HELD_OUT_PART
    if len(content) - split <= seq_length:
        raise ValueError(
            f"the text must be longer than {HELD_OUT_PART} x (seq_length + 1) bytes: bytes={len(content)}, "
            f"seq_length={seq_length}"
        )
    numbers = torch.frombuffer(content, dtype=torch.uint8)
    source = "Python standard library sources" if path is None else path.name
    return Text(source, numbers[:split], numbers[split:])


def training_batch(text: Text, *, step: int, seed: int, batch_size: int, seq_length: int) -> tuple[Tensor, Tensor]:
    """Return int64 tokens and targets [batch_size, seq_length]; they depend on the arguments alone, not on ranks."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(text.train.numel() - seq_length, (batch_size,), generator=generator)
    return _windows(text.train, starts, seq_length)


def held_out_windows(text: Text, *, num_windows: int, seq_length: int) -> tuple[Tensor, Tensor]:
    """Return int64 tokens and targets [num_windows, seq_length], spread evenly over the held-out bytes."""
    starts = torch.linspace(0, text.held_out.numel() - seq_length - 1, num_windows).long()
    return _windows(text.held_out, starts, seq_length)


def _files_below(root: Path, pattern: str) -> list[Path]:
    found = (f for f in root.rglob(pattern) if f.is_file())
    return [f for f in found if not SKIPPED_FOLDERS & set(f.relative_to(root).parts[:-1])]


def _name_hash(path: Path, root: Path) -> bytes:
    return hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()


def _read_up_to(files: list[Path], max_bytes: int) -> bytearray:
    content = bytearray()
    for file in files:
        content += file.read_bytes()
        if len(content) >= max_bytes:
            break
    return content[:max_bytes]


def _windows(numbers: Tensor, starts: Tensor, seq_length: int) -> tuple[Tensor, Tensor]:
    windows = numbers[starts[:, None] + torch.arange(seq_length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
