"""Exact changes: replicas equal to the shards bit for bit. A change is sent in units in the last place, without loss.

    new shard, own row --encode--> message --exchange--> messages --decode--> rows

The coder is :mod:`zcomm._kernels.ulps`. Its messages are as long as the change is rich, which only the sender knows. So
each rank receives into room for the longest possible message, and the head of what arrives has its length: gloo's
receives over TCP take shorter messages, and leave the rest of their memory as it is. Elsewhere, and on GPUs:
:mod:`zcomm._stateful.capped_changes`.

Invariants:
    O1  The room of a row follows from its elements: equal on all ranks without an agreement.
    O2  A shard is encoded, and this rank's row of the replica written, before the call returns: they have the same bits
        even if the caller writes the next values while the message is in flight.

If a message is damaged on its way, all ranks raise with ZCOMM_CHECK=1; without it the receiver and those that it
forwards to, as in every format.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._base.pending import Pending
from zcomm._collectives.encoder import Encoder
from zcomm._formats.message import MessageInfo
from zcomm._kernels import ulps
from zcomm._stateful.uneven_state import UnevenReplica
from zcomm._transport import backend
from zcomm._transport.backend import UNEVEN_GATHER
from zcomm._transport.route import Route
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Steps
from zcomm.errors import FormatError, MessageError

EXACT = "exact"
"""The name of exact changes where a format is asked for."""


class ExactReplica(UnevenReplica):
    """Rows of a :class:`zcomm.DeltaGather` that have the bits of the shards, rounded to the replica's dtype.

    Args:
        replica, route, numbering, sizes, is_whole: As for :class:`UnevenReplica`.

    Raises:
        FormatError: The replica is not bfloat16 or float16.
    """

    def __init__(
        self, replica: Tensor, route: Route, numbering: Numbering, sizes: Sequence[int], *, is_whole: bool
    ) -> None:
        if replica.dtype not in (torch.bfloat16, torch.float16):
            raise FormatError(
                f"format={EXACT!r} sends changes of bfloat16 and float16 replicas, got {replica.dtype}: use a 16-bit "
                "replica, or another format"
            )
        super().__init__(replica, route, numbering, sizes, is_whole=is_whole)
        self._own = self._shards.own
        self._room = [ulps.max_message_nbytes(numel) if numel else 0 for numel in self._shards.numels]
        """Bytes of the longest message of each row: O1."""

    def update_steps(self, shard: Tensor, encoder: Encoder) -> Steps:
        """Send the change of ``shard`` against this rank's row, and apply all that arrive. Messages are forwarded."""
        del encoder  # nothing is rounded
        shard, message = shard.to(self._replica.dtype), torch.empty(self._room[self._own], dtype=torch.uint8)
        used = ulps.encode(shard, self.held, message) if shard.numel() else 0
        self.held.copy_(shard)
        return self._send(message, used)

    def _send(self, message: Tensor, used: int) -> Steps:
        messages = yield from self._gather(0, [[row] for row in self._pack], message, used)
        if self._num_hops > 1:
            messages[self._own] = message[:used]
            used = sum(part.numel() for part in messages.values())
            pack = torch.empty(sum(self._room[row] for row in self._pack), dtype=torch.uint8)
            torch.cat([messages[row] for row in self._pack if row in messages], out=pack[:used])
            messages |= yield from self._gather(1, self._shards.packs, pack, used)
        for row, received in messages.items():
            if row != self._own:
                ulps.decode(received, self._rows[row])

    def _gather(
        self, hop: int, groups: Sequence[Sequence[int]], mine: Tensor, used: int
    ) -> Generator[Pending | None, None, dict[int, Tensor]]:
        """Send the first ``used`` bytes of ``mine``; the messages of ``groups[i]`` come from rank i of hop ``hop``."""
        over, _ = self._shards.route.hops[hop]
        sizes = [sum(self._room[row] for row in rows) for rows in groups]
        received = [torch.empty(n if rank != over.rank else 0, dtype=torch.uint8) for rank, n in enumerate(sizes)]
        if env.is_set("ZCOMM_CHECK"):  # checksums are of all of the room
            for part in (mine[used:], *received):
                part.zero_()
        info = MessageInfo(self._shards.route.operation, EXACT, self._shards.numel(groups[over.rank]))
        if used:
            backend.count(over, info, used)
        sent = [mine if rank != over.rank else mine[:0] for rank in range(over.size)]
        # The same on the hops of all nodes, as the tags of paired hops are equal.
        yield backend.exchange_parts(
            received, sent, over, info, sum(self._room), operation=UNEVEN_GATHER, sizes=sizes, used=[used] * over.size
        )
        return {row: part for rows, room in zip(groups, received, strict=True) for row, part in self._parts(rows, room)}

    def _parts(self, rows: Sequence[int], room: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The messages of ``rows``, which lie side by side at the start of ``room``; none if that is empty."""
        for row in rows:
            if room.numel() and self._room[row]:
                nbytes = room.numel()
                with suppress(MessageError):  # decode() raises it, when no rank waits for this one to forward
                    nbytes = ulps.message_nbytes(room)
                yield row, room[:nbytes]
                room = room[nbytes:]
