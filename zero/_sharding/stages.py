"""The stages of ZeRO, 0 to 3: what each shards. Other modules ask this table, never for a stage's number.

Source: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054), and "ZeRO++"
(arXiv:2306.10209) for the switches.
"""

from __future__ import annotations

from dataclasses import dataclass

from zcomm import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """What is sharded over the ranks, and when gradients are reduced."""

    number: int
    shards_states: bool
    """Optimizer states and master weights: this rank's shard, or all of them."""
    shards_gradients: bool
    """Reduced gradients: this rank's shard, or the full buffer."""
    shards_parameters: bool
    """Parameters between uses: this rank's shard, gathered before use, or the full parameters."""
    reduces_every_micro_batch: bool
    """False: only at the accumulation boundary."""


STAGES = {
    0: Stage(0, False, False, False, False),
    1: Stage(1, True, False, False, False),
    2: Stage(2, True, True, False, True),
    3: Stage(3, True, True, True, True),
}


def get_stage(number: int) -> Stage:
    """The stage with this number; ConfigError if there is none."""
    if isinstance(number, bool) or number not in STAGES:
        raise ConfigError(f"stage must be one of {sorted(STAGES)}: stage={number!r}")
    return STAGES[number]


def model_state_nbytes(
    numel: int, stage: int, world_size: int, *, gradient_nbytes: int = 4, param_nbytes: int = 2, state_nbytes: int = 12
) -> float:
    """Bytes of model states per rank: parameters, gradients, and optimizer states with float32 master weights.

    Args:
        numel: Parameters of the model, in elements.
        stage: 0 to 3.
        world_size: Ranks that sharded states are partitioned over.
        gradient_nbytes: Bytes per gradient element, 4 or 2.
        param_nbytes: Bytes per parameter element, 2 for bf16.
        state_nbytes: Bytes of states per element: 12 for Adam with a float32 master, 8 without one.
    """
    which = get_stage(stage)
    are_sharded = which.shards_parameters, which.shards_gradients, which.shards_states
    kinds = zip((param_nbytes, gradient_nbytes, state_nbytes), are_sharded, strict=True)
    return numel * sum(nbytes / (world_size if is_sharded else 1) for nbytes, is_sharded in kinds)
