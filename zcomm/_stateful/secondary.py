"""Secondary partition (hpZ of "ZeRO++", arXiv:2306.10209): a flat buffer sharded again, over the ranks of one node.

fill(full)       local rank l keeps elements [l * s, (l + 1) * s),  s = ceil(numel / ranks_per_node)
gather(output)   an all-gather inside the node: no inter-node traffic
invalidate()     the values changed elsewhere; fill again before the next gather
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm._base.arguments import as_count, as_device, as_floating_dtype, check_flag
from zcomm._formats.formats import FORMATS
from zcomm._formats.message import MessageInfo
from zcomm._transport import backend
from zcomm._transport.debug import compare_calls
from zcomm._transport.nccl_communicators import check_device
from zcomm._transport.route import check_flat, check_topology, intra_hop
from zcomm._transport.topology import Topology
from zcomm._transport.work import Steps, Work, run
from zcomm.errors import LayoutError, StateError

OPERATION = "secondary_gather"


class SecondaryPartition:
    """This rank's part of a node's copy of a flat buffer.

    Args:
        topology: Nodes and ranks; gathers run over this rank's node.
        numel: Elements of the full buffer, any number.
        dtype: Of the buffer, floating point.
        device: Of full buffers.
        is_on_host: Keep the part in host memory, page-locked with CUDA, and copy it to the device for each gather. On a
            CPU device that is the same memory.

    Raises:
        TopologyError, LayoutError, ConfigError: An argument has the wrong type or value.
        BackendUnavailableError: The topology's backend does not support the device.
    """

    def __init__(
        self,
        topology: Topology,
        numel: int,
        dtype: torch.dtype,
        *,
        device: torch.device | str = "cpu",
        is_on_host: bool = False,
    ) -> None:
        check_topology(topology)
        check_flag("is_on_host", is_on_host)
        numel, dtype = as_count("numel", numel), as_floating_dtype("dtype", dtype)
        self._topology, self._hop, self.numel = topology, intra_hop(topology), numel
        shard_numel = -(-numel // topology.ranks_per_node)
        self._device, self.is_on_host = as_device("device", device), is_on_host
        if self._hop.nccl is not None:
            check_device(OPERATION, self._device)
        place, is_pinned = "cpu" if is_on_host else self._device, is_on_host and self._device.type == "cuda"
        self._shard = torch.zeros(shard_numel, dtype=dtype, device=place, pin_memory=is_pinned)
        self.is_valid = False

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank."""
        return self._shard.numel() * self._shard.element_size()

    def fill(self, full: Tensor) -> None:
        """Keep this rank's part of ``full`` [numel]. No communication."""
        self._check("full", full)
        start = self._topology.local_rank * self._shard.numel()
        part = full[start : start + self._shard.numel()]
        self._shard[: part.numel()].copy_(part)
        self.is_valid = True

    def gather(self, output: Tensor, *, async_op: bool = False) -> Work | None:
        """Rebuild the full buffer in ``output`` [numel] from the ranks of the node. Collective inside the node.

        With ZCOMM_CHECK=1 it is collective over all ranks: a message damaged in one node raises on every rank.

        Raises:
            StateError: :meth:`fill` was not called since the start or the last :meth:`invalidate`.
            LayoutError: ``output`` does not fit. Both are raised before any communication.

        Cost for each rank: its part to every other rank of the node; 0 bytes between nodes.
        """
        check_flag("async_op", async_op)
        self._check("output", output)
        if not self.is_valid:
            raise StateError("the secondary partition is not valid: call fill(full) after the values changed")
        hop = self._topology.intra
        compare_calls(OPERATION, ((hop, FORMATS["none"]),), hop, numel=self.numel, dtype=self._shard.dtype)
        return run(self._steps(output), output, self._shard, async_op=async_op, queue=self._topology.queue)

    def _steps(self, output: Tensor) -> Steps:
        is_exact = self.numel == self._shard.numel() * self._topology.ranks_per_node
        numel = self._shard.numel()
        full = output if is_exact else output.new_empty(numel * self._topology.ranks_per_node)
        own = self._shard
        if self.is_on_host:
            start = self._topology.local_rank * numel
            # Asynchronous from page-locked memory, and in order: the exchange is queued behind the copy.
            own = full[start : start + numel].copy_(own, non_blocking=True)
        yield backend.all_gather(full, own, self._hop, MessageInfo(OPERATION, "none", numel))
        if not is_exact:
            output.copy_(full[: self.numel])

    def invalidate(self) -> None:
        """The full values have changed, so what this partition holds is worthless."""
        self.is_valid = False

    def _check(self, name: str, full: Tensor) -> None:
        check_flat(name, full)
        if full.numel() != self.numel or full.dtype != self._shard.dtype or full.device != self._device:
            raise LayoutError(
                f"{name} must fit the partition: numel={full.numel()}, dtype={full.dtype}, device={full.device}; "
                f"expected {self.numel}, {self._shard.dtype}, {self._device}"
            )
