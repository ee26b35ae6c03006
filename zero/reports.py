"""Reports that an engine logs on one rank: steps_per_print, wall_clock_breakdown, memory_breakdown, comms_logger."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import zcomm
from zero._config import Config
from zero.optimizer import ZeroOptimizer

__all__ = ["Reports"]

logger = logging.getLogger("zero")
PHASES = ("forward", "backward", "gather", "reduce", "step")
MIB = 2**20


class Reports:
    """Measures what ``config`` asks for while the engine runs, and logs it after each step.

    Args:
        optimizer: Its exchanges and memory are measured.
        config: ``steps_per_print``, ``wall_clock_breakdown``, ``memory_breakdown`` and ``comms_logger``.
        device: Where the parameters are.
    """

    def __init__(self, optimizer: ZeroOptimizer, config: Config, device: torch.device) -> None:
        self._optimizer, self._config, self._device = optimizer, config, device
        self._is_log_rank = optimizer.parts.runtime.is_log_rank
        self._seconds: dict[str, float] = {}
        if config.wall_clock_breakdown:
            optimizer.time_exchanges(self._timed)
        self._sent: zcomm.Traffic | None = None
        if config.comms_logger.enabled and self._is_log_rank:
            self._sent = zcomm.traffic().__enter__()

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Measure a forward, a backward or a step."""
        if not self._config.wall_clock_breakdown:
            yield
        else:
            self._synchronize()
            with self._timed(phase):
                yield
                self._synchronize()
        if self._config.memory_breakdown and self._is_log_rank:
            logger.info("memory after %s: %s", phase, self._memory())

    def end_step(self, step: int, line: str) -> None:
        """Log what is due after ``step`` steps; ``line`` is for steps_per_print."""
        config = self._config
        is_due = bool(config.steps_per_print) and step % (config.steps_per_print or 1) == 0
        if self._is_log_rank:
            if is_due:
                logger.info("step=%d, %s", step, line)
            if config.wall_clock_breakdown:
                times = ", ".join(f"{phase} {1e3 * self._seconds.get(phase, 0.0):.1f} ms" for phase in PHASES)
                logger.info("step=%d: %s (gather and reduce within the others)", step, times)
            if self._sent is not None and (config.comms_logger.verbose or is_due):
                self._log_sent(f"in step {step}" if config.comms_logger.verbose else f"in {step} steps")
        self._seconds.clear()

    def close(self) -> None:
        """Log what has been sent since the start, or since the last step if every step is logged."""
        if self._sent is not None:
            self._log_sent("since the last step" if self._config.comms_logger.verbose else "by this engine")
            self._sent = None

    def _log_sent(self, when: str) -> None:
        assert self._sent is not None, "nothing was counted"
        asked = self._config.comms_logger
        logger.info("sent %s by rank 0:\n%s", when, self._sent.table(None if asked.prof_all else asked.prof_ops))
        if asked.verbose:
            self._sent = zcomm.traffic().__enter__()

    def _memory(self) -> str:
        report = self._optimizer.memory()
        kinds = ", ".join(f"{kind} {nbytes / MIB:.1f} MiB" for kind, nbytes in report.by_kind.items() if nbytes)
        if self._device.type == "cuda":
            now, most = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
            return f"{kinds}; allocated {now / MIB:.1f} MiB, at most {most / MIB:.1f} MiB"
        now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"{kinds}; resident {now / MIB:.1f} MiB, at most {most / MIB:.1f} MiB"

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
