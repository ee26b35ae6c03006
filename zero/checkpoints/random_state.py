"""The states of the random generators of this process: python, numpy, torch, and the GPU's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_random_state", "restore_random_state"]


def capture_random_state(device: torch.device) -> dict[str, Any]:
    """The states, as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "numpy": (name, keys, *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what :func:`capture_random_state` gave."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
