"""What torch raises when an exchange over one of its process groups fails, as the error that says which and what to do.

torch raises a bare RuntimeError, with the address of a peer: "Connection closed by peer [127.0.0.1]:18153".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from zcomm.errors import CommunicationError

__all__ = ["Members", "as_communication_error"]

Members = dist.ProcessGroup | Sequence[int] | None
"""A process group, or the global ranks of those who take part; None: all of torch.distributed."""
REMEDY = (
    "A rank has ended or makes another call: see the first error in the other ranks' logs; ZCOMM_DEBUG=1 names the "
    "ranks, their calls and lines"
)
MAX_NAMED = 16


def as_communication_error(error: BaseException, exchange: str, members: Members) -> BaseException:
    """``error`` itself, unless torch has raised it for ``exchange`` among ``members``: then what to raise from it.

    What this rank alone has done wrong stays as it is: errors of zcomm, of arguments, of memory, of CUDA.
    """
    is_of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
    if not is_of_torch or "DefaultCPUAllocator" in str(error):
        return error
    text = str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
    return CommunicationError(f"{exchange} failed{_place(members)}: {text}. {REMEDY}")


def _place(members: Members) -> str:
    with suppress(Exception):  # the process group may be gone
        ranks = list(members) if isinstance(members, Sequence) else dist.get_process_group_ranks(members)
        named = ", ".join(map(str, ranks[:MAX_NAMED]))
        more = f", ... ({len(ranks)} ranks)" if len(ranks) > MAX_NAMED else ""
        return f" on rank {dist.get_rank()} of ranks {named}{more}"
    return ""
