"""Updates of masters and moments that are offloaded to files: a pipeline over sub-groups, then a commit.

The inner optimizer sees the part of each parameter that lies in the sub-group as a tensor of its own, with that part of
the state. Numbers of a state, such as ``step``, and the valid extent of the files change only in
:meth:`FileUpdate.commit`. The ranks agree before it: a failed write on one rank leaves all of them before the step.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from zcomm import StateError
from zero._optim.masters import MasterPiece, is_elementwise, pieces_by_bucket
from zero._optim.several import name_of, optimizers_of
from zero._optim.state_files import LoadedSubGroup, StateFiles
from zero._optim.step_pieces import numbers_of_groups, step_leaves
from zero._optim.sub_groups import SubGroup, new_pipeline
from zero._optim.updaters import updater_of, updaters_of_groups
from zero._storage.poison import placeholder


class LoadedMaster(NamedTuple):
    """Elements ``[first, first + len(master))`` of a piece, loaded into memory."""

    piece: MasterPiece
    first: int
    master: Tensor
    moments: dict[str, Tensor]
    grad: Tensor
    out: Tensor
    """Where the new parameter goes."""


class FileUpdate:
    """Updates those of ``pieces`` whose buckets are in ``files``; none if it has no buckets."""

    def __init__(self, files: StateFiles, inner: Optimizer, pieces: Sequence[MasterPiece]) -> None:
        self._files, self._inner = files, inner
        self._pieces = pieces_by_bucket(files.groups_of, pieces)
        self.is_used = bool(self._pieces)
        """Whether there is anything in files."""
        self.keeps_previous = files.settings.keeps_previous
        """Whether the files keep the previous values until a run is committed."""
        self._number_of: dict[int, int] = {}
        self._group_of, self._updaters = numbers_of_groups(inner), updaters_of_groups(inner)
        self._done: list[SubGroup] = []
        self._states: dict[int, dict[str, Any]] = {}

    def run(self, factor: float, *, all_buckets: bool) -> None:
        """Update every sub-group with a gradient and write its parameters; :meth:`commit` makes them valid.

        Args:
            factor: Multiplies gradients; 1 unless the optimizer is, or has, one of zero's own.
            all_buckets: Also write the parameters of sub-groups without a gradient.
        """
        self._done, self._states = [], {}
        self._number_of = {}
        for one in optimizers_of(self._inner):
            leaves = (param for group in one.param_groups for param in group["params"])
            self._number_of |= {id(leaf): number for number, leaf in enumerate(leaves)}
        self._files.gradients.raise_error()
        groups = [group for group in self._files.groups if all_buckets or self._has_gradient(group)]
        self._files.drop_ahead(set(self._files.groups) - set(groups))
        settings = (group.items() for group in self._inner.param_groups)
        before = [{key: value for key, value in each if isinstance(value, (int, float))} for each in settings]

        def restore_numbers() -> None:
            for options, numbers in zip(self._inner.param_groups, before, strict=True):
                options.update(numbers)

        def update(group: SubGroup, unit: LoadedSubGroup) -> None:
            restore_numbers()  # they change once a step, not once a sub-group
            self._update(group, unit, factor)
            self._done.append(group)

        try:
            new_pipeline(self._load, self._files.settings).run(groups, update)
        except BaseException:
            restore_numbers()
            self._files.drop_ahead()  # what failed to be read must not fail a retry, too
            raise

    def commit(self) -> None:
        """Make the last run valid on this rank, after every rank has written everything."""
        self._files.commit(self._done)
        for pieces in self._pieces.values():
            for piece in pieces:
                if id(piece.master) in self._states:
                    self._inner.state[piece.master] = self._states[id(piece.master)]
        self._done, self._states = [], {}

    def discard(self) -> None:
        """Undo the last run; the caller must write back the parameters that it wrote."""
        self._done, self._states = [], {}

    def _has_gradient(self, group: SubGroup) -> bool:
        return any(piece.master.grad is not None for piece, _, _ in self._ranges(group))

    def _ranges(self, group: SubGroup) -> Iterator[tuple[MasterPiece, int, int]]:
        """The pieces in ``group``, with the elements of the bucket's master that are in both."""
        for piece in self._pieces[group.bucket]:
            start, stop = max(piece.start, group.start), min(piece.start + piece.master.numel(), group.stop)
            if start < stop:
                yield piece, start, stop

    def _load(self, group: SubGroup) -> LoadedSubGroup:
        gradient = self._files.gradients.gradient_of.get(group.bucket) if self._has_gradient(group) else None
        unit = self._files.take(group)
        try:
            if gradient is not None:
                unit.add_gradient(gradient.load(group))
        except BaseException:
            with suppress(Exception):
                unit.wait()
            unit.free()
            raise
        return unit

    def _update(self, group: SubGroup, unit: LoadedSubGroup, factor: float) -> None:
        bucket, base = group.bucket, group.start
        shard = bucket.start_update(group.start, group.stop)
        for start, stop in bucket.gaps:
            shard[max(start - base, 0) : max(stop - base, 0)].zero_()
        master, moments, parts = unit.master, unit.moments, []
        for piece, start, stop in self._ranges(group):
            run, first, grad = slice(start - base, stop - base), start - piece.start, piece.master.grad
            if grad is None:
                shard[run].copy_(master[run])
                continue
            shape = piece.master.shape if piece.is_whole else (stop - start,)
            own = {name: moment[run].view(shape) for name, moment in moments.items()}
            flat = grad.reshape(-1)[first : stop - piece.start] if unit.gradient is None else unit.gradient.values[run]
            parts.append(
                LoadedMaster(piece, first, master[run].view(shape), own, flat.view(shape), shard[run].view(shape))
            )
        for part in parts:
            self._inner.state[part.master] = self._state_of(part)
        try:
            self._step(parts, factor)
            for part in parts:
                self._keep_state(part, self._inner.state[part.master])
        finally:
            for part in parts:
                self._inner.state.pop(part.master, None)
        bucket.finish_update(group.start, group.stop)

    def _state_of(self, part: LoadedMaster) -> dict[str, Any]:
        """The state of a part: its runs of the moments, and copies of the rest."""
        state = self._inner.state.get(part.piece.master, {})
        return {
            name: part.moments[name] if name in part.moments else copy.deepcopy(value)  # steps change it in place
            for name, value in state.items()
        }

    def _step(self, parts: list[LoadedMaster], factor: float) -> None:
        inner = self._inner
        leaves: dict[int, list[Tensor]] = defaultdict(list)
        for part in parts:
            number = self._group_of[id(part.piece.master)]
            leaves[number] += self._updaters[number].prepare(part.master, part.grad, factor)
        if not updater_of(inner).is_fused:
            step_leaves(inner, leaves)
        for part in parts:
            leaf = id(part.piece.master)
            number, place = self._group_of[leaf], (self._number_of[leaf], part.first)
            part.master.grad = None
            self._updaters[number].finish(
                part.master, part.grad, inner.param_groups[number], factor=factor, out=part.out, place=place
            )

    def _keep_state(self, part: LoadedMaster, state: Mapping[str, Any]) -> None:
        """Copy moments to the buffer that is written; keep the rest for the commit."""
        kept: dict[str, Any] = {}
        named = self._updaters[self._group_of[id(part.piece.master)]].moments
        for name, value in state.items():
            if name in part.moments:
                if value.data_ptr() != part.moments[name].data_ptr():
                    part.moments[name].copy_(value)
                kept[name] = placeholder(part.piece.master.shape, value.dtype)
            elif isinstance(value, Tensor) and (
                name in named or (not part.piece.is_whole and value.numel() > 1 and is_elementwise(part.master, value))
            ):
                raise StateError(
                    f"{name_of(self._inner)} keeps {name!r} for each element, which it did not in a trial step: "
                    "the files have no room for it; use offload_optimizer.device 'cpu'"
                )
            else:
                kept[name] = value
        self._states[id(part.piece.master)] = kept
