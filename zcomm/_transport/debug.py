"""With ZCOMM_DEBUG=1, ranks compare their calls before each exchange: a mismatch is one error, the same on every rank.

Calls over the same ranks are compared in the order in which each rank makes them, whatever group or Topology they go
over: so a rank that takes one hop is found where the others take two. Ranks that make no such call within the process
group's timeout, or are in one over other ranks, are named. What a thread of the program calls is compared group by
group instead: threads have no common order.

Costs a meeting in torch.distributed's store for each call (:mod:`zcomm._transport.store_exchange`), and with it the wait for all ranks;
no collective. Without it nothing is compared beforehand: a message of another kind is refused when it is decoded, and
where even the lengths differ the backend ends the process (gloo) or reports an error.
"""

from __future__ import annotations

import threading

import torch.distributed as dist

from zcomm._base import env
from zcomm._formats.formats import Format
from zcomm._transport import backend, call_context
from zcomm._transport.backend import Hop
from zcomm._transport.store_exchange import meet
from zcomm.errors import LayoutError


def compare_calls(operation: str, hops: tuple[tuple[Hop, Format], ...], whole: Hop, **facts: object) -> None:
    """Raise on every rank of ``whole`` unless all of them call ``operation`` with equal ``facts``.

    Raises:
        LayoutError: The calls differ: names every rank's, with its line.
        CommunicationError: Ranks made no call within the timeout of the process group.
    """
    if whole.group is None or not env.is_set("ZCOMM_DEBUG"):
        return
    group = whole.group
    formats = " -> ".join(str(wire) for _, wire in hops)
    named = {**facts, "format": formats, "hops": len(hops), "group": repr(group.group_name)}
    call = f"{operation}(" + ", ".join(f"{key}={value}" for key, value in named.items()) + ")"
    ranks = dist.get_process_group_ranks(group)
    said = call_context.describe(threading.get_ident(), call)
    texts = meet(ranks, said, lane=_lane(group.group_name), timeout=backend.timeout_of(group))
    if len({text.rpartition(" at ")[0] for text in texts}) > 1:
        lines = [f"  rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True)]
        raise LayoutError("the ranks' calls must be equal:\n" + "\n".join(lines))


def _lane(group_name: str) -> str:
    """Calls of the main thread, and of autograd's for it, are in one order; those of other threads only in a group."""
    thread = threading.current_thread()
    is_main = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    return "main" if is_main else f"group {group_name}"
