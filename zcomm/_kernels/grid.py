"""A uniform grid whose step follows from the error that is asked for, entropy-coded: fewer bits at the same error.

    values --rms of each block--> steps --round--> integers --coder of changes--> | steps, bf16 | pad | message |

A block of 128 values with the root mean square r is rounded to multiples of sqrt(12) * error * r, in bf16: rounding to
a fine grid of step s loses s / sqrt(12), and never more than s / 2 of a value. Most integers are near 0, so their
entropy is below that of 4-bit codes, which spend as much on every value (bench/results/formats.md). Integers are coded
as changes of zeros in units in the last place (:mod:`zcomm._kernels.ulps`), whose bits they are.

Blocks are short, so that small parameters beside large ones have the error, too: in longer ones fewer bits have the
same error over all, since whole parameters are rounded to 0.

No integer is cut off: |x| <= sqrt(128) * r, and the error is at least 0.001. The integers of one rank may differ from
those of another machine with the same values where a step's last bit depends on the order of summation. A block with
values that are not finite has the step NaN, and is decoded as NaN. Steps that are not normal float32 numbers are 0, and
so are all values of the block.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from zcomm._kernels import ulps
from zcomm.errors import ConfigError

BLOCK = 128
LEAST_ERROR, LARGEST_ERROR = 1e-3, 0.5
NAME = "grid"
"""In counters of traffic."""
FIXED_NBYTES = 200
"""About what a message has beside its elements: head, table of frequencies and states of the coder."""


class OnGrid(NamedTuple):
    """Values that are rounded to a grid."""

    steps: Tensor
    """bf16 [blocks]."""
    integers: Tensor
    """float32 [blocks, BLOCK]; zeros after the last value."""
    numel: int

    def values(self) -> Tensor:
        """As they are decoded, float32 [numel], clamped to finite numbers. Overwrites the integers."""
        largest = torch.finfo(torch.float32).max
        scaled = self.integers.mul_(self.steps.float().unsqueeze(1)).clamp_(-largest, largest)
        return scaled.view(-1)[: self.numel]


def check_error(name: str, relative_error: float) -> None:
    """Raise ConfigError unless ``relative_error`` is 0 or one that a grid can have."""
    if relative_error and not LEAST_ERROR <= relative_error <= LARGEST_ERROR:
        raise ConfigError(f"{name} must be 0, or from {LEAST_ERROR} to {LARGEST_ERROR}: {name}={relative_error}")


@cache
def expected_bits(relative_error: float) -> float:
    """Bits of an element that is normally distributed: the entropy of its integer, and its share of the step."""
    step = math.sqrt(12) * relative_error
    bounds = [(k - 0.5) * step / math.sqrt(2) for k in range(int(8 / step) + 2)]
    shares = [(math.erf(high) - math.erf(low)) / 2 for low, high in pairwise(bounds)]
    of_one_sign = sum(-share * math.log2(share) for share in shares[1:] if share)
    return 2 * of_one_sign - shares[0] * math.log2(shares[0]) + 16 / BLOCK


def expected_nbytes(numel: int, relative_error: float) -> int:
    """Of a message of normally distributed elements; at most :func:`max_message_nbytes`."""
    coded = round(numel * expected_bits(relative_error) / 8) + FIXED_NBYTES
    return min(coded, max_message_nbytes(numel)) if numel else 0


def max_message_nbytes(numel: int) -> int:
    """The most bytes that ``numel`` elements can cost."""
    return _nbytes_of_steps(numel) + ulps.max_message_nbytes(numel)


def round_to_grid(values: Tensor, relative_error: float) -> OnGrid:
    """Round ``values``, float32 [n] with n > 0."""
    blocks = _in_blocks(values)
    steps = _steps(blocks, values.numel(), relative_error)
    inverse = torch.where(steps > 0, 1 / steps.float(), 0).unsqueeze(1)  # also for NaN
    scaled = blocks * inverse
    if bool(steps.isnan().any()):
        scaled[steps.isnan()] = 0  # infinity * 0 has no integer
    return OnGrid(steps, scaled.round_(), values.numel())


def encode(rounded: OnGrid, message: Tensor) -> int:
    """Write ``rounded`` to the start of ``message``, uint8 [at least max_message_nbytes(n)]; the bytes used."""
    steps, first = rounded.steps.view(torch.uint8), _nbytes_of_steps(rounded.numel)
    message[: steps.numel()].copy_(steps)
    message[steps.numel() : first].zero_()
    codes = _folded(rounded.integers.to(torch.int16).view(-1)[: rounded.numel]).view(torch.bfloat16)
    return first + ulps.encode(codes, torch.zeros_like(codes), message[first:])


def decode(message: Tensor, numel: int) -> Tensor:
    """The ``numel`` values of a message, float32; bytes after it are ignored.

    Raises:
        MessageError: It is damaged, or of another size. Of the steps there is no checksum, as of scales.
    """
    codes, first = torch.zeros(numel, dtype=torch.bfloat16), _nbytes_of_steps(numel)
    ulps.decode(message[first:], codes)
    steps = message[: 2 * _num_blocks(numel)].view(torch.bfloat16)
    return OnGrid(steps, _in_blocks(_folded(codes.view(torch.int16)).float()), numel).values()


def _steps(blocks: Tensor, numel: int, relative_error: float) -> Tensor:
    """Of each block, bf16: summed in float64, where no square overflows or vanishes."""
    norms = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64)
    counts = torch.full_like(norms, BLOCK)
    counts[-1] = numel - BLOCK * (norms.numel() - 1)
    steps = norms * counts.rsqrt_() * (math.sqrt(12) * relative_error)
    limits = torch.finfo(torch.bfloat16)
    steps.clamp_(max=limits.max).mul_(steps >= limits.smallest_normal)
    return torch.where(norms.isfinite(), steps, math.nan).bfloat16()


def _in_blocks(values: Tensor) -> Tensor:
    """[blocks, BLOCK]; a last block that is shorter is filled with zeros."""
    missing = -values.numel() % BLOCK
    return (pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _folded(integers: Tensor) -> Tensor:
    """Two's complement int16 as a sign and a magnitude in the order of the values, or back."""
    return (integers >> 15).bitwise_and_(0x7FFF).bitwise_xor_(integers)


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _nbytes_of_steps(numel: int) -> int:
    return -(-2 * _num_blocks(numel) // 4) * 4
