"""How one call of a collective encodes: its random numbers on every hop, and its residual on the last.

An element's random number depends on its place in the tensor. A chunk is columns ``first`` and on of every row: its
messages draw from ``first`` on, and buffers between hops keep whole rows apart, where a format draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zcomm._formats.formats import Format, get_format
from zcomm._formats.message import MessageLayout
from zcomm._formats.philox import Draw, RandomKey
from zcomm._kernels import kernels
from zcomm._residuals.residual import Residual
from zcomm._transport.route import Route, WireFormat
from zcomm.errors import FormatError


def check_random(random: RandomKey | None, *formats: WireFormat) -> None:
    """Raise FormatError unless ``random`` is given exactly if one of ``formats`` rounds stochastically."""
    of_hops = [f for wire in formats for f in ((wire,) if isinstance(wire, (str, Format)) else wire)]
    drawing = [str(f) for f in map(get_format, of_hops) if f.is_random]
    if random is not None and not isinstance(random, RandomKey):
        raise FormatError(f"random must be a zcomm.RandomKey(seed, tensor, step): random={random!r}")
    if drawing and random is None:
        raise FormatError(
            f"format {drawing[0]!r} rounds stochastically and needs random=zcomm.RandomKey(seed, tensor, step)"
        )
    if random is not None and not drawing:
        used = ", ".join(str(get_format(f)) for f in of_hops)
        raise FormatError(f"no format here rounds stochastically, leave out random=: format={used}, random={random}")


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes for one call over ``route``."""

    route: Route
    shard_numel: int
    """Elements of a whole row."""
    random: RandomKey | None = None
    residual: Residual | None = None
    first_hop: int = 0
    """The number of the route's first hop in a collective of several routes."""
    rank: int | None = None
    """Which rank's random numbers are drawn, if not that of the route."""
    first: int = 0
    """The first column of this chunk."""

    def at(self, first: int) -> Encoder:
        """That of the chunk that begins at column ``first``."""
        return replace(self, first=first)

    def draw(self, hop: int) -> Draw | None:
        """The random numbers of the route's hop number ``hop``, if its format takes any."""
        if not self.route.hops[hop][1].is_random:
            return None
        assert self.random is not None, "checked before the exchange"
        key, rank = self.random, self.rank
        if rank is None:
            rank = self.route.node_rank * self.route.ranks_per_node + self.route.local_rank
        return Draw(key.seed, key.tensor, key.step, self.first_hop + hop, rank, self.first)

    def buffer(self, hop: int, num_rows: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for values [num_rows, numel] to be encoded for that hop, in rows of the chunk or of the whole."""
        stride = numel if self.draw(hop) is None else self.shard_numel
        room = torch.empty((num_rows - 1) * stride + numel, dtype=dtype, device=device)
        return room.as_strided((num_rows, numel), (stride, 1))

    def encode(
        self, hop: int, values: Tensor, out: Tensor, layout: MessageLayout, *, expected: Tensor | None = None
    ) -> None:
        """Row i of ``values`` as message i of ``out``; with a residual ``values``, float32, are lost.

        ``expected``, what the hop will bring, as in :func:`zcomm._kernels.kernels.quantize`.
        """
        residual = self.residual if hop == len(self.route.hops) - 1 else None
        arguments = values, layout, out, values.stride(0), 0, self.draw(hop)
        if residual is None:
            kernels.quantize(*arguments, expected=expected)
        elif kernels.fuses_residual(values, layout, draw=self.draw(hop)):
            blocks = residual.blocks_to_renew(self.first, layout.segment_numel)
            kernels.quantize(*arguments, residual=blocks, expected=expected)
        else:
            residual.add_to_(values, self.first)
            kernels.quantize(*arguments, expected=expected)
            residual.keep(values, out, layout, self.first)

    def sum_and_encode(
        self, received: Tensor, summed: MessageLayout, out: Tensor, layout: MessageLayout, *, expected: Tensor
    ) -> None:
        """Hop 2 of a reduction: sum ``received``; segment s of the sum becomes message s of ``out``."""
        self.encode_sum(1, received, summed, out, layout, expected=expected)

    def encode_sum(
        self, hop: int, received: Tensor, summed: MessageLayout, out: Tensor, layout: MessageLayout, *, expected: Tensor
    ) -> None:
        """As :meth:`encode`, of the sum of ``received``, for the route's last hop, whose number is ``hop``."""
        draw, numel = self.draw(hop), layout.segment_numel
        if draw is None or numel == self.shard_numel:
            if self.residual is None:
                kernels.decode_sum_requantize(received, summed, out, layout, draw, expected=expected)
                return
            if kernels.fuses_residual(received, layout, summed, draw=draw):
                blocks = self.residual.blocks_to_renew(self.first, numel)
                kernels.decode_sum_requantize(received, summed, out, layout, draw, residual=blocks, expected=expected)
                return
        values = self.buffer(hop, summed.num_segments, numel, torch.float32, received.device)
        kernels.decode_sum(received, summed, values, values.stride(0), 1)
        self.encode(hop, values, out, layout, expected=expected)
