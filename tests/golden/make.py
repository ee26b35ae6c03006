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
from tests.zcomm.oracle import Wire

FOLDER = Path(__file__).parent
NUMEL = 1101  # several kinds of blocks, and a short last one
FLOAT32, BF16, FP16 = "float32", "bfloat16", "float16"
CASES = [
    (Wire("int8", 256), FLOAT32),
    (Wire("int8", 256), BF16),
    (Wire("int8", 64), FP16),
    (Wire("int4", 128), FLOAT32),
    (Wire("int4", 128), BF16),
    (Wire("int4", 32), FP16),
    (Wire("none", 0), FLOAT32),
    (Wire("none", 0), BF16),
    (Wire("bf16", 0), FLOAT32),
    (Wire("fp16", 0), FLOAT32),
    (Wire("nf4", 64), FLOAT32),
    (Wire("nf4", 32), BF16),
    (Wire("fp8_e4m3", 128), FLOAT32),
    (Wire("fp8_e4m3", 64), FP16),
    (Wire("int8", 256, symmetric=False), FLOAT32),
    (Wire("int4", 64, symmetric=False), BF16),
    (Wire("int8", 128, hadamard=True), FLOAT32),
    (Wire("int4", 32, hadamard=True), BF16),
    (Wire("nf4", 64, hadamard=True), FLOAT32),
    (Wire("fp8_e4m3", 128, hadamard=True), FLOAT32),
    (Wire("int4", 64, symmetric=False, hadamard=True), FLOAT32),
    (Wire("int8", 256, random=(7, 3, 11, 1, 2)), FLOAT32),
    (Wire("int4", 128, random=(2**32 - 1, 0, 5, 0, 1)), BF16),
    (Wire("int4", 64, symmetric=False, hadamard=True, random=(1, 2, 3, 4, 5)), FLOAT32),
]

STEPS = [
    *(Wire("int8", 256), Wire("int4", 128), Wire("nf4", 64), Wire("fp8_e4m3", 128)),
    *(Wire("int8", 256, symmetric=False), Wire("int4", 64, symmetric=False), Wire("int4", 128, hadamard=True)),
    *(Wire("int8", 128, random=(7, 3, 11, 0, 0)), Wire("int4", 64, hadamard=True, random=(7, 3, 11, 0, 0))),
    Wire("int4", 32, symmetric=False, hadamard=True, random=(1, 2, 3, 0, 0)),
]
"""Formats with golden sums, deltas and residuals."""
STEP_NUMEL, BETA = 601, 0.75


def _finite_or_small(x: torch.Tensor) -> torch.Tensor:
    """Keep golden values of cast formats finite: which NaN they send depends on the hardware."""
    return x.nan_to_num(1.5, 2.5, -2.5).clamp(-6e4, 6e4)


def _file_name(wire: Wire, dtype_name: str) -> str:
    options = "_asym" * (not wire.symmetric) + "_hadamard" * wire.hadamard + "_random" * (wire.random is not None)
    return f"{wire.name}_b{wire.block}{options}_{dtype_name}.npz"


def make(wire: Wire, dtype_name: str) -> None:
    """Write one file unless it exists."""
    path = FOLDER / _file_name(wire, dtype_name)
    if path.exists():
        return
    x = mixture(2 * NUMEL, 3, getattr(torch, dtype_name))
    if wire.block:
        segments = np.split(x.float().numpy(), 2)
        message = np.frombuffer(oracle.encode(segments, wire, "golden"), np.uint8)
        decoded = oracle.decode(segments, wire).reshape(-1)
    else:
        x = _finite_or_small(x)
        cast = x.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(wire.name, x.dtype))
        message, decoded = cast.view(torch.uint8).numpy(), cast.float().numpy()
    np.savez_compressed(
        path,
        input=x.view(torch.uint8).numpy(),
        dtype=dtype_name,
        format=wire.name,
        block=wire.block,
        symmetric=wire.symmetric,
        hadamard=wire.hadamard,
        random=np.array(wire.random or (), np.int64),
        num_segments=2,
        operation="golden",
        message=message,
        decoded=decoded,
    )


def make_steps(wire: Wire) -> None:
    """Write the results for three messages, a difference, and two exchanges with a residual (N8, N10, N11)."""
    path = FOLDER / "steps" / _file_name(wire, FLOAT32)
    if path.exists():
        return
    inputs = mixture(3 * STEP_NUMEL, 5).numpy().reshape(3, -1)
    held = mixture(STEP_NUMEL, 6, torch.bfloat16)
    with np.errstate(all="ignore"):
        terms = [oracle.decode([x], wire)[0] for x in inputs]
        total = (terms[0] + terms[1]) + terms[2]
        difference = inputs[0] - held.float().numpy()
        applied = held.float().numpy() + oracle.decode([difference], wire)[0]
        residual, sent = oracle.residual_blocks(STEP_NUMEL), []
        for x in inputs[:2]:
            decoded, residual = oracle.encode_with_residual(x, residual, wire, BETA)
            sent.append(decoded)
        content = {
            "messages": [oracle.encode([x], wire, "golden") for x in inputs],
            "again": [oracle.encode([total], wire, "golden")],
            "delta": [oracle.encode([difference], wire, "golden")],
        }
        mean = total / np.float32(3)
    np.savez_compressed(
        path, inputs=inputs, held=held.view(torch.uint8).numpy(), format=wire.name, block=wire.block,
        symmetric=wire.symmetric, hadamard=wire.hadamard, random=np.array(wire.random or (), np.int64), beta=BETA,
        mean=mean, applied=torch.from_numpy(applied).bfloat16().view(torch.uint8).numpy(), sent=np.stack(sent),
        residual=oracle.decode_residual(residual),
        **{name: np.stack([np.frombuffer(m, np.uint8) for m in messages]) for name, messages in content.items()},
    )  # fmt: skip


if __name__ == "__main__":
    for case in CASES:
        make(*case)
    for wire in STEPS:
        make_steps(wire)
