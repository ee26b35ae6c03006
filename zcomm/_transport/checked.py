"""With ZCOMM_CHECK=1, every message has a checksum, and no rank uses any before all have found theirs whole.

    sender    CRC-32 of each message, when its exchange starts --tagged send--> receiver
    receiver  the message has come: its CRC-32 compared --verdict--> the ranks of the exchange --> the other hop's

A thread for each process group does this behind the exchanges, in the order in which they were started; whoever waits
for an exchange waits for its verdict. Verdicts are equal on all ranks that hear of them, so all raise the same error.

Invariants:
    V1  What was started over a group before is judged before. So ranks may wait for exchanges in any order. Only those
        that ranks complete for others, whose calls differ, are judged beside (:func:`zcomm._transport.backend.take_part`).
    V2  Checksums and verdicts have tags beside that of their exchange (:mod:`zcomm._transport.tagged`): they meet no other send,
        and no other exchange's. Where a group takes no host tensors they are small collectives instead, when the
        exchange is waited for, which is in the order of the calls there.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm._base.pending import Pending
from zcomm._transport.tagged import Tags
from zcomm._transport.traffic import record
from zcomm.errors import DamagedError

CHECKSUM, VERDICT, BESIDE = 1, 2, 3
"""What is added to the tag of an exchange, which is a multiple of 4."""
RANK_BITS = 24


@dataclass(frozen=True)
class Ranks:
    """The ranks of an exchange, as seen from this one."""

    group: dist.ProcessGroup
    rank: int
    takes_host_tensors: bool
    links: tuple[tuple[str, int], ...]
    """Of each link class, to how many ranks."""
    is_apart: bool = False
    """Whether the exchange is judged at once, in a thread of its own."""

    @property
    def global_ranks(self) -> list[int]:
        """In the group's order."""
        return list(dist.get_process_group_ranks(self.group))


@dataclass(frozen=True)
class Checks:
    """What is exchanged: to rank i of ``ranks`` goes ``sent[i]``, if anything does; from it comes ``received[i]``."""

    words: tuple[str, ...]
    """Operation, format and links, for the error."""
    tags: Tags
    """Of the exchange."""
    ranks: Ranks
    sent: Sequence[Tensor]
    received: Mapping[int, Tensor]
    """Not this rank's own."""
    beside: Ranks | None
    """Who must hear of damage, too: the ranks of the other hop, whose turn comes next or was before."""


def checked(pending: Pending, exchange: Checks) -> Pending:
    """``pending``, which has just been started, with its verdict."""
    ranks = exchange.ranks
    parts = {part.data_ptr(): part for part in exchange.sent}  # a gather sends the same to all
    by_place = {place: _crc32(part) for place, part in parts.items()}
    sums = [by_place[part.data_ptr()] for part in exchange.sent] or [0] * len(ranks.global_ranks)
    judged = _Judged(pending, exchange, sums)
    if ranks.is_apart:
        threading.Thread(target=judged.judge, name="zcomm-check", daemon=True).start()
    elif ranks.takes_host_tensors:
        _judge_of(ranks.group).put(judged)
    return judged


def land(pending: Pending, _received: Mapping[int, Tensor]) -> None:
    """Return when what comes has been written to ``_received``."""
    pending.wait()


def _crc32(part: Tensor) -> int:
    data: Any = part.reshape(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(data)


_JUDGES: weakref.WeakKeyDictionary[dist.ProcessGroup, SimpleQueue[_Judged | None]] = weakref.WeakKeyDictionary()


def _judge_of(group: dist.ProcessGroup) -> SimpleQueue[_Judged | None]:
    queue = _JUDGES.get(group)
    if queue is None:
        queue = _JUDGES[group] = SimpleQueue()
        threading.Thread(target=_serve, args=(queue,), name="zcomm-check", daemon=True).start()
        weakref.finalize(group, queue.put, None)
    return queue


def _serve(queue: SimpleQueue[_Judged | None]) -> None:
    while (judged := queue.get()) is not None:
        judged.judge()
        del judged  # its tensors must not stay until the next exchange


@dataclass
class _Judged:
    """An exchange that has ended when it has landed and its verdict is there."""

    pending: Pending | None
    exchange: Checks | None
    sums: list[int]
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        if self.exchange is not None and not self.exchange.ranks.takes_host_tensors:
            self.judge()
        self.done.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.done.is_set()

    def ends_within(self, seconds: float) -> bool:
        return self.done.wait(seconds)

    def judge(self) -> None:
        exchange, pending = self.exchange, self.pending
        assert exchange is not None, "judged once"
        assert pending is not None, "judged once"
        try:
            land(pending, exchange.received)
            self._judge(exchange)
        except BaseException as error:  # handed to whoever waits
            self.error = error
        self.exchange = self.pending = None
        self.done.set()

    def _judge(self, exchange: Checks) -> None:
        ranks, tags = exchange.ranks, exchange.tags
        sent = _swap(ranks, self.sums, tags.own + CHECKSUM)
        mine = 0
        for peer, part in exchange.received.items():
            if sent[peer] != _crc32(part):
                of = ranks.global_ranks
                mine = (1 << 2 * RANK_BITS) | (of[peer] << RANK_BITS) | of[ranks.rank]
                break
        verdict = max(_swap(ranks, [mine] * len(sent), tags.own + VERDICT))
        if exchange.beside is not None:
            size = len(exchange.beside.global_ranks)
            verdict = max(_swap(exchange.beside, [verdict] * size, tags.beside + BESIDE))
        if verdict:
            sender, receiver = (verdict >> RANK_BITS) & (2**RANK_BITS - 1), verdict & (2**RANK_BITS - 1)
            operation, wire, links = exchange.words
            raise DamagedError(
                f"a message was damaged on the way: {operation}, in {wire} over {links} links: what rank {receiver} "
                f"got from rank {sender} has not the checksum it was sent with (ZCOMM_CHECK=1). No rank uses anything "
                "of this exchange; look for a faulty network card, cable or memory, and go on from the last checkpoint"
            )


def _swap(ranks: Ranks, values: list[int], tag: int) -> list[int]:
    """``values[i]`` goes to rank i; returns what came from each rank, this one's own included."""
    mine = torch.tensor(values, dtype=torch.int64)
    for link, num_peers in ranks.links:
        if num_peers:
            record(("check", "none", link), num_peers, 1, 8)
    if not ranks.takes_host_tensors:
        device = torch.device("cuda", torch.cuda.current_device())
        mine = mine.to(device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=ranks.group)
        return cast("list[int]", theirs.tolist())
    theirs = mine.clone()
    peers = [peer for peer in range(len(values)) if peer != ranks.rank]
    receives = [dist.irecv(theirs[peer : peer + 1], group=ranks.group, tag=tag, group_src=peer) for peer in peers]
    sends = [dist.isend(mine[peer : peer + 1], group=ranks.group, tag=tag, group_dst=peer) for peer in peers]
    for work in (*receives, *sends):
        assert work is not None, "this rank is in the group"
        work.wait()
    return cast("list[int]", theirs.tolist())
