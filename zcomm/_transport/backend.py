"""The only module that calls torch.distributed's collectives: absorbs their renames, counts what is sent.

A hop with a carrier goes over that instead (:mod:`zcomm._transport.nccl_communicators`).

Tensors travel as bytes, so every dtype goes through every backend. A hop of one rank is a local copy.

Over gloo exchanges are tagged sends and receives, straight into place (:mod:`zcomm._transport.tagged`). CUDA tensors over gloo,
and CPU tensors over NCCL, pass through a copy on a device that the backend takes; those exchanges end before the call
returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm._base import env
from zcomm._base.pending import Pending
from zcomm._kernels.profiling import named_wait
from zcomm._transport import tagged
from zcomm._transport.checked import Checks, Ranks, checked
from zcomm._transport.collective_log import CollectiveCall, CollectiveLog, call_here, failing, tracked
from zcomm._transport.store_exchange import meet
from zcomm._transport.tagged import TaggedExchange, Tags, exchange, tags_of
from zcomm._transport.traffic import record

# torch 2.13 renamed all_gather_into_tensor to all_gather_single and deprecated the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Carrier(Protocol):
    """What exchanges the bytes of a hop instead of torch's process group."""

    def all_gather(self, output: Tensor, message: Tensor) -> Pending:
        """As :func:`all_gather` of a hop of several ranks."""

    def all_to_all(self, output: Tensor, messages: Tensor) -> Pending:
        """As :func:`all_to_all` of a hop of several ranks."""


@dataclass(frozen=True)
class Hop:
    """The ranks that one exchange runs over, as seen from this one."""

    group: dist.ProcessGroup | None
    """None: this rank alone."""
    size: int
    rank: int
    num_intra_peers: int
    num_inter_peers: int
    backend: str = ""
    """Of the group, as torch.distributed names it."""
    ledger: CollectiveLog = field(default_factory=CollectiveLog, compare=False, repr=False)
    """What has been started over it."""
    carrier: Carrier | None = field(default=None, compare=False, repr=False)
    """None: the group itself."""
    beside: Hop | None = field(default=None, compare=False, repr=False)
    """The other hop of a collective of two: its ranks hear of damage in this one's messages, too."""
    is_apart: bool = False
    """Whether checksums go beside those of other exchanges, out of their order."""
    communicators: Any = field(default=None, compare=False, repr=False)
    """The :class:`zcomm._transport.nccl_communicators.Communicators` of its Topology; None: a process group of a caller's."""

    def ranks(self) -> Ranks:
        """Who exchanges checksums and verdicts."""
        assert self.group is not None, "a rank alone exchanges nothing"
        return Ranks(self.group, self.rank, takes_host_tensors(self.backend), _links(self), self.is_apart)

    def sends(self, device_type: str) -> bool:
        """Whether tensors there are exchanged by tagged sends."""
        return device_type == "cpu" and "gloo" in self.backend

    def next_to(self, other: Hop) -> Hop:
        """The same hop of a collective whose other one is ``other``."""
        return replace(self, beside=other)

    def with_carrier(self, carrier: Carrier) -> Hop:
        """The same ranks and the same ledger, over ``carrier``."""
        return replace(self, carrier=carrier)


ALONE = Hop(None, 1, 0, 0, 0)


class MessageInfo(NamedTuple):
    """What a message is, for the counters."""

    operation: str
    format: str
    numel: int


def count(hop: Hop, sent: MessageInfo, nbytes: int) -> None:
    """Count ``nbytes`` to every other rank of ``hop``."""
    for link, num_peers in _links(hop):
        if num_peers:
            record((sent.operation, sent.format, link), num_peers, sent.numel, nbytes)


Words = tuple[str, str, str]


def words_of(hop: Hop, sent: MessageInfo) -> Words:
    """How a profiler's trace calls an exchange: what, in which format, over which links."""
    return sent.operation, sent.format, "/".join(link for link, count in _links(hop) if count)


def _links(hop: Hop) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("intra", hop.num_intra_peers), ("inter", hop.num_inter_peers)


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # one element, cut from something strided
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def all_gather(output: Tensor, message: Tensor, hop: Hop, sent: MessageInfo) -> Pending | None:
    """Start gathering contiguous ``message`` from every rank.

    ``output`` is contiguous, or 2-D with one contiguous row for each rank; ``message`` may be its own row already.
    """
    if message.numel() == 0:
        return None
    count(hop, sent, message.numel() * message.element_size())
    if hop.group is None:
        if output.data_ptr() != message.data_ptr():
            _bytes(output).copy_(_bytes(message))
        return None
    return _start(output, message, hop, "all_gather", sent)


def _start(output: Tensor, mine: Tensor, hop: Hop, operation: str, sent: MessageInfo) -> Pending | None:
    """Start exchanging ``mine``; what goes over the group itself is entered into its ledger."""
    words = words_of(hop, sent)
    start = partial(_gather if operation == "all_gather" else _exchange, words=words)
    call = call_here(operation, mine.numel() * mine.element_size(), mine.device.type)
    if hop.beside is not None:
        call = hop.ledger.beside(call)
    if hop.carrier is not None:
        return named_wait(start(output, mine, hop, tags_of(hop.ledger.carry(), call)), *words)
    if device_of(hop.backend, mine.device) != mine.device:
        return _through_copies(output, mine, hop, words, call)
    number = hop.ledger.start(call, sent.format)
    with failing(operation, hop.group, hop.ledger.lost):
        pending = named_wait(start(output, mine, hop, tags_of(number, call)), *words)
    return tracked(pending, hop.ledger, number, hop.group)


def _gather(output: Tensor, message: Tensor, hop: Hop, tags: Tags, words: Words) -> Pending:
    pending = _gather_unchecked(output, message, hop, tags.own)
    if not env.is_set("ZCOMM_CHECK"):
        return pending
    rows = output.view(hop.size, -1) if output.is_contiguous() else output
    return _checked(pending, hop, (words, tags), [message] * hop.size, rows.unbind(0))


def _checked(
    pending: Pending, hop: Hop, about: tuple[Words, Tags], sent: Sequence[Tensor], received: Sequence[Tensor]
) -> Pending:
    """With its verdict; ``received`` by rank of the hop."""
    beside = None if hop.beside is None else hop.beside.ranks()
    others = {peer: part for peer, part in enumerate(received) if peer != hop.rank}
    return checked(pending, Checks(*about, hop.ranks(), sent, others, beside))


def _gather_unchecked(output: Tensor, message: Tensor, hop: Hop, tag: int) -> Pending:
    if hop.carrier is not None:
        return hop.carrier.all_gather(output, message)
    if not hop.sends(message.device.type):
        if output.is_contiguous():
            return cast(Pending, _all_gather(_bytes(output), _bytes(message), group=hop.group, async_op=True))
        rows = [_bytes(row) for row in output]
        return cast(Pending, dist.all_gather(rows, _bytes(message), group=hop.group, async_op=True))
    return _swap(output.view(hop.size, -1).unbind(0), [message.view(-1)] * hop.size, hop, tag)


def _swap(received: Sequence[Tensor], sent: Sequence[Tensor], hop: Hop, tag: int) -> TaggedExchange:
    """``sent[i]`` goes to rank i of the hop; ``received[i]`` comes from it. This rank's own part is copied."""
    assert hop.group is not None, "a rank alone exchanges nothing"
    before = [(hop.rank - step) % hop.size for step in range(1, hop.size)]
    after = [(hop.rank + step) % hop.size for step in range(1, hop.size)]
    receives = [(peer, _bytes(received[peer])) for peer in before]
    own = _bytes(received[hop.rank]), _bytes(sent[hop.rank])
    return exchange(hop.group, tag, receives, [(peer, _bytes(sent[peer])) for peer in after], own)


def together(exchanges: Sequence[Pending | None]) -> Pending | None:
    """All of ``exchanges``, which have been started, as one."""
    return TaggedExchange([exchange for exchange in exchanges if exchange is not None])


def all_to_all(output: Tensor, messages: Tensor, hop: Hop, sent: MessageInfo) -> Pending | None:
    """Start sending part i of contiguous ``messages`` to rank i; part j of contiguous ``output`` comes from rank j."""
    if messages.numel() == 0:
        return None
    count(hop, sent, messages.numel() * messages.element_size() // hop.size)
    if hop.group is None:
        _bytes(output).copy_(_bytes(messages))
        return None
    return _start(output, messages, hop, "all_to_all", sent)


def _exchange(output: Tensor, messages: Tensor, hop: Hop, tags: Tags, words: Words) -> Pending:
    if hop.carrier is not None:
        pending = hop.carrier.all_to_all(output, messages)
    elif hop.sends(messages.device.type):
        sent, received = (_bytes(tensor).view(hop.size, -1).unbind(0) for tensor in (messages, output))
        pending = _swap(received, sent, hop, tags.own)
    else:
        work = dist.all_to_all_single(_bytes(output), _bytes(messages), group=hop.group, async_op=True)
        pending = cast(Pending, work)
    if not env.is_set("ZCOMM_CHECK"):
        return pending
    sent, received = (_bytes(tensor).view(hop.size, -1).unbind(0) for tensor in (messages, output))
    return _checked(pending, hop, (words, tags), sent, received)


def _through_copies(output: Tensor, source: Tensor, hop: Hop, words: Words, call: CollectiveCall) -> Pending | None:
    device = device_of(hop.backend, source.device)
    received = torch.empty(output.shape, dtype=output.dtype, device=device)
    start = _gather if call.operation == "all_gather" else _exchange
    call = call._replace(device_type=device.type)
    number = hop.ledger.start(call, words[1])
    with failing(call.operation, hop.group, hop.ledger.lost):
        pending = start(received, source.to(device), hop, tags_of(number, call), words)
    with hop.ledger.waiting(number, hop.group):
        pending.wait()
        output.copy_(received)
    return None


def take_part(number: int, call: CollectiveCall, hop: Hop) -> Pending:
    """Start exchange ``number`` of ``hop``, whose values nobody will use: ranks wait for this one in it.

    ``hop`` has another beside it if the call's had one. The ledger is left to the caller.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if call.device_type == "cuda" else torch.device("cpu")
    mine, tags = torch.zeros(call.nbytes, dtype=torch.uint8, device=device), tags_of(number, call)
    hop = replace(hop, is_apart=True)
    words = (call.operation, "none", "/".join(link for link, count in _links(hop) if count))
    if call.operation == "broadcast":
        return _broadcast(mine, call.src, hop, tags, relays=False)
    if call.operation in tagged.FIRST:
        rows = mine.new_empty((hop.size, call.nbytes)) if hop.rank == 0 else None
        assert hop.group is not None, "a rank alone exchanges nothing"
        return tagged.FIRST[call.operation](mine, rows, hop.group, tags.own)
    if call.operation == "all_to_all":
        return _exchange(torch.empty_like(mine), mine, hop, tags, words)
    return _gather(mine.new_empty((hop.size, call.nbytes)), mine, hop, tags, words)


def broadcast_(tensor: Tensor, src: int, hop: Hop) -> None:
    """Overwrite contiguous ``tensor`` with rank ``src``'s, ``src`` counted in the hop."""
    if hop.group is None or tensor.numel() == 0:
        return
    if hop.rank == src:
        count(hop, MessageInfo("control", "none", tensor.numel()), tensor.numel() * tensor.element_size())
    values = tensor.to(device_of(hop.backend, tensor.device))
    call = call_here("broadcast", tensor.numel() * tensor.element_size(), values.device.type, src)
    number = hop.ledger.start(call)
    with hop.ledger.waiting(number, hop.group):
        _broadcast(_bytes(values), src, hop, tags_of(number, call)).wait()
    if values is not tensor:
        tensor.copy_(values)


def _broadcast(values: Tensor, src: int, hop: Hop, tags: Tags, *, relays: bool = True) -> Pending:
    if hop.sends(values.device.type):
        assert hop.group is not None, "a rank alone exchanges nothing"
        place = hop.group, hop.size, hop.rank
        pending: Pending = tagged.broadcast(values, src, place, tags.own, relays=relays)
    else:
        pending = cast(Pending, dist.broadcast(values, group=hop.group, group_src=src, async_op=True))
    if not env.is_set("ZCOMM_CHECK"):
        return pending
    words, is_src = words_of(hop, MessageInfo("broadcast", "none", values.numel())), hop.rank == src
    received = {} if is_src else {src: values}
    return checked(pending, Checks(words, tags, hop.ranks(), [values] * hop.size if is_src else [], received, None))


def sum_(tensor: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Start torch.distributed's own all-reduce of ``tensor``, in place. Not counted: it has no hops of ours."""

    def first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        with failing("all_reduce", group):
            return done.value()[0]

    with failing("all_reduce", group):
        future: torch.futures.Future[list[Tensor]] = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return cast("torch.futures.Future[Tensor]", future.then(first))


def device_of(backend: str, wanted: torch.device) -> torch.device:
    """``wanted`` if ``backend`` takes its tensors, else a device whose tensors it takes."""
    if wanted.type == "cpu" and not takes_host_tensors(backend):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if wanted.type == "cuda" and "nccl" not in backend else wanted


def takes_host_tensors(backend: str) -> bool:
    """Whether ``backend`` exchanges tensors in host memory."""
    return "gloo" in backend or "nccl" not in backend


_LEDGERS: WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = WeakKeyDictionary()


def ledger_of(group: dist.ProcessGroup) -> CollectiveLog:
    """That of a process group which no Topology has made: the same one at each call."""
    return _LEDGERS.setdefault(group, CollectiveLog())


def gather_ints(value: int, group: dist.ProcessGroup | None) -> list[int]:
    """Every rank's ``value``, in rank order. A barrier; over NCCL a meeting in the store, without any device."""
    whole = dist.group.WORLD if group is None else group
    assert whole is not None, "torch.distributed is initialised"
    if not takes_host_tensors(backend_of(group)):
        ranks = dist.get_process_group_ranks(whole)
        return [int(text) for text in meet(ranks, str(value), lane="numbers", timeout=timeout_of(group))]
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return ints_over(value, Hop(whole, size, rank, 0, 0, backend_of(group), ledger_of(whole)))


def ints_over(value: int, hop: Hop) -> list[int]:
    """Every rank's ``value``, in rank order. A barrier. ``hop`` has several ranks and takes tensors in host memory."""
    mine = torch.tensor([value], dtype=torch.int64, device="cpu")  # a constructor may run under torch.device("meta")
    of_ranks = mine.new_empty(hop.size)
    call = call_here("all_gather of one number", 8, "cpu")
    number = hop.ledger.start(call)
    with hop.ledger.waiting(number, hop.group), torch._C.DisableTorchFunction():
        _gather_unchecked(of_ranks, mine, hop, tags_of(number, call).own).wait()
    return [int(v) for v in of_ranks.tolist()]


def backend_of(group: dist.ProcessGroup | None) -> str:
    """The group's backends as ``cpu:gloo,cuda:nccl``."""
    return str(dist.get_backend_config(group))


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """The timeout of ``group``: torch.distributed would give a new group half an hour whatever its parent has."""
    whole: Any = dist.group.WORLD if group is None else group
    for device in whole._device_types:
        timeout = getattr(getattr(whole._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def group_named(name: str) -> dist.ProcessGroup:
    """The process group whose ``group_name`` that is."""
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    return cast(dist.ProcessGroup, resolve(name))
