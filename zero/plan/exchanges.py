"""Bytes that a rank sends in a step of a planned model, its exchanges, and the traffic of its kernels' memory."""

from __future__ import annotations

import torch

from zcomm.volume import one_hop_sent
from zero._gradients.bucket_reduce_scatter import WIRE_NAMES
from zero._runtime.exchanges import KINDS, NOTHING, Exchanges, MovedBytes, times, total
from zero.plan.model import Model

__all__ = ["Exchanges", "MovedBytes", "kernel_nbytes", "step_moved"]


def step_moved(
    model: Model, exchanges: Exchanges, num_micro: int = 1, *, is_once: bool = False
) -> dict[str, MovedBytes]:
    """Return the bytes that a rank sends in a step and its exchanges, by kind and link class.

    ``is_once``: see :meth:`zero._runtime.exchanges.Exchanges.schedule`.
    """
    often = exchanges.schedule(num_micro, is_once=is_once)
    totals = dict.fromkeys(KINDS, NOTHING)
    for layout, repeats, is_trainable in model.layouts(exchanges.shape.world_size, exchanges.effective.merged_numel):
        for kind, moved in exchanges.moved_for(layout, often, is_trainable=is_trainable).items():
            totals[kind] = total([totals[kind], times(moved, repeats)])
    return totals | {KINDS[4]: exchanges.agreements(num_micro, is_once=is_once)}


def kernel_nbytes(model: Model, exchanges: Exchanges, num_micro: int = 1, *, is_once: bool = False) -> float:
    """Return the bytes of device memory that a rank's kernels read and write in a step to encode, decode and sum.

    With w bytes for an element in its message, a gathered element takes w + b_p unless it is uncompressed. A reduced
    element takes b_g + w to encode and w to sum, on the first hop. Later hops add 1 / L of that and are left out.
    """
    effective, numel = exchanges.effective, model.numel
    if exchanges.shape.world_size == 1:
        return 0.0
    of_gather, of_gradient = exchanges.dtype.itemsize, exchanges.gradient_dtype.itemsize
    wire = effective.gradient_formats or (WIRE_NAMES[exchanges.dtype],) * 2
    first = wire[0] if exchanges.shape.ranks_per_node > 1 else wire[1]
    on_wire = _wire_nbytes(first, exchanges.gradient_dtype)
    reductions = num_micro if effective.stage.reduces_every_micro_batch and not is_once else 1
    found = reductions * (of_gradient + 2 * on_wire) * numel
    if exchanges.change_wire is not None:
        decoded = numel if exchanges.mode.deltas_over == "world" else numel / exchanges.shape.ranks_per_node
        found += (_wire_nbytes(exchanges.change_wire, torch.float32) + 2 * of_gather) * decoded
    elif effective.weight_format != "none":
        sends_once = is_once or effective.has_secondary or not effective.stage.shards_parameters
        gathers = 1 if sends_once else 2 * num_micro
        found += gathers * (_wire_nbytes(effective.weight_format, exchanges.dtype) + of_gather) * numel
    return found


def _wire_nbytes(wire: str, dtype: torch.dtype) -> float:
    """Bytes of an element in a message, with its share of the scales."""
    numel = 2**20
    return one_hop_sent(numel, dtype, 1, 0, wire).intra / numel
