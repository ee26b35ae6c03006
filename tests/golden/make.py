"""Makes the golden vectors: inputs, wire bytes and decoded values of every format, by the NumPy oracle of the tests.

Run as ``python -m tests.golden.make`` after adding a case. Existing files are never overwritten: the wire format is a
specification, and a changed byte is a bug.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.zcomm import oracle
from tests.zcomm.data import mixture

FOLDER = Path(__file__).parent
NUMEL = 1101  # several kinds of blocks, and a short last one
CASES = [
    ("int8", 256, "float32"),
    ("int8", 256, "bfloat16"),
    ("int8", 64, "float16"),
    ("int4", 128, "float32"),
    ("int4", 128, "bfloat16"),
    ("int4", 32, "float16"),
    ("none", 0, "float32"),
    ("none", 0, "bfloat16"),
    ("bf16", 0, "float32"),
    ("fp16", 0, "float32"),
]


def _finite_or_small(x: torch.Tensor) -> torch.Tensor:
    """Cast formats are golden on finite values only: which NaN they send is the hardware's."""
    return x.nan_to_num(1.5, 2.5, -2.5).clamp(-6e4, 6e4)


def make(name: str, block: int, dtype_name: str) -> None:
    """Write one file unless it is there."""
    path = FOLDER / f"{name}_b{block}_{dtype_name}.npz"
    if path.exists():
        return
    x = mixture(2 * NUMEL, 3, getattr(torch, dtype_name))
    if name in oracle.QMAX:
        segments = np.split(x.float().numpy(), 2)
        message = np.frombuffer(oracle.encode(segments, name, block, "golden"), np.uint8)
        decoded = oracle.decode(segments, name, block).reshape(-1)
    else:
        x = _finite_or_small(x)
        wire = x.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, x.dtype))
        message, decoded = wire.view(torch.uint8).numpy(), wire.float().numpy()
    np.savez_compressed(
        path,
        input=x.view(torch.uint8).numpy(),
        dtype=dtype_name,
        format=name,
        block=block,
        num_segments=2,
        operation="golden",
        message=message,
        decoded=decoded,
    )


if __name__ == "__main__":
    for case in CASES:
        make(*case)
