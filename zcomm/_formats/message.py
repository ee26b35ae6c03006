"""Message layout: where headers, codes and the trailer lie in the bytes that one rank sends in one call.

A message holds ``num_segments`` segments of ``segment_numel`` elements. Cast codecs: a plain array, segment after
segment. Block codecs:

    | headers, segment-major | 0 to 16 | codes, segment-major, each from a byte | 0 | hash u32 | checksum u32 |

A block's header is its bf16 scale, or its bf16 scale and its bf16 zero point.

Invariants:
    M1  Every rank computes the same ``nbytes``, so no sizes are exchanged.
    M2  ``nbytes`` and the start of the codes are multiples of 16: kernels load aligned words.
    M3  A block never straddles two segments. A segment's last block may be short; its missing codes are not sent.
    M4  The hash covers operation, codec, block, rotation and sizes: a message of another layout is refused, never
        misread. Receive buffers have no trailers, so a message that is too short is refused, too.
    M5  The checksum is 0, or with ZCOMM_CHECK=1 the CRC-32 of everything before the trailer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._formats.formats import Codec, Format, codec_for
from zcomm.errors import MessageError

ALIGN = 16
TRAILER_NBYTES = 8


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class MessageInfo(NamedTuple):
    """What the traffic counters know about a message."""

    operation: str
    format: str
    numel: int


@dataclass(frozen=True)
class MessageLayout:
    """Sizes and offsets of one operation's messages. The same on every rank."""

    operation: str
    codec: Codec
    block: int
    num_segments: int
    segment_numel: int
    is_rotated: bool = False
    """Full blocks are Hadamard-rotated."""
    kernels: str = field(default="auto", compare=False)
    """Which kernels encode and decode. Not compared: the bits are the same with all of them."""
    format: str = field(default="", compare=False)

    @cached_property
    def numel(self) -> int:
        return self.num_segments * self.segment_numel

    @cached_property
    def info(self) -> MessageInfo:
        return MessageInfo(self.operation, self.format, self.numel)

    @cached_property
    def blocks_per_segment(self) -> int:
        return -(-self.segment_numel // self.block) if self.block else 0

    @cached_property
    def codes_offset(self) -> int:
        """Byte offset of the codes."""
        return _round_up(self.codec.header_nbytes * self.num_segments * self.blocks_per_segment, ALIGN)

    @cached_property
    def segment_nbytes(self) -> int:
        """Bytes of the codes of one segment."""
        return -(-self.segment_numel * self.codec.bits // 8)

    @cached_property
    def nbytes(self) -> int:
        codes = self.num_segments * self.segment_nbytes
        return _round_up(self.codes_offset + codes + TRAILER_NBYTES, ALIGN) if self.codec.is_block else codes

    @cached_property
    def hash(self) -> int:
        """The layout's hash in the trailer (M4)."""
        text = f"{self.operation}|{self.codec.name}|{self.block}|{self.num_segments}|{self.segment_numel}"
        text += "|hadamard" if self.is_rotated else ""
        return zlib.crc32(text.encode())

    def new(self, num_messages: int, device: torch.device) -> Tensor:
        """An uninitialized buffer for messages, uint8 [num_messages, nbytes]."""
        return torch.empty((num_messages, self.nbytes), dtype=torch.uint8, device=device)

    def new_to_receive(self, num_messages: int, device: torch.device) -> Tensor:
        """A receive buffer like :meth:`new`, with its trailers cleared.

        Uninitialized memory may hold the trailer of an earlier message of this layout; a message that arrives too short
        would then pass as valid (M4). Where a kernel encodes what is sent, the argument ``expected=`` of
        :func:`zcomm._kernels.kernels.quantize` clears them in the same launch.
        """
        messages = self.new(num_messages, device)
        if self.codec.is_block:
            clear_trailers(messages)
        return messages


@lru_cache(maxsize=4096)
def layout_of(
    operation: str, format: Format, dtype: torch.dtype, num_segments: int, segment_numel: int, kernels: str = "auto"
) -> MessageLayout:
    """The layout of ``operation``'s messages for tensors of ``dtype``."""
    codec = codec_for(format, dtype)
    is_rotated = format.rotation is not None
    return MessageLayout(operation, codec, format.block, num_segments, segment_numel, is_rotated, kernels, str(format))


def clear_trailers(messages: Tensor) -> None:
    """Zero the trailers of ``messages`` [num_messages, nbytes] of a block codec."""
    num_messages, nbytes = messages.shape
    first = messages.storage_offset() + nbytes - TRAILER_NBYTES
    messages.as_strided((num_messages, TRAILER_NBYTES), (messages.stride(0), 1), first).zero_()


def _checksums(messages: Tensor) -> list[int]:
    return [zlib.crc32(row[:-TRAILER_NBYTES].contiguous().numpy()) for row in messages.cpu()]


def sign(messages: Tensor, layout: MessageLayout) -> None:
    """With ZCOMM_CHECK=1, write the checksums into ``messages`` [num_messages, nbytes]."""
    if layout.codec.is_block and env.is_set("ZCOMM_CHECK"):
        sums = torch.tensor(_checksums(messages), dtype=torch.int64)
        messages[:, -4:] = sums.to(torch.uint32).view(torch.uint8).view(-1, 4).to(messages.device)


def verify(messages: Tensor, layout: MessageLayout) -> None:
    """With ZCOMM_CHECK=1, raise MessageError on a checksum mismatch."""
    if not (layout.codec.is_block and env.is_set("ZCOMM_CHECK")):
        return
    sent = messages[:, -4:].cpu().contiguous().view(torch.uint32).flatten().tolist()
    for index, (found, expected) in enumerate(zip(_checksums(messages), sent, strict=True)):
        if expected != found:
            raise MessageError(
                f"a message was damaged on the way: checksum mismatch, operation={layout.operation}, message {index} "
                f"of {len(sent)}, nbytes={layout.nbytes}, expected={expected:#010x}, got={found:#010x}"
            )
