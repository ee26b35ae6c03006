"""Node sums whose hop between nodes sends an entropy-coded grid (:mod:`zcomm._kernels.grid`) with a given error.

    sums of a row + residual --encode--> message --exchange--> messages --decode, add in rank order--> mean
                    new residual <--- what was rounded off

Messages are as long as the sums are rich, which only the sender knows: they are received as in
:mod:`zcomm._stateful.exact_changes`, into room for the longest, whose size follows from the elements of a row.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._collectives.uneven_shards import links_of, of_sizes
from zcomm._formats.formats import Format
from zcomm._formats.message import MessageInfo
from zcomm._kernels import grid
from zcomm._residuals.residual import Residual
from zcomm._stateful.uneven_state import UnevenSums
from zcomm._transport import backend
from zcomm._transport.backend import UNEVEN_SCATTER
from zcomm._transport.route import Route, separate_hops
from zcomm._transport.topology import Topology
from zcomm._transport.traffic import record
from zcomm._transport.work import Steps
from zcomm.errors import BackendUnavailableError


class CodedSums(UnevenSums):
    """The two hops of :class:`zcomm.NodeSums`, the second with the error ``relative_error``.

    Raises:
        BackendUnavailableError: Between nodes messages of unknown length cannot be received, or ``device`` is not the
            CPU.
    """

    def __init__(
        self,
        route: Route,
        topology: Topology,
        formats: tuple[Format, Format],
        sizes: Sequence[int],
        relative_error: float,
        device: torch.device,
    ) -> None:
        _, hop = separate_hops(topology)
        if hop.size > 1 and not (device.type == "cpu" and hop.takes_shorter):
            raise BackendUnavailableError(
                "gradients of a given error are messages of unknown length, which are received in host memory, over "
                f"gloo, on Linux: relative_error={relative_error} on {device}, backend {hop.backend!r}, "
                f"{sys.platform}; use a format, such as 'nf4'"
            )
        super().__init__(route, topology, formats, sizes)
        self._relative_error = relative_error
        self._room = [grid.max_message_nbytes(numel) if numel else 0 for numel in self._shards.numels]

    def among_equals(self) -> AbstractContextManager[None]:
        """A context whose exchanges match those of ranks with the same sizes and error only."""
        return of_sizes(f"local, error {self._relative_error!r}", self.sizes)

    def reduce_between_nodes(self, values: Tensor, output: Tensor, residual: Residual | None) -> Steps:
        """Hop 2: write the mean of ``values`` [pack_numel], which are overwritten, to ``output``."""
        (hop, _), world_size = self._route.hops[1], self._route.world_size
        if hop.size == 1:
            yield from super().reduce_between_nodes(values, output, residual)
            return
        rooms = [self._room[row] for row in self._pack]
        messages = [torch.empty(n if i != hop.rank else 0, dtype=torch.uint8) for i, n in enumerate(rooms)]
        used, own = self._encode_rows(values, messages, residual)
        received = [torch.empty(rooms[hop.rank] if i != hop.rank else 0, dtype=torch.uint8) for i in range(hop.size)]
        if env.is_set("ZCOMM_CHECK"):  # checksums are of all of the room
            for part in (*(message[n:] for message, n in zip(messages, used, strict=True)), *received):
                part.zero_()
        for peer, link in enumerate(links_of(self._route, hop)):
            if used[peer]:
                record((self._route.operation, grid.NAME, link), 1, self._numels[peer], used[peer])
        info = MessageInfo(self._route.operation, grid.NAME, self.pack_numel)
        # The same on the hops of all nodes, as the tags of paired hops are equal.
        yield backend.exchange_parts(
            received, messages, hop, info, sum(self._room), operation=UNEVEN_SCATTER, sizes=rooms, used=used
        )
        if output.numel():
            total = torch.zeros(output.numel())
            for i, part in enumerate(received):
                total.add_(own if i == hop.rank else grid.decode(part, own.numel()))
            output.copy_(total.div_(world_size))

    def _encode_rows(
        self, values: Tensor, messages: Sequence[Tensor], residual: Residual | None
    ) -> tuple[list[int], Tensor]:
        """Fill ``messages``; the bytes used of each, and this rank's own row as others would decode it."""
        own_row, used, own = self._route.hops[1][0].rank, [0] * len(messages), values[:0]
        for i, row in enumerate(torch.split(values, self._numels)):
            if not row.numel():
                continue
            start = residual.row_starts[i] if residual is not None else 0
            if residual is not None:
                residual.add_to_(row.view(1, -1), start)
            rounded = grid.round_to_grid(row, self._relative_error)
            if i != own_row:
                used[i] = grid.encode(rounded, messages[i])
            decoded = rounded.values()
            if residual is not None:
                residual.keep_difference(row.view(1, -1), decoded.view(1, -1), start)
            if i == own_row:
                own = decoded
        return used, own
