"""Matrices that the ranks of a node update together with Muon, where one rank would have more than its share.

Each rank has as many rows of the matrix, of its momentum and of its gradient. In every iteration it computes as many
rows of each product, with the operations of :class:`zero.Muon`:

    momentum rows -> all rows      of the matrix, in bfloat16
    rows of X X^T -> all rows      for each iteration
    rows of new X -> all rows      for each iteration; the last ones are the update

Nothing is sent between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import SecondaryPartition
from zero._optim.masters import MasterPiece
from zero._optim.muon import momentum_of, normalized, scale_of
from zero._optim.step_pieces import numbers_of_groups
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime


class JointPiece(NamedTuple):
    """This rank's rows of a matrix, with memory for a step."""

    piece: MasterPiece
    group: dict[str, Any]
    momentum: Tensor
    full: Tensor
    """The matrix, [rows, columns] as the parameter."""
    two: tuple[Tensor, Tensor]
    """X before and after an iteration, [m, n] with m <= n."""
    gram: Tensor
    has_gradient: bool


class JointUpdate:
    """Updates those of ``pieces`` of ``inner`` that are rows of matrices; ``runtime.effective`` gets a line."""

    def __init__(self, runtime: Runtime, inner: Optimizer, pieces: Sequence[MasterPiece]) -> None:
        self._topology, self._inner = runtime.topology, inner
        # In the same order in every node: see zero._sharding.placement.
        joint = (piece for piece in pieces if piece.is_joint)
        self._pieces = sorted(joint, key=lambda piece: sorted(piece.param.shape), reverse=True)
        buckets = [bucket for bucket in runtime.buckets if bucket.is_trainable]
        self._params = [bucket.params[slot] for bucket in buckets for slot in bucket.layout.joint_slots]
        self.is_used = bool(self._params)
        """Whether any rank has any: the same on all."""
        if self.is_used:
            runtime.effective = runtime.effective.with_notes(details=(self._described(),))

    def _described(self) -> str:
        steps, ranks = max(g.get("ns_steps", 0) for g in self._inner.param_groups), self._topology.ranks_per_node
        numel = sum(p.numel() + steps * (p.numel() + min(p.shape) ** 2) for p in self._params)
        sent = 2 * numel // self._topology.num_nodes * (ranks - 1) // ranks
        return (
            f"{len(self._params)} of them are updated by the ranks of a node together, each of which sends {sent:,} "
            "bytes inside the node for it"
        )

    def run(self) -> None:
        """Update all that have gradients, and write their shards. Collective.

        Raises:
            Exception: What went wrong before anything was exchanged; on every rank.
        """
        if self.is_used:
            used = "".join("01"[param.grad is not None] for param in self._params)
            fact = f"matrices with gradients, of those that a node updates together: {used}"
            for one in on_every_rank(self._prepare, self._topology, fact=fact):
                self._update(one)

    def _prepare(self) -> list[JointPiece]:
        """Allocate: what fails on one rank fails here, before the others wait for it."""
        numbers, found = numbers_of_groups(self._inner), list[JointPiece]()
        if all(param.grad is None for param in self._params):
            return found
        for piece in self._pieces:
            master, (rows, columns) = piece.master, piece.param.shape
            has_gradient = master.grad is not None
            m, n = sorted((rows, columns))
            full, x, new, gram = (
                torch.empty(shape, dtype=torch.bfloat16, device=master.device)
                for shape in ((rows, columns), (m, n), (m, n), (m, m))
            )
            buffer = torch.zeros_like(master)
            if has_gradient:
                buffer = self._inner.state[master].setdefault("momentum_buffer", buffer)
            group = self._inner.param_groups[numbers[id(master)]]
            found.append(JointPiece(piece, group, buffer, full, (x, new), gram, has_gradient))
        return found

    @torch.no_grad()
    def _update(self, one: JointPiece) -> None:
        """Without a gradient only exchange, as the other nodes do."""
        master, group = one.piece.master, one.group
        grad = torch.zeros_like(master) if master.grad is None else master.grad
        own = one.full[self._rows(one.full)]
        own.copy_(momentum_of(grad.to(master.dtype), one.momentum, group))
        self._gather(one.full)
        own.copy_(self._orthogonal(one)[self._rows(one.full)])
        if not one.has_gradient:
            return
        rate = float(group["lr"])
        master.mul_(1 - rate * group["weight_decay"])
        master.add_(own, alpha=-rate * scale_of(one.full.shape, group["adjust_lr_fn"]))
        one.piece.bucket.update_shard()

    def _orthogonal(self, one: JointPiece) -> Tensor:
        """The update of all rows. Collective inside the node."""
        (a, b, c), is_tall = one.group["ns_coefficients"], one.full.shape[0] > one.full.shape[1]
        (x, new), gram = one.two, one.gram
        x.copy_(normalized(one.full.mT if is_tall else one.full, one.group))
        own = self._rows(x)
        for _ in range(one.group["ns_steps"]):
            torch.mm(x[own], x.mT, out=gram[own])
            self._gather(gram)
            torch.addmm(x[own], torch.addmm(gram[own], gram[own], gram, beta=b, alpha=c), x, beta=a, out=new[own])
            self._gather(new)
            x, new = new, x
        return x.mT if is_tall else x

    def _rows(self, matrix: Tensor) -> slice:
        """This rank's."""
        count = matrix.shape[0] // self._topology.ranks_per_node
        return slice(self._topology.local_rank * count, (self._topology.local_rank + 1) * count)

    def _gather(self, matrix: Tensor) -> None:
        """Fill the other ranks' rows. Collective inside the node."""
        flat = matrix.view(-1)
        part = SecondaryPartition(self._topology, flat.numel(), flat.dtype, device=flat.device)
        part.fill(flat)
        part.gather(flat)
