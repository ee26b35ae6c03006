"""Exchanges between the first rank of a hop and the others, in host memory: what one rank needs goes to that one only.

    gather   rank r --message r--> the first rank          scatter   the first rank --row r--> rank r

Over groups that take host tensors, from whichever thread has the group to itself. Synchronous.

Every byte is in the traffic counters. No :class:`zcomm.ledger.Ledger` has these exchanges: the ranks give tensors of
different sizes, which its calls compare, and a hop made for one call has a ledger that nobody reads. One that fails is
told to the flight recorder, as any other; one that lacks a rank ends with the group's timeout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import env
from zcomm.backend import Hop, Pending, Sent, count, words_of
from zcomm.checked import Exchange, checked
from zcomm.ledger import failing
from zcomm.traffic import record

__all__ = ["gather_to_first", "scatter_from_first"]


def gather_to_first(message: Tensor, hop: Hop) -> Tensor | None:
    """Every rank's ``message`` [n] as [hop size, n] on the first rank; None on the others. Not empty."""
    if hop.group is None:
        return message.view(1, -1)
    sent, is_first = Sent("control", "none", message.numel()), hop.rank == 0
    of_ranks = message.new_empty((hop.size if is_first else 0, message.numel()))
    rows = list(of_ranks.unbind(0))
    if not is_first:  # ranks of a node are consecutive
        link = "intra" if hop.rank <= hop.num_intra_peers else "inter"
        record((sent.operation, sent.format, link), 1, sent.numel, message.nbytes)
    with failing("gather to the first rank", hop.group):
        work = dist.gather(message, rows if is_first else None, group=hop.group, group_dst=0, async_op=True)
        _wait(work, hop, sent, [message] * hop.size, dict(enumerate(rows[1:], 1)))
    return of_ranks if is_first else None


def scatter_from_first(rows: Tensor | None, numel: int, hop: Hop) -> Tensor:
    """This rank's row of ``rows``, uint8 [hop size, ``numel``], which the first rank has. Not empty."""
    if hop.group is None:
        assert rows is not None, "a rank alone is the first"
        return rows[0]
    sent, is_first = Sent("control", "none", numel), hop.rank == 0
    mine = torch.empty(numel, dtype=torch.uint8)
    parts = [] if rows is None else list(rows.unbind(0))
    if is_first:
        count(hop, sent, numel)
    with failing("scatter from the first rank", hop.group):
        work = dist.scatter(mine, parts if is_first else None, group=hop.group, group_src=0, async_op=True)
        _wait(work, hop, sent, parts, {} if is_first else {0: mine})
    return mine


def _wait(work: object, hop: Hop, sent: Sent, parts: Sequence[Tensor], received: Mapping[int, Tensor]) -> None:
    """``parts`` go to the ranks, in their order; ``received`` come from them."""
    pending = cast(Pending, work)
    if env.is_set("ZCOMM_CHECK"):
        pending = checked(pending, Exchange(words_of(hop, sent), hop.ranks(), parts, received, None))
    pending.wait()
