"""Load and store residuals (N10): rows of int8 blocks of 256, with codes and scales in separate arrays."""

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import FLOAT32_MAX
from .codecs import encode_tile
from .tiles import decoded_tile, elements_of

RESIDUAL_BLOCK = tl.constexpr(256)


@triton.jit
def load_residual(codes_ptr, scales_ptr, tile, remaining, ROWS: tl.constexpr):
    """Values float32 [ROWS, 256] of a tile of the row at ``codes_ptr`` (int8) and ``scales_ptr`` (bf16's bits)."""
    rows = tl.arange(0, ROWS)
    headers = tl.load(scales_ptr + tile * ROWS + rows, mask=rows * RESIDUAL_BLOCK < remaining, other=0).to(tl.int32)
    offsets, mask = elements_of(remaining, RESIDUAL_BLOCK, ROWS, RESIDUAL_BLOCK)
    codes = tl.load(codes_ptr + tile * (ROWS * RESIDUAL_BLOCK) + offsets, mask=mask, other=0).to(tl.uint8, bitcast=True)
    return decoded_tile(headers, codes, remaining, "symmetric", 8, RESIDUAL_BLOCK, False, ROWS, FLOAT32_MAX)


@triton.jit
def store_residual(codes_ptr, scales_ptr, tile, remaining, values, ROWS: tl.constexpr):
    """Encode a tile over the row's old blocks; those that are not finite stay."""
    offsets, mask = elements_of(remaining, RESIDUAL_BLOCK, ROWS, RESIDUAL_BLOCK)
    headers, codes, is_finite = encode_tile(values, mask, 0.0, "symmetric", 8, 127, False)
    tl.debug_barrier()  # no warp still reads what is overwritten
    rows = tl.arange(0, ROWS)
    stored = (rows * RESIDUAL_BLOCK < remaining) & is_finite
    tl.store(scales_ptr + tile * ROWS + rows, headers.to(tl.int16), mask=stored)
    pointers = codes_ptr + tile * (ROWS * RESIDUAL_BLOCK) + offsets
    tl.store(pointers, codes.to(tl.int8, bitcast=True), mask=mask & is_finite[:, None])
