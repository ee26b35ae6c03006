"""Shards of different lengths in the collectives that keep state: replicas of rows, and sums of rows.

Rows, packs and messages are those of :mod:`zcomm._collectives.uneven_shards`. What one rank holds is its pack, the rows
of the ranks of its local rank side by side in the order of nodes, or the rows of all ranks. With sizes that are equal
every class gives the bits that it gives without sizes: a block never straddles two rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from zcomm._collectives.encoder import Encoder
from zcomm._collectives.uneven_shards import (
    UnevenShards,
    encoded_groups,
    gather_rows,
    new_to_receive,
    of_sizes,
    packs_of,
)
from zcomm._formats.formats import FORMATS, Format
from zcomm._kernels import kernels
from zcomm._residuals.buffer_layout import as_shard_sizes
from zcomm._residuals.residual import Residual
from zcomm._transport.route import Group, Route, check_flat, check_topology, separate_hops
from zcomm._transport.topology import Numbering, Topology
from zcomm._transport.work import Steps, nothing
from zcomm.errors import BackendUnavailableError, LayoutError


def apart(route: Route, topology: Group, first: Literal["intra", "inter"]) -> Route:
    """``route`` as two hops, ``first`` and the other, even if one of them is of a rank alone."""
    check_topology(topology)
    assert isinstance(topology, Topology), "checked"
    formats = [wire for _, wire in route.hops]
    intra, inter = separate_hops(topology)
    hops = (intra, inter) if first == "intra" else (inter, intra)
    return replace(route, hops=((hops[0], formats[0]), (hops[1], formats[-1])))


def shards_over(route: Route, numbering: Numbering, sizes: Sequence[int]) -> UnevenShards:
    """Float32 shards of ``sizes`` elements over ``route``.

    Raises:
        LayoutError: ``sizes`` are not a list with a count for each rank.
        BackendUnavailableError: The route is over NCCL, which exchanges parts of one length only.
    """
    numels = as_shard_sizes(sizes, route.world_size)
    assert numels is not None, "uneven shards without sizes"
    if route.backend == "nccl":
        raise BackendUnavailableError("backend='nccl' does not serve shard_sizes: use backend='torch'")
    encoder = Encoder(route, 0)
    return UnevenShards(route, encoder, numbering, torch.float32, list(numels), packs_of(route, numbering))


def check_own_size(numel: int, shard_numel: int) -> None:
    """Raise LayoutError unless ``shard_numel`` is this rank's of the sizes, ``numel``."""
    if numel != shard_numel:
        raise LayoutError(f"shard_numel must be this rank's of shard_sizes: shard_numel={shard_numel}, it has {numel}")


class UnevenReplica:
    """The rows of a :class:`zcomm.DeltaGather`.

    Args:
        replica: What this rank holds, flat: all rows, or its pack.
        route: Its first hop is between nodes; the only one that is used if the replica is a pack.
        numbering: The order of the rows.
        sizes: Elements of every rank's shard.
        is_whole: Whether the replica has all rows.

    Raises:
        LayoutError, BackendUnavailableError: See :func:`shards_over`; or ``replica`` does not have their elements.
    """

    def __init__(
        self, replica: Tensor, route: Route, numbering: Numbering, sizes: Sequence[int], *, is_whole: bool
    ) -> None:
        check_flat("replica", replica)
        self._shards = shards_over(route, numbering, sizes)
        self._pack = self._shards.packs[self._shards.own_pack]
        self._num_hops = len(route.hops) if is_whole else 1
        held = range(len(sizes)) if is_whole else self._pack
        if replica.numel() != self._shards.numel(held):
            raise LayoutError(
                f"replica must have the elements of its rows: numel={replica.numel()}, by shard_sizes "
                f"{self._shards.numel(held)}"
            )
        self._replica = replica
        self._rows = dict(zip(held, torch.split(replica, [self._shards.numels[row] for row in held]), strict=True))

    has_rest = False
    """Whether :meth:`rest_steps` must follow what was exchanged."""

    def rest_steps(self) -> Steps:
        """Finish the last exchange, in the thread that waits for it."""
        return nothing()

    @property
    def numel_of_all(self) -> int:
        """Elements of all shards. Nothing is exchanged only if there are none, since with ZCOMM_CHECK=1 others wait for
        the verdict on an exchange of empty rows, too.
        """
        return sum(self._shards.numels)

    @property
    def held(self) -> Tensor:
        """This rank's row."""
        return self._rows[self._shards.own]

    def among_equals(self) -> AbstractContextManager[None]:
        """A context whose exchanges match those of ranks with the same sizes only."""
        return of_sizes(self._shards.numbering, self._shards.numels)

    def refresh_steps(self) -> Steps:
        """Send this rank's row in its dtype."""
        route = self._shards.route
        exact = replace(route, hops=tuple((hop, FORMATS["none"]) for hop, _ in route.hops))
        shards = replace(self._shards, route=exact, encoder=Encoder(exact, 0), dtype=self._replica.dtype)
        if self._num_hops == len(route.hops):
            yield from gather_rows(self._replica, self.held, shards)
            return
        received = [self._rows[row].view(torch.uint8) for row in self._pack]
        yield shards.gather(0, received, self.held.view(torch.uint8), [[row] for row in self._pack])

    def update_steps(self, shard: Tensor, encoder: Encoder) -> Steps:
        """Send the difference of ``shard`` to this rank's row, and add all that arrive. Messages are forwarded."""
        shards, last = self._shards, self._num_hops - 1
        order = shards.in_order if last or len(shards.packs) == 1 else self._pack
        singles = [[row] for row in order]
        flat = new_to_receive(shards.codec(last), (shards.nbytes(last, order),), shard.device)
        messages = dict(zip(order, shards.split(last, flat, singles), strict=True))
        mine = messages[shards.own]
        if shard.numel():
            layout = shards.layout(0, shard.numel())
            kernels.quantize_difference(shard, self.held, layout, mine.view(1, -1), encoder.draw(0))
        yield shards.gather(0, [messages[row] for row in self._pack], mine, [[row] for row in self._pack])
        if last:
            packs = shards.split(last, flat, shards.packs)
            yield shards.gather(last, packs, packs[shards.own_pack], shards.packs)
        for row, message in messages.items():
            if message.numel():
                numel = shards.numels[row]
                kernels.decode_add(message.view(1, -1), shards.layout(last, numel), self._rows[row].view(1, -1))


class UnevenSums:
    """The two hops of :class:`zcomm.NodeSums` over rows of ``sizes`` elements; sums of a pack are flat.

    Raises:
        LayoutError, BackendUnavailableError: See :func:`shards_over`.
    """

    def __init__(self, route: Route, topology: Topology, formats: tuple[Format, Format], sizes: Sequence[int]) -> None:
        hops = separate_hops(topology)
        self._route = replace(route, hops=tuple(zip(hops, formats, strict=True)))
        self._shards = shards_over(self._route, "local", sizes)
        self._pack = self._shards.packs[self._shards.own_pack]
        self._singles = [[row] for row in self._pack]
        self._numels = [self._shards.numels[row] for row in self._pack]
        self.numel, self.pack_numel = sum(self._shards.numels), sum(self._numels)
        self.shard_numel = self._shards.numels[self._shards.own]
        self.first = sum(self._shards.numels[: self._pack[0]])
        """Where the pack starts in the buffer."""
        self.sizes = tuple(self._shards.numels)

    def among_equals(self) -> AbstractContextManager[None]:
        """A context whose exchanges match those of ranks with the same sizes only."""
        return of_sizes("local", self._shards.numels)

    def sum_in_node(self, source: Tensor, values: Tensor) -> Steps:
        """Hop 1: write the node's sums of ``source`` [numel] to ``values`` [pack_numel], float32."""
        shards, (hop, _) = replace(self._shards, dtype=source.dtype), self._route.hops[0]
        if hop.size == 1:
            values.copy_(source)
            yield None
            return
        sent = encoded_groups(source, shards.packs, shards)
        received = new_to_receive(shards.codec(0), (hop.size, shards.nbytes(0, self._pack)), source.device)
        yield shards.scatter(0, received.unbind(0), sent, shards.packs)
        if shards.codec(0).dtype is not None and values.numel():  # plain arrays
            kernels.decode_sum(received, shards.layout(0, self.pack_numel), values, 0, 1)
            return
        messages = torch.split(received, [shards.nbytes(0, rows) for rows in self._singles], dim=1)
        for message, row in zip(messages, torch.split(values, self._numels), strict=True):
            if row.numel():
                kernels.decode_sum(message.contiguous(), shards.layout(0, row.numel()), row, 0, 1)

    def reduce_between_nodes(self, values: Tensor, output: Tensor, residual: Residual | None) -> Steps:
        """Hop 2: write the mean of ``values`` [pack_numel], which are overwritten, to ``output``."""
        shards, (hop, _), world_size = self._shards, self._route.hops[1], self._route.world_size
        if hop.size == 1:
            output.copy_(values.div_(world_size))
            yield None
            return
        flat = torch.empty(shards.nbytes(1, self._pack), dtype=torch.uint8, device=values.device)
        messages = shards.split(1, flat, self._singles)
        inside = self._route.divisor_inside(shards.dtype, world_size, has_residual=residual is not None)
        self._encode(values if inside == 1 else values.div_(inside), messages, residual)
        layout, received = shards.layout(1, output.numel()), output.new_empty((hop.size, 0), dtype=torch.uint8)
        if output.numel():
            received = layout.new_to_receive(hop.size, output.device)
        yield shards.scatter(1, received.unbind(0), messages, self._singles)
        if output.numel():
            kernels.decode_sum(received, layout, output, 0, world_size / inside)

    def _encode(self, values: Tensor, messages: Sequence[Tensor], residual: Residual | None) -> None:
        starts = residual.row_starts if residual is not None else list(accumulate(self._numels, initial=0))
        encoder = Encoder(self._route, self.numel, None, residual)
        for row, message, start in zip(torch.split(values, self._numels), messages, starts, strict=False):
            if row.numel():
                layout = self._shards.layout(1, row.numel())
                encoder.at(start).encode(1, row.view(1, -1), message.view(1, -1), layout)
