"""The objects that FSDP2 calls instead of torch.distributed: duck-typed, with torch's names for arguments.

    Gather         all-gather in place: the input is this rank's row of the output
    Reduce         reduce-scatter; FSDP2 looks at the output, not at what is returned
    ReplicaMean    the mean over replicas, after the reduce-scatter, at the boundary of accumulation
    Shadow...      torch's own, with one of ours beside it to measure

FSDP2 may call one object with several groups (``reshard_after_forward=<int>`` gathers a second time over a smaller
one), so what is known is kept by group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from zcomm._transport.topology import Topology, hop_of_group
from zcomm.install.choices import AS_IS, FormatChoice
from zcomm.install.fsdp2_units import FSDPUnit
from zcomm.install.pieces import FormatPiece, cut
from zcomm.install.planned import Planned
from zcomm.install.report import InstallationTally, Tally

Path = Topology | dist.ProcessGroup


class Plans:
    """What the objects of one unit share: its parameters' formats, the way over the ranks, the account."""

    def __init__(
        self,
        unit: FSDPUnit,
        choices: Sequence[FormatChoice],
        topology: Topology | None,
        account: InstallationTally,
        *,
        residual_of: type[Reduce] | type[ReplicaMean] | None = None,
        backend: BackendWish = "auto",
    ) -> None:
        self._over_nccl = backend == "nccl"
        self.unit, self.choices, self.account = unit, tuple(choices), account
        self._topology, self._residual_of = topology, residual_of
        self._trainable = [i for i, trainable in enumerate(unit.is_trainable) if trainable]

    def path(self, group: dist.ProcessGroup) -> Path:
        """The Topology, which is over all ranks of this unit, if ``group`` is, too; else ``group``."""
        return self._topology if self._topology is not None and self.is_whole(group) else group

    def backend_of(self, path: Path) -> BackendName | None:
        """What carries exchanges over ``path``: a Topology knows itself."""
        return "nccl" if self._over_nccl and not isinstance(path, Topology) else None

    def is_whole(self, group: dist.ProcessGroup) -> bool:
        """Whether ``group`` is the ranks that share the parameters."""
        return tuple(dist.get_process_group_ranks(group)) == self.unit.ranks

    def gathered(self, group: dist.ProcessGroup, dtype: torch.dtype) -> list[Planned]:
        """The pieces of a gather over ``group``."""
        choices = self.choices
        if not self.is_whole(group):
            # Values that were decoded once already: a second rounding would make backward's weights others.
            why = f"gathered again over {group.size()} ranks"
            choices = tuple(choice._replace(wires=AS_IS, reason=why) for choice in choices)
        pieces = cut(choices, self._columns(range(len(choices)), group), lambda choice: choice.wires.weights)
        path = self.path(group)
        return [
            Planned(piece, self._tally("weights", piece, piece.choices[0].wires.weights, path, dtype))
            for piece in pieces
        ]

    def reduced(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> list[Planned]:
        """The pieces of a reduce-scatter over ``group`` to ``numel`` columns."""
        path = self.path(group)
        pieces = self.gradient_pieces(group, numel, lambda choice: choice.wires.gradients)
        planned = []
        for piece in pieces:
            wire = self.of_hops(piece.choices[0].wires.gradients, path)
            tally = self._tally("gradients", piece, wire, path, dtype)
            residual = self.residual(Reduce, piece, path, group.size()) if self._loses(wire) else None
            planned.append(Planned(piece, tally, residual))
        return planned

    @staticmethod
    def _loses(wire: Any) -> bool:
        """Whether the last hop quantizes."""
        return bool((wire[1] if isinstance(wire, tuple) else wire).block)

    def residual(
        self, kind: type[Reduce] | type[ReplicaMean], piece: FormatPiece, path: Path, num_rows: int
    ) -> Residual | None:
        """Of exchanges of ``piece`` by ``kind``, if the recipe has one there and it is known whose values they are."""
        if kind is not self._residual_of or any(choice.name == self._label for choice in piece.choices):
            return None
        spans, numel = piece.spans(num_rows), num_rows * piece.numel
        return self.account.carried.open(path, spans, numel, device=self.unit.group.device)

    def gradient_pieces(
        self, group: dist.ProcessGroup, numel: int, formats_of: Callable[[FormatChoice], object]
    ) -> tuple[FormatPiece, ...]:
        """The pieces of gradients of ``numel`` columns: FSDP2 does not say whose, if some have none in a step."""
        columns = self._columns(self._trainable, group)
        if numel == sum(columns):
            return cut([self.choices[i] for i in self._trainable], columns, formats_of)
        formats = {formats_of(choice) for choice in self.choices}
        if len(formats) == 1:
            return (self._part(self.choices[0]._replace(name=self._label, numel=numel)),)
        self.account.note(f"{self.unit.label}: some parameters had no gradient; the others' travelled as they are")
        return (self._part(FormatChoice(self._label, numel, AS_IS, "unknown part of the module")),)

    @staticmethod
    def _part(choice: FormatChoice) -> FormatPiece:
        return FormatPiece((choice,), (choice.numel,), ((0, choice.numel),))

    @property
    def _label(self) -> str:
        return f"{self.unit.name or '(root)'}.part"

    def of_hops(self, gradients: tuple[Format, Format], path: Path) -> Any:
        """The pair on a Topology; over a group, what the widest of its links takes."""
        if isinstance(path, Topology):
            return gradients
        return gradients[1] if hop_of_group(path).num_inter_peers else gradients[0]

    def _columns(self, indices: Sequence[int], group: dist.ProcessGroup) -> list[int]:
        return [self.unit.padded_numels[i] // group.size() for i in indices]

    def _tally(self, kind: str, piece: FormatPiece, wire: Any, path: Path, dtype: torch.dtype) -> Tally:
        def bytes_of(wire: Any) -> volume.Sent:
            if not isinstance(path, Topology):
                hop = hop_of_group(path)
                return volume.one_hop_sent(piece.numel, dtype, hop.num_intra_peers, hop.num_inter_peers, wire)
            shape, pair = (path.num_nodes, path.ranks_per_node), wire if isinstance(wire, tuple) else (wire, wire)
            if kind == "weights":
                return volume.all_gather_sent(piece.numel, dtype, *shape, pair)
            return volume.reduce_scatter_sent(piece.numel, dtype, *shape, pair)

        return self.account.open(piece.choices, f"{kind} {described(wire)}", bytes_of(wire), bytes_of("none"))


def described(wire: Format | tuple[Format, ...]) -> str:
    """``as is``, or the formats."""
    formats = wire if isinstance(wire, tuple) else (wire,)
    return "as is" if {f.name for f in formats} == {"none"} else ",".join(map(str, formats))


class _Allocates:
    """``allocate`` as torch's own objects have it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocates):
    """All-gather of one unit's parameters."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._planned: dict[tuple[dist.ProcessGroup, torch.dtype], list[Planned]] = {}

    def planned(self, group: dist.ProcessGroup, dtype: torch.dtype) -> list[Planned]:
        """The pieces over ``group``."""
        key = (group, dtype)
        if key not in self._planned:
            self._planned[key] = self._plans.gathered(group, dtype)
        return self._planned[key]

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object) -> None:
        """Gather ``input_tensor`` into ``output_tensor``; on CUDA in the order of the current stream."""
        path, rows = self._plans.path(group), output_tensor.view(group.size(), -1)
        backend = self._plans.backend_of(path)
        for one in self.planned(group, output_tensor.dtype):
            piece, wire = one.piece, one.wires.weights
            shard = piece.take(input_tensor.view(1, -1))[0]
            if piece.is_view:
                start, stop = piece.ranges[0]
                all_gather_single(rows[:, start:stop], shard, path, format=wire, backend=backend)
            else:
                values = rows.new_empty(rows.shape[0], piece.numel)
                all_gather_single(values, shard, path, format=wire, backend=backend)
                piece.put(values, rows)
            one.tally.calls += 1


class Reduce(_Allocates):
    """Reduce-scatter of one unit's gradients, summed in float32 whatever their dtype."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._planned: dict[tuple[dist.ProcessGroup, int, torch.dtype], list[Planned]] = {}

    def planned(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> list[Planned]:
        """The pieces over ``group`` of ``numel`` columns."""
        key = (group, numel, dtype)
        if key not in self._planned:
            self._planned[key] = self._plans.reduced(group, numel, dtype)
        return self._planned[key]

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, **_: object
    ) -> None:
        """Sum (or average) ``input_tensor`` over the ranks into ``output_tensor``."""
        path, rows = self._plans.path(group), input_tensor.view(group.size(), -1)
        backend = self._plans.backend_of(path)
        for one in self.planned(group, output_tensor.numel(), output_tensor.dtype):
            piece, wire = one.piece, self._plans.of_hops(one.wires.gradients, path)
            start, stop = piece.ranges[0]
            shard = output_tensor[start:stop] if piece.is_view else output_tensor.new_empty(piece.numel)
            key = self._plans.account.carried.key_for(*(wire if isinstance(wire, tuple) else (wire,)))
            source, residual = piece.take(rows), one.begin(self._plans.account.scaling)
            how: dict[str, Any] = {"format": wire, "residual": residual, "random": key, "backend": backend}
            reduce_scatter_single(shard, source, op, group=path, **how)
            if not piece.is_view:
                piece.put(shard.view(1, -1), output_tensor.view(1, -1))
            one.tally.calls += 1


class ReplicaMean:
    """FSDP2's all-reduce hook over a 1-D mesh: the mean over replicas, as native HSDP takes it.

    While ``set_requires_all_reduce(False)`` is in effect, what is reduced inside the replica is kept here; at the
    boundary of accumulation it is added and crosses the network once.
    """

    def __init__(self, plans: Plans, group: dist.ProcessGroup) -> None:
        self._plans, self._group = plans, group
        self._partial: Tensor | None = None
        self._planned: dict[tuple[int, torch.dtype], list[Planned]] = {}

    def __call__(self, reduce_output: Tensor) -> None:
        """Replace ``reduce_output`` by its mean over the replicas."""
        if not self._plans.unit.group.all_reduce_grads:
            self._partial = reduce_output.clone() if self._partial is None else self._partial.add_(reduce_output)
            reduce_output.zero_()
            return
        if self._partial is not None:
            reduce_output += self._partial
            self._partial = None
        columns = reduce_output.view(1, -1)
        for one in self._pieces(reduce_output):
            piece, between, reduced = one.piece, one.wires.gradients[1], one.wires.reduced
            values, account = piece.take(columns), self._plans.account
            key, residual = account.carried.key_for(between, reduced), one.begin(account.scaling)
            all_reduce(
                values.view(-1), "avg", self._group, format=between, gather_format=reduced, residual=residual,
                random=key, backend=self._plans.backend_of(self._group),
            )  # fmt: skip
            if not piece.is_view:
                piece.put(values, columns)
            one.tally.calls += 1

    def _pieces(self, reduce_output: Tensor) -> list[Planned]:
        key = (reduce_output.numel(), reduce_output.dtype)
        if key not in self._planned:
            shard_group = self._plans.unit.group.mesh_info.shard_process_group
            pieces = self._plans.gradient_pieces(
                shard_group, reduce_output.numel(), lambda choice: (choice.wires.gradients[1], choice.wires.reduced)
            )
            self._planned[key] = [self._plan(piece, reduce_output.dtype) for piece in pieces]
        return self._planned[key]

    def _plan(self, piece: FormatPiece, dtype: torch.dtype) -> Planned:
        loses = piece.choices[0].wires.gradients[1].block
        residual = self._plans.residual(ReplicaMean, piece, self._group, 1) if loses else None
        return Planned(piece, self._tally(piece, dtype), residual)

    def _tally(self, piece: FormatPiece, dtype: torch.dtype) -> Tally:
        hop, wires = hop_of_group(self._group), piece.choices[0].wires
        shard_numel = -(-piece.numel // hop.size)

        def bytes_of(*formats: Any) -> volume.Sent:
            peers = hop.num_intra_peers, hop.num_inter_peers
            sent = [volume.one_hop_sent(shard_numel, dtype, *peers, wire) for wire in formats]
            return volume.Sent(sum(s.intra for s in sent), sum(s.inter for s in sent))

        used = (wires.gradients[1], wires.reduced)
        return self._plans.account.open(
            piece.choices, f"replicas {described(used)}", bytes_of(*used), bytes_of("none", "none")
        )


class ShadowGather:
    """torch's own all-gather; ours beside it, into a copy, to measure."""

    def __init__(self, own: Any, compressed: Gather) -> None:
        self._own, self._compressed = own, compressed
        self.allocate = own.allocate

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        """What torch does."""
        copy, values = torch.empty_like(output_tensor), input_tensor.clone()
        work = self._own(output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        if work is not None:
            work.wait()
        self._compressed(output_tensor=copy, input_tensor=values, group=group)
        exact, got = output_tensor.view(group.size(), -1), copy.view(group.size(), -1)
        _measure(self._compressed.planned(group, copy.dtype), exact, got)
        return work


class ShadowReduce:
    """torch's own reduce-scatter; ours beside it."""

    def __init__(self, own: Any, compressed: Reduce, unit: FSDPUnit) -> None:
        self._own, self._compressed, self._unit = own, compressed, unit
        self.allocate = own.allocate

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, **options: Any
    ) -> Any:
        """What torch does."""
        work = self._own(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, **options)
        if work is not None:
            work.wait()
        is_known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        copy = torch.empty_like(output_tensor)
        self._compressed(
            output_tensor=copy, input_tensor=input_tensor, group=group, op=op if is_known else dist.ReduceOp.SUM
        )
        if not is_known:  # PREMUL_SUM, whose factor only the unit knows
            copy /= self._unit.group.gradient_divide_factor
        planned = self._compressed.planned(group, copy.numel(), copy.dtype)
        _measure(planned, output_tensor.view(1, -1), copy.view(1, -1))
        return work


def _measure(planned: list[Planned], exact: Tensor, compressed: Tensor) -> None:
    for one in planned:
        one.tally.measure(one.piece.take(exact), one.piece.take(compressed), one.piece.sizes)
