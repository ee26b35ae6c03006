"""Node sums: a two-hop reduce-scatter split in two, so that gradients are summed in the node over micro-batches first.

    add(input)      hop 1 alone: the node's sum of ``input`` is added to this rank's rows
    reduce(output)  hop 1 of the last input, added to the rows, then hop 2: the mean over all ranks of all inputs

Only hop 2 crosses the network, once per step. With N nodes of L ranks and shards of n elements a rank keeps rows [N, n]
in float32, the shards of the N ranks of its own local rank: 1 / L of the buffer. They are allocated at the first
``add``. Shards are numbered local (:mod:`zcomm._transport.topology`), so the rows are contiguous in the buffer.

Over several nodes, with one input, the bits are those of :func:`zcomm.reduce_scatter_single` with the same formats and
residual. On one node there is no hop 2: it loses nothing, and a residual does not change. Shards may differ in length
(:mod:`zcomm._stateful.uneven_state`).

Called by a trainer that accumulates gradients, from one thread.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from zcomm._base.arguments import as_count, as_device, as_positive
from zcomm._base.pending import Pending
from zcomm._collectives.encoder import Encoder, check_random
from zcomm._formats.formats import Format, codec_for
from zcomm._formats.message import MessageLayout
from zcomm._kernels import grid, kernels
from zcomm._residuals.residual import Residual
from zcomm._stateful.coded_sums import CodedSums
from zcomm._stateful.uneven_state import UnevenSums, check_own_size
from zcomm._transport import backend
from zcomm._transport.chunks import chunks_of, pipelined
from zcomm._transport.route import (
    Route,
    check_arguments,
    check_flat,
    check_topology,
    find_route,
    format_pair,
    rows_of,
    separate_hops,
)
from zcomm._transport.topology import Topology
from zcomm._transport.work import Steps, Work, run
from zcomm.errors import FormatError, LayoutError

OPERATION = "reduce_scatter"
Messages = tuple[Tensor, MessageLayout]


class NodeSums:
    """This rank's rows of its node's sums of one flat buffer.

    Args:
        topology: Nodes and ranks.
        shard_numel: Elements n of every shard; the buffer has world_size x n.
        formats: Wire formats, (inside the node, between nodes).
        device: Of the tensors that are exchanged.
        residual: Error feedback for hop 2, of the buffer numbered local. Call its ``commit()`` or ``rollback()``.
        shard_sizes: Elements of every rank's shard, numbered local, where shards differ; ``shard_numel`` is this rank's
            then, and the rows are one dimension, side by side. None: all have n elements. Not over NCCL.
        relative_error: Not 0: send an entropy-coded grid between nodes, which loses about so much of every block of 128
            elements (root mean square of the error / of the values), from 0.001 to 0.5. Normally distributed values
            take 3.7 bits an element at 0.1, 3.1 at 0.15 (nf4, whose error is 0.09: 4.25), and each message about 200
            bytes. The second format must be "none". Needs ``shard_sizes``, here and for the residual; in host memory,
            over gloo, on Linux. Equal on all ranks.

    Raises:
        TopologyError, LayoutError, ConfigError: An argument has the wrong type or value.
        FormatError: ``formats`` is not a pair, or one is unknown or rounds stochastically, or the second one is not
            "none" beside a ``relative_error``.
        BackendUnavailableError: The topology's backend does not support the device, or not ``relative_error``.
    """

    def __init__(
        self,
        topology: Topology,
        shard_numel: int,
        formats: tuple[str | Format, str | Format],
        *,
        device: torch.device | str = "cpu",
        residual: Residual | None = None,
        shard_sizes: Sequence[int] | None = None,
        relative_error: float = 0.0,
    ) -> None:
        check_topology(topology)
        check_arguments(topology, residual=residual)
        self._intra_format, self._inter_format = format_pair(formats)
        check_random(None, formats)
        self._topology, self.shard_numel = topology, as_count("shard_numel", shard_numel)
        self._route = find_route(OPERATION, topology, formats, first="intra")
        self._device, self.residual = as_device("device", device), residual
        self._route.check_device(self._device)
        self._uneven: UnevenSums | None = None
        pair = self._intra_format, self._inter_format
        if relative_error != 0:
            relative_error = as_positive("relative_error", relative_error)
            _check_coded(relative_error, self._inter_format, shard_sizes)
        if shard_sizes is not None:
            made = self._route, topology, pair, shard_sizes
            self._uneven = CodedSums(*made, relative_error, self._device) if relative_error else UnevenSums(*made)
            check_own_size(self._uneven.shard_numel, self.shard_numel)
        self._rows: Tensor | None = None
        self.is_empty = True
        """Whether nothing was added since the last reduction."""

    @property
    def rows(self) -> Tensor | None:
        """The sums so far, float32 [num_nodes, n], once all works have been waited for; None before the first add.

        With ``shard_sizes`` flat: the elements of all rows.
        """
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank, without the residual."""
        return 0 if self._rows is None else self._rows.nbytes

    def add(self, input: Tensor, *, async_op: bool = False) -> Work | None:
        """Add the node's sum of ``input`` to the rows. Collective inside the node; with ZCOMM_CHECK=1 over all ranks.

        Args:
            input: floating point, [world_size * n] contiguous. Do not change it before an asynchronous call has been
                waited for.
            async_op: return a Work at once.

        Raises:
            LayoutError: ``input`` does not fit. Raised before any communication.
            DamagedError: With ZCOMM_CHECK=1, on every rank: a message of some node was damaged.

        Cost for each rank: one message of num_nodes segments to every other rank of the node.
        """
        (input,) = check_arguments(self._topology, async_op=async_op, input=input)
        rows = self._checked(input)
        if self._rows is None:
            self._rows = torch.empty(self._shape_of_rows(self.shard_numel), device=self._device)
        is_first, self.is_empty = self.is_empty, False
        steps = [self._add_steps(rows[..., c], self._rows[..., c], is_first=is_first) for c in self._chunks]
        return self._run(steps, input, self._rows, async_op=async_op, num_exchanges=1)

    def reduce(
        self, output: Tensor, input: Tensor | None = None, *, scale: float = 1.0, async_op: bool = False
    ) -> Work | None:
        """Write the mean over all ranks of the sums and ``input`` to ``output``, and empty the rows. Collective.

        Args:
            output: this rank's shard, floating point, [n] contiguous.
            input: The last input, as in :meth:`add`; None: reduce only what was added.
            scale: The factor in the inputs (a loss scale), above 0. Hop 2 and its residual see values without it.
            async_op: return a Work at once.

        Raises:
            LayoutError: The arguments do not fit, or there is nothing to reduce. Raised before any communication.
            ConfigError: ``scale`` or ``async_op`` is invalid.

        Cost for each rank: that of a two-hop reduce-scatter; without ``input`` that of its hop 2. Scratch: the
        messages, and num_nodes x n elements in float32; n more if there is a ``scale`` and ``output`` has 16 bits. With
        ``relative_error`` messages have room of 2 bytes for each element, and a row takes a few more float32 and int16
        buffers of its size while it is encoded.
        """
        scale, (output,) = as_positive("scale", scale), check_arguments(None, async_op=async_op, output=output)
        if input is not None:
            (input,) = check_arguments(None, input=input)
        elif self.is_empty:
            raise LayoutError("there is nothing to reduce: nothing was added since the last reduction, and input=None")
        rows = None if input is None else self._checked(input)
        check_flat("output", output)
        if output.numel() != self.shard_numel or output.device != self._device:
            raise LayoutError(
                f"output must be one shard: numel={output.numel()} on {output.device}, expected {self.shard_numel} on "
                f"{self._device}"
            )
        if self.residual is not None:
            source = output if rows is None else rows
            sizes = None if self._uneven is None else self._uneven.sizes
            self.residual.check(self._route, "local", self.shard_numel, source, sizes)
        added, self.is_empty = None if self.is_empty else self._rows, True
        steps = [self._reduce_steps(output[c], rows, added, c, scale) for c in self._chunks]
        work = self._run(steps, output, output if input is None else input, async_op=async_op, num_exchanges=2)
        return work if self.residual is None else self.residual.watch(work)

    def forget(self, start: int, stop: int) -> None:
        """Set elements ``start`` to ``stop`` of the buffer to zero in this rank's rows. No communication.

        Raises:
            LayoutError: ``start`` or ``stop`` is not an integer of at least 0.
        """
        start, stop = as_count("start", start), as_count("stop", stop)
        if self._rows is None or self.is_empty:
            return
        first = self._topology.local_rank * self._rows.numel() if self._uneven is None else self._uneven.first
        low, high = max(start - first, 0), min(stop - first, self._rows.numel())
        if low < high:
            self._rows.view(-1)[low:high].zero_()

    def clear(self) -> None:
        """Drop the sums, as for a skipped step. The memory stays allocated."""
        self.is_empty = True

    def _shape_of_rows(self, numel: int) -> tuple[int, ...]:
        """That of the rows of a chunk of ``numel`` columns."""
        return (self._topology.num_nodes, numel) if self._uneven is None else (self._uneven.pack_numel,)

    @property
    def _chunks(self) -> list[slice]:
        if self._uneven is not None:  # not in chunks
            return [slice(0, None)] if self._uneven.numel else []
        least = self._route.min_chunk_numel(self._device)
        return chunks_of(self.shard_numel, self._intra_format, self._inter_format, min_numel=least)

    def _checked(self, input: Tensor) -> Tensor:
        if self._uneven is not None:
            check_flat("input", input)
            rows, fits = input, input.numel() == self._uneven.numel
        else:
            rows = rows_of("input", input, self._topology.world_size)
            fits = rows.shape[1] == self.shard_numel
        if not fits or rows.device != self._device:
            raise LayoutError(
                f"input must hold a shard for every rank: {tuple(rows.shape)} on {rows.device}, expected rows of "
                f"{self.shard_numel if self._uneven is None else self._uneven.sizes} on {self._device}"
            )
        for wire in (self._intra_format, self._inter_format):
            if codec_for(wire, input.dtype).dtype == torch.float64:
                raise LayoutError(f"input must not be float64, since node sums are float32: dtype={input.dtype}")
        return rows

    def _run(
        self, chunks: list[Steps], first: Tensor, second: Tensor, *, async_op: bool, num_exchanges: int
    ) -> Work | None:
        steps = chunks[0] if len(chunks) == 1 else pipelined(chunks, num_exchanges=num_exchanges)
        exchanges = num_exchanges * len(chunks)
        with nullcontext() if self._uneven is None else self._uneven.among_equals():
            return run(steps, first, second, async_op=async_op, queue=self._topology.queue, num_exchanges=exchanges)

    def _add_steps(self, rows: Tensor, sums: Tensor, *, is_first: bool) -> Steps:
        """Hop 1 of ``rows``, added to ``sums`` [num_nodes, m], a chunk of this rank's rows."""
        values = sums if is_first else torch.empty_like(sums, memory_format=torch.contiguous_format)
        yield from self._sum_in_node(rows, values)
        if values is not sums:
            sums.add_(values)

    def _reduce_steps(self, output: Tensor, rows: Tensor | None, added: Tensor | None, c: slice, scale: float) -> Steps:
        if rows is None:
            assert added is not None, "nothing to reduce"
            values = added[..., c].contiguous()
        elif self._sums_and_encodes and added is None and scale == 1:
            received, layout = yield from self._exchange_in_node(rows[:, c])
            yield from self._reduce_between_nodes((received, layout), output, c.start)
            return
        else:
            values = torch.empty(self._shape_of_rows(output.numel()), device=output.device)
            yield from self._sum_in_node(rows[..., c], values)
            if added is not None:
                values.add_(added[..., c])
        if scale == 1:
            yield from self._reduce_between_nodes(values, output, c.start)
            return
        # Rounded once, with the scale: in 16 bits small values would be lost without it.
        mean = output if output.dtype.itemsize >= 4 else torch.empty_like(output, dtype=torch.float32)
        yield from self._reduce_between_nodes(values.mul_(1 / scale), mean, c.start)
        mean.mul_(scale)
        if mean is not output:
            output.copy_(mean)

    @property
    def _sums_and_encodes(self) -> bool:
        """Whether messages of hop 1 are summed and encoded for hop 2 at once."""
        return self._uneven is None and self._topology.intra.size > 1 and self._topology.inter.size > 1

    def _sum_in_node(self, rows: Tensor, values: Tensor) -> Steps:
        """Hop 1: write the node's sums of ``rows`` [world_size, m] to ``values`` [num_nodes, m], float32."""
        if self._uneven is not None:
            yield from self._uneven.sum_in_node(rows, values)
            return
        if self._topology.intra.size == 1:
            values.copy_(rows)
            yield None
            return
        received, layout = yield from self._exchange_in_node(rows)
        kernels.decode_sum(received, layout, values, values.stride(0), 1)

    def _exchange_in_node(self, rows: Tensor) -> Generator[Pending | None, None, Messages]:
        """Exchange ``rows`` [world_size, m] in the node; return the messages received, num_nodes segments in each."""
        (hop, _), num_nodes, device = separate_hops(self._topology), self._topology.num_nodes, rows.device
        layout = self._route.layout(self._intra_format, rows.dtype, num_nodes, rows.shape[1])
        received, sending = layout.new(hop.size, device), rows
        if not (rows.is_contiguous() and layout.codec.dtype == rows.dtype):
            sending = layout.new(hop.size, device)
            strides = num_nodes * rows.stride(0), rows.stride(0)
            kernels.quantize(rows, layout, sending, *strides, expected=received)
        yield backend.all_to_all(received, sending, hop, layout.info)
        return received, layout

    def _reduce_between_nodes(self, values: Tensor | Messages, output: Tensor, first: int) -> Steps:
        """Hop 2: write the mean of ``values`` [num_nodes, m], which are overwritten, to ``output``.

        Columns start at ``first``.

        With several nodes ``values`` may also be messages whose sum they are: sum and encoding are then one kernel.
        """
        if self._uneven is not None and isinstance(values, Tensor):
            yield from self._uneven.reduce_between_nodes(values, output, self.residual)
            return
        topology, (_, hop), device = self._topology, separate_hops(self._topology), output.device
        if isinstance(values, Tensor) and hop.size == 1:
            output.copy_(values[0].div_(topology.world_size))
            yield None
            return
        layout = self._route.layout(self._inter_format, torch.float32, 1, output.numel())
        sending, received = layout.new(hop.size, device), layout.new(hop.size, device)
        route: Route = replace(self._route, hops=((hop, self._inter_format),))
        encoder = Encoder(route, self.shard_numel, None, self.residual, first_hop=1, first=first)
        has_residual = self.residual is not None
        inside = self._route.divisor_inside(torch.float32, topology.world_size, has_residual=has_residual)
        if isinstance(values, Tensor):
            encoder.encode(0, values if inside == 1 else values.div_(inside), sending, layout, expected=received)
        else:
            encoder.encode_sum(0, *values, sending, layout, divisor=inside, expected=received)
        yield backend.all_to_all(received, sending, hop, layout.info)
        kernels.decode_sum(received, layout, output, 0, topology.world_size / inside)


def _check_coded(relative_error: float, between: Format, shard_sizes: Sequence[int] | None) -> None:
    """Raise ConfigError, FormatError or LayoutError for what does not go with ``relative_error``."""
    grid.check_error("relative_error", relative_error)
    if between.name != "none":
        raise FormatError(
            f"relative_error={relative_error} chooses what is sent between nodes: the second format must be 'none', "
            f"formats=(..., {str(between)!r})"
        )
    if shard_sizes is None:
        raise LayoutError(f"relative_error={relative_error} needs shard_sizes: pass [n] * world_size for equal shards")
