"""The Hadamard rotation of blocks: butterflies of stride 1, 2, 4, ... in float32, never a matrix product (N7)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate", "rotate_back"]


def rotate(blocks: Tensor) -> Tensor:
    """Float32 [..., 2^k] times the Hadamard matrix of order 2^k, unnormalised."""
    size, stride = blocks.shape[-1], 1
    while stride < size:
        pairs = blocks.reshape(*blocks.shape[:-1], size // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        blocks = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        stride *= 2
    return blocks


def rotate_back(blocks: Tensor) -> Tensor:
    """The inverse: the same butterflies, then times 2^-k."""
    return rotate(blocks) * (1.0 / blocks.shape[-1])
