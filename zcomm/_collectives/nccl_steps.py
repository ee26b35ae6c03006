"""The collectives over ``backend="nccl"``: one call of the communicator in C++ (``cpp/nccl``), which runs the pipeline.

    one call    in stream order: it runs after what is queued on the current stream, and before what is queued later
    chunks      each is a message of its own (:mod:`zcomm._formats.message`); the decoded bits are those of one message

Invariants:
    Q1  Chunks depend on sizes and formats alone, so all ranks use the same ones: otherwise they would deadlock.
    Q2  What the pipeline does not support goes hop by hop over the same communicator, with the same bits. The only
        errors are tensors that are not on a GPU, and, after the ranks have agreed on it, ranks without NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zcomm._base import env
from zcomm._collectives.encoder import Encoder
from zcomm._formats.formats import Format, is_same_wire
from zcomm._formats.message import MessageInfo, MessageLayout, layout_of
from zcomm._kernels import on_cuda
from zcomm._kernels.message_flags import flag_of
from zcomm._kernels.native_calls import DTYPE_NUMBERS
from zcomm._transport import backend
from zcomm._transport.chunks import min_numel_of_all_ranks
from zcomm._transport.collective_log import call_here
from zcomm._transport.device_streams import on_device
from zcomm._transport.nccl_communicators import check_device, communicator_over, intra_first
from zcomm._transport.route import Route
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Link, Steps
from zcomm.errors import CommunicationError, MessageError

NATIVE_S = 60e-6
"""Host time per chunk: about 5 kernel launches, 2 NCCL groups and 10 event calls, all in C++."""
MIN_CHUNK_NUMEL = max(2**24, min_numel_of_all_ranks(NATIVE_S))
"""Smallest chunk, in elements of all ranks, over links that were not measured."""
MAX_CHUNKS = 16
MIN_BLOCK, MAX_BLOCK = 8, 1024
"""Block sizes that the CUDA kernels support."""

Rows = tuple[int, int, int, int]
"""Dtype number, address, and the strides from local rank to local rank and from node to node, in elements."""


def is_native(encoder: Encoder, *tensors: Tensor) -> bool:
    """Whether the pipeline in C++ runs this call. If not, Python runs it over the same route.

    The pipeline does not support options of formats, float64, residuals, checksums, and a Topology with ``kernels=``
    other than "auto" and "cuda"; nor a mean that is divided before hop 2, which its caller sees. The answer depends
    only on what is the same on all ranks: with different answers they would make different exchanges, and deadlock.

    Raises:
        BackendUnavailableError: The tensors are not on a GPU.
    """
    route = encoder.route
    if route.backend != "nccl":
        return False
    for tensor in tensors:
        check_device(route.operation, tensor.device)
    is_plain = encoder.residual is None and not env.is_set("ZCOMM_CHECK") and route.kernels in ("auto", "cuda")
    has_dtypes = all(tensor.dtype in DTYPE_NUMBERS for tensor in tensors)
    return is_plain and has_dtypes and all(_has_kernels(wire) for _, wire in route.hops)


def _has_kernels(wire: Format) -> bool:
    is_plain = wire.symmetric and wire.rotation is None and not wire.is_random
    is_power = MIN_BLOCK <= wire.block <= MAX_BLOCK and wire.block & (wire.block - 1) == 0
    return is_plain and ((is_power and wire.name in on_cuda.CODECS) or not wire.block)


def chunk_numel(numel: int, num_ranks: int, *formats: Format, links: Sequence[Link] = ()) -> int:
    """Elements of each rank in a chunk: a multiple of the blocks, large enough to pay, at most ``MAX_CHUNKS`` chunks.

    ``links`` as for :func:`zcomm._transport.chunks.min_chunk_numel`.
    """
    multiple = math.lcm(*(format.block or 1 for format in formats), 256)
    fewest = max(2**24, min_numel_of_all_ranks(NATIVE_S, links)) if links else MIN_CHUNK_NUMEL
    wanted = max(-(-fewest // num_ranks), -(-numel // MAX_CHUNKS))
    return -(-wanted // multiple) * multiple


def gather_over_nccl(rows: Tensor, shard: Tensor, numbering: Numbering, encoder: Encoder) -> Steps:
    """:func:`zcomm._collectives.all_gather.gather_steps`, in the pipeline."""
    route = encoder.route
    segments = (1,) * len(route.hops)
    wires = [wire for _, wire in route.hops]
    if len(wires) == 2 and not is_same_wire(wires[0], wires[1], shard.dtype):
        segments = (1, route.num_nodes)
    carried = (1, route.num_nodes)[: len(wires)]  # messages that a rank sends at once
    sizes = _sizes(route, shard.dtype, shard.numel(), segments)
    output = _rows(rows, route, numbering)
    _count(route, shard.dtype, sizes, segments, [c // s for c, s in zip(carried, segments, strict=True)])
    yield from _call_communicator(
        route, (shard, rows), lambda native, place: native.all_gather(sizes, _flat(shard), output, place)
    )


def reduce_over_nccl(output: Tensor, rows: Tensor, numbering: Numbering, divisor: int, encoder: Encoder) -> Steps:
    """:func:`zcomm._collectives.reduce_scatter.reduce_steps`, in the pipeline."""
    route = encoder.route
    segments = (route.num_nodes, 1) if len(route.hops) == 2 else (1,)
    sizes = _sizes(route, rows.dtype, output.numel(), segments)
    source = _rows(rows, route, numbering)
    _count(route, rows.dtype, sizes, segments, [1] * len(segments))
    yield from _call_communicator(
        route, (rows, output), lambda native, place: native.reduce_scatter(sizes, source, _flat(output), divisor, place)
    )


def exchange_over_nccl(output: Tensor, source: Tensor, encoder: Encoder) -> Steps:
    """:func:`zcomm.all_to_all_single` of [world_size, n] tensors, in the pipeline."""
    route = encoder.route
    segments = (1,) * len(route.hops)
    sizes = _sizes(route, source.dtype, source.shape[1], segments)
    carried = [route.num_nodes, route.ranks_per_node] if len(segments) == 2 else [1]
    _count(route, source.dtype, sizes, segments, carried)
    sent, received = _rows(source, route, "rank"), _rows(output, route, "rank")
    tensors = (source, output)
    yield from _call_communicator(route, tensors, lambda native, place: native.all_to_all(sizes, sent, received, place))


def _sizes(route: Route, dtype: torch.dtype, numel: int, segments: tuple[int, ...]) -> tuple[Any, ...]:
    """numel, chunk numel, and for each hop: codec, block, layout hash of a full chunk, layout hash of the last one."""
    links = () if route.queue is None else route.queue.links
    step = min(numel, chunk_numel(numel, route.world_size, *(wire for _, wire in route.hops), links=links))
    last_numel, wires = numel - (numel - 1) // step * step, []
    for (_, wire), count in zip(route.hops, segments, strict=True):
        full, last = (layout_of(route.operation, wire, dtype, count, n) for n in (step, last_numel))
        wires.append((full.codec.number, full.block, full.hash, last.hash))
    return numel, step, wires


def _flat(tensor: Tensor) -> Rows:
    return DTYPE_NUMBERS[tensor.dtype], tensor.data_ptr(), 0, 0


def _rows(rows: Tensor, route: Route, numbering: Numbering) -> Rows:
    row = rows.stride(0)
    if len(route.hops) == 1:  # one hop: rows in rank order
        return DTYPE_NUMBERS[rows.dtype], rows.data_ptr(), row, 0
    return DTYPE_NUMBERS[rows.dtype], rows.data_ptr(), *route.strides(numbering, row)


def _count(
    route: Route, dtype: torch.dtype, sizes: tuple[Any, ...], segments: tuple[int, ...], messages: list[int]
) -> None:
    """Count the traffic to each peer of each hop, chunk by chunk: the pipeline itself counts nothing."""
    numel, step, _ = sizes
    for (hop, wire), count, carried in zip(route.hops, segments, messages, strict=True):
        for start in range(0, numel, step):
            layout: MessageLayout = layout_of(route.operation, wire, dtype, count, min(step, numel - start))
            backend.count(hop, MessageInfo(route.operation, str(wire), carried * layout.numel), carried * layout.nbytes)


def _call_communicator(route: Route, tensors: tuple[Tensor, Tensor], call: Callable[[Any, Any], int]) -> Steps:
    """Queue ``call`` of the communicator on the current stream of the device of input and output ``tensors``.

    ``call(native, None)`` returns the bytes of scratch memory that a call needs while a graph is captured.
    """
    device = tensors[0].device
    with on_device(device):
        flag = _flag(device, route.operation)
        communicator = communicator_over(intra_first([hop for hop, _ in route.hops]), device)
        scratch = torch.empty(0, dtype=torch.uint8, device=device)
        if communicator.streams.is_captured():
            # Allocated in the capture, from the graph's memory pool: a replay must not write what others use by then.
            scratch = torch.empty(call(communicator.native, None), dtype=torch.uint8, device=device)
        made = call_here(route.operation, tensors[0].nbytes, device.type)
        with communicator.streams.on_current(device, (*tensors, flag), made) as stream:
            try:
                call(communicator.native, (stream.address, flag.data_ptr(), scratch.data_ptr(), scratch.numel()))
            except RuntimeError as error:
                raise CommunicationError(f"{route.operation} over NCCL: {error}") from error
            ended = stream.completion()
    yield ended
    if device.type == "cpu" and not flag.item():
        raise MessageError(
            f"a message of {route.operation} has another layout than this rank expects: pass the same sizes and "
            "formats on all ranks"
        )


def _flag(device: torch.device, operation: str) -> Tensor:
    """int32 [1] on ``device``, cleared by a message of another layout: shared on a GPU, one per call on the host."""
    if device.type == "cuda":
        return flag_of(device).used_by(operation)
    return torch.ones(1, dtype=torch.int32, device=device)
