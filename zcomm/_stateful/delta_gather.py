"""Delta weights: all ranks keep a replica of the gathered weights, and only its changes are sent, in few bits.

    new shard - own row of the replica --quantize--> message --all-gather--> messages --decode--> added to the rows

The arithmetic is N11 of :mod:`zcomm._formats.reference`. A change is much smaller than the weight, and so is the
quantization error. Shards may differ in length; each row is decoded on its own then
(:mod:`zcomm._stateful.uneven_state`). With ``format="exact"`` nothing is quantized: the replica has the bits of the
shards, rounded to its dtype (:mod:`zcomm._stateful.exact_changes`).

Invariants:
    E1  Every rank adds the decoded messages, to its own row as well. So all replicas have the same bits, and each
        sender knows what its receivers hold.
    E2  So the error of one step is part of the next step's delta, and errors do not accumulate.
    E3  A value that is not finite becomes NaN on every rank, until :meth:`DeltaGather.refresh`: nothing is hidden. With
        exact changes it stays what it is.

Source: weight differences as in "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM
Training" (arXiv:2410.15526).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from zcomm._base.arguments import check_choice
from zcomm._collectives.all_gather import gather_messages, gather_steps, own_message
from zcomm._collectives.encoder import Encoder, check_random
from zcomm._formats.formats import FORMATS, Format, codec_for, get_format
from zcomm._formats.philox import RandomKey
from zcomm._kernels import kernels
from zcomm._stateful.capped_changes import exact_replica
from zcomm._stateful.exact_changes import EXACT
from zcomm._stateful.uneven_state import UnevenReplica, apart
from zcomm._transport.chunks import chunks_of, pipelined
from zcomm._transport.route import Group, Route, check_apart, check_arguments, check_flat, find_route, rows_of
from zcomm._transport.topology import Numbering, Topology
from zcomm._transport.work import Steps, Work, WorkThen, nothing, run
from zcomm.errors import LayoutError, StateError, TopologyError


class DeltaGather:
    """Keep ``replica`` the same on all ranks, and close to their shards, by sending differences.

    Args:
        replica: What every rank holds, floating point, [size * n] contiguous or [size, n] with contiguous rows. Written
            in place; no other memory is kept.
        group: a ProcessGroup (default: all ranks), or a :class:`zcomm.Topology` for two hops.
        format: of the differences, on all hops: messages are forwarded. "exact": without loss, for 16-bit replicas,
            contiguous, and not with backend "nccl"; messages are as long as the change is rich.
        numbering: which rank owns which row: "rank" as in torch, or "local" (:mod:`zcomm._transport.topology`).
        over: "world": between all ranks, size = world_size. "nodes": between the ranks of equal local rank, one per
            node, size = num_nodes, rows in node order; ``group`` must be a Topology.
        shard_sizes: elements of the shard of every rank of the group, in the order of ``numbering``, where shards
            differ; ``replica`` is flat then, its rows side by side. None: all have n elements. Not over NCCL.

    Raises:
        LayoutError, FormatError, TopologyError: The arguments do not fit.
        BackendUnavailableError: ``shard_sizes`` or exact changes with backend "nccl", or exact changes on a GPU with a
            package without CUDA kernels.
    """

    def __init__(
        self,
        replica: Tensor,
        group: Group = None,
        *,
        format: str | Format = "int4",
        numbering: Numbering = "rank",
        over: Literal["world", "nodes"] = "world",
        shard_sizes: Sequence[int] | None = None,
    ) -> None:
        (replica,) = check_arguments(group, numbering=numbering, replica=replica)
        check_choice("over", over, ("world", "nodes"), TopologyError)
        self._is_exact = isinstance(format, str) and format == EXACT
        self._format, self._numbering = get_format("none" if self._is_exact else format), numbering
        self._route = find_route("delta_gather", group, self._format, first="inter")
        self._route.check_device(replica.device)
        self._rank = self._route.node_rank * self._route.ranks_per_node + self._route.local_rank
        of_all = self._route
        if over == "nodes":
            self._route = _hop_between_nodes(self._route, group)
        self._uneven: UnevenReplica | None = None
        self._rows = replica
        if shard_sizes is None:
            self._rows = rows_of("replica", replica, self._route.world_size)
        if shard_sizes is not None or self._is_exact:
            route = self._route if over == "world" else apart(of_all, group, "inter")
            sizes = [self._rows.shape[1]] * of_all.world_size if shard_sizes is None else shard_sizes
            flat = replica if replica.ndim == 1 or not replica.is_contiguous() else replica.view(-1)
            kind = exact_replica if self._is_exact else UnevenReplica
            self._uneven = kind(flat, route, numbering, sizes, is_whole=over == "world")
        codec_for(self._format, self._rows.dtype)
        self._work: Work | None = None
        self.is_valid = False
        """Whether the replica is known to be the same on every rank: since a refresh, if no exchange failed."""

    @property
    def replica(self) -> Tensor:
        """The replica, [size, n]; flat with ``shard_sizes``. Read it only after the last call has been waited for."""
        return self._rows

    @property
    def held(self) -> Tensor:
        """This rank's row of the replica: what the other ranks hold of its shard."""
        return self._rows[self._own_row] if self._uneven is None else self._uneven.held

    @property
    def _own_row(self) -> int:
        return self._route.own_row(self._numbering if len(self._route.hops) == 2 else "rank")

    def refresh(self, shard: Tensor, *, async_op: bool = False) -> Work | None:
        """Send ``shard`` itself, rounded to the replica's dtype. Collective.

        Args:
            shard: This rank's shard, floating point, [n] contiguous; may be its own row of the replica. Do not change
                it before an asynchronous call has been waited for.
            async_op: return a Work at once.

        Raises:
            LayoutError: ``shard`` does not fit. Raised before any communication.

        Cost for each rank: that of an all-gather of n elements of the replica's dtype.
        """
        shard = self._prepare(shard, async_op=async_op)
        exact = replace(self._route, hops=tuple((hop, FORMATS["none"]) for hop, _ in self._route.hops))
        self.is_valid = True
        steps = partial(self._refresh_steps, shard, Encoder(exact, shard.numel()))
        return self._run(steps, shard, async_op=async_op)

    def update(self, shard: Tensor, *, random: RandomKey | None = None, async_op: bool = False) -> Work | None:
        """Send the difference between ``shard`` and its row of the replica; add what arrives. Collective.

        With a size of 1 there is nobody to send to: ``shard`` is copied to the replica.

        Args:
            shard: As in :meth:`refresh`, but not the replica's own row.
            random: required for a format that rounds stochastically, refused for others. A new key for each call.
            async_op: return a Work at once. With exact changes on GPUs, and wherever gloo does not use TCP, its
                ``wait()`` may exchange what had no room: wait for such works in the same order on every rank.

        Raises:
            StateError: No refresh since the start, :meth:`invalidate`, or a failed exchange.
            LayoutError, FormatError: ``shard`` or ``random`` do not fit. All are raised before any communication.

        Cost for each rank: that of an all-gather of n elements in the format. Scratch: the messages, and n elements in
        float32; with exact changes room for the longest messages, at most 4 bytes for each element of the replica.
        Where ``wait()`` may exchange more (``async_op``), the first update after a refresh sends 16 bits an element.
        """
        check_random(random, self._format)
        if not self.is_valid:
            raise StateError("ranks may hold different replicas: call refresh(shard) before update(shard)")
        shard = self._prepare(shard, async_op=async_op)
        check_apart("shard", shard, "replica", self._rows)
        if self._route.world_size == 1:
            return self.refresh(shard, async_op=async_op)
        encoder = Encoder(self._route, shard.numel(), random, rank=self._rank)
        return self._run(partial(self._update_steps, shard, encoder), shard, async_op=async_op)

    def invalidate(self) -> None:
        """The replica was written, or may differ between ranks: the next call must be a refresh."""
        self.is_valid = False

    def _prepare(self, shard: Tensor, *, async_op: bool) -> Tensor:
        (shard,) = check_arguments(None, async_op=async_op, shard=shard)
        check_flat("shard", shard)
        codec_for(self._format, shard.dtype)
        numel = self.held.numel()
        if shard.numel() != numel or shard.device != self._rows.device:
            raise LayoutError(
                f"shard must be as long as its row of the replica, on its device: numel={shard.numel()} on "
                f"{shard.device}, a row of {numel} on {self._rows.device}"
            )
        work, self._work = self._work, None
        if work is not None:
            # The next delta is relative to the replica that this one writes. A refresh needs none of its values.
            with nullcontext() if self.is_valid else suppress(Exception):
                work.wait()
        return shard

    def _run(self, start: Callable[[], Steps], shard: Tensor, *, async_op: bool) -> Work | None:
        route = self._route
        has_any = shard.numel() if self._uneven is None else self._uneven.numel_of_all
        steps = self._invalidate_on_error(start if has_any else nothing)
        next(steps)
        with nullcontext() if self._uneven is None else self._uneven.among_equals():
            count = len(route.hops)
            self._work = run(steps, shard, self._rows, async_op=async_op, queue=route.queue, num_exchanges=count)
        if self._uneven is not None and self._uneven.has_rest:
            finish = partial(self._finish, self._uneven)
            if self._work is None:
                finish()
            else:
                self._work = WorkThen(self._work, finish)
        return self._work

    def _finish(self, uneven: UnevenReplica) -> None:
        steps = self._invalidate_on_error(uneven.rest_steps)
        next(steps)
        with uneven.among_equals():
            run(steps, self._rows, async_op=False, queue=self._route.queue)

    def _invalidate_on_error(self, start: Callable[[], Steps]) -> Steps:
        """What ``start`` returns. The first step calls it, so that steps cancelled in the queue are an error, too."""
        try:
            steps = start()
            yield None
            yield from steps
        except BaseException:
            # Some ranks may have added messages that others did not get: E1 no longer holds.
            self.is_valid = False
            raise

    def _refresh_steps(self, shard: Tensor, encoder: Encoder) -> Steps:
        self.held.copy_(shard)
        if self._uneven is not None:
            yield from self._uneven.refresh_steps()
            return
        yield from gather_steps(self._rows, self.held, self._numbering, encoder)

    def _update_steps(self, shard: Tensor, encoder: Encoder) -> Steps:
        if self._uneven is not None:
            return self._uneven.update_steps(shard, encoder)
        if len(self._route.hops) == 1:
            return self._exchange(self._rows, shard, encoder)
        chunks = chunks_of(shard.numel(), self._format, min_numel=self._route.min_chunk_numel(shard.device))
        of_chunks = [self._exchange(self._rows[:, c], shard[c], encoder.at(c.start)) for c in chunks]
        return pipelined(of_chunks, num_exchanges=2)

    def _exchange(self, rows: Tensor, shard: Tensor, encoder: Encoder) -> Steps:
        route, device = self._route, shard.device
        layout = route.layout(self._format, torch.float32, 1, shard.numel())
        messages = layout.new(route.world_size, device)
        own, draw = own_message(messages, route), encoder.draw(0)
        kernels.quantize_difference(shard, rows[self._own_row], layout, own, draw, expected=messages)
        yield from gather_messages(messages, own, layout, route)
        if len(route.hops) == 1 or self._numbering == "local":  # messages are in the order of rows
            kernels.decode_add(messages, layout, rows)
            return
        for local_rank, of_nodes in enumerate(messages.view(route.ranks_per_node, route.num_nodes, -1)):
            kernels.decode_add(of_nodes, layout, rows[local_rank :: route.ranks_per_node])


def _hop_between_nodes(route: Route, group: Group) -> Route:
    """One hop between the ranks of equal local rank, each as a node of one rank."""
    if not isinstance(group, Topology):
        raise TopologyError(f"over='nodes' needs a Topology as group: group={group!r}")
    hop = next((hop for hop, _ in route.hops if hop.group is group.inter.group), group.inter)  # keeps its backend
    return replace(route, hops=((hop, route.hops[0][1]),), ranks_per_node=1, local_rank=0)
