"""What each parameter costs: bytes that a rank sends for it in a step, and bytes of states that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from zcomm.volume import Sent
from zero._modes.mode import StepSchedule
from zero._optim.masters import MasterPiece, tensors_in
from zero._runtime.exchanges import KINDS, Exchanges, total
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """The bytes of one parameter on this rank."""

    gathers: Sent
    """Sent in a step for its values: gathers, new values after a step, or their deltas."""
    reductions: Sent
    """Sent in a step for its gradient."""
    masters: int
    """Held: its master, unless that is what the forward reads."""
    states: int
    """Held: what the optimizer keeps; none before its first step."""
    gradients: int
    """Held: its gradient, once a step has made one."""

    @property
    def sent(self) -> int:
        """Bytes sent in a step, to all other ranks."""
        return sum(self.gathers) + sum(self.reductions)

    @property
    def held(self) -> int:
        """Bytes held, in memory or in files."""
        return self.masters + self.states + self.gradients


class BytesByParameter(dict[str, ParameterBytes]):
    """By name; as text a table, the parameters that cost most first."""

    def __str__(self) -> str:
        width = max([len("parameter"), *map(len, self)])
        titles = ("sent: values", "sent: gradient", "to other nodes", "held: master", "states", "gradient")
        lines = [f"{'parameter':<{width}}" + "".join(f"{title:>16}" for title in titles)]
        for name, of in sorted(self.items(), key=lambda item: (-item[1].sent, -item[1].held, item[0])):
            numbers = (
                sum(of.gathers),
                sum(of.reductions),
                of.gathers.inter + of.reductions.inter,
                of.masters,
                of.states,
            )
            lines.append(f"{name:<{width}}" + "".join(f"{number:>16,}" for number in (*numbers, of.gradients)))
        return "\n".join(lines)


def bytes_by_parameter(runtime: Runtime, inner: Optimizer, pieces: list[MasterPiece]) -> BytesByParameter:
    """Divide what each bucket costs among its parameters. No communication."""
    held: dict[tuple[int, int], list[int]] = {}
    for piece in pieces:
        counts = held.setdefault((piece.bucket.index, piece.slot), [0, 0])
        counts[0] += 0 if piece.bucket.master is piece.bucket.shard else piece.master.nbytes
        counts[1] += _states_of(piece, inner)
    found = BytesByParameter()
    for bucket in runtime.buckets:
        gathers, reductions = _sent(bucket, runtime)
        shares = zip(_shares(bucket, gathers), _shares(bucket, reductions), _gradients(bucket, runtime), strict=True)
        for index, (of_gathers, of_reductions, gradient) in enumerate(shares):
            masters, states = held.get((bucket.index, index), (0, 0))
            name = bucket.layout.slots[index].name
            found[name] = ParameterBytes(of_gathers, of_reductions, masters, states, gradient)
    return found


def _states_of(piece: MasterPiece, inner: Optimizer) -> int:
    values = [tensor for value in inner.state.get(piece.master, {}).values() for tensor in tensors_in(value)]
    in_files = piece.bucket.states.moments
    if in_files:
        values = [value for value in values if not value.ndim]
    return sum(value.nbytes for value in values) + piece.master.numel() * sum(d.itemsize for d in in_files.values())


def _sent(bucket: Bucket, runtime: Runtime) -> tuple[Sent, Sent]:
    """What a step sends for the values and for the gradient of ``bucket``."""
    settings, effective, options = runtime.settings, runtime.effective, runtime.gatherer.options
    gradient_dtype = runtime.reducer.by_bucket[bucket.index].dtype if bucket.is_trainable else torch.float32
    if bucket.storage.format != "none":
        effective = replace(effective, weight_format=bucket.storage.format)
    elif not bucket.dtype.is_floating_point:
        effective = replace(effective, weight_format="none")
    exchanges = Exchanges(settings, effective, options, runtime.topology, bucket.dtype, gradient_dtype)
    often = _often(bucket, runtime, exchanges.schedule(settings.gradient_accumulation_steps))
    facts = {"is_trainable": bucket.is_trainable, "is_persistent": bucket.is_persistent}
    moved = exchanges.moved_for(bucket.layout, often, **facts)
    of_gradient = {KINDS[2]} if effective.stage.shards_states else {KINDS[2], KINDS[3]}  # stage 0 gathers gradients
    values = total([each for kind, each in moved.items() if kind not in of_gradient])
    return values.sent, total([moved[kind] for kind in of_gradient]).sent


def _often(bucket: Bucket, runtime: Runtime, planned: StepSchedule) -> StepSchedule:
    """``planned``, at most as often, with the gathers of the recorded order of uses once there is one."""
    counts = runtime.gatherer.planned_gathers()
    if bucket.is_persistent:
        return planned._replace(gathers=0, node_gathers=0)
    if counts is None:
        return planned
    number = counts[bucket.index]
    over_all = number if not planned.node_gathers else min(number, planned.gathers) if bucket.is_trainable else 0
    return planned._replace(gathers=over_all, node_gathers=number - over_all)


def _shares(bucket: Bucket, sent: Sent) -> Iterator[Sent]:
    """Divide ``sent`` in proportion to elements, padding included; whole bytes, whose sum is ``sent``."""
    ends = [0, *(slot.end for slot in bucket.layout.slots[:-1]), bucket.layout.numel]
    parts = [[nbytes * end // max(ends[-1], 1) for end in ends] for nbytes in sent]
    for index in range(len(ends) - 1):
        yield Sent(*(part[index + 1] - part[index] for part in parts))


def _gradients(bucket: Bucket, runtime: Runtime) -> list[int]:
    """Bytes of each parameter's gradient that this rank keeps between backward and step."""
    slots, found = bucket.layout.slots, [0] * len(bucket.layout.slots)
    if not bucket.is_trainable:
        return found
    grads = runtime.reducer.by_bucket[bucket.index]
    if not runtime.stage.shards_gradients:
        return [slot.numel * grads.dtype.itemsize for slot in slots]
    tensors = grads.store.tensors
    per_element = sum(tensor.element_size() for tensor in tensors) if tensors else grads.dtype.itemsize
    for piece in bucket.layout.pieces(bucket.row):
        found[piece.slot] = (piece.stop - piece.start) * per_element
    return found
