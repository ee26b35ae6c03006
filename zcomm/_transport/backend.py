"""Exchanges over one hop: the only module that calls torch.distributed's collectives, and counts what is sent.

    all_gather, all_to_all, exchange_parts, broadcast_
        --> gloo     tagged sends and receives (tagged.py)
        --> others   torch.distributed's collectives
        --> NCCL     this library's communicator, if ``Hop.nccl`` is set; it has no exchange_parts

Tensors travel as bytes, so every backend takes every dtype. A hop of one rank is a local copy.

CUDA tensors over gloo, and CPU tensors over NCCL, are copied to a device that the backend supports. Such an exchange
is synchronous: it completes before the call returns.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm._base import env
from zcomm._base.pending import Pending
from zcomm._formats.message import MessageInfo
from zcomm._kernels.profiling import NamedWait, is_profiling
from zcomm._transport import tagged
from zcomm._transport.checked import Checks, Ranks, checked
from zcomm._transport.collective_log import (
    CollectiveCall,
    CollectiveLog,
    TrackedWork,
    call_here,
    failing,
    raise_converted,
)
from zcomm._transport.store_exchange import exchange_texts
from zcomm._transport.tagged import TaggedExchange, Tags, exchange, tag_of, tags_of
from zcomm._transport.tagged_group import Group, TaggedGroup, given
from zcomm._transport.traffic import traffic_counter

# torch 2.13 renamed all_gather_into_tensor to all_gather_single and deprecated the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NcclHop(Protocol):
    """Exchanges bytes over a hop of several ranks in place of torch's process group."""

    def all_gather(self, output: Tensor, message: Tensor) -> Pending: ...

    def all_to_all(self, output: Tensor, messages: Tensor) -> Pending: ...


@dataclass(eq=False, slots=True)  # not frozen: every call makes one, and a frozen one takes several times as long
class Hop:
    """The ranks that one exchange runs over, as seen from this one."""

    group: Group | None
    """None: this rank alone."""
    size: int
    rank: int
    num_intra_peers: int
    num_inter_peers: int
    backend: str = ""
    """Name of the group's backend in torch.distributed."""
    log: CollectiveLog = field(default_factory=CollectiveLog, repr=False)
    """The exchanges started over this hop."""
    nccl: NcclHop | None = field(default=None, repr=False)
    """None: exchanges use the process group."""
    paired: Hop | None = field(default=None, repr=False)
    """The other hop of a two-hop collective: its ranks also learn of damaged messages on this hop."""
    is_unordered: bool = False
    """Whether checksums are verified at once, in a thread of their own, and not in the order of the exchanges."""
    communicators: Any = field(default=None, repr=False)
    """The Topology's :class:`nccl_communicators.Communicators`; None for a hop over a caller's process group."""

    def ranks(self) -> Ranks:
        assert self.group is not None, "a rank alone exchanges nothing"
        return Ranks(self.group, self.rank, takes_host_tensors(self.backend), self.links, self.is_unordered)

    @property
    def links(self) -> list[tuple[str, int]]:
        """Link classes, with the number of other ranks of each that has any."""
        links = [("intra", self.num_intra_peers)] if self.num_intra_peers else []
        return [*links, ("inter", self.num_inter_peers)] if self.num_inter_peers else links

    def is_tagged(self, device_type: str) -> bool:
        """Whether tensors on ``device_type`` are exchanged by tagged sends and receives."""
        return device_type == "cpu" and "gloo" in self.backend

    @property
    def takes_shorter(self) -> bool:
        """Whether less may be sent than the receive on a CPU has room for. gloo's TCP does it, libuv waits for all."""
        return self.is_tagged("cpu") and sys.platform == "linux"

    def paired_with(self, other: Hop) -> Hop:
        return replace(self, paired=other)


ALONE = Hop(None, 1, 0, 0, 0)


def count(hop: Hop, sent: MessageInfo, nbytes: int) -> None:
    """Count a message of ``nbytes`` to every other rank of ``hop``."""
    add = traffic_counter().add
    if hop.num_intra_peers:
        add((sent.operation, sent.format, "intra"), hop.num_intra_peers, sent.numel, nbytes)
    if hop.num_inter_peers:
        add((sent.operation, sent.format, "inter"), hop.num_inter_peers, sent.numel, nbytes)


ExchangeName = tuple[str, str, str]


def exchange_name_of(hop: Hop, sent: MessageInfo) -> ExchangeName:
    """The name of an exchange in a profiler trace: operation, format and links."""
    return sent.operation, sent.format, "/".join(link for link, _ in hop.links)


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # a slice of one element keeps the stride of its base, which view(dtype) rejects
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def all_gather(output: Tensor, message: Tensor, hop: Hop, sent: MessageInfo) -> Pending | None:
    """Start gathering contiguous ``message`` from every rank.

    ``output`` is contiguous, or 2-D with one contiguous row for each rank; ``message`` may be its own row already.
    """
    return _start("all_gather", output, message, hop, sent)


def all_to_all(output: Tensor, messages: Tensor, hop: Hop, sent: MessageInfo) -> Pending | None:
    """Start sending part i of contiguous ``messages`` to rank i; part j of contiguous ``output`` comes from rank j."""
    return _start("all_to_all", output, messages, hop, sent)


def _start(operation: str, output: Tensor, mine: Tensor, hop: Hop, sent: MessageInfo) -> Pending | None:
    """Start exchanging ``mine``. Exchanges over the process group are logged; over NCCL the stream logs them."""
    nbytes, device = mine.nbytes, mine.device
    if not nbytes:
        return None
    count(hop, sent, nbytes if operation == "all_gather" else nbytes // hop.size)
    if hop.group is None:
        if output.data_ptr() != mine.data_ptr():
            _bytes(output).copy_(_bytes(mine))
        return None
    call = call_here(operation, nbytes, device.type)
    if hop.paired is not None:
        call = hop.log.number_pair(call)
    if hop.nccl is not None:
        return _named(_exchange(output, mine, hop, hop.log.count_nccl(), call, sent), hop, sent)
    if not hop.is_tagged(device.type) and device_of(hop.backend, device) != device:
        return _through_copies(output, mine, hop, sent, call)
    number = hop.log.start(call, sent.format)
    try:
        pending = _exchange(output, mine, hop, number, call, sent)
        if is_profiling():
            pending = _named(pending, hop, sent)
    except BaseException as error:
        raise_converted(error, operation, hop.group, hop.log.departed)
        raise
    return TrackedWork(pending, hop.log, number, hop.group)


def _named(pending: Pending, hop: Hop, sent: MessageInfo) -> Pending:
    return NamedWait(pending, *exchange_name_of(hop, sent)) if is_profiling() else pending


def _exchange(output: Tensor, mine: Tensor, hop: Hop, number: int, call: CollectiveCall, info: MessageInfo) -> Pending:
    """Start exchange ``number`` of ``hop``, a gather or an all-to-all, with ZCOMM_CHECK=1 also of checksums."""
    is_gather = call.operation != "all_to_all"
    pending = _unchecked(output, mine, hop, tag_of(number, call), is_gather=is_gather)
    if not env.is_set("ZCOMM_CHECK"):
        return pending
    sent, received = _parts_to_send(mine, hop, is_gather=is_gather), _parts(output, hop.size)
    return _checked(pending, hop, (exchange_name_of(hop, info), tags_of(number, call)), sent, received)


def _checked(
    pending: Pending, hop: Hop, about: tuple[ExchangeName, Tags], sent: Sequence[Tensor], received: Sequence[Tensor]
) -> Pending:
    """``pending`` with checksums exchanged; ``received`` is indexed by rank of the hop."""
    paired = None if hop.paired is None else hop.paired.ranks()
    others = {peer: part for peer, part in enumerate(received) if peer != hop.rank}
    return checked(pending, Checks(*about, hop.ranks(), sent, others, paired))


def _unchecked(output: Tensor, mine: Tensor, hop: Hop, tag: int, *, is_gather: bool) -> Pending:
    if hop.nccl is not None:
        return (hop.nccl.all_gather if is_gather else hop.nccl.all_to_all)(output, mine)
    if hop.is_tagged(mine.device.type):
        sent, received = _parts_to_send(mine, hop, is_gather=is_gather), _parts(output, hop.size)
        if output.dtype != mine.dtype:
            sent, received = [_bytes(part) for part in sent], [_bytes(part) for part in received]
        return _send_and_receive(received, sent, hop, tag)
    if not is_gather:
        work = dist.all_to_all_single(_bytes(output), _bytes(mine), group=hop.group, async_op=True)
    elif output.is_contiguous():
        work = _all_gather(_bytes(output), _bytes(mine), group=hop.group, async_op=True)
    else:
        work = dist.all_gather([_bytes(row) for row in output], _bytes(mine), group=hop.group, async_op=True)
    return cast(Pending, work)


def _parts_to_send(mine: Tensor, hop: Hop, *, is_gather: bool) -> list[Tensor]:
    return _parts(mine, 1) * hop.size if is_gather else _parts(mine, hop.size)


def row_stride(tensor: Tensor, size: int) -> int:
    """Elements from each of ``size`` ranks' contiguous part of ``tensor`` to the next."""
    return tensor.numel() // size if tensor.is_contiguous() else tensor.stride(0)


def _parts(tensor: Tensor, size: int) -> list[Tensor]:
    """The equal, contiguous and flat parts of ``tensor`` for ``size`` ranks."""
    if size == tensor.ndim == 1:
        return [tensor]
    numel, stride, first = tensor.numel() // size, row_stride(tensor, size), tensor.storage_offset()
    # Each other kind of view that a call makes takes 10 us, since its code is not in the processor's cache.
    return [tensor.as_strided((numel,), (1,), first + rank * stride) for rank in range(size)]


@lru_cache
def _peers(rank: int, size: int) -> tuple[list[int], list[int]]:
    """The other ranks in the order in which ``rank`` receives from them, and sends to them."""
    return [(rank - step) % size for step in range(1, size)], [(rank + step) % size for step in range(1, size)]


def _send_and_receive(
    received: Sequence[Tensor], sent: Sequence[Tensor], hop: Hop, tag: int, *, some_are_empty: bool = False
) -> TaggedExchange:
    """Bytes ``sent[i]`` go to rank i of the hop; ``received[i]`` come from it. This rank's own part is copied."""
    assert hop.group is not None, "a rank alone exchanges nothing"
    # Each rank starts with its neighbour, so that no rank is the first target of all others.
    before, after = _peers(hop.rank, hop.size)
    if some_are_empty:
        before, after = [p for p in before if received[p].numel()], [p for p in after if sent[p].numel()]
    receives, sends = [(peer, received[peer]) for peer in before], [(peer, sent[peer]) for peer in after]
    own = received[hop.rank], sent[hop.rank]
    return exchange(hop.group, tag, receives, sends, own, is_local=hop.num_inter_peers == 0)


def combined(exchanges: Sequence[Pending | None]) -> Pending | None:
    """One handle for ``exchanges``, all of which have been started."""
    return TaggedExchange([exchange for exchange in exchanges if exchange is not None])


UNEVEN = "all_to_all with split sizes"
UNEVEN_GATHER = "all_gather of uneven shards"
UNEVEN_SCATTER = "reduce_scatter of uneven shards"
"""Operations of :func:`exchange_parts`."""
ONE_NUMBER = "all_gather of one number"
"""The operation of :func:`ints_over`."""


def exchange_parts(
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    hop: Hop,
    info: MessageInfo,
    nbytes: int,
    *,
    operation: str = UNEVEN,
    sizes: Sequence[int] = (),
    used: Sequence[int] | None = None,
) -> Pending | None:
    """Start sending contiguous ``sent[i]`` to rank i; ``received[j]`` comes from rank j. Empty parts are not sent.

    Every pair of ranks has agreed on its sizes, and the caller counts what is sent.

    Args:
        received: Parts of any length.
        sent: Parts of any length; this rank's own is copied, and may be empty in both lists.
        hop: The ranks.
        info: For a profiler trace.
        nbytes: Of the parts of all ranks, since what a rank sends differs, and a tag is made of what is equal on all;
            also on the hops of other nodes, if the hop has a paired one.
        operation: UNEVEN, or UNEVEN_GATHER: rank i sends ``sizes[i]`` bytes to every other rank, or UNEVEN_SCATTER: it
            receives so many from every other rank.
        sizes: The same on all ranks of the hop. With them the watch can complete the exchange.
        used: Send the first ``used[i]`` bytes of part i, and leave the rest of what receives them as it is; only if
            the hop :attr:`~Hop.takes_shorter`. Checksums are of whole parts: with ZCOMM_CHECK=1 both must have zeros
            there.
    """
    received, sent = [_bytes(part) for part in received], [_bytes(part) for part in sent]
    if hop.group is None:
        received[0].copy_(sent[0])
        return None
    device = device_of(hop.backend, sent[0].device)
    if device != sent[0].device:
        copies = [torch.empty_like(part, device=device) for part in received]
        by_place = {part.data_ptr(): part for part in sent}  # a gather sends one part to all: copy it once
        on_device = {place: part.to(device) for place, part in by_place.items()}
        sent = [on_device[part.data_ptr()] for part in sent]
        pending = exchange_parts(copies, sent, hop, info, nbytes, operation=operation, sizes=sizes)
        assert pending is not None, "a hop of several ranks"
        pending.wait()
        for part, copy in zip(received, copies, strict=True):
            part.copy_(copy)
        return None
    call = call_here(operation, nbytes, device.type)._replace(sizes=" ".join(map(str, sizes)))
    if hop.paired is not None:
        call = hop.log.number_pair(call)
    number = hop.log.start(call, info.format)
    with failing(operation, hop.group, hop.log.departed):
        pending = _exchange_parts(received, sent, hop, number, call, info, used)
    return TrackedWork(_named(pending, hop, info), hop.log, number, hop.group)


def _exchange_parts(
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    hop: Hop,
    number: int,
    call: CollectiveCall,
    info: MessageInfo,
    used: Sequence[int] | None = None,
) -> Pending:
    if hop.is_tagged(sent[0].device.type):
        short = sent if used is None else [part[:n] for part, n in zip(sent, used, strict=True)]
        pending: Pending = _send_and_receive(received, short, hop, tag_of(number, call), some_are_empty=True)
    else:
        pending = cast(Pending, dist.all_to_all(received, sent, group=hop.group, async_op=True))
    if env.is_set("ZCOMM_CHECK"):
        return _checked(pending, hop, (exchange_name_of(hop, info), tags_of(number, call)), sent, received)
    return pending


def _dummy_parts(call: CollectiveCall, hop: Hop, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank receives and sends in an exchange of uneven shards."""
    of_ranks = [int(size) for size in call.sizes.split()]
    mine = [of_ranks[hop.rank]] * hop.size
    sizes = (of_ranks, mine) if call.operation == UNEVEN_GATHER else (mine, of_ranks)
    received, sent = ([torch.zeros(n, dtype=torch.uint8, device=device) for n in numels] for numels in sizes)
    return received, sent


def _through_copies(
    output: Tensor, source: Tensor, hop: Hop, sent: MessageInfo, call: CollectiveCall
) -> Pending | None:
    device = device_of(hop.backend, source.device)
    received = torch.empty(output.shape, dtype=output.dtype, device=device)
    call = call._replace(device_type=device.type)
    number = hop.log.start(call, sent.format)
    with failing(call.operation, hop.group, hop.log.departed):
        pending = _exchange(received, source.to(device), hop, number, call, sent)
    with hop.log.waiting(number, hop.group):
        pending.wait()
        output.copy_(received)
    return None


def start_for_others(number: int, call: CollectiveCall, hop: Hop) -> Pending:
    """Start exchange ``number`` of ``hop`` with dummy values, so that ranks blocked in it wake up and raise.

    ``hop`` has a paired hop if that of the call had one. The caller updates the log.
    """
    if call.operation == UNEVEN:
        # Only the call itself knew its sizes. It starts this right after the ranks have agreed on them (I2 of
        # uneven_all_to_all.py), so no rank lacks it unless an interrupt came in between: then the timeout ends it.
        return TaggedExchange([])
    device = torch.device("cuda", torch.cuda.current_device()) if call.device_type == "cuda" else torch.device("cpu")
    # The ordered checksum thread may itself be blocked behind an exchange that this call completes.
    hop = replace(hop, is_unordered=True)
    info = MessageInfo(call.operation, "none", call.nbytes)
    if call.sizes:
        return _exchange_parts(*_dummy_parts(call, hop, device), hop, number, call, info)
    mine, tags = torch.zeros(call.nbytes, dtype=torch.uint8, device=device), tags_of(number, call)
    if call.operation == "broadcast":
        return _broadcast(mine, call.src, hop, tags, relays=False)
    if call.operation in tagged.FIRST_RANK_EXCHANGES:
        rows = mine.new_empty((hop.size, call.nbytes)) if hop.rank == 0 else None
        assert hop.group is not None, "a rank alone exchanges nothing"
        return tagged.FIRST_RANK_EXCHANGES[call.operation](mine, rows, hop.group, tags.own)
    output = mine.new_empty(call.nbytes if call.operation == "all_to_all" else (hop.size, call.nbytes))
    if call.operation == ONE_NUMBER:  # ranks exchange no checksums of it
        return _unchecked(output, mine, hop, tags.own, is_gather=True)
    return _exchange(output, mine, hop, number, call, info)


def broadcast_(tensor: Tensor, src: int, hop: Hop) -> None:
    """Overwrite contiguous ``tensor`` with that of rank ``src`` of the hop."""
    if hop.group is None or tensor.numel() == 0:
        return
    if hop.rank == src:
        count(hop, MessageInfo("control", "none", tensor.numel()), tensor.numel() * tensor.element_size())
    values = tensor.to(device_of(hop.backend, tensor.device))
    call = call_here("broadcast", tensor.numel() * tensor.element_size(), values.device.type, src)
    number = hop.log.start(call)
    with hop.log.waiting(number, hop.group):
        _broadcast(_bytes(values), src, hop, tags_of(number, call)).wait()
    if values is not tensor:
        tensor.copy_(values)


def _broadcast(values: Tensor, src: int, hop: Hop, tags: Tags, *, relays: bool = True) -> Pending:
    if hop.is_tagged(values.device.type):
        assert hop.group is not None, "a rank alone exchanges nothing"
        place = hop.group, hop.size, hop.rank
        pending: Pending = tagged.broadcast(values, src, place, tags.own, relays=relays)
    else:
        assert not isinstance(hop.group, TaggedGroup), "its exchanges are tagged"
        pending = cast(Pending, dist.broadcast(values, group=hop.group, group_src=src, async_op=True))
    if not env.is_set("ZCOMM_CHECK"):
        return pending
    name, is_src = exchange_name_of(hop, MessageInfo("broadcast", "none", values.numel())), hop.rank == src
    received = {} if is_src else {src: values}
    return checked(pending, Checks(name, tags, hop.ranks(), [values] * hop.size if is_src else [], received, None))


def sum_(tensor: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Start torch.distributed's own in-place all-reduce of ``tensor``. Its traffic is not counted."""

    def first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        with failing("all_reduce", group):
            return done.value()[0]

    with failing("all_reduce", group):
        future: torch.futures.Future[list[Tensor]] = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return cast("torch.futures.Future[Tensor]", future.then(first))


def device_of(backend: str, wanted: torch.device) -> torch.device:
    """``wanted`` if ``backend`` supports its tensors, else a device that it supports."""
    if wanted.type == "cpu" and not takes_host_tensors(backend):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if wanted.type == "cuda" and "nccl" not in backend else wanted


def takes_host_tensors(backend: str) -> bool:
    return "gloo" in backend or "nccl" not in backend


_LOGS: WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = WeakKeyDictionary()


def log_of(group: dist.ProcessGroup) -> CollectiveLog:
    """The log of a caller's process group: always the same object, so that exchanges are numbered in one sequence."""
    log = _LOGS.get(group)
    return _LOGS.setdefault(group, CollectiveLog()) if log is None else log


def gather_ints(value: int, group: dist.ProcessGroup | None) -> list[int]:
    """Every rank's ``value``, in rank order. A barrier. Over NCCL a store exchange, which waits for no device.

    A bit that flips on the way changes nothing.
    """
    process_group = given(group)
    if not takes_host_tensors(backend_of(group)):
        ranks = dist.get_process_group_ranks(process_group)
        return [int(text) for text in exchange_texts(ranks, str(value), lane="numbers", timeout=timeout_of(group))]
    return ints_over(value, hop_over(process_group))


def hop_over(group: dist.ProcessGroup) -> Hop:
    """One hop over ``group``, whose messages are not counted by link."""
    return Hop(group, dist.get_world_size(group), dist.get_rank(group), 0, 0, backend_of(group), log_of(group))


def ints_over(value: int, hop: Hop) -> list[int]:
    """Every rank's ``value``, in rank order. A barrier. ``hop`` has several ranks and takes host tensors."""
    # Explicitly on the CPU and without __torch_function__: a constructor may run under torch.device("meta").
    # Three times instead of ZCOMM_CHECK's checksums, which ranks exchange only once they know that all have set it.
    mine = torch.tensor([value] * 3, dtype=torch.int64, device="cpu")
    of_ranks = mine.new_empty((hop.size, 3))
    call = call_here(ONE_NUMBER, mine.nbytes, "cpu")
    number = hop.log.start(call)
    with hop.log.waiting(number, hop.group), torch._C.DisableTorchFunction():
        _unchecked(of_ranks, mine, hop, tag_of(number, call), is_gather=True).wait()
    return [(a & b) | (b & c) | (a & c) for a, b, c in of_ranks.tolist()]  # the majority of each bit


def backend_of(group: dist.ProcessGroup | None) -> str:
    """The backends of ``group``, as in ``cpu:gloo,cuda:nccl``."""
    return str(dist.get_backend_config(group))


def timeout_of(group: Group | None) -> timedelta | None:
    """The timeout of ``group``. A new group does not inherit it: torch.distributed's default is half an hour."""
    process_group: Any = group.group if isinstance(group, TaggedGroup) else given(group)
    for device in process_group._device_types:
        timeout = getattr(getattr(process_group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def group_named(name: str) -> dist.ProcessGroup:
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    return cast(dist.ProcessGroup, resolve(name))
