"""The table of codecs, which declares the wire formats: names, bits, blocks, options. All else is derived from it.

A *cast* codec sends a plain array of its dtype. A *block* codec sends codes, and a header for each ``block`` elements:
a bf16 scale, or a bf16 scale and a bf16 zero point. The format ``none`` is the cast codec of the tensor's own dtype.
For the numerics contract see :mod:`zcomm._formats.reference`.

    x ~ code * scale              int8, int4: codes symmetric in [-qmax, qmax]
    x ~ level[code] * scale       nf4: 16 levels, dense near 0;  fp8_e4m3: the levels are 8-bit floats
    x ~ zero + code * scale       int8, int4 with symmetric=False: codes in [0, 2^bits - 1]

A block codec with levels of its own has a file ``codec_<name>.py``, which declares nothing: its two functions stand in
the table. Kernels that do not have a codec leave it to the PyTorch reference.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zcomm._formats import codec_fp8_e4m3, codec_nf4
from zcomm.errors import FormatError


@dataclass(frozen=True, slots=True)
class Codec:
    """How one element is encoded; the part of a format that kernels depend on."""

    name: str
    number: int
    """Its id in the native kernels. Never used again for another codec."""
    bits: int
    dtype: torch.dtype | None = None
    """Cast codecs: the dtype on the wire. Block codecs: None."""
    block: int | None = None
    """Default block of the format of this name, 0 for a cast format; None: the codec is chosen by other means."""
    qmax: int = 0
    """Block codecs: the largest scaled value; the scale is absmax / qmax."""
    has_zero_point: bool = False
    has_options: bool = False
    """Whether the format takes ``symmetric=False``, which means the codec ``<name>_asym``, and ``rounding``."""
    widest_gap: float = 1.0
    """Block codecs: between two neighbouring levels, before the scale."""
    nearest: Callable[[Tensor], Tensor] | None = None
    """The codes of scaled values, float32 in [-qmax, qmax]; None: they are rounded to integers."""
    levels: Callable[[Tensor], Tensor] | None = None
    """The float32 levels of codes, int8 of which ``bits`` count; None: the codes are integers."""

    @property
    def is_block(self) -> bool:
        """Whether messages hold headers and codes, rather than a plain array."""
        return self.dtype is None

    @property
    def header_nbytes(self) -> int:
        """Bytes of a block's header."""
        return (4 if self.has_zero_point else 2) if self.is_block else 0

    @property
    def relative_rounding(self) -> float:
        """Block codecs: what rounding to nearest may change, over absmax of the block; without rounding of the scale.

        Half the widest gap. With a zero point the levels span at most twice absmax.
        """
        return self.widest_gap / (1 if self.has_zero_point else 2) / self.qmax

    def dtype_between(self, before: Codec) -> torch.dtype:
        """Dtype of values decoded with ``before`` and encoded again with this codec: wide enough to be exact."""
        if self.dtype is not None:
            return self.dtype
        return torch.float64 if before.dtype == torch.float64 else torch.float32


CODECS = {
    codec.name: codec
    for codec in (
        Codec("f32", 0, 32, torch.float32),
        Codec("bf16", 1, 16, torch.bfloat16, block=0),
        Codec("fp16", 2, 16, torch.float16, block=0),
        Codec("int8", 3, 8, block=256, qmax=127, has_options=True),
        Codec("int4", 4, 4, block=128, qmax=7, has_options=True),
        Codec("f64", 5, 64, torch.float64),
        Codec(
            "nf4", 6, 4, block=64, qmax=8, widest_gap=8 - 5.5625,
            nearest=codec_nf4.nearest, levels=codec_nf4.levels,
        ),
        Codec(
            "fp8_e4m3", 7, 8, block=128, qmax=448, widest_gap=32,
            nearest=codec_fp8_e4m3.nearest, levels=codec_fp8_e4m3.levels,
        ),
        Codec("int8_asym", 8, 8, qmax=255, has_zero_point=True),
        Codec("int4_asym", 9, 4, qmax=15, has_zero_point=True),
    )
}  # fmt: skip
CODEC_OF_DTYPE = {codec.dtype: codec for codec in CODECS.values() if codec.dtype is not None}
_BLOCKS = {"none": 0} | {codec.name: codec.block for codec in CODECS.values() if codec.block is not None}
"""Default block of each format; 0: a cast format."""
_WITH_OPTIONS = tuple(codec.name for codec in CODECS.values() if codec.has_options)


@dataclass(frozen=True, slots=True)
class Format:
    """A wire format with its options."""

    name: str
    block: int = 0
    """Elements per scale; 0 for cast formats."""
    symmetric: bool = True
    """False, for int8 and int4: a scale and a zero point, so that the codes span [min, max] of the block."""
    rounding: str = "nearest"
    """``"stochastic"``, for int8 and int4: randomly up or down, with the right mean; a collective then needs
    ``random=``."""
    rotation: str | None = None
    """``"hadamard"``: every full block is rotated before it is quantized and rotated back after it is decoded, which
    spreads outliers over the block. The block must be a power of two; a shorter last block is not rotated."""
    _text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise FormatError for options that no kernel supports."""
        if self.name not in _BLOCKS:
            close = difflib.get_close_matches(self.name, _BLOCKS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise FormatError(f"format must be one of {', '.join(_BLOCKS)}: format={self.name!r}{hint}")
        if not _BLOCKS[self.name]:
            if self.block:
                raise FormatError(f"format {self.name!r} has no blocks: block={self.block}")
        elif self.block % 2 or not 2 <= self.block <= 65536:
            raise FormatError(f"block must be even and from 2 to 65536: format={self.name!r}, block={self.block}")
        self._check_options()
        name = self.name if self.block == _BLOCKS[self.name] else f"{self.name}/{self.block}"
        options = ("" if self.symmetric else "asym", self.rotation or "", "stochastic" if self.is_random else "")
        object.__setattr__(self, "_text", ":".join([name, *filter(None, options)]))  # frozen

    def _check_options(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise FormatError(f"rounding must be 'nearest' or 'stochastic': rounding={self.rounding!r}")
        if self.rotation not in (None, "hadamard"):
            raise FormatError(f"rotation must be None or 'hadamard': rotation={self.rotation!r}")
        if self.name not in _WITH_OPTIONS and (not self.symmetric or self.rounding != "nearest"):
            raise FormatError(
                f"symmetric=False and rounding='stochastic' are options of {' and '.join(_WITH_OPTIONS)}: "
                f"format={self.name!r}, symmetric={self.symmetric}, rounding={self.rounding!r}"
            )
        if self.rotation is not None and (self.block & (self.block - 1) or not self.block):
            raise FormatError(
                f"rotation needs a block that is a power of two: format={self.name!r}, block={self.block}, "
                f"rotation={self.rotation!r}"
            )

    @property
    def is_random(self) -> bool:
        """Whether encoding needs random numbers."""
        return self.rounding == "stochastic"

    def __str__(self) -> str:
        """The name, with the options that are not defaults: ``int4/64:asym:hadamard:stochastic``."""
        return self._text


FORMATS = {name: Format(name, block) for name, block in _BLOCKS.items()}


def get_format(
    format: str | Format,
    *,
    block: int | None = None,
    symmetric: bool | None = None,
    rounding: str | None = None,
    rotation: str | None = None,
) -> Format:
    """The format that ``format`` names, with the given options.

    ``format`` may be a Format, a name, or what ``str()`` of a Format gives: ``"int4/64:asym:hadamard:stochastic"``.

    Raises:
        FormatError: There is no such format (the error suggests the nearest), or it does not support an option.
    """
    if isinstance(format, str):
        format = FORMATS.get(format) or _parsed(format)
    if not isinstance(format, Format):
        raise FormatError(f"format must be a name or a zcomm.Format: format={format!r}")
    if block is None and symmetric is None and rounding is None and rotation is None:
        return format
    given = {"block": block, "symmetric": symmetric, "rounding": rounding, "rotation": rotation}
    changed: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    return replace(format, **changed) if changed else format


def _parsed(text: str) -> Format:
    head, *options = text.split(":")
    name, _, block = head.partition("/")
    if block and not block.isdecimal():
        raise FormatError(f"the block after '/' must be a number: format={text!r}")
    known: dict[str, dict[str, Any]] = {
        "asym": {"symmetric": False},
        "hadamard": {"rotation": "hadamard"},
        "stochastic": {"rounding": "stochastic"},
    }
    chosen: dict[str, Any] = {}
    for option in options:
        if option not in known:
            raise FormatError(f"options after ':' must be of {', '.join(known)}: format={text!r}")
        chosen |= known[option]
    return Format(name, int(block) if block else _BLOCKS.get(name, 0), **chosen)


@cache
def codec_for(format: Format, dtype: torch.dtype) -> Codec:
    """The codec of ``format`` for tensors of ``dtype``."""
    if dtype not in CODEC_OF_DTYPE:
        known = ", ".join(str(d).removeprefix("torch.") for d in CODEC_OF_DTYPE)
        raise FormatError(f"dtype must be one of {known}: format={format}, dtype={dtype}")
    if format.name == "none":
        return CODEC_OF_DTYPE[dtype]
    return CODECS[format.name if format.symmetric else f"{format.name}_asym"]


def is_same_wire(first: Format, second: Format, dtype: torch.dtype) -> bool:
    """Whether messages in both formats are laid out alike for ``dtype``, so that one can be forwarded as the other.

    The rounding may differ: it does not change the layout.
    """
    kinds = [(codec_for(format, dtype), format.block, format.rotation) for format in (first, second)]
    return kinds[0] == kinds[1]
