"""Node replica: a copy of a sharded buffer in every node, updated with deltas, so that gathers never leave the node.

    N nodes of L ranks, shards of n elements, numbered local (:mod:`zcomm._transport.topology`); on local rank l:
    replica [N, n]      the shards of the N ranks of local rank l: contiguous in the buffer, 1 / L of it
    gather(part)        inside the node, from the replicas of its ranks
    update(shard)       between the ranks of equal local rank: the difference to the replica, in few bits
    refresh(shard)      between the same ranks: the shard itself, exactly

Updates are those of :class:`zcomm.DeltaGather`: all nodes hold the same bits, and errors do not accumulate (with
``format="exact"`` there are none). Reading the replica waits for an update in flight. Shards may differ in length
(:mod:`zcomm._stateful.uneven_state`).

Called by an optimizer that shards parameters, from one thread: gathers in forward and backward, one update per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zcomm._collectives.uneven_shards import of_sizes
from zcomm._formats.formats import Format, get_format
from zcomm._formats.message import MessageInfo
from zcomm._formats.philox import RandomKey
from zcomm._residuals.buffer_layout import as_shard_sizes
from zcomm._stateful.delta_gather import DeltaGather
from zcomm._stateful.uneven_state import check_own_size
from zcomm._transport import backend
from zcomm._transport.debug import compare_calls
from zcomm._transport.route import check_flat, check_topology, intra_hop, rows_of
from zcomm._transport.topology import Topology
from zcomm._transport.work import Steps, Work, nothing, run
from zcomm.errors import LayoutError

OPERATION = "secondary_gather"


class NodeReplica:
    """This rank's part of its node's copy of a buffer of world_size shards.

    Args:
        topology: Nodes and ranks.
        shard_numel: Elements n of every shard.
        dtype: Of the replica, floating point.
        format: Of the differences between nodes, as for :class:`zcomm.DeltaGather`; "exact": without loss.
        device: Of the replica.
        shard_sizes: Elements of every rank's shard, numbered local, where shards differ; ``shard_numel`` is this rank's
            then, and the replica is flat: its shards side by side. None: all have n elements. Not over NCCL.

    The replica is zero before the first :meth:`refresh`. Memory: num_nodes x n elements.

    Raises:
        LayoutError: ``shard_sizes`` do not fit.
        BackendUnavailableError: ``shard_sizes`` with backend "nccl".
    """

    def __init__(
        self,
        topology: Topology,
        shard_numel: int,
        dtype: torch.dtype,
        *,
        format: str | Format = "int4",
        device: torch.device | str = "cpu",
        shard_sizes: Sequence[int] | None = None,
    ) -> None:
        check_topology(topology)
        self._topology, self._sizes = topology, as_shard_sizes(shard_sizes, topology.world_size)
        shape: tuple[int, ...] = topology.num_nodes, shard_numel
        if self._sizes is not None:
            check_own_size(self._sizes[topology.shard_index("local")], shard_numel)
            shape = (self._part_numels[topology.local_rank],)
        self._replica = torch.zeros(shape, dtype=dtype, device=device)
        options: dict[str, Any] = {"format": format, "numbering": "local", "over": "nodes"}
        self._delta = DeltaGather(self._replica, topology, shard_sizes=self._sizes, **options)
        self._work: Work | None = None

    @property
    def _part_numels(self) -> list[int]:
        """Elements of the replica of each rank of the node, where shards differ."""
        assert self._sizes is not None, "equal shards"
        num_nodes = self._topology.num_nodes
        return [sum(self._sizes[i : i + num_nodes]) for i in range(0, len(self._sizes), num_nodes)]

    @property
    def values(self) -> Tensor:
        """The replica [num_nodes, n], the shards of equal local rank in node order. Waits for an update in flight.

        With ``shard_sizes`` flat: the elements of these shards.
        """
        self.wait()
        return self._replica

    @property
    def held(self) -> Tensor:
        """What every node holds of this rank's shard, [n]. Waits for an update in flight."""
        self.wait()
        return self._delta.held

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank."""
        return self._replica.nbytes

    @property
    def part_numel(self) -> int:
        """Elements of the replica: the columns of the buffer that each rank of the node provides to a gather."""
        return self._replica.numel()

    def wait(self) -> None:
        """Wait for an update or a refresh in flight, and raise its error."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def abandon(self) -> None:
        """Wait until no exchange uses the replica, and raise its error. Values are undefined then. Not collective."""
        work, self._work = self._work, None
        if work is not None:
            work.abandon()

    def update(self, shard: Tensor, *, random: RandomKey | None = None, async_op: bool = False) -> None:
        """Send the change of ``shard`` to all nodes, as :meth:`DeltaGather.update`. Collective between nodes.

        ``random`` is required for a format that rounds stochastically, and refused for others. Do not change ``shard``
        before the next :meth:`wait`, or a call that waits.
        """
        self.wait()
        self._work = self._delta.update(shard, random=random, async_op=async_op)

    def refresh(self, shard: Tensor, *, async_op: bool = False) -> None:
        """Send ``shard`` itself to all nodes, rounded to the replica's dtype. Collective between nodes."""
        self.wait()
        self._work = self._delta.refresh(shard, async_op=async_op)

    def gather(self, output: Tensor, start: int, stop: int, *, async_op: bool = False) -> Work | None:
        """Fill columns ``[start, stop)`` of the buffer seen as [ranks_per_node, part_numel]. Collective in the node.

        With ``shard_sizes`` ranks have parts of their own length, and only all columns are filled, by one exchange.
        With ZCOMM_CHECK=1 it is collective over all ranks: a message damaged in one node raises on every rank.

        Args:
            output: The full buffer, [world_size * n] contiguous, or flat with all shards; of the replica's dtype.
            start: The first column.
            stop: The column after the last.
            async_op: return a Work at once.

        Raises:
            LayoutError: ``output`` or the columns do not fit. Raised before any communication.

        Cost for each rank: stop - start elements to every other rank of the node, 0 bytes between nodes.
        """
        if self._sizes is not None:
            return self._gather_uneven(output, start, stop, async_op=async_op)
        rows = rows_of("output", output, self._topology.ranks_per_node)
        expected = (self._replica.numel(), self._replica.dtype, self._replica.device)
        if (rows.shape[1], rows.dtype, rows.device) != expected or not 0 <= start <= stop <= rows.shape[1]:
            raise LayoutError(
                f"output must be the full buffer: rows of {rows.shape[1]}, {rows.dtype}, {rows.device}, columns "
                f"{start} to {stop}; expected {expected}"
            )
        own = self.values.view(-1)[start:stop]
        hop = self._topology.intra
        compare_calls(OPERATION, ((hop, get_format("none")),), hop, numel=stop - start, dtype=rows.dtype)
        steps = self._gather_steps(rows[:, start:stop], own)
        return run(steps, output, self._replica, async_op=async_op, queue=self._topology.queue)

    def _gather_steps(self, rows: Tensor, own: Tensor) -> Steps:
        yield backend.all_gather(rows, own, intra_hop(self._topology), MessageInfo(OPERATION, "none", own.numel()))

    def _gather_uneven(self, output: Tensor, start: int, stop: int, *, async_op: bool) -> Work | None:
        assert self._sizes is not None, "equal shards"
        check_flat("output", output)
        expected = (sum(self._sizes), self._replica.dtype, self._replica.device)
        got = (output.numel(), output.dtype, output.device)
        if got != expected or (start, stop) != (0, self.part_numel):
            raise LayoutError(
                f"output must be the full buffer, filled at once: got {got}, columns {start} to {stop}; expected "
                f"{expected}, columns 0 to {self.part_numel}"
            )
        hop, own = self._topology.intra, self.values
        compare_calls(OPERATION, ((hop, get_format("none")),), hop, split_numels=self._sizes, dtype=output.dtype)
        parts = torch.split(output, self._part_numels)
        steps = self._uneven_steps(parts, own) if output.numel() else nothing()
        with of_sizes("local", self._sizes):
            return run(steps, output, self._replica, async_op=async_op, queue=self._topology.queue)

    def _uneven_steps(self, parts: Sequence[Tensor], own: Tensor) -> Steps:
        hop, info = intra_hop(self._topology), MessageInfo(OPERATION, "none", own.numel())
        sizes = [part.nbytes for part in parts]
        if own.numel():
            backend.count(hop, info, own.nbytes)
        yield backend.exchange_parts(
            parts, [own] * hop.size, hop, info, sum(sizes), operation=backend.UNEVEN_GATHER, sizes=sizes
        )
