"""The numerics contract in pure PyTorch: the reference whose bits every kernel reproduces.

    N1  absmax is an integer maximum over ``bits & 0x7FFFFFFF`` of the float32 values of a block. At or above 0x7F800000
        (NaN, infinity): scale NaN (0x7FC0), codes 0, the block decodes to NaN. Below 0x0D800000 (2^-100): scale 0,
        decodes to +0. So nothing depends on denormal modes, and quantization never hides an overflow.
    N2  scale = RN(absmax / qmax), rounded up to bf16, at most 0x7F7F.
    N3  y = RN(x * RN(1 / scale)); code = y rounded half to even, clamped to +-qmax; no fused multiply-add.
    N4  value = RN(code * scale), clamped to the finite range of the output dtype.
    N8  A sum is d0, then + d1, ... in message order in float32, each term clamped to the finite range of float32; a
        mean is one division at the end. Sums are not clamped: an overflow of a sum stays visible.

Arrays are addressed as message i, segment s at ``i * message_stride + s * segment_stride`` elements. float64 tensors
travel as float64 in cast codecs, are summed in float64, and are rounded to float32 before block codecs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from zcomm.errors import MessageError
from zcomm.message import MessageLayout

__all__ = ["decode", "decode_sum", "decode_sum_requantize", "quantize"]

TINY_BITS = 0x0D800000
INFINITY_BITS = 0x7F800000
NAN_SCALE_BITS = 0x7FC00000
LARGEST_SCALE_BITS = 0x7F7F0000
UPPER_HALF = -0x10000  # 0xFFFF0000 as int32


def _segments(array: Tensor, layout: MessageLayout, num_messages: int, strides: tuple[int, int]) -> Tensor:
    shape = (num_messages, layout.num_segments, layout.segment_numel)
    return array.as_strided(shape, (*strides, 1), array.storage_offset())


def quantize(x: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int) -> None:
    """Write messages ``out`` uint8 [num_messages, nbytes] from the flat array ``x``."""
    values = _segments(x, layout, out.shape[0], (message_stride, segment_stride))
    out.copy_(_encode(values, layout))


def _encode(values: Tensor, layout: MessageLayout) -> Tensor:
    """Values [num_messages, num_segments, segment_numel] to messages uint8 [num_messages, nbytes]."""
    num_messages = values.shape[0]
    if layout.codec.dtype is not None:
        flat = values.to(layout.codec.dtype).reshape(-1).contiguous()
        return flat.view(torch.uint8).view(num_messages, layout.nbytes)
    padded = layout.blocks_per_segment * layout.block
    blocks = pad(values.float(), (0, padded - layout.segment_numel)).view(*values.shape[:2], -1, layout.block)
    scale_bits, codes = _quantize_blocks(blocks, layout.codec.qmax)
    scales = (scale_bits >> 16).to(torch.int16).reshape(num_messages, -1).view(torch.uint8)
    codes = codes.view(*values.shape[:2], padded)[..., : layout.segment_numel]
    packed = _pack(codes, layout.codec.bits).reshape(num_messages, -1)
    trailer = torch.tensor([layout.hash, 0], dtype=torch.uint32).view(torch.uint8).to(values.device)
    gap = layout.nbytes - layout.codes_offset - packed.shape[1] - trailer.numel()
    return torch.cat(
        [
            pad(scales, (0, layout.codes_offset - scales.shape[1])),
            pad(packed, (0, gap)),
            trailer.expand(num_messages, -1),
        ],
        dim=1,
    )


def _quantize_blocks(blocks: Tensor, qmax: int) -> tuple[Tensor, Tensor]:
    """Float32 [..., block] to the float32 bits of the scales, int32 [..., 1], and codes int8 [..., block]."""
    absmax_bits = (blocks.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    is_finite, is_tiny = absmax_bits < INFINITY_BITS, absmax_bits < TINY_BITS
    bits = _divided(absmax_bits.view(torch.float32), qmax).view(torch.int32)
    bits = ((bits + 0xFFFF) & UPPER_HALF).clamp(max=LARGEST_SCALE_BITS)
    is_normal = is_finite & ~is_tiny
    inverse = torch.where(is_normal, 1 / bits.view(torch.float32), 0.0)
    codes = (torch.where(is_normal, blocks, 0.0) * inverse).round().clamp(-qmax, qmax).to(torch.int8)
    bits = torch.where(is_tiny, 0, torch.where(is_finite, bits, NAN_SCALE_BITS))
    return bits.to(torch.int32), codes


def _divided(values: Tensor, divisor: float) -> Tensor:
    """IEEE division: by a Python number, torch multiplies with the reciprocal on CUDA."""
    return values / torch.full((1,), divisor, dtype=values.dtype, device=values.device)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Int8 codes [..., n] to bytes; two 4-bit codes a byte, the even element in the low half."""
    if bits == 8:
        return codes.contiguous().view(torch.uint8)
    codes = pad(codes, (0, codes.shape[-1] % 2)).view(torch.uint8)
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def _unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    if bits == 8:
        return packed.view(torch.int8)
    low = (packed << 4).view(torch.int8) >> 4  # arithmetic shifts: the sign comes along
    high = packed.view(torch.int8) >> 4
    return torch.stack([low, high], -1).flatten(-2)[..., :numel]


def _decoded(messages: Tensor, layout: MessageLayout) -> Tensor:
    """Messages to their exact values [num_messages, num_segments, segment_numel], in float32 or the wire's dtype."""
    shape = (messages.shape[0], layout.num_segments, layout.segment_numel)
    if layout.codec.dtype is not None:
        return messages.reshape(-1).view(layout.codec.dtype).view(shape)
    check_hashes(messages, layout)
    num_scales = layout.num_segments * layout.blocks_per_segment
    scale_bits = messages[:, : 2 * num_scales].contiguous().view(torch.int16).to(torch.int32) << 16
    scales = scale_bits.view(torch.float32).view(*shape[:2], -1, 1)
    end = layout.codes_offset + layout.num_segments * layout.segment_nbytes
    packed = messages[:, layout.codes_offset : end].contiguous().view(*shape[:2], layout.segment_nbytes)
    codes = _unpack(packed, layout.codec.bits, layout.segment_numel).float()
    padded = pad(codes, (0, layout.blocks_per_segment * layout.block - layout.segment_numel))
    values = padded.view(*shape[:2], layout.blocks_per_segment, layout.block) * scales
    return _clamped(values.flatten(2)[..., : layout.segment_numel], torch.float32)


def check_hashes(messages: Tensor, layout: MessageLayout) -> None:
    """Raise MessageError if a message is not of this layout."""
    found = messages[:, -8:-4].cpu().contiguous().view(torch.uint32).flatten().tolist()
    for index, value in enumerate(found):
        if value != layout.hash:
            raise MessageError(
                f"message {index} of {len(found)} is not what this rank expects: layout hash {value:#010x}, expected "
                f"{layout.hash:#010x} for {layout.operation}, {layout.codec.name}, block={layout.block}, "
                f"{layout.num_segments} x {layout.segment_numel} elements: sizes and formats differ between ranks"
            )


def _clamped(values: Tensor, dtype: torch.dtype) -> Tensor:
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)  # decoded values are float32
    return values.clamp(-largest, largest)  # NaN stays NaN


def decode(messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int) -> None:
    """Write the values of ``messages`` into the flat array ``out``."""
    values = _decoded(messages, layout)
    if layout.codec.is_block:
        values = _clamped(values, out.dtype)
    _segments(out, layout, messages.shape[0], (message_stride, segment_stride)).copy_(values)


def _summed(messages: Tensor, layout: MessageLayout) -> Tensor:
    values = _decoded(messages, layout)
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    total = values[0].to(wide)
    for term in values[1:]:
        total = total + term.to(wide)
    return total


def decode_sum(messages: Tensor, layout: MessageLayout, out: Tensor, segment_stride: int, divisor: float) -> None:
    """Write the sum of ``messages``, divided by ``divisor``, into ``out``: segment s at ``s * segment_stride``."""
    total = _summed(messages, layout)
    if divisor != 1:
        total = _divided(total, divisor)
    _segments(out, layout, 1, (0, segment_stride)).copy_(total.unsqueeze(0))


def decode_sum_requantize(messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout) -> None:
    """Sum ``messages``; segment s of the sum becomes message s of ``out``, which has one segment a message."""
    out.copy_(_encode(_summed(messages, layout).unsqueeze(1), out_layout))
