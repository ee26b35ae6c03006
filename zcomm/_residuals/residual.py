"""Residuals (error feedback): what an encoding loses is kept in int8 and added at the next exchange.

    sums x --+--> u --quantize--> message --------------> other ranks
             |    '--- minus the decoded message -------> new residual, pending until commit()
    residual r

Residuals are for the last hop of a reduction, whose errors are not averaged afterwards. On two hops (N nodes, L ranks
per node) a rank keeps 1 / L byte per element of the buffer, on one hop 1 byte; between an exchange and ``commit()``
twice that. The arithmetic is N10 of :mod:`zcomm._formats.reference`.

Invariants:
    R1  Exchanges read and write a copy; ``commit()`` makes it current, ``rollback()`` drops it. So a skipped step
        leaves no trace, and of several exchanges before a commit (micro-batches) each uses the residual of the last.
    R2  Blocks start at multiples of 256 in a row, and so do chunks: the bits do not depend on chunks. Rows of different
        lengths are stored as one, each from a block on.
    R3  A block that is not finite keeps its old residual: one bad step does not lose what was accumulated.
    R4  A residual is stored in the units of the gradients that are sent, with their loss scale. ``set_loss_scale``
        rescales it when the scale changes. Values that are read or saved are in units without the loss scale.

Source: "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training" (arXiv:2407.04480) stores the error in 8
bits, damps and resets it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zcomm._base.arguments import as_count, as_device, as_positive, shown
from zcomm._formats.formats import FORMATS, codec_for
from zcomm._formats.message import MessageInfo, MessageLayout, layout_of
from zcomm._kernels import kernels
from zcomm._kernels.on_triton import ResidualBlocks
from zcomm._residuals.buffer_layout import BufferLayout, Span
from zcomm._transport import backend
from zcomm._transport.route import Group, Route, find_route
from zcomm._transport.topology import Numbering
from zcomm._transport.work import Steps, Work, run
from zcomm.errors import ConfigError, LayoutError, StateError

FORMAT = FORMATS["int8"]
BLOCK = FORMAT.block


@dataclass
class _Blocks:
    """Rows as int8 blocks: codes int8 [num_rows, num_blocks, BLOCK], scales bf16 [num_rows, num_blocks]."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros(cls, num_rows: int, numel: int, device: torch.device | str) -> _Blocks:
        num_blocks = -(-numel // BLOCK)
        codes = torch.zeros((num_rows, num_blocks, BLOCK), dtype=torch.int8, device=device)
        return cls(codes, torch.zeros((num_rows, num_blocks), dtype=torch.bfloat16, device=device))

    def clone(self) -> _Blocks:
        return _Blocks(self.codes.clone(), self.scales.clone())

    def decode(self, first: int, numel: int) -> Tensor:
        """Columns ``first`` to ``first + numel``, float32 [num_rows, numel]."""
        part = _blocks_of(first, numel)
        values = self.codes[:, part] * self.scales[:, part].float().unsqueeze(-1)  # exact
        largest = torch.finfo(torch.float32).max
        return values.clamp_(-largest, largest).flatten(1)[:, :numel]

    def rescale_(self, factor: float | Tensor) -> None:
        """Multiply by ``factor``: exact for powers of 2, and clamped to the largest finite scale."""
        largest = torch.finfo(torch.bfloat16).max
        self.scales.copy_((self.scales.float() * factor).clamp_(max=largest))

    def to_bytes(self) -> Tensor:
        """Scales and codes as uint8 [n]."""
        return torch.cat([self.scales.flatten().view(torch.uint8), self.codes.flatten().view(torch.uint8)])

    def from_bytes(self, content: Tensor) -> _Blocks:
        """The inverse of :meth:`to_bytes`, for blocks of the shape of these."""
        scales = content[: self.scales.nbytes].clone().view(torch.bfloat16)  # view() needs an aligned address
        codes = content[self.scales.nbytes :].view(torch.int8)
        return _Blocks(codes.view(self.codes.shape), scales.view(self.scales.shape))

    def encode(self, values: Tensor, first: int, chosen: str = "auto") -> None:
        """Encode float32 ``values`` [num_rows, numel] into the columns from ``first``; blocks not finite stay (R3)."""
        num_rows, numel = values.shape
        layout = layout_of("residual", FORMAT, torch.float32, num_rows, numel, chosen)
        message = layout.new(1, values.device)
        kernels.quantize(values, layout, message, 0, values.stride(0))
        part, num_blocks = _blocks_of(first, numel), layout.blocks_per_segment
        scales = message[0, : 2 * num_rows * num_blocks].view(torch.bfloat16).view(num_rows, num_blocks)
        codes = message[0, layout.codes_offset :][: num_rows * numel].view(torch.int8).view(num_rows, numel)
        codes = pad(codes, (0, num_blocks * BLOCK - numel)).view(num_rows, num_blocks, BLOCK)
        is_kept = scales.isnan()
        self.scales[:, part] = torch.where(is_kept, self.scales[:, part], scales)
        self.codes[:, part] = torch.where(is_kept.unsqueeze(-1), self.codes[:, part], codes)


def _starts_of(numels: Sequence[int]) -> list[int]:
    """Where rows of ``numels`` elements start side by side, each on a multiple of a block, and where the last ends."""
    return list(accumulate((-(-numel // BLOCK) * BLOCK for numel in numels), initial=0))


def _decoded_rows(blocks: _Blocks, numels: Sequence[int]) -> Tensor:
    """Rows of ``numels`` elements that lie in ``blocks`` by :func:`_starts_of`, float32, side by side."""
    return torch.cat([blocks.decode(first, n)[0] for first, n in zip(_starts_of(numels), numels, strict=False)])


def decode_state(state: Mapping[str, Any]) -> Tensor:
    """The values of a :meth:`Residual.state_dict`, as of :meth:`Residual.values`; equal rows are padded to blocks."""
    blocks, layout = _Blocks(state["codes"], state["scales"]), BufferLayout.from_state(state["layout"])
    if layout.shard_sizes is not None:
        return _decoded_rows(blocks, layout.row_numels(state["local_rank"]))
    return blocks.decode(0, blocks.codes[0].numel())


def check_damping(beta: float, reset_interval: int, *, prefix: str = "") -> None:
    """Raise ConfigError for an invalid ``beta`` or ``reset_interval`` of a :class:`Residual`."""
    if as_positive(f"{prefix}beta", beta) > 1:
        raise ConfigError(f"{prefix}beta must be at most 1: {prefix}beta={beta}")
    as_count(f"{prefix}reset_interval", reset_interval, error=ConfigError)


def _blocks_of(first: int, numel: int) -> slice:
    assert first % BLOCK == 0, f"chunks start at multiples of a block (R2): first={first}"
    return slice(first // BLOCK, -(-(first + numel) // BLOCK))


class Residual:
    """Error feedback for the reduction of one flat buffer: what its last hop loses on this rank, by parameter.

    Pass it as ``residual=`` to :func:`zcomm.reduce_scatter_single` or :func:`zcomm.all_reduce`. Then call
    :meth:`commit` once the result has been used, or :meth:`rollback` if the step is skipped. With a loss scale call
    :meth:`set_loss_scale` before the exchange.

    Args:
        group: That of the collective: a ProcessGroup, or a :class:`zcomm.Topology`.
        spans: Where the parameters lie in the buffer: :class:`zcomm.Span`, or (key, first element, numel). The same
            on every rank.
        numel: Elements of the buffer: the input of a reduce-scatter, the tensor of an all-reduce.
        numbering: That of the reduce-scatter; an all-reduce accepts either.
        beta: Factor of the residual before it is added, in (0, 1]; below 1 old losses fade.
        reset_interval: Commits after which the residual is reset to zero; 0: never.
        device: Of the tensors that are exchanged.
        shard_sizes: Elements of every rank's shard, in the order of rows; None: all have the same. Only for
            :class:`zcomm.NodeSums` of the same sizes.

    Raises:
        LayoutError: Spans overlap or leave the buffer, or ``shard_sizes`` do not add up to ``numel``.
        ConfigError: ``beta`` or ``reset_interval`` is invalid.
    """

    def __init__(
        self,
        group: Group,
        spans: Iterable[Span | tuple[Any, ...]],
        numel: int,
        *,
        numbering: Numbering = "rank",
        beta: float = 1.0,
        reset_interval: int = 0,
        device: torch.device | str = "cpu",
        shard_sizes: Sequence[int] | None = None,
    ) -> None:
        check_damping(beta, reset_interval)
        self.route = find_route("residual", group, "none", first="intra", backend="torch")
        self.layout = BufferLayout.of(spans, numel, self.route, numbering, shard_sizes)
        self.beta, self.reset_interval = float(beta), int(reset_interval)
        self.num_commits = 0
        self._loss_scale: float | Tensor = 1.0
        place = as_device("device", device)
        self.row_starts = _starts_of(self.layout.row_numels(self.route.local_rank))
        """Where rows differ: the column in which each row starts, as if they were one, and the end of the last."""
        if self.layout.shard_sizes is None:
            self._current = _Blocks.zeros(self.layout.num_rows, self.layout.shard_numel, place)
        else:
            self._current = _Blocks.zeros(1, self.row_starts[-1], place)
        self._next: _Blocks | None = None
        self._works: list[Work] = []

    @property
    def device(self) -> torch.device:
        """The device of the residual and of the tensors that are exchanged."""
        return self._current.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank after a commit; twice that between an exchange and its commit."""
        return self._current.codes.nbytes + self._current.scales.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """That of :meth:`values`."""
        layout = self.layout
        if layout.shard_sizes is None:
            return layout.num_rows, layout.shard_numel
        return (sum(layout.row_numels(self.route.local_rank)),)

    def values(self) -> Tensor:
        """The committed residual, float32 [num_rows, shard_numel]: rows ``layout.rows_of(local_rank)``.

        Where rows differ they are side by side in one dimension.
        """
        return self._decoded(self._unscaled(self._current), self.route.local_rank).contiguous()

    def _decoded(self, blocks: _Blocks, local_rank: int) -> Tensor:
        if self.layout.shard_sizes is None:
            return blocks.decode(0, self.layout.shard_numel)
        return _decoded_rows(blocks, self.layout.row_numels(local_rank))

    def values_of_node(self) -> Iterator[tuple[int, Tensor]]:
        """The committed residual of this node, rank by rank: (local rank, values).

        Collective inside the node if there are two hops. With one hop it yields only this rank's.
        """
        if not self.layout.has_two_hops:
            yield self.route.local_rank, self.values()
            return
        mine = self._unscaled(self._current).to_bytes()
        per_node = self.layout.ranks_per_node
        if self.layout.shard_sizes is None:
            shapes, rows = [self._current] * per_node, mine.new_empty((per_node, mine.numel()))
            steps, of_ranks = self._gather_steps(rows, mine), list(rows)
        else:
            lengths = [_starts_of(self.layout.row_numels(local_rank))[-1] for local_rank in range(per_node)]
            shapes = [_Blocks.zeros(1, length, "meta") for length in lengths]
            parts = [mine.new_empty(blocks.codes.nbytes + blocks.scales.nbytes) for blocks in shapes]
            steps, of_ranks = self._uneven_gather_steps(parts, mine), parts
        run(steps, mine, async_op=False, queue=self.route.queue)
        for local_rank, (blocks, content) in enumerate(zip(shapes, of_ranks, strict=True)):
            yield local_rank, self._decoded(blocks.from_bytes(content), local_rank)

    def _gather_steps(self, of_ranks: Tensor, mine: Tensor) -> Steps:
        hop, _ = self.route.hops[0]
        yield backend.all_gather(of_ranks, mine, hop, MessageInfo("residual", str(FORMAT), self._current.codes.numel()))

    def _uneven_gather_steps(self, of_ranks: list[Tensor], mine: Tensor) -> Steps:
        hop, _ = self.route.hops[0]
        info = MessageInfo("residual", str(FORMAT), self._current.codes.numel())
        if mine.numel():
            backend.count(hop, info, mine.nbytes)
        sizes = [part.numel() for part in of_ranks]
        yield backend.exchange_parts(
            of_ranks, [mine] * hop.size, hop, info, sum(sizes), operation=backend.UNEVEN_GATHER, sizes=sizes
        )

    def _unscaled(self, blocks: _Blocks) -> _Blocks:
        """``blocks`` in units without the loss scale (R4); ``blocks`` itself if there is no loss scale."""
        if isinstance(self._loss_scale, float) and self._loss_scale == 1:
            return blocks
        blocks = blocks.clone()
        blocks.rescale_(_quotient(1.0, self._loss_scale))
        return blocks

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Set the loss scale of the gradients from the next exchange on, and rescale the residual if it changes.

        If the scale changes, this waits for exchanges in flight.

        Args:
            scale: Greater than 0; initially 1. A tensor of one element is copied and read on its device: with one on a
                GPU the host never waits.

        Cost: none for an unchanged number; else a pass over the scales, 2 bytes per 256 elements.
        """
        if isinstance(scale, Tensor):
            scale = scale.detach().to(self.device, torch.float32, copy=True)
        elif scale == self._loss_scale:
            return
        for work in self._works:  # they write the scales that are about to be multiplied
            with suppress(Exception):  # raised where the caller waits for it
                work.wait()
        factor = _quotient(scale, self._loss_scale)
        for blocks in (self._current, self._next):
            if blocks is not None:
                blocks.rescale_(factor)
        self._loss_scale = scale

    def exceeds(self, scale: float | Tensor) -> bool | Tensor:
        """Whether the loss scale that was set last is larger than ``scale``."""
        return scale < self._loss_scale

    def norm(self) -> float:
        """The Euclidean norm of this rank's committed residual."""
        return math.sqrt(float(self.values().double().square().sum()))

    def commit(self, *, unless: bool | Tensor = False) -> None:
        """Make the residual of the exchanges since the last commit current. Waits for them and raises their errors.

        The residual of an exchange that failed is undefined: call :meth:`rollback`.

        Args:
            unless: If true, roll back instead. A tensor of one element is read on its device: the host does not wait.
        """
        while self._works:
            self._works.pop().wait()
        if unless is True:
            self._next = None
            return
        if self._next is not None:
            kept, renewed = self._current, self._next
            if isinstance(unless, Tensor):  # decided on the device, so that the host does not wait
                renewed.scales.copy_(torch.where(unless, kept.scales, renewed.scales))
                renewed.codes.copy_(torch.where(unless, kept.codes, renewed.codes))
            self._current, self._next = renewed, None
        self.num_commits += 1
        if self.reset_interval and self.num_commits % self.reset_interval == 0:
            self.reset()

    def copy(self) -> Residual:
        """A copy that shares the values: committing it leaves this one, and its next exchange, as they are."""
        other = copy(self)
        other._works = list(self._works)
        return other

    def rollback(self) -> None:
        """Drop the residual of the exchanges since the last commit: their step was skipped. Waits for them."""
        while self._works:
            with suppress(Exception):  # raised where the caller waits for it
                self._works.pop().wait()
        self._next = None

    def reset(self) -> None:
        """Reset the residual to zero: nothing is added to the next exchange."""
        self.rollback()
        self._current.codes.zero_()
        self._current.scales.zero_()
        self._loss_scale = 1.0

    @property
    def is_committed(self) -> bool:
        """Whether there was no exchange since the last commit or rollback."""
        return not self._works and self._next is None

    def check_committed(self, call: str) -> None:
        """Raise StateError if there were exchanges since the last commit."""
        if not self.is_committed:
            raise StateError(f"there were exchanges since the last commit: call commit() or rollback() before {call}")

    def state_dict(self) -> dict[str, Any]:
        """This rank's committed residual and its layout, as tensors, numbers, strings, tuples, and the spans' keys.

        Raises:
            StateError: There were exchanges since the last commit.
        """
        self.check_committed("state_dict()")
        blocks = self._unscaled(self._current).clone()
        return {
            "codes": blocks.codes,
            "scales": blocks.scales,
            "local_rank": self.route.local_rank,
            "node_rank": self.route.node_rank,
            "num_commits": self.num_commits,
            "layout": self.layout.as_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank, bit for bit.

        Raises:
            StateError: The state is of another rank, layout or topology: use :func:`zcomm.load_residuals`.
        """
        mine = self.state_dict()
        for name in ("layout", "node_rank", "local_rank"):
            if state[name] != mine[name]:
                raise StateError(
                    f"the state is of another {name}: {_shortened(state[name])}, here {_shortened(mine[name])}; "
                    "pass the states of all ranks to zcomm.load_residuals()"
                )
        self._current.codes.copy_(state["codes"])
        self._current.scales.copy_(state["scales"])
        self._loss_scale, self.num_commits = 1.0, int(state["num_commits"])

    def set_values(self, values: Tensor) -> None:
        """Encode float32 ``values``, as of :meth:`values`, as the committed residual."""
        self.reset()
        if self.layout.shard_sizes is None:
            self._current.encode(values, 0)
            return
        for first, row in zip(self.row_starts, self.layout.rows_in(values, self.route.local_rank), strict=False):
            if row.numel():
                self._current.encode(row.view(1, -1), first)

    def check(
        self,
        route: Route,
        numbering: Numbering,
        shard_numel: int,
        source: Tensor,
        shard_sizes: tuple[int, ...] | None = None,
    ) -> None:
        """Raise LayoutError if this residual was made for another reduction than that of ``source`` over ``route``."""
        layout = self.layout
        if layout.shard_sizes != shard_sizes:
            raise LayoutError(
                "the residual was made for shards of other sizes: shard_sizes="
                f"{shown(layout.shard_sizes)}, the exchange has {shown(shard_sizes)}"
            )
        if shard_sizes is not None:
            shard_numel = layout.shard_numel
        if len(route.hops) != len(self.route.hops):
            raise LayoutError(
                f"the residual is for {len(self.route.hops)} hops, the exchange has {len(route.hops)}: "
                "pass the group that the residual was made for"
            )
        expected = (layout.num_nodes, layout.ranks_per_node, layout.shard_numel, self.device)
        got = (route.num_nodes, route.ranks_per_node, shard_numel, source.device)
        if got != expected or (layout.has_two_hops and numbering != layout.numbering):
            raise LayoutError(
                "the residual was made for another exchange: (nodes, ranks per node, shard numel, device), numbering = "
                f"{expected}, {layout.numbering!r}; got {got}, {numbering!r}"
            )
        if codec_for(route.hops[-1][1], source.dtype).dtype == torch.float64:
            raise LayoutError(
                "a residual is float32 and cannot be used with an exchange in float64: choose another format or dtype"
            )

    def watch(self, work: Work | None) -> Work | None:
        """Record ``work``, an exchange with this residual, for commit() to wait for; None: the exchange is complete."""
        if work is not None:
            self._works.append(work)
        return work

    def add_to_(self, values: Tensor, first: int) -> None:
        """Add the residual to float32 ``values`` [num_rows, numel], columns from ``first``: u of N10."""
        blocks = self._current if self._next is None else self._next
        residual = blocks.decode(first, values.shape[1])
        if self.beta != 1:
            residual = residual.mul_(self.beta)
        values.add_(residual)

    def blocks_to_renew(self, first: int, numel: int) -> ResidualBlocks:
        """Columns from ``first``, for a kernel that adds them and overwrites them with the new residual of N10."""
        part = _blocks_of(first, numel)
        blocks = self._uncommitted()
        return blocks.codes[:, part], blocks.scales[:, part], self.beta

    def _uncommitted(self) -> _Blocks:
        if self._next is None:
            self._next = self._current.clone()
        return self._next

    def keep(self, values: Tensor, messages: Tensor, layout: MessageLayout, first: int) -> None:
        """Store the new residual of N10: ``values`` [num_rows, numel], u, minus decoded ``messages``; overwrites u."""
        decoded = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        kernels.decode(messages, layout, decoded, values.shape[1], 0)
        self.keep_difference(values, decoded, first, layout.kernels)

    def keep_difference(self, values: Tensor, decoded: Tensor, first: int, chosen: str = "auto") -> None:
        """Store ``values`` - ``decoded``, both [num_rows, numel], as the new residual; overwrites ``values``."""
        self._uncommitted().encode(values.sub_(decoded), first, chosen)


def _quotient(new: float | Tensor, old: float | Tensor) -> float | Tensor:
    """``new`` / ``old``; 0 if either is not a valid scale: the residual's units are then unknown, and it is dropped."""
    if isinstance(new, Tensor) or isinstance(old, Tensor):
        return torch.nan_to_num(new / old, nan=0.0, posinf=0.0).clamp_(min=0)  # type: ignore[arg-type]
    return new / old if 0 < new < math.inf and 0 < old < math.inf else 0.0


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
