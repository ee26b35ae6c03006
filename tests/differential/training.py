"""Runs a random program: in one process for all ranks, and on one rank under ZeroOptimizer.

Both go through ``train``, the loop that a user writes. They differ in whose batches a process has and in how gradients
are averaged, clipped and cleared: :class:`Plain` and :class:`Sharded` share none of that code.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.differential.model import EVALUATION, Model, loss_by_rank, new_model, optimizer_of, register_hooks
from tests.differential.programs import Program

__all__ = ["Trained", "plain", "train"]


class Trained(NamedTuple):
    """The results of a run, as plain numbers."""

    losses: list[list[float]]
    """For each forward, evaluations included: the loss of each rank whose batches this process has."""
    norms: list[float]
    """The gradient norm of each step before clipping, if the program clips."""
    values: dict[str, list[float]]
    """The final parameters."""


class Plain:
    """One process with torch's own optimizer. ``defect`` names an error to make, which the comparison must find."""

    def __init__(self, program: Program, model: Model, defect: str = "") -> None:
        self.program, self.model, self.defect = program, model, defect
        self.optimizer = optimizer_of(program, model)
        self.ranks: Iterable[int] = range(program.world_size)
        self.groups = self.optimizer.param_groups

    def backward(self, loss: Tensor, index: int, count: int) -> None:
        if self.defect != "a backward is lost" or index or count == 1:
            loss.backward()

    def step(self) -> float | None:
        """Update; return the gradient norm before clipping, if the program clips."""
        norm = None
        if self.program.clip is not None:
            _, max_norm, norm_type = self.program.clip
            params = [
                p for p in self.model.parameters() if p.grad is not None and p.numel()
            ]  # norms of empty tensors are errors for norm_type=inf
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type).item()
        self.optimizer.step()
        return norm

    def zero_grad(self) -> None:
        if self.defect == "gradients are kept":
            return
        clear(self.program.zero_grad, self.model, self.optimizer)


def clear(who: str, model: nn.Module, optimizer: Any) -> None:
    if who == "optimizer":
        optimizer.zero_grad()
    elif who == "model":
        model.zero_grad()


class Sharded:
    def __init__(self, program: Program, model: Model, rank: int, optimizer: Any) -> None:
        self.program, self.model, self.optimizer, self.ranks = program, model, optimizer, [rank]
        self.groups = optimizer.param_groups

    def backward(self, loss: Tensor, index: int, count: int) -> None:
        how = self.program.accumulation
        defers = how == "no_sync everywhere" or (how == "no_sync" and index < count - 1)
        context: AbstractContextManager[None] = self.optimizer.no_sync() if defers else nullcontext()
        with context:
            loss.backward()

    def step(self) -> float | None:
        """Update; return the gradient norm before clipping, if the program clips."""
        norm = None
        if self.program.clip is not None and self.program.clip[0] == "call":
            _, max_norm, norm_type = self.program.clip
            norm = self.optimizer.clip_grad_norm_(max_norm, norm_type).item()
        self.optimizer.step()
        if self.program.clip is not None and self.program.clip[0] == "configured":
            norm = self.optimizer.last_grad_norm
        return norm

    def zero_grad(self) -> None:
        clear(self.program.zero_grad, self.model, self.optimizer)


def options(program: Program) -> dict[str, Any]:
    """Keyword arguments for ZeroOptimizer."""
    settings: dict[str, Any] = {"stage": program.stage, **dict(program.settings)}
    if program.accumulation == "counted":
        settings["gradient_accumulation_steps"] = program.num_backwards[0]
    if program.clip is not None and program.clip[0] == "configured":
        settings["gradient_clipping"] = program.clip[1]
    return settings


def plain(program: Program, defect: str = "") -> Trained:
    """The expected results of ``program``: the batches of all ranks in this process."""
    model = new_model(program)
    register_hooks(model)
    side = Plain(program, model, defect)
    if defect == "a rank is lost":
        side.ranks = range(program.world_size - 1)
    losses, norms = train(side)
    return Trained(losses, norms, {name: _numbers(param) for name, param in model.named_parameters()})


def _numbers(tensor: Tensor) -> list[float]:
    return tensor.detach().flatten().tolist()  # type: ignore[no-any-return]


def train(side: Plain | Sharded) -> tuple[list[list[float]], list[float]]:
    """Run the program; return all losses and norms."""
    program, losses, norms, number = side.program, list[list[float]](), list[float](), 0
    base = [group["lr"] for group in side.groups]
    for step in range(program.steps):
        for group, lr in zip(side.groups, base, strict=True):
            group["lr"] = lr * program.lr_factors[step]
        index = 0
        for _ in range(program.num_micro[step]):
            means = []
            for _ in range(program.num_forwards):
                by_rank = loss_by_rank(side.model, step, number, side.ranks)
                losses.append([loss.item() for loss in by_rank])
                means.append(torch.stack(by_rank).mean() / program.num_micro[step])
                number += 1
            for loss in _together(program, means):
                side.backward(loss, index, program.num_backwards[step])
                index += 1
        norm = side.step()
        norms += [] if norm is None else [norm]
        side.zero_grad()
        if program.evaluates:
            side.model.eval()
            with torch.no_grad():
                losses.append([loss.item() for loss in loss_by_rank(side.model, step, EVALUATION + step, side.ranks)])
            side.model.train()
    return losses, norms


def _together(program: Program, losses: list[Tensor]) -> list[Tensor]:
    """The losses that ``backward`` is called on, in order."""
    if program.backward == "together":
        return [torch.stack(losses).sum()]
    return losses[::-1] if program.backward == "reversed" else losses
