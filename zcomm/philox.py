"""Counter-based random numbers: Philox4x32-10 of "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).

A number depends on its key and counter alone, so that a restarted run, and every kernel, draws the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Draw", "philox", "uniform24"]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """Which random numbers an encoding takes: one for each element, by its position in memory.

    Element e (0 at the array's first, plus ``first``) gets word e % 4 of the counter
    (e // 4 mod 2^32, step, hop + 256 * (e // 2^34), rank) under the key (seed, tensor).
    """

    seed: int
    tensor: int = 0
    step: int = 0
    hop: int = 0
    rank: int = 0
    first: int = 0
    """The array's first element, counted in the tensor that the key stands for."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four words, int64 tensors in [0, 2^32), for each counter of int64 tensors in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # modulo 2^64: the bits are those of unsigned products
        high0, high1 = (p0 >> 32) & MASK, (p1 >> 32) & MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & MASK, high0 ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def uniform24(elements: Tensor, draw: Draw) -> Tensor:
    """A whole number in [0, 2^24), as float32, for each of int64 ``elements``."""
    flat = elements.reshape(-1) + draw.first
    quads = flat >> 2
    constant = torch.zeros_like(quads)
    counter = (
        quads & MASK,
        constant + (draw.step & MASK),
        (constant + draw.hop + ((quads >> 32) << 8)) & MASK,
        constant + (draw.rank & MASK),
    )
    words = torch.stack(philox(counter, (draw.seed & MASK, draw.tensor & MASK)), dim=-1)
    chosen = words.gather(-1, (flat & 3).unsqueeze(-1)).squeeze(-1)
    return (chosen >> 8).to(torch.float32).view(elements.shape)
