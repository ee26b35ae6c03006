"""Exact changes where both sides of an exchange must know its length: on GPUs, and wherever gloo does not use TCP.

A message is as long as the change is rich, and on a GPU its length is known on the device alone. So each row has a
capacity, which follows from the lengths of its last two messages:

    update     encode --> the first `capacity` bytes are exchanged --> decode what has all of its bytes
               heads, and flags of what was decoded, are copied to the host; nothing waits for them
    rest       the host reads them: the capacities of the next update; what did not fit is exchanged and decoded

:class:`zcomm.DeltaGather` asks for the rest when an update is waited for. On a GPU the host waits there until the
copies have arrived; before, it has queued the whole exchange and goes on.

Invariants:
    O3  The ranks of an exchange have the same capacities: those that exchange a row, or forward it, have all seen its
        head. So they agree without a message on what the next exchange has room for, and on whether one is missing.
    O4  Capacities change which bytes travel when, and no value: a message that was cut off is refused by the decoder,
        which leaves the row as it was, and decoded when the rest has come.
    O5  With ZCOMM_CHECK=1 capacities are those of the longest messages, so that no rest is exchanged: ranks of other
        hops wait for the checksums of every exchange, and would not know of that one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._base.pending import Pending
from zcomm._collectives.encoder import Encoder
from zcomm._formats.message import MessageInfo
from zcomm._kernels import ulps, ulps_on_cuda
from zcomm._stateful.exact_changes import EXACT, ExactReplica
from zcomm._transport import backend
from zcomm._transport.backend import UNEVEN_GATHER
from zcomm._transport.route import Route
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Steps
from zcomm.errors import BackendUnavailableError, MessageError

MARGIN = 64
"""A capacity is longer by 1 / 64 than the longer of a row's last two messages, and by so many bytes."""


@dataclass
class _Left:
    """What the host still has to read after an update."""

    messages: dict[int, Tensor]
    """The first bytes of every row's message; all of this rank's own."""
    facts: Tensor
    """[rows, HEAD_NBYTES + 4], on the host: heads, and whether a message was decoded."""
    event: torch.cuda.Event | None
    """When ``facts`` are there; None: they are."""


class CappedReplica(ExactReplica):
    """An :class:`ExactReplica` whose messages are sent in buffers of a size that both sides know.

    Args:
        replica, route, numbering, sizes, is_whole: As for :class:`ExactReplica`.

    Raises:
        FormatError: The replica is not bfloat16 or float16.
        BackendUnavailableError: It is neither in host memory nor on a GPU that the installed package has kernels for.
    """

    has_rest = True

    def __init__(
        self, replica: Tensor, route: Route, numbering: Numbering, sizes: Sequence[int], *, is_whole: bool
    ) -> None:
        is_served = ulps_on_cuda.is_built() if replica.is_cuda else replica.device.type == "cpu"
        if not is_served:
            raise BackendUnavailableError(
                f"format={EXACT!r} serves replicas in host memory, and on GPUs if the package was built with CUDA, got "
                f"{replica.device}: use another format"
            )
        super().__init__(replica, route, numbering, sizes, is_whole=is_whole)
        self._lengths: list[tuple[int, ...]] = [() for _ in self._room]
        """Of the last two messages of each row, in bytes."""
        self._left: _Left | None = None

    def refresh_steps(self) -> Steps:
        """Send this rank's row in its dtype. Capacities start again, as a rank may have missed a length by an error."""
        self._lengths, self._left = [() for _ in self._room], None
        return super().refresh_steps()

    def update_steps(self, shard: Tensor, encoder: Encoder) -> Steps:
        """Exchange what fits of the change of ``shard``; :meth:`rest_steps` must follow."""
        del encoder  # nothing is rounded
        shard, device = shard.to(self._replica.dtype), shard.device
        message = torch.zeros(self._room[self._own], dtype=torch.uint8, device=device)
        if shard.numel():
            _encode(shard, self.held, message)
        self.held.copy_(shard)
        return self._exchange_and_decode(message)

    def _exchange_and_decode(self, message: Tensor) -> Steps:
        capacities = self._capacities
        if message.is_cuda:  # made on the caller's stream, and used on this one
            message.record_stream(torch.cuda.current_stream(message.device))
        messages = {self._own: message[: capacities[self._own]]}
        yield from self._exchange(messages, capacities)
        rows = [row for row in messages if capacities[row]]
        heads = [messages[row][: ulps.HEAD_NBYTES] for row in rows]
        flags = torch.ones(len(rows), 1, dtype=torch.int32, device=message.device)
        for row, flag in zip(rows, flags.unbind(), strict=True):
            if row != self._own:
                _decode(messages[row], self._rows[row], flag)
        if rows:
            facts = torch.cat([torch.stack(heads), flags.view(torch.uint8)], dim=1)
            whole = messages | {self._own: message}
            self._left = _Left({row: whole[row] for row in rows}, *_to_host(facts))

    def rest_steps(self) -> Steps:
        """Read the heads of the last update's messages, and exchange what did not fit. Collective.

        Raises:
            MessageError: A message was damaged on its way. If in this update one did not fit, too, the other ranks
                wait for this one until their time limit.
        """
        left, self._left = self._left, None
        if left is None:
            return
        if left.event is not None:
            left.event.synchronize()
            for message in left.messages.values():  # made on a side stream, and used here
                message.record_stream(torch.cuda.current_stream(message.device))
        facts, before = dict(zip(left.messages, left.facts, strict=True)), self._capacities
        lengths = {row: ulps.message_nbytes(fact[: ulps.HEAD_NBYTES]) for row, fact in facts.items()}
        self._remember(lengths)
        missing = {row: max(0, lengths[row] - before[row]) for row in lengths}
        bad = [row for row, fact in facts.items() if not missing[row] and not fact[ulps.HEAD_NBYTES :].any()]
        if any(missing.values()):
            rests: dict[int, Tensor] = {}
            if self._own in missing:
                rests[self._own] = left.messages[self._own][before[self._own] : lengths[self._own]]
            of_rows = [missing.get(row, 0) for row in range(len(self._room))]
            yield from self._exchange(rests, of_rows)
            late = [row for row, nbytes in missing.items() if nbytes and row != self._own]
            flags = torch.ones(len(late), 1, dtype=torch.int32, device=self._replica.device)
            for row, flag in zip(late, flags.unbind(), strict=True):
                _decode(torch.cat([left.messages[row], rests[row]]), self._rows[row], flag)
            bad += [row for row, is_valid in zip(late, flags.flatten().tolist(), strict=True) if not is_valid]
        if bad:
            raise MessageError(f"changes in ulps: the messages of rows {bad} were damaged on their way")

    @property
    def _capacities(self) -> list[int]:
        """Bytes of each row in the next exchange: O3."""
        if env.is_set("ZCOMM_CHECK"):
            return list(self._room)  # O5
        longest = [max(lengths, default=room) for lengths, room in zip(self._lengths, self._room, strict=True)]
        return [
            min(room, _up_to_4(nbytes + nbytes // MARGIN + MARGIN)) if room else 0
            for nbytes, room in zip(longest, self._room, strict=True)
        ]

    def _remember(self, lengths: dict[int, int]) -> None:
        for row, nbytes in lengths.items():
            self._lengths[row] = (*self._lengths[row], nbytes)[-2:]

    def _exchange(self, parts: dict[int, Tensor], nbytes: Sequence[int]) -> Steps:
        """Add to ``parts``, which has this rank's own, ``nbytes[row]`` bytes of every other row that it holds."""
        singles = [[row] for row in self._pack]
        yield from self._hop(0, singles, parts, nbytes)
        if self._num_hops > 1:
            yield from self._hop(1, self._shards.packs, parts, nbytes)

    def _hop(
        self, hop: int, groups: Sequence[Sequence[int]], parts: dict[int, Tensor], nbytes: Sequence[int]
    ) -> Generator[Pending | None, None, None]:
        """Exchange the rows of ``groups[i]`` of rank i of hop ``hop``, side by side."""
        over, _ = self._shards.route.hops[hop]
        sizes, device = [sum(nbytes[row] for row in rows) for rows in groups], self._replica.device
        if over.size == 1:
            return
        mine = [parts[row] for row in groups[over.rank] if nbytes[row]]
        sent = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
        received = [
            torch.empty(size if rank != over.rank else 0, dtype=torch.uint8, device=device)
            for rank, size in enumerate(sizes)
        ]
        info = MessageInfo(self._shards.route.operation, EXACT, self._shards.numel(groups[over.rank]))
        if sent.numel():
            backend.count(over, info, sent.numel())
        to_each = [sent if rank != over.rank else sent[:0] for rank in range(over.size)]
        # As in ExactReplica: what is counted in the tag is equal on the hops of all nodes.
        yield backend.exchange_parts(
            received, to_each, over, info, sum(self._room), operation=UNEVEN_GATHER, sizes=sizes
        )
        for rank, rows in enumerate(groups):
            if rank != over.rank:
                of_rows = torch.split(received[rank], [nbytes[row] for row in rows])
                parts |= dict(zip(rows, of_rows, strict=True))


def exact_replica(
    replica: Tensor, route: Route, numbering: Numbering, sizes: Sequence[int], *, is_whole: bool
) -> ExactReplica:
    """An :class:`ExactReplica`; a :class:`CappedReplica` where both sides must know the length of an exchange.

    Raises:
        FormatError, BackendUnavailableError: As these; or over backend "nccl".
    """
    if route.backend == "nccl":
        raise BackendUnavailableError(
            f"backend='nccl' does not exchange messages of different lengths, which format={EXACT!r} needs: leave out "
            "backend=, torch's own NCCL groups do"
        )
    takes_any = replica.device.type == "cpu" and all(hop.size == 1 or hop.takes_shorter for hop, _ in route.hops)
    return (ExactReplica if takes_any else CappedReplica)(replica, route, numbering, sizes, is_whole=is_whole)


def _encode(new: Tensor, old: Tensor, message: Tensor) -> None:
    if new.is_cuda:
        ulps_on_cuda.encode(new, old, message)
    else:
        ulps.encode(new, old, message)


def _decode(message: Tensor, values: Tensor, is_valid: Tensor) -> None:
    """Replace old ``values`` by new ones; 0 in ``is_valid`` [1] and unchanged values if bytes are missing or wrong."""
    if values.is_cuda:
        ulps_on_cuda.decode(message, values, is_valid)
        return
    try:
        ulps.decode(message, values)
    except MessageError:
        is_valid.zero_()


def _to_host(facts: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy of ``facts`` on the host, and the event of its arrival."""
    if not facts.is_cuda:
        return facts, None
    copy = torch.empty(facts.shape, dtype=facts.dtype, pin_memory=True)
    copy.copy_(facts, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(facts.device))
    return copy, event


def _up_to_4(nbytes: int) -> int:
    return -(-nbytes // 4) * 4
