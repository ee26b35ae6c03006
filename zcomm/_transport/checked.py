"""Checksums of messages with ZCOMM_CHECK=1: no rank uses a message before all ranks have verified theirs.

    sender    CRC-32 of each message, when its exchange starts --tagged send--> receiver
    receiver  compares the CRC-32 of what it received --verdict--> the ranks of the exchange --> those of the paired hop

One thread for each process group verifies exchanges in the order in which they were started. ``wait()`` returns only
after the verdict. Every rank receives the same verdict, so all raise the same error.

Invariants:
    V1  Exchanges of a group are verified in the order in which they were started, whatever the order of ``wait()``.
        Otherwise two ranks that wait in different orders would deadlock in each other's verdicts. The exception is
        dummy exchanges, which wake ranks from a deadlock (:func:`zcomm._transport.backend.start_for_others`).
    V2  Checksums and verdicts have tags of their own next to that of their exchange (:mod:`zcomm._transport.tagged`),
        so they match no other send. Where a group takes no host tensors they are small collectives instead, started
        in ``wait()``, which is called in the order of the calls there.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm._base.daemon_threads import DaemonThread, start_daemon
from zcomm._base.pending import Pending
from zcomm._base.rank_context import threads
from zcomm._transport.tagged import Tags
from zcomm._transport.tagged_group import Group, ranks_of
from zcomm._transport.traffic import record
from zcomm.errors import DamagedError

CHECKSUM, VERDICT, PAIRED = 1, 2, 3
"""Added to the tag of an exchange, which is a multiple of 4."""
RANK_BITS = 24
MARK = 0x7FFF << 2 * RANK_BITS
"""In a verdict of damage; 0 in the others. A bit that flips here changes the verdict on no rank: most bits count."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of an exchange, as seen from this one."""

    group: Group
    rank: int
    takes_host_tensors: bool
    links: Sequence[tuple[str, int]]
    """Link classes, with the number of other ranks of each."""
    is_unordered: bool = False
    """Whether the exchange is verified at once, in a thread of its own."""

    @property
    def global_ranks(self) -> list[int]:
        return ranks_of(self.group)


@dataclass(frozen=True)
class Checks:
    """One exchange: ``sent[i]`` goes to rank i of ``ranks``, if there is one; ``received[i]`` comes from it."""

    name: tuple[str, ...]
    """Operation, format and links, for the error."""
    tags: Tags
    ranks: Ranks
    sent: Sequence[Tensor]
    received: Mapping[int, Tensor]
    """Without this rank's own part."""
    paired: Ranks | None
    """The ranks of the other hop of the collective, which must receive the verdict too."""


def checked(pending: Pending, exchange: Checks) -> Pending:
    """``pending``, just started as ``exchange``, whose ``wait()`` also verifies checksums.

    Raises:
        DamagedError: In ``wait()``: a checksum does not match. The same on every rank.
    """
    ranks = exchange.ranks
    # Now, and not in the thread: the caller may overwrite what it sends as soon as the exchange itself completes.
    parts = {part.data_ptr(): part for part in exchange.sent}  # an all-gather sends the same to all: hash it once
    by_place = {place: _crc32(part) for place, part in parts.items()}
    sums = [by_place[part.data_ptr()] for part in exchange.sent] or [0] * len(ranks.global_ranks)
    work = _CheckedExchange(pending, exchange, sums)
    if ranks.is_unordered:
        start_daemon(work.verify, "zcomm-check")
    elif ranks.takes_host_tensors:
        _thread_of(ranks.group).run(work.verify)  # V1: one thread for each group
    return work


def wait_received(pending: Pending, _received: Mapping[int, Tensor]) -> None:
    """Return when the received messages have been written. Tests replace it to damage them."""
    pending.wait()


def _crc32(part: Tensor) -> int:
    data: Any = part.reshape(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(data)


_THREADS: weakref.WeakKeyDictionary[Group, DaemonThread] = weakref.WeakKeyDictionary()


def _thread_of(group: Group) -> DaemonThread:
    thread = _THREADS.get(group)
    if thread is None:
        thread = _THREADS[group] = DaemonThread("zcomm-check")
        weakref.finalize(group, thread.end)  # of the thread alone, never of the group
    return thread


@dataclass
class _CheckedExchange:
    """An exchange that completes when its messages have arrived and the verdict is known."""

    pending: Pending | None
    exchange: Checks | None
    sums: list[int]
    error: BaseException | None = None
    done: threading.Event = field(default_factory=lambda: threads().Event())

    def wait(self) -> None:
        if self.exchange is not None and not self.exchange.ranks.takes_host_tensors:
            self.verify()  # V2: collectives of NCCL, which the caller must start in the order of its calls
        self.done.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.done.is_set()

    def ends_within(self, seconds: float) -> bool:
        return self.done.wait(seconds)

    def verify(self) -> None:
        exchange, pending = self.exchange, self.pending
        assert exchange is not None, "verified once"
        assert pending is not None, "verified once"
        try:
            wait_received(pending, exchange.received)
            self._verify(exchange)
        except BaseException as error:  # raised in wait()
            self.error = error
        self.exchange = self.pending = None  # before done is set: the owner of the tensors may count references
        self.done.set()

    def _verify(self, exchange: Checks) -> None:
        ranks, tags = exchange.ranks, exchange.tags
        sent = _swap(ranks, self.sums, tags.own + CHECKSUM)
        # 0: no damage. Otherwise the mark, the sender and the receiver in one integer: all ranks take the maximum.
        mine = 0
        for peer, part in exchange.received.items():
            if sent[peer] != _crc32(part):
                of = ranks.global_ranks
                mine = MARK | (of[peer] << RANK_BITS) | of[ranks.rank]
                break
        verdict = _worst(_swap(ranks, [mine] * len(sent), tags.own + VERDICT))
        if exchange.paired is not None:
            size = len(exchange.paired.global_ranks)
            verdict = _worst(_swap(exchange.paired, [verdict] * size, tags.paired + PAIRED))
        if verdict:
            sender, receiver = (verdict >> RANK_BITS) & (2**RANK_BITS - 1), verdict & (2**RANK_BITS - 1)
            operation, wire, links = exchange.name
            raise DamagedError(
                f"a message was damaged on the way: checksum mismatch in {operation}, format={wire}, links={links}: "
                f"rank {receiver} received other bytes than rank {sender} sent (ZCOMM_CHECK=1). No rank has used the "
                "result; check network cards, cables and memory, and resume from the last checkpoint"
            )


def _worst(verdicts: list[int]) -> int:
    """The largest verdict of damage; 0 if there is none."""
    return max((MARK | verdict for verdict in verdicts if (verdict & MARK).bit_count() > 7), default=0)


def _swap(ranks: Ranks, values: list[int], tag: int) -> list[int]:
    """``values[i]`` goes to rank i; returns what came from each rank, this one's own included."""
    mine = torch.tensor(values, dtype=torch.int64)
    for link, num_peers in ranks.links:
        record(("check", "none", link), num_peers, 1, 8)
    if not ranks.takes_host_tensors:
        device = torch.device("cuda", torch.cuda.current_device())
        mine = mine.to(device)
        theirs = torch.empty_like(mine)
        assert isinstance(ranks.group, dist.ProcessGroup), "a TaggedGroup is gloo's, which takes host tensors"
        dist.all_to_all_single(theirs, mine, group=ranks.group)
        return cast("list[int]", theirs.tolist())
    theirs = mine.clone()
    peers = [peer for peer in range(len(values)) if peer != ranks.rank]
    receives = [ranks.group.recv([theirs[peer : peer + 1]], peer, tag) for peer in peers]
    sends = [ranks.group.send([mine[peer : peer + 1]], peer, tag) for peer in peers]
    for work in (*receives, *sends):
        work.wait()
    return cast("list[int]", theirs.tolist())
