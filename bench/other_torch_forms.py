"""nf4, fp8_e4m3, the asymmetric int codecs and stochastic rounding in plain torch operations. See torch_forms.py."""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._formats.codec_nf4 import LEVELS as NF4_LEVELS
from zcomm._formats.philox import Draw, uniform24

__all__ = ["decode_other", "encode_other", "pack_nibbles", "round_at_random", "scale_up", "uniform_numbers"]

LEVELS = torch.tensor(NF4_LEVELS)
MIDPOINTS = (LEVELS[1:] + LEVELS[:-1]) / 2


def scale_up(quotients: Tensor) -> Tensor:
    """Round positive float32 values up to bfloat16."""
    return ((quotients.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes into a byte, the even element in the low nibble."""
    pairs = codes.view(torch.int16)  # low byte: the even element
    return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.uint8)


def encode_other(values: Tensor, name: str, qmax: int) -> tuple[Tensor, Tensor]:
    """Encode float32 [rows, block] to headers bfloat16 [rows, 1 or 2] and packed codes uint8 [rows, ...]."""
    if name.endswith("_asym"):
        low, high = torch.aminmax(values, dim=1, keepdim=True)
        zeros = low.bfloat16().float()
        zeros = torch.where(zeros > low, torch.nextafter(zeros.bfloat16(), torch.tensor(-torch.inf)).float(), zeros)
        scales = scale_up((high - zeros) / qmax)
        codes = ((values - zeros) * (1 / scales)).round().clamp(0, qmax).to(torch.uint8)
        return torch.cat([scales, zeros], 1).bfloat16(), codes if qmax == 255 else pack_nibbles(codes)
    scales = scale_up(torch.linalg.vector_norm(values, torch.inf, dim=1, keepdim=True) / qmax)
    scaled = values * (1 / scales)
    if name == "nf4":
        return scales.bfloat16(), pack_nibbles(torch.bucketize(scaled, MIDPOINTS.to(scaled.device)).to(torch.uint8))
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return scales.bfloat16(), codes.masked_fill(codes == 0x80, 0)  # no negative zero


def decode_other(headers: Tensor, packed: Tensor, name: str) -> Tensor:
    """Decode headers float32 [rows, 1 or 2] and packed codes to float32 [rows, block]."""
    scales = headers[:, :1]
    if name == "fp8_e4m3":
        return packed.view(torch.float8_e4m3fn).float() * scales
    codes = packed if name == "int8_asym" else torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)
    if name == "nf4":
        return LEVELS.to(codes.device)[codes.int()] * scales
    return headers[:, 1:] + codes * scales


def round_at_random(scaled: Tensor, qmax: int, uniform: Tensor | None) -> Tensor:
    """Round stochastically to integers in +-qmax, by ``uniform`` numbers in [0, 1) or, if None, torch's."""
    magnitudes = scaled.abs()
    below = magnitudes.floor()
    numbers = torch.rand_like(scaled) if uniform is None else uniform
    return (below + (numbers < magnitudes - below)).clamp_(max=qmax).copysign(scaled)


def uniform_numbers(numel: int, draw: Draw, chunk: int = 1 << 18) -> Tensor:
    """Return the wire format's random numbers in [0, 1) of ``numel`` elements; multiples of 2^-24, so exact."""
    parts = [uniform24(torch.arange(i, min(i + chunk, numel)), draw) for i in range(0, numel, chunk)]
    return torch.cat(parts) * 2.0**-24
