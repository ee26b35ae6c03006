"""Node sums whose hop between nodes sends an entropy-coded grid (:mod:`zcomm._kernels.grid`) with a given error.

    sums of a row + residual --encode--> message --exchange--> messages --decode, add in rank order--> mean
                    new residual <--- what was rounded off

Messages are as long as the sums are rich, which only the sender knows: they are received as in
:mod:`zcomm._stateful.exact_changes`, into room for the longest, whose size follows from the elements of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._collectives.uneven_shards import links_of
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
                f"relative_error={relative_error} sends messages of unknown length, which are received in host memory "
                f"over gloo's TCP only, got {device}: use a format, such as 'nf4'"
            )
        super().__init__(route, topology, formats, sizes)
        self._relative_error = relative_error
        self._room = [grid.max_message_nbytes(numel) if numel else 0 for numel in self._shards.numels]

    def reduce_between_nodes(self, values: Tensor, output: Tensor, residual: Residual | None) -> Steps:
        """Hop 2: write the mean of ``values`` [pack_numel], which are overwritten, to ``output``."""
        (hop, _), world_size = self._route.hops[1], self._route.world_size
        if hop.size == 1:
            yield from super().reduce_between_nodes(values, output, residual)
            return
        rooms = [self._room[row] for row in self._pack]
        messages, used = [torch.empty(room, dtype=torch.uint8) for room in rooms], [0] * hop.size
        own = self._encode_rows(values, messages, used, residual)
        size = rooms[hop.rank]
        received = [messages[0].new_empty(size if rank != hop.rank else 0) for rank in range(hop.size)]
        if env.is_set("ZCOMM_CHECK"):  # checksums are of all of the room
            for part in (*(message[n:] for message, n in zip(messages, used, strict=True)), *received):
                part.zero_()
        for peer, link in enumerate(links_of(self._route, hop)):
            if used[peer] and peer != hop.rank:
                record((self._route.operation, grid.NAME, link), 1, self._numels[peer], used[peer])
        info = MessageInfo(self._route.operation, grid.NAME, self.pack_numel)
        messages[hop.rank] = messages[hop.rank][:0]
        # The same on the hops of all nodes, as the tags of paired hops are equal.
        yield backend.exchange_parts(
            received, messages, hop, info, sum(self._room), operation=UNEVEN_SCATTER, sizes=rooms, used=used
        )
        if output.numel():
            parts = [own if rank == hop.rank else grid.decode(part, own.numel()) for rank, part in enumerate(received)]
            total = parts[0].clone() if parts[0] is own else parts[0]
            for part in parts[1:]:
                total.add_(part)
            output.copy_(total.div_(world_size))

    def _encode_rows(
        self, values: Tensor, messages: Sequence[Tensor], used: list[int], residual: Residual | None
    ) -> Tensor:
        """Fill ``messages`` and ``used``; the decoded values of this rank's own row."""
        own = values[:0]
        for i, row in enumerate(torch.split(values, self._numels)):
            if not row.numel():
                continue
            start = residual.row_starts[i] if residual is not None else 0
            if residual is not None:
                residual.add_to_(row.view(1, -1), start)
            used[i], decoded = grid.encode(row, self._relative_error, messages[i])
            if residual is not None:
                residual.keep_difference(row.view(1, -1), decoded.view(1, -1), start)
            if i == self._route.hops[1][0].rank:
                own = decoded
        return own
