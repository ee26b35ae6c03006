"""Whether gradients have overflowed."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_nonfinite"]


def is_nonfinite(tensors: list[Tensor]) -> bool:
    """Whether any element is a NaN or an infinity. One pass; a second one only if the first overflows."""
    if not tensors:
        return False
    norms = torch.stack([torch.linalg.vector_norm(t).float() for t in tensors])
    if norms.isfinite().all():
        return False
    return not all(bool(t.isfinite().all()) for t in tensors)
