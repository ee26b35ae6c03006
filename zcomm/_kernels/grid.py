"""A uniform grid whose step follows from the error that is asked for, entropy-coded: fewer bits at the same error.

    values --rms of each block--> steps --round--> integers --coder of changes--> | steps, bf16 | pad | message |

A block of 4096 values with the root mean square r is rounded to multiples of sqrt(12) * error * r, in bf16: rounding to
a fine grid of step s loses s / sqrt(12). Most integers are near 0, so their entropy is far below that of 4-bit codes,
which spend as much on every value: normally distributed values take 3.7 bits at the error of nf4, which takes 4.25, and
gradients 3.0 (bench/results/formats.md).
Integers are coded as changes of zeros in units in the last place (:mod:`zcomm._kernels.ulps`), whose bits they are.

No integer is cut off: |x| <= sqrt(4096) * r, and the error is at least 0.001. The integers of one rank may differ from
those of another machine with the same values where a step's last bit depends on the order of summation. A block with
values that are not finite has the step NaN, and is decoded as NaN. Steps that are not normal float32 numbers are 0, and
so are all values of the block.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from zcomm._kernels import ulps
from zcomm.errors import ConfigError

BLOCK = 4096
LEAST_ERROR, LARGEST_ERROR = 1e-3, 0.5
NAME = "grid"
"""In counters of traffic."""


def check_error(name: str, relative_error: float) -> None:
    """Raise ConfigError unless ``relative_error`` is 0 or one that a grid can have."""
    if relative_error and not LEAST_ERROR <= relative_error <= LARGEST_ERROR:
        raise ConfigError(f"{name} must be 0, or from {LEAST_ERROR} to {LARGEST_ERROR}: {name}={relative_error}")


@cache
def expected_bits(relative_error: float) -> float:
    """Bits of an element that is normally distributed: the entropy of its integer, and its share of the step.

    Gradients take 0.1 to 0.4 bits less where they were measured, as their blocks are not of one scale.
    """
    step = math.sqrt(12) * relative_error
    bounds = [(k - 0.5) * step / math.sqrt(2) for k in range(int(8 / step) + 2)]
    shares = [(math.erf(high) - math.erf(low)) / 2 for low, high in pairwise(bounds)]
    of_one_sign = sum(-share * math.log2(share) for share in shares[1:] if share)
    return 2 * of_one_sign - shares[0] * math.log2(shares[0]) + 16 / BLOCK


def max_message_nbytes(numel: int) -> int:
    """The most bytes that ``numel`` elements can cost."""
    return _nbytes_of_steps(numel) + ulps.max_message_nbytes(numel)


def encode(values: Tensor, relative_error: float, message: Tensor) -> tuple[int, Tensor]:
    """Write ``values``, float32 [n] with n > 0, to the start of ``message``, uint8.

    Returns:
        The bytes used, and the values as they will be decoded, float32 [n].
    """
    steps = _steps(values, relative_error)
    inverse = torch.where(steps > 0, 1 / steps.float(), 0).unsqueeze(1)  # also for NaN
    scaled = _in_blocks(values) * inverse
    if bool(steps.isnan().any()):
        scaled[steps.isnan()] = 0  # infinity * 0 has no integer
    largest = torch.iinfo(torch.int16).max
    integers = scaled.round_().clamp_(-largest, largest)
    codes = _folded(integers.to(torch.int16).view(-1)[: values.numel()]).view(torch.bfloat16)
    first = _nbytes_of_steps(values.numel())
    message[: steps.nbytes].copy_(steps.view(torch.uint8))
    message[steps.nbytes : first].zero_()
    used = ulps.encode(codes, torch.zeros_like(codes), message[first:])
    return first + used, integers.mul_(steps.float().unsqueeze(1)).view(-1)[: values.numel()]


def decode(message: Tensor, numel: int) -> Tensor:
    """The ``numel`` values of a message, float32; bytes after it are ignored.

    Raises:
        MessageError: It is damaged, or of another size. Of the steps no checksum is kept.
    """
    num_steps, first = -(-numel // BLOCK), _nbytes_of_steps(numel)
    codes = torch.zeros(numel, dtype=torch.bfloat16)
    ulps.decode(message[first:], codes)
    steps = message[: 2 * num_steps].view(torch.bfloat16).float().unsqueeze(1)
    integers = _in_blocks(_folded(codes.view(torch.int16)).float())
    return integers.mul_(steps).view(-1)[:numel]


def _steps(values: Tensor, relative_error: float) -> Tensor:
    """Of each block, bf16: summed in float64, where no square overflows or vanishes."""
    norms = torch.linalg.vector_norm(_in_blocks(values), dim=1, dtype=torch.float64)
    counts = torch.full_like(norms, BLOCK)
    counts[-1] = values.numel() - BLOCK * (norms.numel() - 1)
    steps = norms * counts.rsqrt_() * (math.sqrt(12) * relative_error)
    limits = torch.finfo(torch.bfloat16)
    steps.clamp_(max=limits.max).mul_(steps >= limits.smallest_normal)
    return torch.where(norms.isfinite(), steps, math.nan).bfloat16()


def _in_blocks(values: Tensor) -> Tensor:
    """[blocks, BLOCK]; a last block that is shorter is filled with zeros."""
    return pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _folded(integers: Tensor) -> Tensor:
    """Two's complement int16 as a sign and a magnitude in the order of the values, or back."""
    return integers ^ ((integers >> 15) & 0x7FFF)


def _nbytes_of_steps(numel: int) -> int:
    return -(-2 * -(-numel // BLOCK) // 4) * 4
