"""Implement the block codecs in plain torch operations, as fast as possible: the baseline of the native kernels.

Forms of each operation:

    eager      expressions on full arrays, temporaries allocated by torch
    out        the same operations with preallocated outputs
    compiled   ``eager`` through torch.compile (on request)
    chunked    ``out`` cut by hand into chunks that stay in the cache

int8 and int4 have all forms; other codecs and options (other_torch_forms.py) have ``eager``, on full arrays and
``chunked``. Scales and codes have the bits of the wire format for finite data with blocks above 2^-100; the forms do
not handle NaN, infinity and tiny blocks. Stochastic rounding is checked with the wire format's random numbers, and
timed with torch's. Arrays are [rows, block], one row a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from other_torch_forms import decode_other, encode_other, pack_nibbles, round_at_random, scale_up, uniform_numbers
from torch import Tensor

from zcomm._formats.philox import Draw
from zcomm._formats.reference import rotate, rotate_back

__all__ = ["CODECS", "CodecSpec", "Forms", "TorchForms"]

LARGEST = torch.finfo(torch.float32).max
CHUNK_NUMEL = 65536  # a thread; float32 256 KiB: with its temporaries inside a second-level cache


@dataclass(frozen=True)
class CodecSpec:
    """A block codec: its name, default block, what its scales divide by, and its options."""

    name: str
    block: int
    qmax: int
    is_rotated: bool = False
    is_random: bool = False

    @property
    def label(self) -> str:
        """The codec and its option."""
        return self.name + (":hadamard" if self.is_rotated else "") + (":stochastic" if self.is_random else "")

    @property
    def row_nbytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block // 2 if self.name in ("int4", "nf4", "int4_asym") else self.block

    @property
    def header_numel(self) -> int:
        """Number of bf16 values in a block's header."""
        return 2 if self.name.endswith("_asym") else 1

    @property
    def is_symmetric_int(self) -> bool:
        """Whether codes are integers around 0."""
        return self.name in ("int8", "int4")

    @property
    def has_out_form(self) -> bool:
        """Whether there is a form with preallocated outputs."""
        return self.is_symmetric_int and not self.is_rotated and not self.is_random


CODECS = {
    spec.label: spec
    for spec in (
        CodecSpec("int8", 256, 127),
        CodecSpec("int4", 128, 7),
        CodecSpec("nf4", 64, 8),
        CodecSpec("fp8_e4m3", 128, 448),
        CodecSpec("int8_asym", 256, 255),
        CodecSpec("int4_asym", 128, 15),
        CodecSpec("int8", 256, 127, is_rotated=True),
        CodecSpec("int4", 128, 7, is_rotated=True),
        CodecSpec("int8", 256, 127, is_random=True),
        CodecSpec("int4", 128, 7, is_random=True),
    )
}
"""By label."""
Forms = dict[str, Callable[[], None]]
Part = tuple[Tensor, Tensor]  # headers bfloat16 [rows, header_numel], packed codes uint8 [rows, row_nbytes]


def pack(codes: Tensor, spec: CodecSpec) -> Tensor:
    """Pack int8 codes to bytes; int4: the even element of a pair in the low nibble."""
    if spec.name == "int8":
        return codes.view(torch.uint8)
    return pack_nibbles(codes)


def unpack(packed: Tensor, spec: CodecSpec) -> Tensor:
    """Unpack bytes to int8 codes."""
    codes = packed.view(torch.int8)
    if spec.name == "int8":
        return codes
    return torch.stack([(codes << 4) >> 4, codes >> 4], dim=-1).flatten(-2)


def scales_of(values: Tensor, spec: CodecSpec) -> Tensor:
    """Return the scales in float32, rounded up to bfloat16."""
    absmax = torch.linalg.vector_norm(values, torch.inf, dim=1, keepdim=True)
    return scale_up(absmax / spec.qmax)


def encode(values: Tensor, spec: CodecSpec, uniform: Tensor | None = None) -> Part:
    """Encode values of any dtype to headers and codes; stochastic rounding uses ``uniform`` or torch's numbers."""
    values = rotate(values.float()) if spec.is_rotated else values.float()
    if not spec.is_symmetric_int:
        return encode_other(values, spec.name, spec.qmax)
    scales = scales_of(values, spec)
    scaled = values * (1 / scales)
    rounded = round_at_random(scaled, spec.qmax, uniform) if spec.is_random else scaled.round()
    return scales.bfloat16(), pack(rounded.to(torch.int8), spec)


def decoded(part: Part, spec: CodecSpec) -> Tensor:
    """Decode headers and packed codes to float32 values."""
    headers, packed = part
    if not spec.is_symmetric_int:
        return decode_other(headers.float(), packed, spec.name)
    values = unpack(packed, spec) * headers.float()
    return rotate_back(values) if spec.is_rotated else values


def decode_sum(parts: list[Part], spec: CodecSpec, divisor: int) -> Tensor:
    """Return the sum of the decoded parts over ``divisor``, in float32."""
    terms = (decoded(part, spec).clamp(-LARGEST, LARGEST) for part in parts)
    total = next(terms)
    for term in terms:
        total = total + term
    return total if divisor == 1 else total / divisor


class TorchForms:
    """All forms of all operations on one codec and dtype; results are in ``part`` and ``out``."""

    def __init__(self, spec: CodecSpec, numel: int, dtype: torch.dtype, *, compiled: bool) -> None:
        """Allocate results and buffers of ``numel`` elements of ``dtype``, a multiple of the block."""
        rows = numel // spec.block
        self.spec = spec
        self.compiled = compiled
        self.part: Part = (
            torch.zeros(rows, spec.header_numel, dtype=torch.bfloat16),
            torch.zeros(rows, spec.row_nbytes, dtype=torch.uint8),
        )
        self.out = torch.zeros(rows, spec.block, dtype=dtype)
        self.chunk_rows = CHUNK_NUMEL * torch.get_num_threads() // spec.block
        self._values = torch.zeros(rows, spec.block)
        self._terms = torch.zeros(rows, spec.block)
        self._codes = torch.zeros(rows, spec.block, dtype=torch.int8)
        self._pairs = torch.zeros(2, rows, spec.block // 2, dtype=torch.int16)
        self._uniform: Tensor | None = None

    def draw(self, draw: Draw | None) -> None:
        """Round with the wire format's numbers of ``draw`` from now on; None: with torch's."""
        self._uniform = None if draw is None else uniform_numbers(self.out.numel(), draw).view_as(self.out)

    def _uniform_of(self, rows: slice) -> Tensor | None:
        return None if self._uniform is None else self._uniform[rows]

    def quantize(self, x: Tensor) -> Forms:
        """Return the forms that encode ``x`` to ``part``."""
        blocks = x.view(-1, self.spec.block)

        def on_full(encoder: Callable[[Tensor, CodecSpec, Tensor | None], Part]) -> None:
            self.part = encoder(blocks, self.spec, self._uniform)

        return self._forms(on_full, encode, lambda rows: self._encode_rows(blocks[rows], rows))

    def decode(self, messages: Tensor, divisor: int) -> Forms:
        """Return the forms that decode the sum of ``messages`` uint8 [count, nbytes] over ``divisor`` to ``out``."""
        parts = [self.split(message) for message in messages]
        dtype = self.out.dtype

        def on_full(decoder: Callable[[list[Part]], Tensor]) -> None:
            self.out = decoder(parts)

        def decoder(parts: list[Part]) -> Tensor:
            return decode_sum(parts, self.spec, divisor).to(dtype)

        return self._forms(on_full, decoder, lambda rows: self._sum_rows(parts, rows, self.out[rows], divisor))

    def requantize(self, messages: Tensor) -> Forms:
        """Return the forms that requantize the sum of ``messages`` to ``part``."""
        parts = [self.split(message) for message in messages]

        def on_full(recoder: Callable[[list[Part]], Part]) -> None:
            self.part = recoder(parts)

        def recoder(parts: list[Part]) -> Part:
            return encode(decode_sum(parts, self.spec, 1), self.spec, self._uniform)

        def recode_rows(rows: slice) -> None:
            values = self._values[: rows.stop - rows.start]
            self._sum_rows(parts, rows, values, divisor=1)
            self._encode_rows(values, rows)

        return self._forms(on_full, recoder, recode_rows)

    def _forms(
        self, on_full: Callable[..., None], function: Callable[..., Any], on_rows: Callable[[slice], None]
    ) -> Forms:
        """Return the forms: ``on_full(function)``, also compiled, and ``on_rows`` at once and chunk by chunk."""
        num_rows = len(self.out)

        def chunked() -> None:
            for start in range(0, num_rows, self.chunk_rows):
                on_rows(slice(start, min(start + self.chunk_rows, num_rows)))

        forms = {"eager": lambda: on_full(function), "chunked": chunked}
        if self.spec.has_out_form:
            forms["out"] = lambda: on_rows(slice(0, num_rows))
        if self.compiled:
            compiled = torch.compile(function)
            forms["compiled"] = lambda: on_full(compiled)
        return forms

    def split(self, message: Tensor) -> Part:
        """Return views of a message's scales and packed codes."""
        scales, packed = self.part
        offset = -(-scales.nbytes // 16) * 16
        codes = message[offset : offset + packed.nbytes]
        return message[: scales.nbytes].view(torch.bfloat16).view_as(scales), codes.view_as(packed)

    def count_differing_bytes(self, message: Tensor) -> int:
        """Count bytes of codes, and scales, in which ``message`` differs from ``part``."""
        scales, packed = self.split(message)
        differing_scales = (scales.view(torch.int16) != self.part[0].view(torch.int16)).sum()
        return int(differing_scales + (packed != self.part[1]).sum())

    def _encode_rows(self, values: Tensor, rows: slice) -> None:
        if not self.spec.has_out_form:
            self.part[0][rows], self.part[1][rows] = encode(values, self.spec, self._uniform_of(rows))
            return
        count = len(values)
        if values.dtype != torch.float32:
            values = self._values[:count].copy_(values)
        scales = scales_of(values, self.spec)
        self.part[0][rows] = scales
        scaled = torch.mul(values, 1 / scales, out=self._terms[:count]).round_()
        if self.spec.name == "int8":
            self.part[1].view(torch.int8)[rows].copy_(scaled)
            return
        pairs = self._codes[:count].copy_(scaled).view(torch.int16)
        high = torch.bitwise_right_shift(pairs, 4, out=self._pairs[0, :count]).bitwise_and_(0xF0)
        low = torch.bitwise_and(pairs, 0x0F, out=self._pairs[1, :count])
        self.part[1][rows].copy_(high.bitwise_or_(low))

    def _decode_rows(self, part: Part, rows: slice, values: Tensor) -> None:
        scales, packed = part
        codes = packed[rows].view(torch.int8)
        if self.spec.name == "int8":
            values.copy_(codes)
        else:
            pairs = values.view(len(values), -1, 2)
            pairs[..., 0].copy_((codes << 4).bitwise_right_shift_(4))
            pairs[..., 1].copy_(codes >> 4)
        values.mul_(scales[rows]).clamp_(-LARGEST, LARGEST)

    def _sum_rows(self, parts: list[Part], rows: slice, out: Tensor, divisor: int) -> None:
        if not self.spec.has_out_form:
            out.copy_(decode_sum([(headers[rows], packed[rows]) for headers, packed in parts], self.spec, divisor))
            return
        total = out if out.dtype == torch.float32 else self._values[: len(out)]
        self._decode_rows(parts[0], rows, total)
        for part in parts[1:]:
            terms = self._terms[: len(out)]
            self._decode_rows(part, rows, terms)
            total.add_(terms)
        if divisor != 1:
            total.div_(divisor)
        if total is not out:
            out.copy_(total)
