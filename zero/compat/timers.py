"""``engine.tput_timer``: DeepSpeed's counts of epochs and steps, which scripts update."""

from __future__ import annotations

from zero.engine import Engine


class ThroughputTimer:
    """Counts of an engine. Times are in the engine's own reports: see ``wall_clock_breakdown``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first_micro_step = 0
        self.epoch_count = 0

    @property
    def batch_size(self) -> int:
        """Samples in a step over all ranks; 1 if the configuration does not say."""
        return self._engine.train_batch_size() or 1

    @property
    def global_step_count(self) -> int:
        """Steps so far."""
        return self._engine.global_steps

    @property
    def micro_step_count(self) -> int:
        """Backward passes of this epoch."""
        return self._engine.micro_steps - self._first_micro_step

    def update_epoch_count(self) -> None:
        """Begin another epoch."""
        self.epoch_count += 1
        self._first_micro_step = self._engine.micro_steps
