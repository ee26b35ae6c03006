"""Adaptive precision of an installation: formats that change between steps, by role (:mod:`zcomm.adaptive`).

    hooks              measure what encoding loses of this rank's gradients, on steps that measure
    end_step()         the ranks agree on that, the loss and the residuals --> policy --> new formats, if they change

A training script's steps are its own, so it says where one ends. All parameters of a role have the same level. Where
formats change, buffers are cut anew at the next exchange, and residuals follow their parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zcomm import control
from zcomm.adaptive import AdaptivePrecision, Policy, Role, Signals, Tracked, gradient_ladder, roles_of
from zcomm.adaptive.ladder import EIGHT_BITS
from zcomm.adaptive.signals import Measured
from zcomm.errors import ConfigError
from zcomm.formats import FORMATS, Format, get_format
from zcomm.install.choices import Choice, clean_name
from zcomm.install.pieces import Piece
from zcomm.recipes import Recipe
from zcomm.residual import Residual
from zcomm.sampling import squares_of
from zcomm.topology import Topology

__all__ = ["Adapting"]

logger = logging.getLogger("zcomm")
ROLES = tuple(Role)


class Adapted(Protocol):
    """What exchanges gradients."""

    def adapt(self) -> None:
        """Take the formats of now; between steps, on all ranks."""


class Adapting:
    """The formats of one installation.

    Args:
        settings: How they follow the training.
        model: Whose parameters have roles.
        recipe: The formats with the fewest bits.
        topology: All ranks of the installation.

    Raises:
        ConfigError: The recipe leaves gradients as they are.
    """

    def __init__(self, settings: AdaptivePrecision, model: nn.Module, recipe: Recipe, topology: Topology) -> None:
        wires = recipe.wires()
        intra, inter = map(str, wires.gradients)
        ladder = gradient_ladder((intra, inter), has_budget=False)
        if ladder is None:
            raise ConfigError(
                f"adaptive precision needs gradients that are quantized: recipe {recipe.name!r} has {intra}, {inter}"
            )
        self._model, self._topology, self._ladder, self._reduced = model, topology, ladder, wires.reduced
        names = {param: clean_name(name) for name, param in model.named_parameters()}
        self._role_of = {names[param]: role for param, role in roles_of(model).items()}
        self.policy = Policy(settings, [Tracked((role.value,), role) for role in ROLES], ladder, None)
        self._squares: dict[Role, Tensor] = {}
        self._numel = dict.fromkeys(ROLES, 0)
        for param, name in names.items():
            self._numel[self._role_of[name]] += param.numel()
        self._exchanges: tuple[Adapted, ...] = ()

    def adapts(self, exchanges: Sequence[Adapted]) -> None:
        """Let ``exchanges`` take the formats of now, and of every change."""
        self._exchanges = tuple(exchanges)
        self._change()

    def _change(self) -> None:
        for exchange in self._exchanges:
            exchange.adapt()

    def adapt(self, choices: Iterable[Choice]) -> list[Choice]:
        """``choices`` with the formats of now; what has an override, or is small, stays."""
        return [choice if choice.reason else self._adapted(choice) for choice in choices]

    def _adapted(self, choice: Choice) -> Choice:
        hops = self.policy.gradient_formats(ROLES.index(self._role_of[choice.name]))
        intra, inter = map(get_format, hops)
        wires = choice.wires._replace(gradients=(intra, inter), reduced=self._way_back(hops))
        return choice if wires == choice.wires else choice._replace(wires=wires, reason="adaptive precision")

    def _way_back(self, hops: tuple[str, ...]) -> Format:
        """The format of the gather of what was reduced in ``hops``."""
        if set(hops) == {"none"}:
            return FORMATS["none"]
        has_all = hops == self._ladder.levels[self._ladder.last]
        return self._reduced if has_all or self._reduced.bits_per_element >= EIGHT_BITS else FORMATS["int8"]

    @torch.no_grad()
    def measure(self, piece: Piece, values: Tensor) -> None:
        """Add what encoding loses of this rank's gradients ``values`` [num_rows, numel] of ``piece``."""
        if not self.policy.measures:
            return
        for choice, part in zip(piece.choices, torch.split(values, list(piece.sizes), 1), strict=True):
            role = self._role_of[choice.name]
            squares = squares_of(part.reshape(-1).contiguous(), self._ladder.formats)
            self._squares[role] = self._squares[role] + squares if role in self._squares else squares

    def end_step(self, residuals: Sequence[Residual], loss: float | None, grad_norm: float | None) -> bool:
        """See :meth:`zcomm.install.report.Installation.end_step`."""
        before = [self.policy.gradient_formats(index) for index in range(len(ROLES))]
        verdict = self.policy.end_step(self._agreed(residuals, loss, grad_norm))
        self._squares = {}
        for residual in residuals if verdict.action != "take" else ():
            residual.rollback()  # what an outlier has lost would be an outlier in a later step
        if self._topology.rank == 0:
            for text in verdict.warnings:
                logger.warning("adaptive precision, %s", text)
            for text in verdict.notes:
                logger.info("adaptive precision, %s", text)
        if before != [self.policy.gradient_formats(index) for index in range(len(ROLES))]:
            self._change()
        if verdict.action == "clip" and grad_norm is not None:
            for param in self._model.parameters():
                if param.grad is not None:
                    param.grad.mul_(min(1.0, verdict.max_norm / grad_norm))
        return verdict.action != "skip"

    def _agreed(self, residuals: Sequence[Residual], loss: float | None, grad_norm: float | None) -> Signals:
        held = residuals if self.policy.measures else ()
        losses = [0.0, 0.0] if loss is None else [loss, 1.0]
        norms = [0.0, 0.0] if grad_norm is None else [grad_norm, 1.0]
        mine = [*losses, *norms, sum(residual.norm() ** 2 for residual in held)]
        nothing = torch.zeros(2 + len(self._ladder.formats), dtype=torch.float64)
        parts = [torch.tensor(mine, dtype=torch.float64)]
        parts += [self._squares.get(role, nothing).cpu() for role in ROLES]
        by_rank = control.gather_float64(torch.cat(parts), self._topology).tolist()
        total, num_losses, norm, num_norms, square, *sums = [sum(column) for column in zip(*by_rank, strict=True)]
        measured = {}
        for index, role in enumerate(ROLES):
            of_role = sums[index * len(nothing) : (index + 1) * len(nothing)]
            if of_role[0]:
                numel = self._numel[role] * self._topology.world_size
                errors = [math.sqrt(error / of_role[0]) for error in of_role[2:]]
                kurtosis = numel * of_role[1] / of_role[0] ** 2
                measured[index] = Measured(dict(zip(self._ladder.formats, errors, strict=True)), kurtosis)
        return Signals(
            grad_norm=norm / num_norms if num_norms else None,
            loss=total / num_losses if num_losses else None,
            residual_norm=math.sqrt(square) if held else None,
            measured=measured,
        )

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.policy.load_state_dict(state)
        self._change()
