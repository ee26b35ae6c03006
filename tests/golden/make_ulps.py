"""Makes the golden messages of changes in ulps, by their reference: old and new bits, and the bytes of the message.

Run as ``python -m tests.golden.make_ulps`` after adding a case. Existing files are never overwritten.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zcomm._formats import ulps_reference

FOLDER = Path(__file__).parent / "ulps"
NUMEL = 5003
LONG_NUMEL = (1 << 20) + 77
"""Two sparse chunks, or five dense ones."""
RARE_NUMEL = (1 << 22) + 77
"""Two chunks of few changes."""


def _tensor(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _moved(bits: np.ndarray, steps: np.ndarray) -> np.ndarray:
    order = bits ^ np.where(bits >> 15, 0x7FFF, 0)
    order = (order + steps) & 0xFFFF
    return (order ^ np.where(order >> 15, 0x7FFF, 0)).astype(np.uint16)


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """New and old bits."""
    draw = np.random.default_rng(7)
    old = draw.integers(0, 1 << 16, NUMEL).astype(np.uint16)
    signs = draw.choice([-1, 1], NUMEL)
    steps = {
        "none": np.zeros(NUMEL, np.int64),
        "one": np.ones(NUMEL, np.int64),
        "sparse": np.where(draw.random(NUMEL) < 0.04, signs * draw.geometric(0.3, NUMEL), 0),
        "narrow": signs * (draw.geometric(0.8, NUMEL) - 1),
        "wide": signs * draw.geometric(0.02, NUMEL),
        "any": draw.integers(0, 1 << 16, NUMEL),
    }
    made = {name: (_moved(old, of_one), old) for name, of_one in steps.items()}
    made["nothing"] = old[:0], old[:0]
    # Zeros, so that the files are small.
    zeros, rare = np.zeros(LONG_NUMEL, np.uint16), draw.random(LONG_NUMEL)
    made["sparse_chunks"] = np.where(rare < 0.01, np.uint16(3), zeros), zeros
    many = np.zeros(RARE_NUMEL, np.uint16)
    made["rare_chunks"] = np.where(draw.random(RARE_NUMEL) < 0.0002, np.uint16(3), many), many
    made["dense_chunks"] = (
        np.where(rare < 0.08, np.uint16(0xFFFF), zeros) & np.where(rare < 0.01, 0x8000, 0xFFFF),
        zeros,
    )
    return {name: (new.astype(np.uint16), old) for name, (new, old) in made.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, (new, old) in cases().items():
        message = torch.empty(ulps_reference.max_message_nbytes(new.size), dtype=torch.uint8)
        used = ulps_reference.encode(_tensor(new), _tensor(old), message)
        if not (path := FOLDER / f"{name}.npz").exists():
            np.savez_compressed(path, new=new, old=old, message=message[:used].numpy())
