"""The workloads of ``zcomm bench``: each collective with its tensors, by zcomm and by torch, and its exact result.

A wire has its formats in the order of a reduction's hops, (inside the node, between nodes). A gather's hops are in the
opposite order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zcomm
from zcomm import Topology
from zcomm._bench import torch_calls
from zcomm._bench.data import Tiles
from zcomm._bench.error_bounds import rounding_of, step_bound
from zcomm._collectives.auto_format import AUTO, table_of
from zcomm._formats.formats import Format, codec_for, get_format
from zcomm._transport.route import WireFormat

REDUCTIONS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class WorkloadFormats:
    """Formats and hops of one case. With one hop both formats are equal."""

    inside: Format
    between: Format
    num_hops: int
    is_auto: bool = False
    """Requested as ``"auto"``, which chose these formats."""

    def __str__(self) -> str:
        """Return the wire as the command line names it."""
        if self.is_auto:
            return "auto"
        return str(self.inside) if self.inside == self.between else f"{self.inside}+{self.between}"

    def of_reduction(self) -> tuple[Format, ...]:
        """Return the formats in the order of a reduction's hops."""
        return (self.inside, self.between)[: self.num_hops]

    def of_gather(self) -> tuple[Format, ...]:
        """Return the formats in the order of a gather's hops; one if the first hop's bytes are forwarded."""
        return (self.between,) if self.inside == self.between else (self.between, self.inside)


@cache
def _group_of_node(_world: dist.ProcessGroup | None, ranks_per_node: int) -> dist.ProcessGroup | None:
    """A process group of this node's ranks, for torch's own calls. Collective at the first use."""
    return dist.new_subgroups(ranks_per_node)[0] if dist.is_initialized() else None  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class OutputPart:
    """A run of elements of the output, and the elements of the ranks' tensors that it comes from."""

    start: int
    numel: int
    source: int
    """Index of the first element in the ranks' tensors."""
    ranks: range
    """The rank whose tensor it is, or all ranks that are summed."""


class Workload:
    """One collective on a full tensor of ``nbytes`` bytes, rounded down to equal shards."""

    def __init__(self, collective: str, nbytes: int, tiles: Tiles, topology: Topology, op: str) -> None:
        self.collective, self.topology, self.op, self.tiles = collective, topology, op, tiles
        self.dtype = tiles.tile.dtype
        self.num_ranks = topology.ranks_per_node if collective == "secondary_gather" else topology.world_size
        self.shard_numel = max(1, nbytes // self.dtype.itemsize // self.num_ranks)
        self.numel = self.shard_numel * self.num_ranks
        self.nbytes = self.numel * self.dtype.itemsize
        self.divisor = topology.world_size if op == "avg" and collective in REDUCTIONS else 1
        self._num_random = 0
        rank, is_gather = topology.rank, collective == "all_gather"
        owner = 0 if collective == "secondary_gather" else rank
        self.input = tiles.of_rank(owner, 0, self.shard_numel if is_gather else self.numel).clone()
        output_numel, device = self.shard_numel if collective == "reduce_scatter" else self.numel, tiles.tile.device
        self.output = torch.zeros(output_numel, dtype=self.dtype, device=device)
        if collective == "secondary_gather":
            self._secondary = zcomm.SecondaryPartition(topology, self.numel, self.dtype, device=device)
            self._secondary.fill(self.input)
            start = topology.local_rank * self.shard_numel
            self._shard = self.input[start : start + self.shard_numel]

    def reset(self) -> None:
        """Restore the input before a call: an all-reduce overwrites it."""
        if self.collective == "all_reduce":
            self.output.copy_(self.input)

    def poison(self) -> None:
        """Fill the output with NaN before a checked call, so that an earlier result cannot pass."""
        if self.collective != "all_reduce":
            self.output.fill_(float("nan"))
        self.reset()

    def call_torch(self) -> None:
        """Call torch.distributed's own collective."""
        if self.collective == "all_gather":
            torch_calls.all_gather(self.output, self.input)
        elif self.collective == "reduce_scatter":
            torch_calls.reduce_scatter(self.output, self.input, self.divisor)
        elif self.collective == "all_reduce":
            torch_calls.all_reduce(self.output, self.divisor)
        elif self.collective == "all_to_all":
            torch_calls.all_to_all(self.output, self.input)
        else:
            torch_calls.all_gather(self.output, self._shard, _group_of_node(dist.group.WORLD, self.num_ranks))

    def call_zcomm(self, wire: WorkloadFormats) -> None:
        """Call zcomm's collective, over one hop or two."""
        is_forced = wire.num_hops == 1 and self.topology.has_two_hops and not wire.is_auto
        group = None if is_forced else self.topology  # the default group: its connections are warm
        forward, backward = self._formats(wire)
        options: dict[str, Any] = {"random": self._next_key(wire), "backend": self.topology.backend}
        if self.collective == "all_gather":
            zcomm.all_gather_single(self.output, self.input, group, format=backward, **options)
        elif self.collective == "reduce_scatter":
            zcomm.reduce_scatter_single(self.output, self.input, self.op, group=group, format=forward, **options)
        elif self.collective == "all_reduce":
            zcomm.all_reduce(self.output, self.op, group, format=forward, **options)
        elif self.collective == "all_to_all":
            zcomm.all_to_all_single(self.output, self.input, group, format=forward, **options)
        else:
            self._secondary.gather(self.output)

    def _next_key(self, wire: WorkloadFormats) -> zcomm.RandomKey | None:
        """A new random key for every call, as in training; None if the wire rounds to nearest."""
        if not any(format.is_random for format in (wire.inside, wire.between)):
            return None
        self._num_random += 1
        return zcomm.RandomKey(0, 0, self._num_random)

    @staticmethod
    def _formats(wire: WorkloadFormats) -> tuple[WireFormat, WireFormat]:
        if wire.is_auto:
            return AUTO, AUTO
        if wire.num_hops == 1:
            return wire.inside, wire.inside
        return (wire.inside, wire.between), (wire.between, wire.inside)

    def parts(self) -> Iterator[OutputPart]:
        """Yield what this rank checks: all of the output; of an all-reduce its own row (ranks compare the others)."""
        n, rank, everyone = self.shard_numel, self.topology.rank, range(self.topology.world_size)
        if self.collective in ("all_gather", "all_to_all"):
            source = 0 if self.collective == "all_gather" else rank * n
            yield from (OutputPart(r * n, n, source, range(r, r + 1)) for r in everyone)
        elif self.collective in REDUCTIONS:
            yield OutputPart(rank * n if self.collective == "all_reduce" else 0, n, rank * n, everyone)
        else:
            yield OutputPart(0, self.numel, 0, range(1))

    @property
    def is_replicated(self) -> bool:
        """Whether all ranks must end with the same output."""
        return self.collective in ("all_gather", "all_reduce", "secondary_gather")

    def exact(self, part: OutputPart, start: int, stop: int) -> Tensor:
        """Return the exact elements [start, stop) of ``part``, float64."""
        return self.tiles.sum_of(part.ranks, part.source + start, part.source + stop) / self.divisor

    def bound(self, part: OutputPart, start: int, stop: int, wire: WorkloadFormats | None) -> Tensor:
        """Bound the error of elements [start, stop); ``start`` is a block's start.

        ``wire`` None: torch's own call, for any order of its additions.
        """
        span = (part.source + start, part.source + stop)
        if self.collective in REDUCTIONS:
            return self._reduction_bound(part, span, wire)
        values = self.tiles.magnitudes(part.ranks, *span)
        return torch.zeros_like(values) if wire is None else self._gather_bound(values, wire)

    def _gather_bound(self, magnitudes: Tensor, wire: WorkloadFormats) -> Tensor:
        off = torch.zeros_like(magnitudes)
        formats = wire.of_reduction() if self.collective == "all_to_all" else wire.of_gather()
        for format in dict.fromkeys(formats[: wire.num_hops]):
            if codec_for(format, self.dtype).dtype != self.dtype:
                off = off + step_bound(magnitudes + off, format, self.dtype)
        return off + (off > 0) * rounding_of(self.dtype) * (magnitudes + off)

    def _reduction_bound(self, part: OutputPart, span: tuple[int, int], wire: WorkloadFormats | None) -> Tensor:
        total, magnitudes = (f(part.ranks, *span) for f in (self.tiles.sum_of, self.tiles.magnitudes))
        unit = rounding_of(self.dtype)
        if wire is None:
            return magnitudes * unit * (len(part.ranks) + 1) / self.divisor
        off = magnitudes * rounding_of(torch.float32) * 2 * len(part.ranks)
        for ranks in self._summed_together(wire.num_hops):
            of_hop = torch.zeros_like(off)
            if codec_for(wire.inside, self.dtype).dtype != self.dtype:
                for rank in ranks:
                    of_hop += step_bound(self.tiles.of_rank(rank, *span).double().abs(), wire.inside, self.dtype)
            if wire.num_hops == 2:
                partial = self.tiles.sum_of(ranks, *span).abs() + of_hop
                of_hop = of_hop + step_bound(partial, wire.between, self.dtype)
            off += of_hop
        total, off = total.abs() / self.divisor, off / self.divisor
        if self.collective == "all_reduce":
            off = off + self._gather_bound(total + off, wire)
        return off + unit * (total + off)

    def _summed_together(self, num_hops: int) -> list[range]:
        everyone = self.topology.world_size
        together = everyone if num_hops == 1 else self.topology.ranks_per_node
        return [range(first, first + together) for first in range(0, everyone, together)]


def auto_wire(workload: Workload) -> WorkloadFormats:
    """Return the formats that ``format="auto"`` chooses for ``workload``. Collective at the first use."""
    table = table_of(workload.topology)
    choice = table.choose(workload.collective, workload.nbytes, workload.output.device)
    hops = choice.num_hops if workload.topology.has_two_hops else 1
    return WorkloadFormats(choice.inside, choice.between, hops, is_auto=True)


def wire_of(text: str, num_hops: int) -> WorkloadFormats | None:
    """Parse the command line's ``text``; None for a pair of formats over one hop."""
    first, plus, second = text.partition("+")
    if plus and num_hops == 1:
        return None
    return WorkloadFormats(get_format(first), get_format(second or first), num_hops)
