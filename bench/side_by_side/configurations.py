"""The configurations of convergence.py by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from contenders.diloco import OUTER_RATE

from zcomm import RECIPES

__all__ = ["BASELINE", "CONFIGURATIONS", "DEFAULT", "Configuration", "baseline_of"]

BASELINE = "bf16-zero3"
"""The baseline of all comparisons."""


@dataclass(frozen=True)
class Configuration:
    """A training configuration."""

    description: str
    dtype: torch.dtype = torch.bfloat16
    is_ddp: bool = False
    """Whether to train under DistributedDataParallel instead of ZeroOptimizer."""
    accumulation: int = 1
    """Micro-batches in a step; a step's data does not depend on their number."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of ZeroOptimizer at stage 3."""
    stays_in_node: bool = False
    """Whether to use a secondary partition inside each node (hpZ)."""
    has_muon: bool = False
    """Whether Muon updates the hidden matrices, and AdamW only the rest."""
    powersgd_rank: int = 0
    """DDP sends factors of gradients, of this rank."""
    local_steps: int = 0
    """Nodes train apart, by DiLoCo, with an exchange after so many steps."""
    outer_rate: float = OUTER_RATE
    """DiLoCo's learning rate of what has changed between two exchanges."""


def _recipe(name: str, description: str) -> Configuration:
    recipe = RECIPES[name]
    formats = {"weight_format": recipe.weights, "gradient_format": recipe.gradients}
    return Configuration(description, options=formats, stays_in_node=True)


DELTA = {"mode": "delta_hpz", "changes": "quantized"}
ZEROPP = {"quantized_weights": True, "quantized_gradients": True}
CONFIGURATIONS = {
    "fp32-ddp": Configuration("DDP in float32", torch.float32, is_ddp=True),
    "bf16-zero3": Configuration("ZeRO-3, everything in bf16"),
    "zeropp-paper": _recipe("zeropp-paper", "ZeRO++ in blocks of 2048"),
    "zeropp": _recipe("zeropp", "ZeRO++ in small blocks"),
    "accurate": _recipe("accurate", "formats of the recipe, without a residual"),
    "smallest": _recipe("smallest", "formats of the recipe"),
    "delta-hpz": Configuration("replicas in every node, 4-bit deltas", options=DELTA),
    "delta-hpz-x4": Configuration("the same, 4 micro-batches a step", accumulation=4, options=DELTA),
    "bf16-zero3-x4": Configuration("ZeRO-3 in bf16, 4 micro-batches a step", accumulation=4),
    "zeropp-x4": Configuration(
        "ZeRO++ in small blocks, 4 micro-batches a step", accumulation=4,
        options=ZEROPP, stays_in_node=True,
    ),
    "bf16-zero3-muon": Configuration("ZeRO-3 in bf16, Muon for the hidden matrices", has_muon=True),
    "delta-hpz-exact": Configuration("replicas with the bits of the masters", options=DELTA | {"changes": "exact"}),
    **{
        f"delta-hpz-exact-{error:g}": Configuration(
            f"the same, gradients entropy-coded with an error of {error:g}",
            options=DELTA | {"changes": "exact", "gradient_error": error},
        )
        for error in (0.1, 0.15, 0.2, 0.3)
    },
    **{
        f"ddp-powersgd-{rank}": Configuration(
            f"DDP, gradients by PowerSGD of rank {rank}", torch.float32, powersgd_rank=rank
        )
        for rank in (4, 16)
    },
    **{
        f"diloco-{steps}{'' if rate == OUTER_RATE else f'-outer{rate}'}": Configuration(
            f"DiLoCo, {steps} steps apart, outer rate {rate}", torch.float32, local_steps=steps,
            outer_rate=rate,
        )
        for steps in (10, 50)
        for rate in (OUTER_RATE, 0.4, 1.0)
    },
    "delta-hpz-muon": Configuration("delta-hpz, Muon for the hidden matrices", options=DELTA, has_muon=True),
    "delta-hpz-muon-int8": Configuration(
        "the same, gradients in 8 bits between nodes",
        options=DELTA | {"gradient_format": ("int8", "int8")}, has_muon=True,
    ),
}  # fmt: skip
DEFAULT = list(CONFIGURATIONS)[:8]


def baseline_of(name: str) -> str:
    """The configuration that ``name`` is compared with: without quantization, with the same optimizer."""
    return f"{BASELINE}-muon" if CONFIGURATIONS[name].has_muon else BASELINE
