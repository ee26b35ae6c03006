"""Exchanges between the first rank of a hop and the others, in host memory: what one rank needs goes to that one only.

    gather   rank r --message r--> the first rank          scatter   the first rank --row r--> rank r

Over groups that take host tensors, from whichever thread has the group to itself. Synchronous. Every byte is in the
traffic counters, every exchange in the hop's :class:`zcomm.ledger.Ledger`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zcomm import env
from zcomm.backend import Hop, Sent, count, words_of
from zcomm.checked import Checks, checked
from zcomm.ledger import call_here
from zcomm.pending import Pending
from zcomm.tagged import FIRST, tags_of
from zcomm.traffic import record

__all__ = ["gather_to_first", "scatter_from_first"]

TO, FROM = FIRST


def gather_to_first(message: Tensor, hop: Hop) -> Tensor | None:
    """Every rank's ``message`` [n] as [hop size, n] on the first rank; None on the others. Not empty."""
    if hop.group is None:
        return message.view(1, -1)
    is_first = hop.rank == 0
    of_ranks = message.new_empty((hop.size, message.numel())) if is_first else None
    if not is_first:  # ranks of a node are consecutive
        link = "intra" if hop.rank <= hop.num_intra_peers else "inter"
        record(("control", "none", link), 1, message.numel(), message.nbytes)
    received = {} if of_ranks is None else dict(enumerate(of_ranks.unbind(0)[1:], 1))
    _run(TO, (message, of_ranks), hop, [message] * hop.size, received)
    return of_ranks


def scatter_from_first(rows: Tensor | None, numel: int, hop: Hop) -> Tensor:
    """This rank's row of ``rows``, uint8 [hop size, ``numel``], which the first rank has. Not empty."""
    if hop.group is None:
        assert rows is not None, "a rank alone is the first"
        return rows[0]
    is_first = hop.rank == 0
    mine = torch.empty(numel, dtype=torch.uint8)
    parts = [] if rows is None else list(rows.unbind(0))
    if is_first:
        count(hop, Sent("control", "none", numel), numel)
    _run(FROM, (mine, rows), hop, parts, {} if is_first else {0: mine})
    return mine


def _run(
    operation: str,
    tensors: tuple[Tensor, Tensor | None],
    hop: Hop,
    parts: Sequence[Tensor],
    received: Mapping[int, Tensor],
) -> None:
    """``parts`` go to the ranks, in their order; ``received`` come from them."""
    mine, rows = tensors
    call = call_here(operation, mine.nbytes, "cpu")
    number, words = hop.ledger.start(call), words_of(hop, Sent("control", "none", mine.numel()))
    tags = tags_of(number, call)
    with hop.ledger.waiting(number, hop.group):
        assert hop.group is not None, "a rank alone exchanges nothing"
        pending: Pending = FIRST[operation](mine, rows, hop.group, tags.own)
        if env.is_set("ZCOMM_CHECK"):
            pending = checked(pending, Checks(words, tags, hop.ranks(), parts, received, None))
        pending.wait()
