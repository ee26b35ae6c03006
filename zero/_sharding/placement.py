"""Which rank holds which tensor, where an optimizer updates whole tensors (Muon): placement, without tensors.

Every tensor is given to a node, and there to a rank, which alone holds its master and its states and updates it.
Gradients are summed on the way there, and new values sent from there, so nothing is sent that equal shards would not
send; but shards have sizes of their own.

Balanced by the memory of states and by the work of updates, over the whole model: the largest tensor first, to the node
that has least. Nodes that have about as little as that one count as equal: among them it goes to the one with the least
of its bucket, so that exchanges of single buckets are balanced, too.

Where a rank would have much more than the mean, and more than the largest tensor, a few tensors of each node are given
to all of its ranks, which update them together (:mod:`zero._step.joint_update`): each has as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import NamedTuple

__all__ = ["PlacedTensor", "place", "work_of"]

SLACK = 0.03
"""The part of a node's mean load by which loads may differ and count as equal."""


LIMIT = 1.1
"""How much of a rank's mean load a rank may have before tensors are updated by a node together."""
MAX_SHARED = 4
"""Tensors of a node, at most, that are updated together."""
MAX_MOVES = 200
"""Enough for any node that was tried: each makes a fullest rank less full."""


class PlacedTensor(NamedTuple):
    """A tensor that :func:`place` gives to a rank."""

    bucket: int
    """The number of its bucket."""
    numel: int
    work: float
    """Of an update: see :func:`work_of`."""
    divisible: tuple[int, ...] = ()
    """Its sides, sorted, if the ranks of a node can update it together."""


def work_of(shape: Sequence[int], *, is_whole: bool) -> float:
    """A measure of the operations of an update: those of a matrix [m, n], m <= n, count m for each element.

    So it is with Newton-Schulz iterations (Muon), and roughly with preconditioners (Shampoo, SOAP).
    """
    return float(prod(shape) * (min(shape[-2:]) if is_whole and len(shape) > 1 else 1))


def place(tensors: Sequence[PlacedTensor], num_nodes: int, ranks_per_node: int) -> list[tuple[int, int | None]]:
    """The node and the local rank of each tensor; None: all of the node. Depends on the arguments alone."""
    total_numel = sum(one.numel for one in tensors) or 1
    total_work = sum(one.work for one in tensors) or 1.0
    costs = [one.numel / total_numel + one.work / total_work for one in tensors]
    order = sorted(range(len(tensors)), key=lambda i: (-costs[i], i))
    nodes = _Bins(num_nodes, SLACK * 2 / num_nodes)
    for index in order:
        nodes.add(index, tensors[index].bucket, costs[index])
    bound = max(LIMIT * sum(costs) / (num_nodes * ranks_per_node), max(costs, default=0.0))
    best, least = dict[int, tuple[int, int | None]](), inf
    divisible = _alike(tensors, nodes.contents) if ranks_per_node > 1 else [list[int]()] * num_nodes
    for num_shared in range(min(MAX_SHARED, len(divisible[0])) + 1):
        places, fullest = dict[int, tuple[int, int | None]](), 0.0
        for node, of_node in enumerate(nodes.contents):
            shared = set(divisible[node][:num_shared])
            ranks = _Bins(ranks_per_node, SLACK * 2 / (num_nodes * ranks_per_node))
            for index in of_node:
                if index not in shared:
                    ranks.add(index, tensors[index].bucket, costs[index])
            ranks.even_out(costs)
            for local_rank, of_rank in enumerate(ranks.contents):
                places |= dict.fromkeys(of_rank, (node, local_rank))
            places |= dict.fromkeys(shared, (node, None))
            of_each = sum(costs[index] for index in shared) / ranks_per_node
            fullest = max(fullest, of_each + ranks.largest_load)
        if fullest < least:
            best, least = places, fullest
        if least <= bound:
            break
    return [best[index] for index in range(len(tensors))]


def _alike(tensors: Sequence[PlacedTensor], of_nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Tensors that nodes can update together, of each node as many, of the same sides, in the same order.

    With ZCOMM_CHECK=1 an exchange inside a node waits for an equal one of the other nodes.
    """
    found: list[list[int]] = [[] for _ in of_nodes]
    for sides in sorted({one.divisible for one in tensors if one.divisible}, reverse=True):
        own = [[index for index in of_node if tensors[index].divisible == sides] for of_node in of_nodes]
        for chosen, indices in zip(found, own, strict=True):
            chosen.extend(indices[: min(map(len, own))])
    return found


class _Bins:
    """Loads of nodes, or of a node's ranks: in all, and by bucket."""

    def __init__(self, num_bins: int, slack: float) -> None:
        self._loads, self._slack = [0.0] * num_bins, slack
        self._of_bucket: dict[int, list[float]] = {}
        self.contents: list[list[int]] = [[] for _ in range(num_bins)]

    def add(self, index: int, bucket: int, cost: float) -> None:
        """Give tensor number ``index``, of ``bucket``, to one of those with the least."""
        loads, own = self._loads, self._of_bucket.setdefault(bucket, [0.0] * len(self._loads))
        limit = min(loads) + self._slack
        chosen = min((i for i, load in enumerate(loads) if load <= limit), key=lambda i: (own[i], loads[i], i))
        self.contents[chosen].append(index)
        loads[chosen] += cost
        own[chosen] += cost

    @property
    def largest_load(self) -> float:
        """That of the fullest bin."""
        return max(self._loads)

    def even_out(self, costs: Sequence[float]) -> None:
        """Move or exchange tensors of the fullest bin as long as that makes the fuller of two bins less full."""
        for _ in range(MAX_MOVES):
            loads, contents = self._loads, self.contents
            # Of those that cost the same, the first: a layer may have hundreds of experts.
            distinct = [list({costs[index]: index for index in reversed(of_bin)}.values()) for of_bin in contents]
            full = max(range(len(loads)), key=lambda i: (loads[i], -i))
            found = None
            for other in range(len(loads)):
                for mine in distinct[full]:
                    for theirs in (None, *distinct[other]) if other != full else ():
                        moved = costs[mine] - (0.0 if theirs is None else costs[theirs])
                        fuller = max(loads[full] - moved, loads[other] + moved)
                        if fuller < (1 - 1e-9) * (loads[full] if found is None else found[0]):
                            found = fuller, other, mine, theirs, moved
            if found is None:
                return
            _, other, mine, theirs, moved = found
            contents[full].remove(mine)
            contents[other].append(mine)
            if theirs is not None:
                contents[other].remove(theirs)
                contents[full].append(theirs)
            loads[full] -= moved
            loads[other] += moved
