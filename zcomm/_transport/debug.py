"""ZCOMM_DEBUG=1: ranks compare their calls before each exchange. A mismatch raises the same error on every rank.

Calls over the same ranks are compared in the order in which each rank makes them, whatever group or Topology they use.
So a rank that takes one hop is found where the others take two. The error names ranks that make no such call within
the process group's timeout, and ranks that are in a call over other ranks. Calls of other threads than the main one are
compared for each group on its own, since threads have no common order.

Each call costs a store exchange (:mod:`zcomm._transport.store_exchange`), which waits for all ranks; no collective.
Without ZCOMM_DEBUG nothing is compared beforehand: a message of another layout is rejected when it is decoded, and if
even the lengths differ, the exchange fails or hangs until the timeout, depending on the backend.
"""

from __future__ import annotations

import threading

from zcomm._base import env
from zcomm._formats.formats import Format
from zcomm._transport import backend, stacks
from zcomm._transport.backend import Hop
from zcomm._transport.call_context import current_context
from zcomm._transport.store_exchange import exchange_texts
from zcomm._transport.tagged_group import ranks_of
from zcomm.errors import LayoutError


def compare_calls(operation: str, hops: tuple[tuple[Hop, Format], ...], all_ranks: Hop, **facts: object) -> None:
    """Raise on every rank of ``all_ranks`` unless all of them call ``operation`` with equal ``facts``.

    Raises:
        LayoutError: The calls differ. Names the call and line of each rank.
        CommunicationError: Some ranks made no call within the process group's timeout.
    """
    if all_ranks.group is None or not env.is_set("ZCOMM_DEBUG"):
        return
    group = all_ranks.group
    formats = " -> ".join(str(wire) for _, wire in hops)
    named = {**facts, "format": formats, "hops": len(hops), "group": repr(group.group_name)}
    if bucket := current_context().bucket:
        named["bucket"] = bucket
    call = f"{operation}(" + ", ".join(f"{key}={value}" for key, value in named.items()) + ")"
    ranks = ranks_of(group)
    own_call = stacks.describe(threading.get_ident(), call)
    texts = exchange_texts(ranks, own_call, lane=_lane(group.group_name), timeout=backend.timeout_of(group))
    if len({text.rpartition(" at ")[0] for text in texts}) > 1:
        lines = [f"  rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True)]
        raise LayoutError("the ranks' calls must be equal:\n" + "\n".join(lines))


def _lane(group_name: str) -> str:
    """One sequence for the main thread and autograd's threads, which run for it; for others one for each group."""
    thread = threading.current_thread()
    is_main = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    return "main" if is_main else f"group {group_name}"
