"""Wire formats: how an element of a tensor becomes bits in a message. One table; everything else is derived.

A *cast* codec sends a plain array of its dtype. A *block* codec sends codes, and one bf16 scale for each ``block``
elements: x ~ code * scale, with codes symmetric in [-qmax, qmax]. The format ``none`` is the cast codec of the tensor's
own dtype. The numerics contract stands in :mod:`zcomm.quant`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache

import torch

from zcomm.errors import FormatError

__all__ = ["CODECS", "FORMATS", "Codec", "Format", "codec_for", "get_format"]


@dataclass(frozen=True, slots=True)
class Codec:
    """What the kernels know of a format."""

    name: str
    number: int
    """Its id in the native kernels."""
    bits: int
    dtype: torch.dtype | None
    """Cast codecs: the dtype on the wire. Block codecs: None."""
    qmax: int = 0

    @property
    def is_block(self) -> bool:
        """Whether messages hold scales and codes, rather than a plain array."""
        return self.dtype is None

    def dtype_between(self, before: Codec) -> torch.dtype:
        """Of values decoded from ``before`` to be encoded with this codec: its own, or wide enough for exact values."""
        if self.dtype is not None:
            return self.dtype
        return torch.float64 if before.dtype == torch.float64 else torch.float32


CODECS = {
    codec.name: codec
    for codec in (
        Codec("f32", 0, 32, torch.float32),
        Codec("bf16", 1, 16, torch.bfloat16),
        Codec("fp16", 2, 16, torch.float16),
        Codec("int8", 3, 8, None, 127),
        Codec("int4", 4, 4, None, 7),
        Codec("f64", 5, 64, torch.float64),
    )
}
CODEC_OF_DTYPE = {codec.dtype: codec for codec in CODECS.values() if codec.dtype is not None}


@dataclass(frozen=True, slots=True)
class Format:
    """A wire format with its options."""

    name: str
    block: int = 0
    """Elements that share a scale; 0 for formats without scales."""

    def __post_init__(self) -> None:
        """Refuse blocks that no kernel takes."""
        if self.name not in _BLOCKS:
            close = difflib.get_close_matches(self.name, _BLOCKS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise FormatError(f"format must be one of {', '.join(_BLOCKS)}: format={self.name!r}{hint}")
        if not _BLOCKS[self.name]:
            if self.block:
                raise FormatError(f"format {self.name!r} has no blocks: block={self.block}")
        elif self.block % 2 or not 2 <= self.block <= 65536:
            raise FormatError(f"block must be even and from 2 to 65536: format={self.name!r}, block={self.block}")

    def __str__(self) -> str:
        """Its name, with the block if that is not the default."""
        return self.name if self.block == _BLOCKS[self.name] else f"{self.name}/{self.block}"


_BLOCKS = {"none": 0, "bf16": 0, "fp16": 0, "int8": 256, "int4": 128}
"""Every format's default block."""
FORMATS = {name: Format(name, block) for name, block in _BLOCKS.items()}


def get_format(format: str | Format, *, block: int | None = None) -> Format:
    """The format called ``format``, with another ``block`` if one is given.

    Raises:
        FormatError: There is no such format (the nearest name is given), or it does not take that block.
    """
    if isinstance(format, str):
        format = FORMATS.get(format) or Format(format)
    if not isinstance(format, Format):
        raise FormatError(f"format must be a name or a zcomm.Format: got {format!r}")
    return format if block is None else Format(format.name, block)


@cache
def codec_for(format: Format, dtype: torch.dtype) -> Codec:
    """The codec that ``format`` means for tensors of ``dtype``."""
    if dtype not in CODEC_OF_DTYPE:
        known = ", ".join(str(d).removeprefix("torch.") for d in CODEC_OF_DTYPE)
        raise FormatError(f"dtype must be one of {known}: format={format}, dtype={dtype}")
    return CODEC_OF_DTYPE[dtype] if format.name == "none" else CODECS[format.name]
