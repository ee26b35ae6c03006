"""Reports of an engine by one rank: lines, times, memory, bytes sent, operations of a forward, monitors."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zcomm
from zero._config import Config
from zero._config.key_support import is_float16
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.forward_profile import ForwardProfile
from zero._runtime.monitors import Event, Monitor
from zero.optimizer import ZeroOptimizer

__all__ = ["Reports"]

logger = logging.getLogger("zero")
PHASES = ("forward", "backward", "gather", "reduce", "step")
TIMED_EVENTS = {"forward": "forward", "backward": "backward", "reduce": "backward_allreduce", "step": "step"}
"""DeepSpeed's names of phases."""
MIB = 2**20


class Reports:
    """Measures what ``config`` asks for while the engine runs, and logs it after each step.

    Args:
        optimizer: Its exchanges and memory are measured.
        config: ``steps_per_print``, ``wall_clock_breakdown``, ``memory_breakdown``, ``comms_logger``, monitors and
            ``flops_profiler``.
        device: Where the parameters are.

    Raises:
        BackendUnavailableError: A monitor's library is missing on the first rank. An error there is raised on all, and
            the optimizer is closed.
    """

    def __init__(self, optimizer: ZeroOptimizer, config: Config, device: torch.device) -> None:
        self._optimizer, self._config, self._device = optimizer, config, device
        self._is_log_rank = optimizer.parts.runtime.is_log_rank
        self._loss: Tensor | None = None
        self.monitor = self._open_monitor()
        self._seconds: dict[str, float] = {}
        if config.wall_clock_breakdown:
            optimizer.time_exchanges(self._timed)
        self._sent: zcomm.Traffic | None = None
        if config.comms_logger.enabled and self._is_log_rank:
            self._sent = zcomm.traffic().__enter__()
        self.profile: ForwardProfile | None = None
        if config.flops_profiler.enabled and self._is_log_rank:
            self.profile = ForwardProfile(optimizer.parts.runtime.model)

    def _open_monitor(self) -> Monitor:
        runtime = self._optimizer.parts.runtime
        try:  # also without a monitor on this rank: ranks may have other sections
            return on_every_rank(
                lambda: Monitor(self._config, is_first_rank=self._is_log_rank), self._optimizer.topology
            )
        except Exception:
            with runtime.gathered(runtime.buckets):  # the model stays full
                self._optimizer.close()
            raise

    @contextmanager
    def around(self, phase: str, step: int) -> Iterator[None]:
        """Measure a forward, a backward or a step; ``step``: how many steps there were before."""
        is_counted = phase == "forward" and step == self._config.flops_profiler.profile_step
        with self._counted() if is_counted else nullcontext():
            if not self._config.wall_clock_breakdown:
                yield
            else:
                self._synchronize()
                with self._timed(phase):
                    yield
                    self._synchronize()
        if self._config.memory_breakdown and self._is_log_rank:
            logger.info("memory after %s: %s", phase, self._memory())

    def add_loss(self, loss: Tensor) -> None:
        """Add a backward's loss, already divided by the accumulation steps, to that of the step."""
        if self.monitor.is_writing:
            self._loss = loss.detach().float() if self._loss is None else self._loss + loss.detach()

    def end_step(self, step: int, samples: int, line: str) -> None:
        """Log what is due after ``step`` steps of so many ``samples``; ``line`` is for steps_per_print."""
        if self.monitor.is_writing:
            self.monitor.write_events(self._events(samples))
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
        if self.profile is not None and step - 1 == config.flops_profiler.profile_step:
            self._show_profile(self.profile)

    def _show_profile(self, profile: ForwardProfile) -> None:
        asked = self._config.flops_profiler
        if not profile.seconds:
            logger.warning(
                "flops_profiler: step %d called no forward of the engine: none is counted", asked.profile_step
            )
            return
        text = profile.text(asked.profile_step, asked.module_depth, asked.top_modules, detailed=asked.detailed)
        if asked.output_file is None:
            logger.info("%s", text)
            return
        path = Path(asked.output_file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:  # on this rank alone: the others train on
            logger.warning("flops_profiler.output_file=%r cannot be written: %s", asked.output_file, error)

    def close(self) -> None:
        """Log what has been sent since the start, or since the last step if every step is logged; close monitors."""
        self.monitor.close()
        if self._sent is not None:
            self._log_sent("since the last step" if self._config.comms_logger.verbose else "by this engine")
            self._sent = None

    def _events(self, samples: int) -> list[Event]:
        """What DeepSpeed writes after a step, and the mean loss over its backwards."""
        optimizer = self._optimizer
        values: dict[str, Any] = {} if self._loss is None else {"train_loss": self._loss}
        values["lr"] = float(optimizer.param_groups[0]["lr"])
        if optimizer.loss_scale is not None and is_float16(self._config):
            values["loss_scale"] = optimizer.loss_scale.scale
        if self._config.wall_clock_breakdown:
            for phase, name in TIMED_EVENTS.items():
                values[f"elapsed_time_ms_{name}"] = 1e3 * self._seconds.get(phase, 0.0)
        self._loss = None
        return [(f"Train/Samples/{name}", value, samples) for name, value in values.items()]

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
    def _counted(self) -> Iterator[None]:
        if self.profile is not None:
            self.profile.start()
        try:
            yield
        finally:
            if self.profile is not None:
                self.profile.stop()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
