"""The batch-size identity: samples a step = samples a rank and backward x backwards a step x ranks."""

from __future__ import annotations

from dataclasses import dataclass

from zcomm import ConfigError
from zero._config.sections import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The three numbers, solved for a world size."""

    train: int | None
    """None: whatever the caller feeds."""
    micro: int | None
    """None: whatever the caller feeds."""
    accumulation: int
    note: str = ""
    """What was assumed; said once."""


def solve_batch_sizes(config: Config, world_size: int) -> BatchSizes:
    """Fill in what is not given.

    Raises:
        ConfigError: The three numbers contradict each other, or do not divide.
    """
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if train is None and micro is None:
        note = "no batch size is given: a batch is what the caller feeds"
        if accumulation is None:
            note += ", gradient_accumulation_steps is 1"
        return BatchSizes(train=None, micro=None, accumulation=accumulation or 1, note=note)
    if train is None:
        assert micro is not None, "one of both is given"
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
