"""Whether gradients have overflowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["is_nonfinite", "nonfinite_flag"]


def nonfinite_flag(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether any element is a NaN or an infinity, a bool scalar on ``device``. One pass; the host does not wait."""
    extremes = [value for t in tensors if t.numel() for value in torch.aminmax(t)]  # a NaN makes both of them NaN
    if not extremes:
        return torch.zeros((), dtype=torch.bool, device=device)
    finite = [value.isfinite().to(device, non_blocking=True) for value in extremes]
    return torch.stack(finite).all().logical_not()


def is_nonfinite(tensors: Sequence[Tensor]) -> bool:
    """Whether any element is a NaN or an infinity, all on one device, which the host waits for."""
    return bool(tensors) and bool(nonfinite_flag(tensors, tensors[0].device))
