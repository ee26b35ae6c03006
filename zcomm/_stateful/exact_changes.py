"""Exact changes: replicas equal to the shards bit for bit. A change is sent in units in the last place, without loss.

    new shard, own row --encode--> message --exchange--> messages --decode--> rows

The coder is :mod:`zcomm._kernels.ulps`. Its messages are as long as the change is rich, known only after encoding. An
exchange needs lengths that all of its ranks know. So each message has a capacity, which follows from the lengths of
earlier messages of this row, and what does not fit into it follows in one more exchange:

    exchange 1    the first capacity[row] bytes of each message; its head has the length
    exchange 2    what is left of longer messages; only if there is one

Invariants:
    O1  Capacities of a hop depend only on lengths that all ranks of that hop have seen: equal without an agreement.
    O2  A rank knows from the heads whether there is a second exchange, and so do all ranks of the hop. With
        ZCOMM_CHECK=1 there always is one, as ranks of the other hop wait for its verdict, and have not seen the heads.
    O3  The bits of the replica do not depend on capacities.

If a message is damaged on its way, all ranks raise with ZCOMM_CHECK=1; without it the receiver alone, as in every
format.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from zcomm._base.pending import Pending
from zcomm._collectives.encoder import Encoder
from zcomm._formats.message import MessageInfo
from zcomm._kernels import ulps
from zcomm._stateful.uneven_state import SentChanges, UnevenReplica
from zcomm._transport import backend
from zcomm._transport.backend import UNEVEN_GATHER
from zcomm._transport.route import Route
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Steps
from zcomm.errors import BackendUnavailableError, FormatError

EXACT = "exact"
"""The name of exact changes where a format is asked for."""
FIRST_BITS_PER_ELEMENT = 5
"""Of the first message after a refresh, whose length nothing predicts: 4.7 were measured at the peak of a learning rate
schedule (bench/results/change_entropy.md). If it is too low, a second exchange follows."""
MARGIN = 1 / 80
"""By how much a capacity exceeds the expected length. A test bounds what is unused, with ALIGN, to 2 %."""
ALIGN = 16
"""Capacities in bytes are multiples of it."""


class ExactReplica(UnevenReplica):
    """Rows of a :class:`zcomm.DeltaGather` that have the bits of the shards, rounded to the replica's dtype.

    Args:
        replica, route, numbering, sizes, is_whole: As for :class:`UnevenReplica`.

    Raises:
        FormatError: The replica is not bfloat16 or float16.
        BackendUnavailableError: It is not in host memory.
    """

    def __init__(
        self, replica: Tensor, route: Route, numbering: Numbering, sizes: Sequence[int], *, is_whole: bool
    ) -> None:
        if replica.dtype not in (torch.bfloat16, torch.float16):
            raise FormatError(
                f"format={EXACT!r} sends changes of bfloat16 and float16 replicas, got {replica.dtype}: use a 16-bit "
                "replica, or another format"
            )
        if replica.device.type != "cpu":
            raise BackendUnavailableError(
                f"format={EXACT!r} serves replicas in host memory, got {replica.device}: use another format"
            )
        super().__init__(replica, route, numbering, sizes, is_whole=is_whole)
        self._lengths: dict[int, tuple[int, int]] = {}
        """By row: of the last message and the one before."""
        self.sent = SentChanges()

    def refresh_steps(self) -> Steps:
        self._lengths.clear()  # they may differ between ranks after an exchange that failed
        yield from super().refresh_steps()

    def update_steps(self, shard: Tensor, encoder: Encoder) -> Steps:
        """Send the change of ``shard`` against this rank's row, and apply all that arrive. Messages are forwarded."""
        del encoder  # nothing is rounded
        # A copy: the caller may write the next values while this runs in a thread, and the row must be what is sent.
        shard = shard.to(self._replica.dtype, copy=True)
        own, message = self._shards.own, torch.empty(0, dtype=torch.uint8)
        if shard.numel():
            message = torch.empty(ulps.max_message_nbytes(shard.numel()), dtype=torch.uint8)
            message = message[: ulps.encode(shard, self.held, message)]
        messages = yield from self._gather(message)
        lengths = {row: message.numel() for row, message in messages.items()}
        for row, received in messages.items():
            if row != own and received.numel():
                ulps.decode(received, self._rows[row])
        self.held.copy_(shard)
        self._lengths = {row: (length, self._lengths.get(row, (length, 0))[0]) for row, length in lengths.items()}

    def _gather(self, message: Tensor) -> Generator[Pending | None, None, dict[int, Tensor]]:
        """Gather every row's message; ``message`` is this rank's."""
        shards, last = self._shards, self._num_hops - 1
        rows = shards.in_order if last else self._pack
        capacities = [self._capacity(row) for row in rows]
        flat = torch.empty(sum(capacities), dtype=torch.uint8)
        first = dict(zip(rows, torch.split(flat, capacities), strict=True))
        rest = dict.fromkeys(rows, flat[:0])
        capacity, used = first[shards.own].numel(), message.numel()
        first[shards.own][:used].copy_(message[:capacity])
        first[shards.own][used:].zero_()
        rest[shards.own] = message[capacity:]
        yield from self._exchange(0, [[row] for row in self._pack], first, rest)
        if last:
            yield from self._exchange(last, shards.packs, first, rest)
        self.sent = SentChanges(
            self.sent.content + used,
            self.sent.capacity + capacity + rest[shards.own].numel(),
            self.sent.second_exchanges + bool(sum(part.numel() for part in rest.values())),
        )
        return {row: self._whole(first[row], rest[row]) for row in rows}

    def _capacity(self, row: int) -> int:
        """Bytes of the first exchange for the message of ``row``: O1."""
        numel = self._shards.numels[row]
        if not numel:
            return 0
        last, before = self._lengths.get(row, (0, 0))
        expected = last or numel * FIRST_BITS_PER_ELEMENT // 8
        expected += max(last - before, 0)  # they may go on growing, as in a warm-up
        with_margin = -(-int(expected * (1 + MARGIN)) // ALIGN) * ALIGN
        return min(max(with_margin, ulps.HEAD_NBYTES), ulps.max_message_nbytes(numel))

    def _exchange(
        self, hop: int, groups: Sequence[Sequence[int]], first: dict[int, Tensor], rest: dict[int, Tensor]
    ) -> Steps:
        """Gather the messages of ``groups[i]`` from rank i of hop number ``hop`` into ``first`` and ``rest``."""
        over, _ = self._shards.route.hops[hop]
        own = groups[over.rank]
        yield self._start(hop, groups, [_joined([first[row] for row in rows]) for rows in groups])
        for rows in groups:
            for row in rows:
                if rows is not own and first[row].numel():
                    left = ulps.message_nbytes(first[row][: ulps.HEAD_NBYTES]) - first[row].numel()
                    rest[row] = torch.empty(max(left, 0), dtype=torch.uint8)
        if over.paired is None and not any(rest[row].numel() for rows in groups for row in rows):
            return
        received = [torch.cat([rest[row] for row in rows]) for rows in groups]
        yield self._start(hop, groups, received)
        for rows, part in zip(groups, received, strict=True):
            for row, of_row in zip(rows, torch.split(part, [rest[row].numel() for row in rows]), strict=True):
                rest[row] = of_row

    def _start(self, hop: int, groups: Sequence[Sequence[int]], received: list[Tensor]) -> Pending | None:
        """Start sending this rank's part of ``received``, uint8, to every rank of the hop; they send the others."""
        over, _ = self._shards.route.hops[hop]
        info = MessageInfo(self._shards.route.operation, EXACT, self._shards.numel(groups[over.rank]))
        sizes = [part.numel() for part in received]
        mine = received[over.rank]
        if mine.numel():
            backend.count(over, info, mine.nbytes)
        sent = [mine] * over.size
        sent[over.rank] = mine[:0]
        received = [part if rank != over.rank else mine[:0] for rank, part in enumerate(received)]
        # Tags of paired hops are equal, and the hops of other local ranks have other sizes.
        nbytes = sum(sizes) if over.paired is None else 0
        return backend.exchange_parts(received, sent, over, info, nbytes, operation=UNEVEN_GATHER, sizes=sizes)

    @staticmethod
    def _whole(first: Tensor, rest: Tensor) -> Tensor:
        if not first.numel():
            return first
        used = ulps.message_nbytes(first[: ulps.HEAD_NBYTES])
        return torch.cat([first, rest]) if rest.numel() else first[:used]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """``parts``, which lie side by side in one buffer, as one tensor."""
    numel = sum(part.numel() for part in parts)
    return parts[0].as_strided((numel,), (1,), parts[0].storage_offset())
