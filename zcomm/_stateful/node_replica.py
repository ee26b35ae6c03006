"""Node replica: a copy of a sharded buffer in every node, updated with deltas, so that gathers never leave the node.

    N nodes of L ranks, shards of n elements, numbered local (:mod:`zcomm._transport.topology`); on local rank l:
    replica [N, n]      the shards of the N ranks of local rank l: contiguous in the buffer, 1 / L of it
    gather(part)        inside the node, from the replicas of its ranks
    update(shard)       between the ranks of equal local rank: the difference to the replica, in few bits
    refresh(shard)      between the same ranks: the shard itself, exactly

Updates are those of :class:`zcomm.DeltaGather`: all nodes hold the same bits, and errors do not accumulate. Reading the
replica waits for an update in flight.

Called by an optimizer that shards parameters, from one thread: gathers in forward and backward, one update per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._formats.formats import Format, get_format
from zcomm._formats.message import MessageInfo
from zcomm._formats.philox import RandomKey
from zcomm._stateful.delta_gather import DeltaGather
from zcomm._transport import backend
from zcomm._transport.debug import compare_calls
from zcomm._transport.route import intra_hop, rows_of
from zcomm._transport.topology import Topology
from zcomm._transport.work import Steps, Work, run
from zcomm.errors import LayoutError

OPERATION = "secondary_gather"


class NodeReplica:
    """This rank's part of its node's copy of a buffer of world_size shards.

    Args:
        topology: Nodes and ranks.
        shard_numel: Elements n of every shard.
        dtype: Of the replica, floating point.
        format: Of the differences between nodes.
        device: Of the replica.

    The replica is zero before the first :meth:`refresh`. Memory: num_nodes x n elements.
    """

    def __init__(
        self,
        topology: Topology,
        shard_numel: int,
        dtype: torch.dtype,
        *,
        format: str | Format = "int4",
        device: torch.device | str = "cpu",
    ) -> None:
        self._topology = topology
        self._replica = torch.zeros((topology.num_nodes, shard_numel), dtype=dtype, device=device)
        self._delta = DeltaGather(self._replica, topology, format=format, numbering="local", over="nodes")
        self._work: Work | None = None

    @property
    def values(self) -> Tensor:
        """The replica [num_nodes, n], the shards of equal local rank in node order. Waits for an update in flight."""
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

        With ZCOMM_CHECK=1 it is collective over all ranks: a message damaged in one node raises on every rank.

        Args:
            output: The full buffer, [world_size * n] contiguous, of the replica's dtype.
            start: The first column.
            stop: The column after the last.
            async_op: return a Work at once.

        Raises:
            LayoutError: ``output`` or the columns do not fit. Raised before any communication.

        Cost for each rank: stop - start elements to every other rank of the node, 0 bytes between nodes.
        """
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
