"""The objects that FSDP2 calls for its collectives, with the call signatures of torch's own (AllGather, ReduceScatter).

    ZcommAllGather        all-gather in place: the input is this rank's row of the output
    ZcommReduceScatter    reduce-scatter; FSDP2 reads the output tensor, not the return value
    ReplicaAllReduce      the mean over replicas, after the reduce-scatter, at the boundary of accumulation
    Shadow...             torch's own; the quantized one runs on a copy, and its error is measured

FSDP2 may call one object with several groups: ``reshard_after_forward=<int>`` gathers a second time over a smaller one.
So the pieces are cached by group.

FSDP2 orders its streams itself: it calls these objects on its all-gather and reduce-scatter streams, and the exchanges
use the current stream. An exchange on another stream would race with FSDP2's copies into and out of the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zcomm import volume
from zcomm._collectives.all_gather import all_gather_single
from zcomm._collectives.all_reduce import all_reduce
from zcomm._collectives.reduce_scatter import reduce_scatter_single
from zcomm._formats.formats import Format
from zcomm._residuals.residual import Residual
from zcomm._transport.backend_choice import BackendName, BackendWish
from zcomm._transport.route import find_route
from zcomm._transport.topology import Topology, hop_of_group
from zcomm.errors import StateError
from zcomm.install.choices import UNCOMPRESSED, FormatChoice
from zcomm.install.fsdp2_units import FSDPUnit
from zcomm.install.pieces import FormatPiece, PieceExchange, split_by_format
from zcomm.install.report import InstallationRecord, PieceTotals

Comm = Topology | dist.ProcessGroup
"""What carries an exchange: a Topology, over two hops, or a process group, over one."""


class _Reductions:
    """The plans of one unit's reductions, made by ``plan``, by what they depend on: the parameters that train first."""

    def __init__(self, record: InstallationRecord) -> None:
        self._record = record
        self._plans: dict[tuple[tuple[int, ...], Hashable], list[PieceExchange]] = {}

    def get(
        self, trained: tuple[int, ...], other: Hashable, plan: Callable[[], list[PieceExchange]]
    ) -> list[PieceExchange]:
        """The exchanges of the parameters ``trained``, of one kind; ``plan`` makes them in the first step."""
        if (trained, other) not in self._plans:
            self._retire(trained)
            self._plans[trained, other] = plan()
        return self._plans[trained, other]

    def _retire(self, trained: tuple[int, ...]) -> None:
        """Drop the plans of other sets with any of ``trained``; save their residuals, which the new plan takes over."""
        for key in [key for key in self._plans if key[0] != trained and set(key[0]) & set(trained)]:
            for one in self._plans.pop(key):
                if one.residual is not None:
                    self._record.carried.retire(one.residual, self._record.scaling)


@dataclass(eq=False)
class UnitPlanner:
    """Decides how one unit's tensors are exchanged: pieces, formats, topology or group, residuals."""

    unit: FSDPUnit
    choices: Sequence[FormatChoice]
    topology: Topology | None
    record: InstallationRecord
    last_hop: type[ZcommReduceScatter] | type[ReplicaAllReduce]
    """What makes the last hop: its errors are worth a residual."""
    backend: BackendWish

    def __post_init__(self) -> None:
        self._gathers: dict[tuple[dist.ProcessGroup, torch.dtype], list[PieceExchange]] = {}
        self._reductions = _Reductions(self.record)

    def gather_over(self, group: dist.ProcessGroup, dtype: torch.dtype) -> list[PieceExchange]:
        """The pieces of an all-gather over ``group``."""
        key = group, dtype
        if key not in self._gathers:
            self._gathers[key] = self._plan_gather(group, dtype)
        return self._gathers[key]

    def reduce_over(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> list[PieceExchange]:
        """The pieces of a reduce-scatter over ``group``, to ``numel`` columns."""
        trained = self.unit.trained
        plan = partial(self._plan_reduce, group, numel, dtype, trained)
        return self._reductions.get(trained, (group, numel, dtype), plan)

    def comm_over(self, group: dist.ProcessGroup) -> Comm:
        """Return the Topology, over two hops, if ``group`` has all ranks of this unit; else ``group``, over one hop."""
        return self.topology if self.topology is not None and self.is_shard_group(group) else group

    def backend_of(self, comm: Comm) -> BackendName | None:
        """Return the backend of exchanges over a Topology or group; None for a Topology, which has its own."""
        return "nccl" if self.backend == "nccl" and not isinstance(comm, Topology) else None

    def is_shard_group(self, group: dist.ProcessGroup) -> bool:
        """Whether ``group`` is the one that the parameters are sharded over."""
        return tuple(dist.get_process_group_ranks(group)) == self.unit.ranks

    def _plan_gather(self, group: dist.ProcessGroup, dtype: torch.dtype) -> list[PieceExchange]:
        choices = self.choices
        if not self.is_shard_group(group):
            # These values are decoded already. A second rounding would give backward other weights than forward.
            why = f"gathered again over {group.size()} ranks"
            choices = [choice._replace(wires=UNCOMPRESSED, reason=why) for choice in choices]
        comm, columns = self.comm_over(group), self._columns(range(len(choices)), group)
        pieces = split_by_format(choices, columns, lambda choice: choice.wires.weights)
        return [PieceExchange(p, self._tally("weights", p, p.choices[0].wires.weights, comm, dtype)) for p in pieces]

    def _plan_reduce(
        self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype, trained: tuple[int, ...]
    ) -> list[PieceExchange]:
        comm, exchanges = self.comm_over(group), []
        for piece in self.gradient_pieces(group, numel, trained, lambda choice: choice.wires.gradients):
            wire = self.formats_for(piece.choices[0].wires.gradients, comm)
            tally = self._tally("gradients", piece, wire, comm, dtype)
            # Only the errors of the last hop are worth a residual, if it quantizes.
            _, last_wire = find_route("reduce_scatter", comm, wire, first="intra").hops[-1]
            residual = self.residual(ZcommReduceScatter, piece, comm, group.size()) if last_wire.block else None
            exchanges.append(PieceExchange(piece, tally, residual))
        return exchanges

    def residual(
        self, kind: type[ZcommReduceScatter] | type[ReplicaAllReduce], piece: FormatPiece, comm: Comm, num_rows: int
    ) -> Residual | None:
        """Return a residual for ``piece``; None unless ``kind`` is the last hop and its parameters are known."""
        has_residual = self.record.carried.recipe.residual and kind is self.last_hop
        if not has_residual or any(choice.name == self._label for choice in piece.choices):
            return None
        spans, numel = piece.spans(num_rows), num_rows * piece.numel
        return self.record.carried.residual_for(comm, spans, numel, device=self.unit.group.device)

    def gradient_pieces(
        self,
        group: dist.ProcessGroup,
        numel: int,
        trained: tuple[int, ...],
        formats_of: Callable[[FormatChoice], Hashable],
    ) -> tuple[FormatPiece, ...]:
        """Split gradients of ``numel`` columns. If some parameters have none in this step, FSDP2 does not say which."""
        columns = self._columns(trained, group)
        if numel == sum(columns):
            return split_by_format([self.choices[i] for i in trained], columns, formats_of)
        # Of all: a parameter that was frozen may still have a gradient, summed before.
        formats = {formats_of(choice) for choice in self.choices}
        if len(formats) == 1:
            return (self._part(self.choices[0]._replace(name=self._label, numel=numel)),)
        self.record.note(f"{self.unit.label}: some parameters had no gradient; the others' were sent uncompressed")
        return (self._part(FormatChoice(self._label, numel, UNCOMPRESSED, "unknown subset of the parameters")),)

    @staticmethod
    def _part(choice: FormatChoice) -> FormatPiece:
        return FormatPiece((choice,), (choice.numel,), ((0, choice.numel),))

    @property
    def _label(self) -> str:
        return f"{self.unit.name or '(root)'}.part"

    def formats_for(self, gradients: tuple[Format, Format], comm: Comm) -> Any:
        """Return both formats on a Topology; over a group the one for its slowest links."""
        if isinstance(comm, Topology):
            return gradients
        return gradients[1] if hop_of_group(comm).num_inter_peers else gradients[0]

    def _columns(self, indices: Sequence[int], group: dist.ProcessGroup) -> list[int]:
        return [self.unit.padded_numels[i] // group.size() for i in indices]

    def _tally(self, kind: str, piece: FormatPiece, wire: Any, comm: Comm, dtype: torch.dtype) -> PieceTotals:
        def bytes_of(wire: Any) -> volume.Sent:
            if not isinstance(comm, Topology):
                hop = hop_of_group(comm)
                return volume.one_hop_sent(piece.numel, dtype, hop.num_intra_peers, hop.num_inter_peers, wire)
            sent = volume.all_gather_sent if kind == "weights" else volume.reduce_scatter_sent
            pair = wire if isinstance(wire, tuple) else (wire, wire)
            return sent(piece.numel, dtype, comm.num_nodes, comm.ranks_per_node, pair)

        return self.record.new_tally(piece.choices, f"{kind} {formats_text(wire)}", bytes_of(wire), bytes_of("none"))


def formats_text(wire: Format | tuple[Format, ...]) -> str:
    """Return the formats as text, or ``uncompressed``."""
    formats = wire if isinstance(wire, tuple) else (wire,)
    return "uncompressed" if {f.name for f in formats} == {"none"} else ",".join(map(str, formats))


class _UnitComm:
    """One unit's planner, and the method ``allocate`` of torch's own objects."""

    def __init__(self, planner: UnitPlanner) -> None:
        self.planner = planner

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)


class ZcommAllGather(_UnitComm):
    """Quantized all-gather of one unit's parameters."""

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object) -> None:
        """Gather ``input_tensor`` into ``output_tensor``. On CUDA this only enqueues work on the current stream."""
        comm, rows = self.planner.comm_over(group), output_tensor.view(group.size(), -1)
        backend = self.planner.backend_of(comm)
        for one in self.planner.gather_over(group, output_tensor.dtype):
            piece, wire = one.piece, one.wires.weights
            shard = piece.take(input_tensor.view(1, -1))[0]
            start, stop = piece.ranges[0]
            values = rows[:, start:stop] if piece.is_view else rows.new_empty(rows.shape[0], piece.numel)
            all_gather_single(values, shard, comm, format=wire, backend=backend)
            piece.put(values, rows)
            one.tally.calls += 1


class ZcommReduceScatter(_UnitComm):
    """Quantized reduce-scatter of one unit's gradients, summed in float32 whatever their dtype."""

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, **_: object
    ) -> None:
        """Sum (or average) ``input_tensor`` over the ranks into ``output_tensor``."""
        comm, rows, record = self.planner.comm_over(group), input_tensor.view(group.size(), -1), self.planner.record
        backend = self.planner.backend_of(comm)
        for one in self.planner.reduce_over(group, output_tensor.numel(), output_tensor.dtype):
            piece, wire = one.piece, self.planner.formats_for(one.wires.gradients, comm)
            start, stop = piece.ranges[0]
            shard = output_tensor[start:stop] if piece.is_view else output_tensor.new_empty(piece.numel)
            key = record.carried.next_random_key(*(wire if isinstance(wire, tuple) else (wire,)))
            reduce_scatter_single(
                shard, piece.take(rows), op, group=comm, format=wire, residual=one.start(record.scaling), random=key,
                backend=backend,
            )  # fmt: skip
            piece.put(shard.view(1, -1), output_tensor.view(1, -1))
            one.tally.calls += 1


class ReplicaAllReduce:
    """FSDP2's all-reduce hook over a 1-D mesh: the quantized mean over replicas, in place of HSDP's all-reduce.

    While ``set_requires_all_reduce(False)`` is in effect, gradients that are reduced inside the replica are summed
    here. At the boundary of gradient accumulation the sum crosses the network, once.
    """

    def __init__(self, planner: UnitPlanner, group: dist.ProcessGroup) -> None:
        self._planner, self._group = planner, group
        self._partial: Tensor | None = None
        self._summed: tuple[int, ...] = ()
        """The parameters whose sums ``_partial`` has."""
        self._reductions = _Reductions(planner.record)

    def __call__(self, reduce_output: Tensor) -> None:
        """Replace ``reduce_output`` by its mean over the replicas."""
        trained = self._planner.unit.trained
        if self._partial is not None and (self._summed, self._partial.numel()) != (trained, reduce_output.numel()):
            self._partial = None
            raise StateError(
                f"{self._planner.unit.label}: other parameters have gradients than in earlier batches of this "
                "accumulation, which are dropped: call zero_grad(), and change which train after a backward with "
                "set_requires_all_reduce(True)"
            )
        if not self._planner.unit.group.all_reduce_grads:
            self._summed = trained
            self._partial = reduce_output.clone() if self._partial is None else self._partial.add_(reduce_output)
            reduce_output.zero_()  # FSDP2 adds it to the sharded gradients: they get the whole sum at the boundary
            return
        if self._partial is not None:
            reduce_output += self._partial
            self._partial = None
        columns = reduce_output.view(1, -1)
        kind = reduce_output.numel(), reduce_output.dtype
        for one in self._reductions.get(trained, kind, partial(self._plan, *kind, trained)):
            piece, (between, reduced) = one.piece, _formats_between(one.piece.choices[0])
            values, record = piece.take(columns), self._planner.record
            key, residual = record.carried.next_random_key(between, reduced), one.start(record.scaling)
            all_reduce(
                values.view(-1), "avg", self._group, format=between, gather_format=reduced, residual=residual,
                random=key, backend=self._planner.backend_of(self._group),
            )  # fmt: skip
            piece.put(values, columns)
            one.tally.calls += 1

    def _plan(self, numel: int, dtype: torch.dtype, trained: tuple[int, ...]) -> list[PieceExchange]:
        group, exchanges = self._planner.unit.process_group, []
        for piece in self._planner.gradient_pieces(group, numel, trained, _formats_between):
            loses = piece.choices[0].wires.gradients[1].block
            residual = self._planner.residual(ReplicaAllReduce, piece, self._group, 1) if loses else None
            exchanges.append(PieceExchange(piece, self._tally(piece, dtype), residual))
        return exchanges

    def _tally(self, piece: FormatPiece, dtype: torch.dtype) -> PieceTotals:
        hop, used = hop_of_group(self._group), _formats_between(piece.choices[0])
        shard_numel, peers = -(-piece.numel // hop.size), (hop.num_intra_peers, hop.num_inter_peers)

        def bytes_of(*formats: Any) -> volume.Sent:
            sent = [volume.one_hop_sent(shard_numel, dtype, *peers, wire) for wire in formats]
            return volume.Sent(sum(s.intra for s in sent), sum(s.inter for s in sent))

        text = f"replicas {formats_text(used)}"
        return self._planner.record.new_tally(piece.choices, text, bytes_of(*used), bytes_of("none", "none"))


def _formats_between(choice: FormatChoice) -> tuple[Format, Format]:
    """The formats of both halves of the all-reduce between replicas."""
    return choice.wires.gradients[1], choice.wires.reduced


class _Shadow:
    """torch's ``own`` collective, and the quantized one into a copy to measure its error."""

    def __init__(self, own: Any, compressed: Any) -> None:
        self._own, self._compressed = own, compressed
        self._planner, self.allocate = compressed.planner, own.allocate


class ShadowAllGather(_Shadow):
    """An all-gather."""

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        """Gather as torch does."""
        # The input is this rank's row of the output: a copy, because both exchanges need it.
        copy, values = torch.empty_like(output_tensor), input_tensor.clone()
        work = self._own(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        if work is not None:
            work.wait()  # the comparison below reads the output on the current stream
        self._compressed(output_tensor=copy, input_tensor=values, group=group)
        exact, got = output_tensor.view(group.size(), -1), copy.view(group.size(), -1)
        for one in self._planner.gather_over(group, copy.dtype):
            one.measure(exact, got)
        return work


class ShadowReduceScatter(_Shadow):
    """A reduce-scatter."""

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, **options: Any
    ) -> Any:
        """Reduce as torch does."""
        work = self._own(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, **options)
        if work is not None:
            work.wait()
        is_known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        copy = torch.empty_like(output_tensor)
        used = op if is_known else dist.ReduceOp.SUM
        self._compressed(output_tensor=copy, input_tensor=input_tensor, group=group, op=used)
        if not is_known:  # PREMUL_SUM: its factor can only be read from the unit
            copy /= self._planner.unit.group.gradient_divide_factor
        for one in self._planner.reduce_over(group, copy.numel(), copy.dtype):
            one.measure(output_tensor.view(1, -1), copy.view(1, -1))
        return work
