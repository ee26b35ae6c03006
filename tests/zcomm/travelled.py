"""Values after one encoding and decoding, by name of the format; for oracles of exchanges."""

from __future__ import annotations

import numpy as np
import torch

from tests.zcomm import oracle

BLOCKS = {"int8": 256, "int4": 128}


def travelled(values: np.ndarray, name: str) -> np.ndarray:
    """Float32 [n], encoded as one segment in ``name`` with its default block, and decoded."""
    if name == "none":
        return values
    if name == "bf16":
        return torch.from_numpy(values).bfloat16().float().numpy()
    return oracle.decode([values], oracle.Wire(name, BLOCKS[name]))[0]
