"""Matrices that the ranks of a node update together with Muon, where one rank would have more than its share.

Each rank has as many rows of the matrix, of its momentum and of its gradient. In every iteration it computes as many
rows of each product, with the operations of :class:`zero.Muon`:

    momentum rows -> all rows      of the matrix, in bfloat16
    rows of X X^T -> all rows      for each iteration
    rows of new X -> all rows      for each iteration; the last ones are the update

Nothing is sent between nodes. States may be in host memory: momentum and update are copied, the iteration runs where
parameters are.

An error on one rank between two exchanges would leave the others waiting. So all memory of a step is allocated first,
the ranks agree that it is there, and nothing is allocated before the last exchange (test_joint_update.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcomm import SecondaryPartition
from zero._optim.masters import MasterPiece
from zero._optim.muon import momentum_of, norm_of, scale_of
from zero._optim.step_pieces import numbers_of_groups
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime

NARROW = torch.bfloat16


class _Memory(NamedTuple):
    """What a matrix [rows, columns] needs for its update; with m <= n its sides, sorted. Matrices share it."""

    full: Tensor
    """The matrix, [rows, columns] as the parameter."""
    x: Tensor
    """Before an iteration, [m, n]."""
    new: Tensor
    """After it."""
    gram: Tensor
    """[m, m]."""
    mixed: Tensor
    """This rank's rows of a polynomial of it."""
    wide: Tensor
    """This rank's rows of the matrix in the dtype of the master, where that is."""
    narrow: Tensor
    """The same in bfloat16."""


_Kind = tuple[str, torch.dtype, torch.device]
"""Of memory, with its name in :class:`_Memory`."""


class _Need(NamedTuple):
    kind: _Kind
    shape: tuple[int, ...]


class JointPiece(NamedTuple):
    """This rank's rows of a matrix, with what a step needs."""

    piece: MasterPiece
    group: dict[str, Any]
    momentum: Tensor | None
    """None: the matrix has no gradient."""
    memory: _Memory


class JointUpdate:
    """Updates those of ``pieces`` of ``inner`` that are rows of matrices; ``runtime.effective`` gets a line."""

    def __init__(self, runtime: Runtime, inner: Optimizer, pieces: Sequence[MasterPiece]) -> None:
        self._topology, self._inner = runtime.topology, inner
        # In the same order in every node: see zero._sharding.placement.
        joint = (piece for piece in pieces if piece.is_joint)
        self._pieces = sorted(joint, key=lambda piece: sorted(piece.param.shape), reverse=True)
        buckets = [bucket for bucket in runtime.buckets if bucket.is_trainable]
        self._params = [bucket.params[slot] for bucket in buckets for slot in bucket.layout.joint_slots]
        self._parts: dict[int, SecondaryPartition] = {}
        """For this step's gathers, by elements of the matrix."""
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

    def run(self, factor: float) -> None:
        """Update all that have gradients, times ``factor``, and write their shards. Collective.

        Raises:
            Exception: What went wrong before anything was exchanged; on every rank.
        """
        if not self.is_used:
            return
        used = "".join("01"[param.grad is not None] for param in self._params)
        fact = f"matrices with gradients, of those that a node updates together: {used}"
        try:
            ready = on_every_rank(self._prepare, self._topology, fact=fact)
            for one in ready:
                self._update(one, factor)
        finally:
            self._parts = {}
        for one in ready:
            if one.momentum is not None:
                one.piece.bucket.update_shard()

    def _prepare(self) -> list[JointPiece]:
        """Allocate: what fails on one rank fails here, before the others wait for it."""
        if all(param.grad is None for param in self._params):
            return []
        numbers, memory, found = numbers_of_groups(self._inner), self._new_memory(), list[JointPiece]()
        for piece in self._pieces:
            master, momentum = piece.master, None
            if master.grad is not None:
                state = self._inner.state[master]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(master)
                momentum = state["momentum_buffer"]
            views = {kind[0]: memory[kind][: prod(shape)].view(shape) for kind, shape in self._needs(piece)}
            if "narrow" not in views:
                views["narrow"] = views["full"][self._rows(views["full"])]
            group = self._inner.param_groups[numbers[id(master)]]
            found.append(JointPiece(piece, group, momentum, _Memory(**views)))
            for matrix in (views["full"], views["gram"]):
                numel = matrix.numel()
                if numel not in self._parts:
                    self._parts[numel] = SecondaryPartition(self._topology, numel, NARROW, device=matrix.device)
        return found

    def _new_memory(self) -> dict[_Kind, Tensor]:
        """Flat, enough for each of the matrices."""
        numels: dict[_Kind, int] = {}
        for need in (need for piece in self._pieces for need in self._needs(piece)):
            numels[need.kind] = max(numels.get(need.kind, 0), prod(need.shape))
        return {kind: torch.empty(numel, dtype=kind[1], device=kind[2]) for kind, numel in numels.items()}

    def _needs(self, piece: MasterPiece) -> Iterator[_Need]:
        master, device, shape = piece.master, piece.bucket.device, tuple(piece.param.shape)
        m, n = sorted(shape)
        for name, of in (("full", shape), ("x", (m, n)), ("new", (m, n)), ("gram", (m, m))):
            yield _Need((name, NARROW, device), of)
        yield _Need(("mixed", NARROW, device), (m // self._topology.ranks_per_node, m))
        yield _Need(("wide", master.dtype, master.device), tuple(master.shape))
        if master.device != device:
            yield _Need(("narrow", NARROW, master.device), tuple(master.shape))

    @torch.no_grad()
    def _update(self, one: JointPiece, factor: float) -> None:
        """Without a gradient only exchange, as the other nodes do."""
        master, group, memory = one.piece.master, one.group, one.memory
        wide, own = memory.wide, memory.full[self._rows(memory.full)]
        if one.momentum is None or master.grad is None:
            own.zero_()
        else:
            wide.copy_(master.grad)
            if factor != 1:
                wide.mul_(factor)
            memory.narrow.copy_(momentum_of(wide, one.momentum, group, out=wide))
            own.copy_(memory.narrow)
        self._gather(memory.full)
        own.copy_(self._orthogonal(memory, group)[self._rows(memory.full)])
        if one.momentum is not None:
            wide.copy_(memory.narrow.copy_(own))
            rate = float(group["lr"])
            master.mul_(1 - rate * group["weight_decay"])
            master.add_(wide, alpha=-rate * scale_of(memory.full.shape, group["adjust_lr_fn"]))

    def _orthogonal(self, memory: _Memory, group: dict[str, Any]) -> Tensor:
        """The update of all rows. Collective inside the node."""
        (a, b, c), is_tall = group["ns_coefficients"], memory.full.shape[0] > memory.full.shape[1]
        x, new, gram, mixed = memory.x, memory.new, memory.gram, memory.mixed
        given = memory.full.mT if is_tall else memory.full
        torch.div(given, norm_of(given, group), out=x)
        own = self._rows(x)
        for _ in range(group["ns_steps"]):
            torch.mm(x[own], x.mT, out=gram[own])
            self._gather(gram)
            torch.addmm(gram[own], gram[own], gram, beta=b, alpha=c, out=mixed)
            torch.addmm(x[own], mixed, x, beta=a, out=new[own])
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
        part = self._parts[flat.numel()]
        part.fill(flat)
        part.gather(flat)
