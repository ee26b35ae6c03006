"""The bytes that one rank sends in one call: where scales, codes and the trailer lie.

A message holds ``num_segments`` segments of ``segment_numel`` elements. Cast codecs: a plain array, segment after
segment. Block codecs:

    | headers, segment-major | 0 to 16 | codes, segment-major, each from a byte | 0 | hash u32 | checksum u32 |

A block's header is its bf16 scale, or its bf16 scale and its bf16 zero point.

Invariants:
    M1  Every rank computes the same ``nbytes``: no size exchange.
    M2  ``nbytes`` and the start of the codes are multiples of 16.
    M3  A block never straddles two segments; a segment's last block may be short, its missing codes are not sent.
    M4  The hash covers operation, codec, block, rotation and sizes; a message of another kind is refused, never
        misread. Nor is a shorter one: room for messages to receive has no trailers.
    M5  The checksum is 0, or with ZCOMM_CHECK=1 the CRC-32 of everything before the trailer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._formats.formats import Codec, Format, codec_for
from zcomm.errors import MessageError

ALIGN = 16
TRAILER_NBYTES = 8


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class MessageLayout:
    """Where things lie in a message of one operation."""

    operation: str
    codec: Codec
    block: int
    num_segments: int
    segment_numel: int
    is_rotated: bool = False
    """Whole blocks are Hadamard-rotated."""
    kernels: str = field(default="auto", compare=False)
    """What encodes and decodes: no part of the message, which has the same bits whatever it is."""

    @cached_property
    def numel(self) -> int:
        """Elements that the message carries."""
        return self.num_segments * self.segment_numel

    @cached_property
    def blocks_per_segment(self) -> int:
        """Headers of one segment."""
        return -(-self.segment_numel // self.block) if self.block else 0

    @cached_property
    def codes_offset(self) -> int:
        """Where the codes begin, in bytes."""
        return _round_up(self.codec.header_nbytes * self.num_segments * self.blocks_per_segment, ALIGN)

    @cached_property
    def segment_nbytes(self) -> int:
        """Bytes of the codes of one segment."""
        return -(-self.segment_numel * self.codec.bits // 8)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message."""
        codes = self.num_segments * self.segment_nbytes
        return _round_up(self.codes_offset + codes + TRAILER_NBYTES, ALIGN) if self.codec.is_block else codes

    @cached_property
    def hash(self) -> int:
        """What the trailer says of the layout."""
        text = f"{self.operation}|{self.codec.name}|{self.block}|{self.num_segments}|{self.segment_numel}"
        text += "|hadamard" if self.is_rotated else ""
        return zlib.crc32(text.encode())

    def new(self, num_messages: int, device: torch.device) -> Tensor:
        """Uninitialised room for messages, uint8 [num_messages, nbytes]."""
        return torch.empty((num_messages, self.nbytes), dtype=torch.uint8, device=device)

    def new_to_receive(self, num_messages: int, device: torch.device) -> Tensor:
        """As :meth:`new`, without trailers: what is received too short is refused, whatever the memory held before.

        Where a kernel encodes what is sent, ``expected=`` of :func:`zcomm._kernels.kernels.quantize` does it in the same launch.
        """
        messages = self.new(num_messages, device)
        if self.codec.is_block:
            clear_trailers(messages)
        return messages


@lru_cache(maxsize=4096)
def layout_of(
    operation: str,
    format: Format,
    dtype: torch.dtype,
    num_segments: int,
    segment_numel: int,
    kernels: str = "auto",
) -> MessageLayout:
    """The layout of ``operation``'s messages for tensors of ``dtype``."""
    codec = codec_for(format, dtype)
    is_rotated = format.rotation is not None
    return MessageLayout(operation, codec, format.block, num_segments, segment_numel, is_rotated, kernels)


def clear_trailers(messages: Tensor) -> None:
    """Set the trailers of a block codec's ``messages`` [num_messages, nbytes] to zero."""
    messages.view(torch.int64)[:, -1] = 0


def _checksums(messages: Tensor) -> list[int]:
    return [zlib.crc32(row[:-TRAILER_NBYTES].contiguous().numpy()) for row in messages.cpu()]


def sign(messages: Tensor, layout: MessageLayout) -> None:
    """With ZCOMM_CHECK=1, write the checksums into ``messages`` [num_messages, nbytes]."""
    if layout.codec.is_block and env.is_set("ZCOMM_CHECK"):
        sums = torch.tensor(_checksums(messages), dtype=torch.int64)
        messages[:, -4:] = sums.to(torch.uint32).view(torch.uint8).view(-1, 4).to(messages.device)


def verify(messages: Tensor, layout: MessageLayout) -> None:
    """With ZCOMM_CHECK=1, raise MessageError if a checksum does not hold."""
    if not (layout.codec.is_block and env.is_set("ZCOMM_CHECK")):
        return
    got = messages[:, -4:].cpu().contiguous().view(torch.uint32).flatten().tolist()
    for index, (expected, found) in enumerate(zip(_checksums(messages), got, strict=True)):
        if expected != found:
            raise MessageError(
                f"a message was damaged on the way: {layout.operation}, message {index} of {len(got)}, checksum of its "
                f"{layout.nbytes} bytes {expected:#010x}, sent with {found:#010x}"
            )
