"""Control exchanges, by which ranks agree: maxima of flags, float64 partial sums, texts, initial values. Synchronous.

    all-gather   every rank --values--> every rank
    gather       rank r --message r--> first rank          scatter   first rank --row r--> rank r

They use host memory (:attr:`Topology.on_host`), so no device is waited for, except in exchanges of device tensors. Over
a caller's process group on NCCL, which takes no host tensors, ranks exchange texts through torch.distributed's store.

Gather and scatter send to one rank only what it needs. They may be called from any thread that has the group to
itself. The traffic counters count every byte, and the hop's collective log records every exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm._base import env
from zcomm._base.pending import Pending
from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageInfo
from zcomm._transport import backend
from zcomm._transport.backend import ALONE, Hop, count, exchange_name_of
from zcomm._transport.call_context import current_context
from zcomm._transport.checked import Checks, checked
from zcomm._transport.collective_log import call_here
from zcomm._transport.debug import compare_calls
from zcomm._transport.store_exchange import exchange_texts
from zcomm._transport.tagged import FIRST_RANK_EXCHANGES, tags_of
from zcomm._transport.tagged_group import ranks_of
from zcomm._transport.topology import Topology, hop_of_group
from zcomm._transport.traffic import record
from zcomm.errors import TopologyError

__all__ = [
    "agree",
    "agree_max",
    "any_",
    "are_equal",
    "broadcast_",
    "gather_beside",
    "gather_float64",
    "gather_texts",
    "gather_to_first",
    "scatter_from_first",
    "text_from_first",
    "texts_to_first",
]

GATHER, SCATTER = FIRST_RANK_EXCHANGES


def gather_to_first(message: Tensor, hop: Hop) -> Tensor | None:
    """On the first rank every rank's ``message`` [n] as [hop size, n]; None on the others. n is not 0."""
    if hop.group is None:
        return message.view(1, -1)
    is_first = hop.rank == 0
    of_ranks = message.new_empty((hop.size, message.numel())) if is_first else None
    if not is_first:  # ranks of a node are consecutive
        link = "intra" if hop.rank <= hop.num_intra_peers else "inter"
        record(("control", "none", link), 1, message.numel(), message.nbytes)
    received = {} if of_ranks is None else dict(enumerate(of_ranks.unbind(0)[1:], 1))
    _run(GATHER, (message, of_ranks), hop, [message] * hop.size, received)
    return of_ranks


def scatter_from_first(rows: Tensor | None, numel: int, hop: Hop) -> Tensor:
    """This rank's row of the first rank's ``rows``, uint8 [hop size, ``numel``]. ``numel`` is not 0."""
    if hop.group is None:
        assert rows is not None, "a rank alone is the first"
        return rows[0]
    is_first = hop.rank == 0
    mine = torch.empty(numel, dtype=torch.uint8)
    parts = [] if rows is None else list(rows.unbind(0))
    if is_first:
        count(hop, MessageInfo("control", "none", numel), numel)
    _run(SCATTER, (mine, rows), hop, parts, {} if is_first else {0: mine})
    return mine


def _run(
    operation: str, tensors: tuple[Tensor, Tensor | None], hop: Hop, parts: list[Tensor], received: dict[int, Tensor]
) -> None:
    """Run a gather or a scatter. ``parts[i]`` goes to rank i, and ``received[i]`` comes from it."""
    mine, rows = tensors
    call = call_here(operation, mine.nbytes, "cpu")
    number, words = hop.log.start(call), exchange_name_of(hop, MessageInfo("control", "none", mine.numel()))
    tags = tags_of(number, call)
    with hop.log.waiting(number, hop.group):
        assert hop.group is not None, "a rank alone exchanges nothing"
        pending: Pending = FIRST_RANK_EXCHANGES[operation](mine, rows, hop.group, tags.own)
        if env.is_set("ZCOMM_CHECK"):
            pending = checked(pending, Checks(words, tags, hop.ranks(), parts, received, None))
        pending.wait()


TEXT_NBYTES = 512


def agree(numbers: Sequence[int], flags: Sequence[bool], topology: Topology) -> tuple[list[int], list[int], list[bool]]:
    """The smallest and the largest of each of all ranks' ``numbers``, and for each of ``flags`` if any rank has it set.

    ``numbers`` are int64; all ranks have as many, and as many flags. Cost for each rank, in one exchange: 8 bytes a
    number and a bit a flag to every other rank.
    """
    if topology.world_size == 1:
        return list(numbers), list(numbers), list(flags)
    # Tensors, as a loop over thousands of ranks would take long.
    places, num_bytes = torch.arange(8, dtype=torch.uint8, device="cpu"), -(-len(flags) // 8)
    bits = torch.zeros(num_bytes * 8, dtype=torch.uint8, device="cpu")
    bits[: len(flags)] = torch.tensor(list(flags), dtype=torch.uint8, device="cpu")
    packed = (bits.view(num_bytes, 8) << places).sum(1).to(torch.uint8)
    mine = torch.cat([torch.tensor(list(numbers), dtype=torch.int64, device="cpu").view(torch.uint8), packed])
    of_ranks = gather_beside(mine, topology)
    of_numbers = of_ranks[:, : 8 * len(numbers)].flatten().view(torch.int64).view(len(of_ranks), len(numbers))
    any_bits = (of_ranks[:, 8 * len(numbers) :, None] >> places & 1).amax(0).flatten()
    any_flags = [bit == 1 for bit in any_bits[: len(flags)].tolist()]
    return of_numbers.amin(0).tolist(), of_numbers.amax(0).tolist(), any_flags


def agree_max(values: Tensor, topology: Topology) -> Tensor:
    """The elementwise maximum of int64 ``values`` over all ranks, on the CPU. The same on every rank."""
    return gather_beside(values.to("cpu", torch.int64), topology).amax(0).view(values.shape)


def any_(flag: Tensor, topology: Topology) -> Tensor:
    """Whether the bool scalar ``flag`` is true on any rank, on its device. On CUDA without a host sync."""
    return gather_beside(flag.to(torch.uint8).view(1), topology).amax().bool()


def gather_float64(values: Tensor, topology: Topology) -> Tensor:
    """Every rank's float64 ``values`` [n] as [world_size, n], in rank order, on the CPU."""
    return gather_beside(values.to("cpu", torch.float64), topology)


def gather_beside(values: Tensor, topology: Topology) -> Tensor:
    """Every rank's ``values`` [n] as [world_size, n], in rank order, on their device. On CUDA without a host sync."""
    mine = values.contiguous()
    topology.keep_order()
    return _gather(mine, _hop_for(mine, topology))


def are_equal(text: str, ranks: Topology | dist.ProcessGroup | None) -> bool:
    """Whether every rank has the same ``text``, by 64-bit digest. ``ranks=None``: all ranks of torch.distributed.

    Cost for each rank: 8 bytes to every other rank.
    """
    if isinstance(ranks, Topology):
        ranks.keep_order()
    hop = ranks.on_host if isinstance(ranks, Topology) else hop_of_group(ranks)
    digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest()  # a path may not be UTF-8
    if _uses_store(hop):
        return len(set(_texts_by_store(digest.hex(), hop))) == 1
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64)
    return bool((_gather(mine, hop) == mine).all())


def gather_texts(text: str, ranks: Topology | dist.ProcessGroup | None) -> list[str]:
    """The first 512 bytes of every rank's ``text``, in rank order. ``ranks=None``: all ranks of torch.distributed."""
    if isinstance(ranks, Topology):
        ranks.keep_order()
    hop = ranks.on_host if isinstance(ranks, Topology) else hop_of_group(ranks)
    data = text.encode(errors="replace")  # a path may not be UTF-8
    if _uses_store(hop):
        return [each.encode()[:TEXT_NBYTES].decode(errors="replace") for each in _texts_by_store(data.decode(), hop)]
    mine = torch.frombuffer(bytearray(data[:TEXT_NBYTES].ljust(TEXT_NBYTES, b"\0")), dtype=torch.uint8)
    data = _gather(mine, hop).numpy().tobytes()
    rows = [data[at : at + TEXT_NBYTES] for at in range(0, len(data), TEXT_NBYTES)]
    texts = {row: row.rstrip(b"\0").decode(errors="replace") for row in set(rows)}
    return [texts[row] for row in rows]


def texts_to_first(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """On the first rank every rank's ``text``, in rank order; [] on the others. ``group=None``: this rank alone.

    Cost for each rank: 8 bytes to every other rank, and the length of the longest text to the first.
    """
    hop, data = _hop_of(group), text.encode()
    lengths = _gather(torch.tensor([len(data)]), hop).flatten().tolist()
    mine = torch.frombuffer(bytearray(data.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    of_ranks = gather_to_first(mine, hop)
    if of_ranks is None:
        return []
    return [row[:length].tobytes().decode() for row, length in zip(of_ranks.numpy(), lengths, strict=True)]


def text_from_first(texts: Sequence[str], group: dist.ProcessGroup | None) -> str:
    """This rank's text among the ``texts`` of the first rank, one for each rank. Other ranks' ``texts`` are ignored.

    Cost for the first rank: 8 world_size bytes and the length of the longest text to every other rank.
    """
    hop = _hop_of(group)
    data = [text.encode() for text in texts] if hop.rank == 0 else []
    lengths = torch.tensor([len(part) for part in data] or [0] * hop.size)
    _compare("broadcast", lengths, hop)
    backend.broadcast_(lengths, 0, hop)
    longest, rows = int(lengths.max()), None
    if data:
        joined = bytearray(b"".join(part.ljust(longest, b"\0") for part in data))
        rows = torch.frombuffer(joined, dtype=torch.uint8).view(hop.size, longest)
    mine = scatter_from_first(rows, longest, hop)
    return mine.numpy()[: int(lengths[hop.rank])].tobytes().decode()


def _gather(mine: Tensor, hop: Hop) -> Tensor:
    """Every rank's ``mine``, of any shape, as [hop size, numel]."""
    _compare("all_gather", mine, hop)
    of_ranks = mine.new_empty((hop.size, mine.numel()))
    work = backend.all_gather(of_ranks, mine, hop, MessageInfo("control", "none", mine.numel()))
    if work is not None:
        work.wait()
    return of_ranks


def _compare(operation: str, tensor: Tensor, hop: Hop) -> None:
    """With ZCOMM_DEBUG=1, raise on every rank unless all make this exchange in the same public call."""
    if env.is_set("ZCOMM_DEBUG"):
        call = current_context().call or "forward, backward, or none of zero's"
        compare_calls(f"control {operation}", ((hop, get_format("none")),), hop, nbytes=tensor.nbytes, call=call)


def _uses_store(hop: Hop) -> bool:
    """Whether ``hop`` takes no host tensors, so that ranks exchange texts through the store: a group on NCCL."""
    return hop.group is not None and not backend.takes_host_tensors(hop.backend)


def _texts_by_store(text: str, hop: Hop) -> list[str]:
    assert hop.group is not None, "a rank alone exchanges nothing"
    ranks = ranks_of(hop.group)
    return exchange_texts(ranks, text, lane="control", timeout=backend.timeout_of(hop.group))


def _hop_of(group: dist.ProcessGroup | None) -> Hop:
    return ALONE if group is None else hop_of_group(group)


def broadcast_(tensor: Tensor, src: int, topology: Topology) -> None:
    """Overwrite ``tensor``, of any dtype and shape, with that of rank ``src``.

    Raises:
        TopologyError: ``src`` is not a rank of ``topology``.
    """
    if not 0 <= src < topology.world_size:
        raise TopologyError(f"src must be a rank: src={src}, world_size={topology.world_size}")
    topology.keep_order()
    values = tensor.detach().contiguous()
    _compare("broadcast", values, topology.world)
    backend.broadcast_(values, src, _hop_for(values, topology))
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)


def _hop_for(tensor: Tensor, topology: Topology) -> Hop:
    return topology.on_host if tensor.device.type == "cpu" else topology.world
