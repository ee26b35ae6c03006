"""How a bucket's gradients get from all ranks to the shard that each of them updates.

    full buffer --reduce-scatter--> mean in the shard                                        every backward that reduces

With ``mode="delta_hpz"`` (:mod:`zero._config.delta_hpz_settings`) the two hops are apart:

    full buffer --hop 1--> node sums, float32 --hop 2 with residual--> mean in the shard     the last backward of a step
    full buffer --hop 1--> node sums                                                         those before it

Residuals are in units without the loss scale, whatever it is, and become current once a step is applied.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zcomm import LayoutError, NodeSums, Residual, Span, Topology, Work, reduce_scatter_single
from zcomm._residuals.loss_scaling import LossScaling
from zcomm._transport.call_context import in_bucket
from zero._config.settings import UNQUANTIZED, Effective, ZeroSettings
from zero._gradients.bucket_gradients import BucketGrads
from zero._optim.loss_scale import LossScale
from zero._sharding.layout import Slot

WIRE_NAMES = {torch.float32: "none", torch.float64: "none", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Reduction:
    """The exchanges of gradients over ``topology``."""

    def __init__(self, topology: Topology, settings: ZeroSettings, effective: Effective) -> None:
        self._topology, self._settings, self._effective = topology, settings, effective
        # Without overlap each exchange is waited for, but not for ever: another rank may have no gradient for it.
        self._is_async = settings.overlap_comm or topology.world_size > 1
        self.stays_in_node = effective.sums_in_node
        """Whether backwards before the last of a step reduce inside the node alone."""
        self.loss_scale: LossScale | None = None
        """What gradients are multiplied with, if it is ours."""
        self.is_unscaled = False
        """Whether they are not any more in this step."""
        self._scaling = LossScaling("auto", self._forget)
        self._residuals: list[Residual] = []

    def _forget(self) -> None:
        for residual in self._residuals:
            residual.reset()

    def prepare(self, grads: BucketGrads) -> None:
        """Make what is kept between exchanges of this bucket.

        Raises:
            LayoutError: The mode sums in float32, and the parameters are float64.
        """
        if not self.stays_in_node:
            return
        bucket, formats = grads.bucket, self._effective.gradient_formats
        assert formats is not None, "the mode has formats of its own"
        if grads.dtype == torch.float64:
            name = bucket.layout.slots[0].name
            raise LayoutError(
                f"mode={self._settings.mode!r} sums gradients in float32: parameter {name!r} has float64 gradients; "
                "use float32, bfloat16 or float16, or leave out the mode"
            )
        residual = None
        if formats[1] not in UNQUANTIZED:
            spans = [Span(slot.name, slot.offset, slot.numel) for slot in bucket.layout.slots]
            residual = Residual(
                self._topology, spans, bucket.layout.numel, numbering="local", device=bucket.device,
                beta=self._settings.residual_beta, reset_interval=self._settings.residual_reset_interval,
            )  # fmt: skip
            self._residuals.append(residual)
        numel = bucket.layout.shard_numel
        grads.in_node = NodeSums(self._topology, numel, formats, device=bucket.device, residual=residual)

    def start(self, grads: BucketGrads, full: Tensor, output: Tensor | None) -> list[Work]:
        """Start reducing ``full`` to ``output``, or to the node's sums if that is None."""
        sums = grads.in_node
        if sums is None:
            assert output is not None, "a reduction without a place for its result"
            return self._reduce_scatter(grads, full, output)
        if output is None:
            work = sums.add(full, async_op=self._is_async)
        else:
            scale = 1.0 if self.loss_scale is None or self.is_unscaled else self.loss_scale.scale
            if self.loss_scale is None and sums.residual is not None:
                sums.residual.set_loss_scale(self._scaling.now())  # of a script's own GradScaler
            work = sums.reduce(output, full, scale=scale, async_op=self._is_async)
        return [] if work is None else [work]

    def travel_dtype(self, grads: BucketGrads) -> torch.dtype:
        """What a buffer of local gradients may hold that is reduced in this backward: they are rounded to it anyway.

        A parameter's uses are summed up before. Of several checkpointed segments (reentrant ones) the first gradient is
        rounded to it, the sum with the others again; and those that come after the bucket was reduced by themselves.
        """
        is_plain = self._effective.gradient_formats is None and grads.in_node is None
        is_narrower = grads.bucket.dtype.itemsize < grads.dtype.itemsize
        return grads.bucket.dtype if is_plain and is_narrower else grads.dtype

    def _reduce_scatter(self, grads: BucketGrads, full: Tensor, output: Tensor) -> list[Work]:
        wire = self._effective.gradient_formats
        if wire is None:
            narrow = "none" if grads.dtype == grads.bucket.dtype else WIRE_NAMES[grads.bucket.dtype]
            wire = (narrow, narrow)
        rows, works = full.view(self._topology.world_size, -1), []
        chunks = grads.bucket.layout.chunks(self._settings.reduce_bucket_size)
        for start, stop in chunks:
            with in_bucket(grads.bucket.name):
                work = reduce_scatter_single(
                    output[start:stop],
                    full if len(chunks) == 1 else rows[:, start:stop],
                    "avg",
                    group=self._topology,
                    format=wire,
                    numbering="local",
                    async_op=self._is_async,
                )
            if work is not None:
                works.append(work)
        return works


def commit(all_grads: Iterable[BucketGrads]) -> None:
    """The step is applied: what its exchanges have lost counts in the next ones."""
    for grads in all_grads:
        if grads.in_node is not None and grads.in_node.residual is not None:
            grads.in_node.residual.commit()


def forget_slot(grads: BucketGrads, slot: Slot) -> None:
    """Forget what the node has summed up of one parameter; of all, if nobody used another."""
    if not any(grads.used):
        roll_back(grads)
    elif grads.in_node is not None:
        grads.in_node.forget(slot.offset, slot.end)


def roll_back(grads: BucketGrads) -> None:
    """Forget the sums of the node, and what exchanges since the last applied step have lost."""
    if grads.in_node is not None:
        grads.in_node.clear()
        if grads.in_node.residual is not None:
            grads.in_node.residual.rollback()
