"""Convert zcomm's message layouts and random draws into arguments of the kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from . import KINDS

__all__ = ["DrawLike", "Encoding", "Layout", "encoding_of", "random_of", "signed", "typed"]


class CodecLike(Protocol):
    """The attributes of a :class:`zcomm._formats.formats.Codec` that are used here."""

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def qmax(self) -> int: ...
    @property
    def header_nbytes(self) -> int: ...


class Layout(Protocol):
    """The attributes of a :class:`zcomm._formats.message.MessageLayout` that are used here."""

    def __hash__(self) -> int: ...

    @property
    def codec(self) -> CodecLike: ...
    @property
    def block(self) -> int: ...
    @property
    def is_rotated(self) -> bool: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def segment_numel(self) -> int: ...
    @property
    def segment_nbytes(self) -> int: ...
    @property
    def codes_offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def hash(self) -> int: ...


class DrawLike(Protocol):
    """The attributes of a :class:`zcomm._formats.philox.Draw`."""

    @property
    def seed(self) -> int: ...
    @property
    def tensor(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def hop(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def first(self) -> int: ...


class Encoding(NamedTuple):
    """A layout as kernel arguments."""

    kind: str
    qmax: int
    block: int
    shape: tuple[int, int, int, int, int, int]
    """num_segments, segment_numel, pitch, segment_nbytes, codes_offset, layout_hash."""


CAST_BLOCK = 1024
"""Cast codecs: the width of a row of a tile."""


@lru_cache(maxsize=4096)
def encoding_of(layout: Layout) -> Encoding:
    """The layout as kernel arguments, cached."""
    kind = KINDS[layout.codec.name]
    pitch = layout.nbytes if layout.codec.dtype is None else layout.num_segments * layout.segment_numel
    shape = (
        layout.num_segments, layout.segment_numel, pitch, layout.segment_nbytes, layout.codes_offset,
        signed(layout.hash),
    )  # fmt: skip
    return Encoding(kind, layout.codec.qmax, layout.block or CAST_BLOCK, shape)


def signed(word: int) -> int:
    """The low 32 bits as an int32: a kernel argument's type must not depend on its value."""
    return ((word + 2**31) & 0xFFFFFFFF) - 2**31


def typed(messages: Tensor, layout: Layout) -> Tensor:
    """Messages as the kernels take them: bytes, or elements in a cast codec's dtype."""
    if layout.codec.dtype is not None:
        return messages.view(-1).view(layout.codec.dtype)
    if messages.data_ptr() % 16:
        raise ValueError(f"messages must begin at a multiple of 16 bytes: address {messages.data_ptr():#x}")
    return messages


def random_of(draw: DrawLike | None, layout: Layout, strides: tuple[int, int]) -> tuple[tuple[int, ...], str]:
    """Seed, tensor, step, hop, rank, first; and how the kernel draws: "", "elements" or "quads"."""
    if draw is None:
        return (0, 0, 0, 0, 0, 0), ""
    words = tuple(signed(word) for word in (draw.seed, draw.tensor, draw.step, draw.hop, draw.rank))
    is_aligned = not any(number % 4 for number in (draw.first, *strides, layout.block))
    return (*words, draw.first), "quads" if is_aligned else "elements"
