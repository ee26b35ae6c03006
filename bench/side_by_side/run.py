"""Train one model with a configuration and a seed, from its last checkpoint until it is finished or time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median_low

import torch
from text_data import Text
from torch import Tensor
from ulps import entropy_bits

import zcomm
from side_by_side.checkpoints import Checkpoints
from side_by_side.configurations import CONFIGURATIONS
from side_by_side.engines import Engine, build_engine
from side_by_side.errors import exact_gradients, gradient_error, read_by_forward, rounded_masters, weight_errors
from side_by_side.jobs import JOBS
from side_by_side.records import Record
from zcomm import Topology, control

__all__ = ["Run", "Settings"]

MAX_NORM = 1.0
EARLY, LATE = 20, 2_000
"""Steps in which errors are sampled, in addition to the middle and the end of the run."""


CHECKPOINT_INTERVAL = 250
"""Steps between checkpoints; they are saved at evaluations only."""


@dataclass(frozen=True)
class Settings:
    """The options that all runs of a command share."""

    eval_interval: int
    """Steps between held-out losses, and between checks of the time limit."""
    outlier_factor: float
    """Factor of rank 0's loss in the step with the outlier."""


class Run:
    """One run on the ranks of ``topology``; all methods are collective."""

    def __init__(
        self, record: Record, settings: Settings, text: Text, topology: Topology, device: torch.device,
        checkpoints: Checkpoints,
    ) -> None:  # fmt: skip
        key = record.key
        self.record, self._settings, self._text = record, settings, text
        self._topology, self._device, self._checkpoints = topology, device, checkpoints
        self._job, self._configuration = JOBS[key.model], CONFIGURATIONS[key.configuration]
        world_size, accumulation = topology.world_size, self._configuration.accumulation
        for name, rows, parts in (
            ("batch_size", self._job.batch_size, world_size * accumulation),
            ("num_held_out", self._job.num_held_out, world_size),
        ):
            if rows % parts:
                raise ValueError(f"{name} must be a multiple of ranks x micro-batches: {rows}, {parts}")
        self._apart = self._configuration.local_steps or 1
        if settings.eval_interval % self._apart:
            raise ValueError(f"eval_interval must be a multiple of {self._apart}, where all nodes have one model")
        model = self._job.model(self._configuration.dtype, device, key.seed)
        record.numel = sum(param.numel() for param in model.parameters())
        self._engine: Engine = build_engine(self._configuration, model, self._job.lr, topology, key.steps)
        record.is_counted = not self._engine.uncounted_inter_nbytes(0)
        self._inter: list[int] = []
        """Bytes between nodes that this rank has sent in each step."""
        self._losses: list[Tensor] = []
        self._held_out = self._mine(self._job.held_out(text))
        steps = key.steps
        self._sampled = {EARLY, LATE, steps // 2, steps} if self._apart == 1 else set()
        self._resume()

    def train(self, has_time: Callable[[], bool], on_step: Callable[[float], object]) -> bool:
        """Train; return whether it is finished. The ranks agree on ``has_time``; ``on_step`` gets the rank's loss."""
        record, steps = self.record, self.record.key.steps
        if not record.held_out_losses:
            self._evaluate()
        while record.steps_done < steps:
            is_sampled = record.steps_done + 1 in self._sampled
            is_pause = (record.steps_done + 1) % self._settings.eval_interval == 0
            has_entropy = is_pause and self._configuration.options.get("changes") == "exact"
            before = rounded_masters(self._engine) if has_entropy else None
            started, batches = time.perf_counter(), self._batches()
            on_step(float(self._step(batches, is_sampled=is_sampled)))
            record.steps_done += 1
            record.seconds += time.perf_counter() - started
            if before is not None:
                entropy = entropy_bits(rounded_masters(self._engine), before)
                record.change_entropies.append((record.steps_done, entropy))
            if is_pause or is_sampled or record.steps_done == steps:
                self._evaluate(is_sampled=is_sampled)
            if is_pause and record.steps_done < steps:
                is_stopped = not self._agree(has_time())
                if is_stopped or record.steps_done % CHECKPOINT_INTERVAL == 0:
                    self._save()
                if is_stopped:
                    return False
        self._count()
        return True

    def close(self) -> None:
        """Free the run's resources."""
        self._engine.close()

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of the next step."""
        mine = self._mine(self._job.batch(self._text, self.record.steps_done, self.record.key.seed))
        count = self._configuration.accumulation
        return list(zip(mine[0].chunk(count), mine[1].chunk(count), strict=True))

    def _mine(self, tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's equal part of the rows, on its device."""
        rank, size = self._topology.rank, self._topology.world_size
        tokens, targets = (tensor.chunk(size)[rank].to(self._device) for tensor in tensors)
        return tokens, targets

    def _step(self, batches: list[tuple[Tensor, Tensor]], *, is_sampled: bool) -> Tensor:
        engine, key, step = self._engine, self.record.key, self.record.steps_done
        total = torch.zeros((), device=self._device)
        recording = read_by_forward(engine.model) if is_sampled else nullcontext({})
        is_outlier = key.outlier_at == step + 1 and self._topology.rank == 0
        with zcomm.traffic() as sent:
            with recording as seen:
                for index, batch in enumerate(batches):
                    loss = engine.loss(*batch, is_last=index == len(batches) - 1) / len(batches)
                    total += loss.detach()
                    engine.backward(loss * self._settings.outlier_factor if is_outlier else loss)
            nbytes = sent.bytes(link="inter")
        if is_sampled and key.outlier_at != step + 1:
            copy = self._job.model(self._configuration.dtype, self._device, key.seed)
            exact = exact_gradients(copy, seen, batches, self._topology)
            self.record.gradient_errors.append((step + 1, gradient_error(engine, exact)))
        with zcomm.traffic() as sent:
            engine.step(self._job.rate(step, key.steps), MAX_NORM)
        if not engine.was_step_applied:
            self.record.skipped_steps.append(step + 1)
        self._inter.append(nbytes + sent.bytes(link="inter"))
        self._losses.append(total)
        return total

    @torch.no_grad()
    def _evaluate(self, *, is_sampled: bool = False) -> None:
        engine, record = self._engine, self.record
        recording: AbstractContextManager[dict[str, Tensor]] = (
            read_by_forward(engine.model) if is_sampled else nullcontext({})
        )
        engine.model.eval()
        with recording as seen:
            held_out = torch.stack([engine.loss(*self._held_out, is_last=True)])
        engine.model.train()
        if is_sampled:
            record.weight_errors.append((record.steps_done, weight_errors(engine, seen)))
        if self._losses:
            record.train_losses.append((record.steps_done, self._average(torch.stack(self._losses).mean().view(1))))
            self._losses.clear()
        record.held_out_losses.append((record.steps_done, self._average(held_out)))

    def _average(self, value: Tensor) -> float:
        mean = value.detach().float()
        zcomm.all_reduce(mean, "avg", group=self._topology)
        return mean.item()

    def _count(self) -> None:
        """Sum the bytes over all ranks."""
        of_ranks = control.gather_float64(torch.tensor(self._inter, dtype=torch.float64), self._topology)
        of_steps = [
            int(nbytes) + self._engine.uncounted_inter_nbytes(step)
            for step, nbytes in enumerate(of_ranks.sum(0).tolist())
        ]
        # After an evaluation the replicas of a node are up to date already, so that step sends less.
        evaluated = {step for step, _ in self.record.held_out_losses}
        undisturbed = [nbytes for step, nbytes in enumerate(of_steps) if step not in evaluated]
        self.record.inter_nbytes_per_step = median_low(undisturbed or of_steps)
        self.record.inter_nbytes = [sum(of_steps[:step]) for step, _ in self.record.held_out_losses]

    def _agree(self, has_time: bool) -> bool:  # noqa: FBT001
        return not control.agree_max(torch.tensor([int(not has_time)]), self._topology).item()

    def _save(self) -> None:
        state = {"engine": self._engine.state_dict(), "record": self.record.as_dict(), "inter": self._inter}
        self._checkpoints.save(self.record.steps_done, state | {"losses": self._losses})

    def _resume(self) -> None:
        state = self._checkpoints.load()
        if state is None:
            return
        self._engine.load_state_dict(state["engine"])
        kept = Record.of(state["record"])
        kept.command = self.record.command
        vars(self.record).update(vars(kept))
        self._inter, self._losses = state["inter"], state["losses"]
