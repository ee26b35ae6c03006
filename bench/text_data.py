"""Real text as bytes: the Python standard library's own sources, which every machine has, or a file or folder."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "load_corpus"]

HELD_OUT_EVERY = 20  # one file in twenty is never trained on
SKIPPED = {"test", "tests", "site-packages", "__pycache__", "idlelib", "lib2to3", "turtledemo"}


class Corpus:
    """Training and held-out text, uint8, and batches cut from them by a seed: the same for every world size."""

    def __init__(self, train: bytes, held_out: bytes, seq_length: int) -> None:
        self.train = torch.frombuffer(bytearray(train), dtype=torch.uint8)
        self.held_out = torch.frombuffer(bytearray(held_out), dtype=torch.uint8)
        self.seq_length = seq_length
        for name, text in (("training", self.train), ("held-out", self.held_out)):
            if text.numel() < seq_length + 2:
                raise ValueError(f"{name} text must be longer than seq_length={seq_length}: {text.numel()} bytes")

    def batch(self, step: int, seed: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Tokens and the bytes that follow them, int64 [batch_size, seq_length], for one step of training."""
        return self._cut(self.train, seed * 1_000_003 + step, batch_size)

    def held_out_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Always the same held-out text, int64 [batch_size, seq_length]."""
        return self._cut(self.held_out, 0, batch_size)

    def _cut(self, text: Tensor, seed: int, batch_size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(text.numel() - self.seq_length - 1, (batch_size, 1), generator=generator)
        windows = text[starts + torch.arange(self.seq_length + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def load_corpus(path: Path | None, seq_length: int, max_nbytes: int = 6_000_000) -> Corpus:
    """Read ``path`` (a file, or every text file under a folder), or the standard library; at most ``max_nbytes``.

    A folder is held out by file, a single file by its last tenth.
    """
    if path is not None and path.is_file():
        text = path.read_bytes()[:max_nbytes]
        cut = len(text) * 9 // 10
        return Corpus(text[:cut], text[cut:], seq_length)
    root = path if path is not None else Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        file
        for file in root.rglob("*.py" if path is None else "*")
        if file.is_file() and not SKIPPED & set(file.relative_to(root).parts)
    )
    if not files:
        raise ValueError(f"there must be a file to train on: nothing under {root}")
    random.Random(0).shuffle(files)  # sorted first, so the order is the same on every rank
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, file in enumerate(files):
        text = file.read_bytes()
        parts[index % HELD_OUT_EVERY == 0].append(text)
        total += len(text)
        if total > max_nbytes:
            break
    return Corpus(b"\n".join(parts[0]), b"\n".join(parts[1]), seq_length)
