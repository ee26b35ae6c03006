"""Solves the batch sizes: train_batch_size = micro-batch size x gradient accumulation steps x world size."""

from __future__ import annotations

from dataclasses import dataclass

from zcomm import ConfigError
from zero._config.sections import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The three batch sizes of DeepSpeed, solved for a world size."""

    train: int | None
    """None: not given, and the caller decides."""
    micro: int | None
    """None: not given, and the caller decides."""
    accumulation: int
    note: str = ""
    """What was assumed; logged once."""


def solve_batch_sizes(config: Config, world_size: int) -> BatchSizes:
    """Fill in the batch sizes that are not given.

    Raises:
        ConfigError: The batch sizes contradict each other, or are not divisible.
    """
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        note = "no batch size is given: the caller decides"
        if accumulation is None:
            note += ", gradient_accumulation_steps=1"
        return BatchSizes(train=None, micro=None, accumulation=accumulation or 1, note=note)
    if train is None:
        assert micro is not None, "train_batch_size or train_micro_batch_size_per_gpu is given"
        steps = accumulation or 1
        return BatchSizes(train=micro * steps * world_size, micro=micro, accumulation=steps)
    if accumulation is None and micro is not None:
        accumulation = train // (micro * world_size)
    accumulation = 1 if accumulation is None else accumulation
    if micro is None:
        micro = train // (accumulation * world_size)
    if micro * accumulation * world_size != train or not accumulation or not micro:
        given = _shown(config.train_micro_batch_size_per_gpu), _shown(config.gradient_accumulation_steps)
        raise ConfigError(
            "train_batch_size must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size: "
            f"train_batch_size={train}, train_micro_batch_size_per_gpu={given[0]}, "
            f"gradient_accumulation_steps={given[1]}, world size={world_size}"
        )
    return BatchSizes(train=train, micro=micro, accumulation=accumulation)


def _shown(value: int | None) -> str:
    return "not given" if value is None else str(value)
