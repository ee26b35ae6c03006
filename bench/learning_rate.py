"""The learning rate schedule of the training scripts."""

from __future__ import annotations

import math

__all__ = ["warmup_cosine"]


def warmup_cosine(step: int, num_steps: int) -> float:
    """The factor of step number ``step`` (from 0): linear warm-up over a tenth, then a cosine down to a tenth."""
    warmup = max(1, num_steps // 10)
    progress = min(1.0, max(0.0, (step - warmup) / max(1, num_steps - warmup)))
    return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))
