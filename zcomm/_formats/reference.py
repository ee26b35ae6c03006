"""The numerics contract in pure PyTorch: the reference whose bits every kernel reproduces.

    N1  absmax is an integer maximum over ``bits & 0x7FFFFFFF`` of the float32 values of a block. At or above 0x7F800000
        (NaN, infinity): scale NaN (0x7FC0), codes 0, and the block decodes to NaN. Below 0x0D800000 (2^-100): scale 0,
        and the block decodes to +0. So nothing depends on denormal modes, and quantization never hides an overflow.
    N2  scale = RN(absmax / qmax), rounded up to bf16, at most 0x7F7F.
    N3  y = RN(x * RN(1 / scale)); code = y rounded half to even, clamped to +-qmax; no fused multiply-add.
    N4  value = RN(code * scale), clamped to the finite range of the output dtype.
    N5  nf4: 16 levels in bf16, qmax 8; code = how many float32 midpoints between levels are below y (ties go down);
        value = RN(level * scale). fp8_e4m3: qmax 448; code = y rounded to e4m3 by integer operations, half to even,
        never a negative zero. A block with a NaN or infinity has codes 0 in every codec.
    N6  Stochastic rounding: with m = |y| and f = floor(m), up iff u < (m - f) * 2^24, where u is a random number of
        :mod:`zcomm._formats.philox`.
    N7  Rotation: before N1, full blocks of 2^k elements pass through butterflies (a + b, a - b) of stride 1, 2, 4 ...
        in float32. After N4 they pass through the same again, times 2^-k. A short last block is not rotated. If a
        butterfly overflows, the block decodes to NaN.
    N9  With a zero point: x clamped to +-2^126; zero = min rounded down to bf16, +0 below 2^-100; scale =
        RN(RN(max - zero) / qmax) rounded up to bf16, 0 if RN(max - zero) < 2^-100; y = RN(RN(x - zero) *
        RN(1 / scale)); code = y rounded, clamped to [0, qmax]; value = RN(zero + code * scale), whose product is exact.
    N8  A sum is d0 + d1 + ... in message order, in float32, each term clamped to the finite range of float32. A mean
        is one division at the end (see Route.divisor_inside for fp16). Sums are not clamped: an overflow of a sum
        stays visible.
    N10 Residual r (float32, decoded from int8 blocks of 256 by N1-N4): u = RN(x + RN(beta * r)), the message is Q(u),
        and the new residual is Q8(RN(u - decoded(message))), rounded to nearest. beta is a float32. Blocks start at
        multiples of 256 of a row; a block with a value that is not finite keeps its old scale and codes.
    N11 A delta is Q(RN(new - held)). Every rank that holds a copy, the sender too, then holds RN(RN(held + decoded)),
        rounded to float32 and then to the dtype of the copy.

Arrays are addressed as message i, segment s at ``i * message_stride + s * segment_stride`` elements. float64 tensors
travel as float64 in cast codecs, are summed in float64, and are rounded to float32 before block codecs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from zcomm._formats.blocks import clamped, decode_blocks, divided, encode_blocks
from zcomm._formats.message import MessageLayout
from zcomm._formats.philox import Draw, uniform24
from zcomm.errors import MessageError


def rotate(blocks: Tensor) -> Tensor:
    """Float32 [..., 2^k] times the Hadamard matrix of order 2^k, not normalized."""
    size, stride = blocks.shape[-1], 1
    while stride < size:
        pairs = blocks.reshape(*blocks.shape[:-1], size // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        blocks = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    return blocks


def rotate_back(blocks: Tensor) -> Tensor:
    """The inverse of :func:`rotate`: the same butterflies, then times 2^-k."""
    return rotate(blocks) * (1.0 / blocks.shape[-1])


def _segments(array: Tensor, layout: MessageLayout, num_messages: int, strides: tuple[int, int]) -> Tensor:
    shape = (num_messages, layout.num_segments, layout.segment_numel)
    return array.as_strided(shape, (*strides, 1), array.storage_offset())


def quantize(
    x: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int, draw: Draw | None = None
) -> None:
    """Write messages ``out`` uint8 [num_messages, nbytes] from the flat array ``x``. ``draw``: round stochastically."""
    values = _segments(x, layout, out.shape[0], (message_stride, segment_stride))
    out.copy_(_encode(values, layout, _uniform(values, (message_stride, segment_stride, 1), draw)))


def _uniform(values: Tensor, strides: tuple[int, ...], draw: Draw | None) -> Tensor | None:
    """The random number of each of ``values``, by its position in memory."""
    if draw is None:
        return None
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    for length, stride in zip(values.shape, strides, strict=True):
        index = index.unsqueeze(-1) + torch.arange(length, device=values.device) * stride
    return uniform24(index, draw)


def _encode(values: Tensor, layout: MessageLayout, uniform: Tensor | None = None) -> Tensor:
    """Encode [num_messages, num_segments, segment_numel] as messages uint8 [num_messages, nbytes]."""
    num_messages = values.shape[0]
    if layout.codec.dtype is not None:
        flat = values.to(layout.codec.dtype).reshape(-1).contiguous()
        return flat.view(torch.uint8).view(num_messages, layout.nbytes)
    blocks = _rotated(_as_blocks(values.float(), layout), layout, rotate)
    headers, codes = encode_blocks(blocks, layout.codec, None if uniform is None else _as_blocks(uniform, layout))
    headers = headers.squeeze(-1) if layout.codec.has_zero_point else headers.squeeze(-1).to(torch.int16)
    headers = headers.contiguous().view(torch.uint8).reshape(num_messages, -1)
    codes = codes.flatten(-2)[..., : layout.segment_numel]
    packed = _pack(codes, layout.codec.bits).reshape(num_messages, -1)
    trailer = torch.tensor([layout.hash, 0], dtype=torch.uint32).view(torch.uint8).to(values.device)
    gap = layout.nbytes - layout.codes_offset - packed.shape[1] - trailer.numel()
    headers, packed = pad(headers, (0, layout.codes_offset - headers.shape[1])), pad(packed, (0, gap))
    return torch.cat([headers, packed, trailer.expand(num_messages, -1)], dim=1)


def _as_blocks(values: Tensor, layout: MessageLayout) -> Tensor:
    """[..., segment_numel] to [..., blocks_per_segment, block]; a short last block is padded with the last element.

    Padding with it, not with 0, leaves absmax, minimum and maximum of the block as they are.
    """
    missing = layout.blocks_per_segment * layout.block - layout.segment_numel
    last = values[..., -1:].expand(*values.shape[:-1], missing if values.shape[-1] else 0)
    return torch.cat([values, last], -1).view(*values.shape[:-1], layout.blocks_per_segment, layout.block)


def _rotated(blocks: Tensor, layout: MessageLayout, rotation: Callable[[Tensor], Tensor]) -> Tensor:
    """Rotate the full blocks if the layout says so, and leave a short last one."""
    if not layout.is_rotated:
        return blocks
    num_whole = layout.segment_numel // layout.block
    return torch.cat([rotation(blocks[..., :num_whole, :]), blocks[..., num_whole:, :]], dim=-2)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Int8 codes [..., n] to bytes; two 4-bit codes per byte, the even element in the low half."""
    if bits == 8:
        return codes.contiguous().view(torch.uint8)
    codes = pad(codes, (0, codes.shape[-1] % 2)).view(torch.uint8)
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def _unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    if bits == 8:
        return packed.view(torch.int8)
    low = (packed << 4).view(torch.int8) >> 4  # arithmetic shifts extend the sign
    high = packed.view(torch.int8) >> 4
    return torch.stack([low, high], -1).flatten(-2)[..., :numel]


def _decoded(messages: Tensor, layout: MessageLayout) -> Tensor:
    """The values of messages [num_messages, num_segments, segment_numel], in float32 or a cast codec's dtype."""
    shape = (messages.shape[0], layout.num_segments, layout.segment_numel)
    codec = layout.codec
    if codec.dtype is not None:
        return messages.reshape(-1).view(codec.dtype).view(shape)
    check_hashes(messages, layout)
    header_nbytes = layout.num_segments * layout.blocks_per_segment * codec.header_nbytes
    wire_dtype = torch.int32 if codec.has_zero_point else torch.int16
    headers = messages[:, :header_nbytes].contiguous().view(wire_dtype).to(torch.int32).view(*shape[:2], -1, 1)
    end = layout.codes_offset + layout.num_segments * layout.segment_nbytes
    packed = messages[:, layout.codes_offset : end].contiguous().view(*shape[:2], layout.segment_nbytes)
    codes = _as_blocks(_unpack(packed, codec.bits, layout.segment_numel), layout)
    values = _rotated(decode_blocks(headers, codes, codec), layout, rotate_back)
    return clamped(values.flatten(2)[..., : layout.segment_numel], torch.float32)


def check_hashes(messages: Tensor, layout: MessageLayout) -> None:
    """Raise MessageError if a message is not of this layout."""
    found = messages[:, -8:-4].cpu().contiguous().view(torch.uint32).flatten().tolist()
    for index, value in enumerate(found):
        if value != layout.hash:
            raise MessageError(
                f"message {index} of {len(found)} has another layout than this rank expects: hash={value:#010x}, "
                f"expected={layout.hash:#010x} for {layout.operation}, {layout.codec.name}, block={layout.block}, "
                f"{layout.num_segments} x {layout.segment_numel} elements: pass the same sizes and formats on all ranks"
            )


def decode(messages: Tensor, layout: MessageLayout, out: Tensor, message_stride: int, segment_stride: int) -> None:
    """Decode ``messages`` into the flat array ``out``."""
    values = _decoded(messages, layout)
    if layout.codec.is_block:
        values = clamped(values, out.dtype)
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
        total = divided(total, divisor)
    _segments(out, layout, 1, (0, segment_stride)).copy_(total.unsqueeze(0))


def decode_sum_requantize(
    messages: Tensor, layout: MessageLayout, out: Tensor, out_layout: MessageLayout, draw: Draw | None = None
) -> None:
    """Sum ``messages``; segment s of the sum becomes message s of ``out``, which has one segment a message."""
    total = _summed(messages, layout)
    uniform = _uniform(total, (layout.segment_numel, 1), draw)
    out.copy_(_encode(total.unsqueeze(1), out_layout, None if uniform is None else uniform.unsqueeze(1)))
