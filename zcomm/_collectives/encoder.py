"""The encoder of one collective call: random numbers on every hop, error feedback (a residual) on the last.

An element's random number depends on its position in the tensor, not on chunks. A chunk is a range of columns of every
row, from column ``first`` on. So its messages draw numbers from ``first`` on, and with stochastic rounding the buffers
between hops have the stride of full rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

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
    """Raise FormatError if ``random`` is missing for a format that rounds stochastically, or given without one."""
    drawing, used = _drawing(formats)
    if random is not None and not isinstance(random, RandomKey):
        raise FormatError(f"random must be a zcomm.RandomKey(seed, tensor, step): random={random!r}")
    if drawing and random is None:
        raise FormatError(
            f"format {drawing[0]!r} rounds stochastically and needs random=zcomm.RandomKey(seed, tensor, step)"
        )
    if random is not None and not drawing:
        raise FormatError(f"no format here rounds stochastically, leave out random=: format={used}, random={random}")


@lru_cache
def _drawing(formats: tuple[WireFormat, ...]) -> tuple[list[str], str]:
    """The formats that round stochastically, and all of them as text."""
    of_hops = [f for wire in formats for f in ((wire,) if isinstance(wire, (str, Format)) else wire)]
    found = [get_format(f) for f in of_hops]
    return [str(f) for f in found if f.is_random], ", ".join(map(str, found))


@dataclass(eq=False, slots=True)  # not frozen, as a Hop
class Encoder:
    route: Route
    shard_numel: int
    """Elements of a full row."""
    random: RandomKey | None = None
    residual: Residual | None = None
    first_hop: int = 0
    """Number of the route's first hop in its collective, which may consist of several routes."""
    rank: int | None = None
    """The rank whose random numbers are used; None: this one."""
    first: int = 0
    """The first column of this chunk."""

    def at(self, first: int) -> Encoder:
        """The encoder of the chunk that starts at column ``first``."""
        return replace(self, first=first)

    def draw(self, hop: int) -> Draw | None:
        """The random numbers of the route's hop number ``hop``; None if its format does not need any."""
        if not self.route.hops[hop][1].is_random:
            return None
        assert self.random is not None, "checked before the exchange"
        key, rank = self.random, self.rank
        if rank is None:
            rank = self.route.node_rank * self.route.ranks_per_node + self.route.local_rank
        return Draw(key.seed, key.tensor, key.step, self.first_hop + hop, rank, self.first)

    def divisor_inside(self, dtype: torch.dtype, divisor: float) -> int:
        """See :meth:`zcomm._transport.route.Route.divisor_inside`."""
        return self.route.divisor_inside(dtype, divisor, has_residual=self.residual is not None)

    def buffer(self, hop: int, num_rows: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for values [num_rows, numel] of ``hop``; with random numbers, at the stride of full rows."""
        stride = numel if self.draw(hop) is None else self.shard_numel
        flat = torch.empty((num_rows - 1) * stride + numel, dtype=dtype, device=device)
        return flat.as_strided((num_rows, numel), (stride, 1))

    def encode(
        self, hop: int, values: Tensor, out: Tensor, layout: MessageLayout, *, expected: Tensor | None = None
    ) -> None:
        """Encode row i of ``values`` as message i of ``out``; with a residual ``values``, float32, are overwritten.

        ``expected`` is the hop's receive buffer, as in :func:`zcomm._kernels.kernels.quantize`.
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

    def encode_sum(
        self,
        hop: int,
        received: Tensor,
        summed: MessageLayout,
        out: Tensor,
        layout: MessageLayout,
        *,
        divisor: int = 1,
        expected: Tensor,
    ) -> None:
        """Sum ``received`` and encode segment s of the sum / ``divisor`` as message s of ``out``.

        ``hop`` is the route's last.
        """
        draw, numel = self.draw(hop), layout.segment_numel
        if divisor == 1 and (draw is None or numel == self.shard_numel):
            if self.residual is None:
                kernels.decode_sum_requantize(received, summed, out, layout, draw, expected=expected)
                return
            if kernels.fuses_residual(received, layout, summed, draw=draw):
                blocks = self.residual.blocks_to_renew(self.first, numel)
                kernels.decode_sum_requantize(received, summed, out, layout, draw, residual=blocks, expected=expected)
                return
        values = self.buffer(hop, summed.num_segments, numel, torch.float32, received.device)
        kernels.decode_sum(received, summed, values, values.stride(0), divisor)
        self.encode(hop, values, out, layout, expected=expected)
