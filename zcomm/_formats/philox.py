"""Counter-based random numbers: Philox4x32-10 of "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).

A number depends on its key and counter alone, so a restarted run draws the same numbers, and so do all kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zcomm.errors import ConfigError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """Key and counter of an encoding's random numbers: one for each element, by its position in memory.

    Element e (0 at the array's first, plus ``first``) gets word e % 4 of the counter
    (e // 4 mod 2^32, step, hop + 256 * (e // 2^34), rank) under the key (seed, tensor).
    """

    seed: int
    tensor: int = 0
    step: int = 0
    hop: int = 0
    rank: int = 0
    first: int = 0
    """Index of the array's first element in the full tensor: not 0 for a chunk."""


@dataclass(frozen=True, slots=True)
class RandomKey:
    """The random numbers of one collective call, for formats with ``rounding="stochastic"``.

    Equal keys give equal numbers, so a run that is restarted at the step where it stopped gives the same bits. An
    element's number depends on the key, the hop, the rank that encodes, and the element's position in the tensor (in
    memory, if rows are not contiguous). It does not depend on chunks or kernels. On the second hop of a gather all
    nodes encode the same values and use the numbers of the first node's ranks. Give every call of a run another key,
    by the tensor's number and the step.

    Raises:
        ConfigError: A value is not an integer from 0 to 2^32 - 1.
    """

    seed: int
    tensor: int = 0
    """A number that the caller gives each tensor."""
    step: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for values that do not fit in 32 bits."""
        for name in ("seed", "tensor", "step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MASK:
                raise ConfigError(f"{name} of a RandomKey must be an integer from 0 to {MASK}: {name}={value!r}")


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four words, int64 tensors in [0, 2^32), for each counter of int64 tensors in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # int64 wraps modulo 2^64: the bits of unsigned products
        high0, high1 = (p0 >> 32) & MASK, (p1 >> 32) & MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & MASK, high0 ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def uniform24(elements: Tensor, draw: Draw) -> Tensor:
    """An integer in [0, 2^24), as float32, for each of int64 ``elements``."""
    flat = elements.reshape(-1) + draw.first
    quads = flat >> 2
    constant = torch.zeros_like(quads)
    hop = (constant + draw.hop + ((quads >> 32) << 8)) & MASK
    counter = quads & MASK, constant + (draw.step & MASK), hop, constant + (draw.rank & MASK)
    words = torch.stack(philox(counter, (draw.seed & MASK, draw.tensor & MASK)), dim=-1)
    chosen = words.gather(-1, (flat & 3).unsqueeze(-1)).squeeze(-1)
    return (chosen >> 8).to(torch.float32).view(elements.shape)
