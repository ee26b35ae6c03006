"""The reduce-scatter of a bucket's gradients: formats, chunks, and ``mode="delta_hpz"``'s sums inside the node.

    full buffer --reduce-scatter--> mean in the shard                                        every backward that reduces

With ``mode="delta_hpz"`` (_config/delta_hpz_settings.py) the two hops run at different times:

    full buffer --hop 1--> node sums, float32 --hop 2 with residual--> mean in the shard     the last backward of a step
    full buffer --hop 1--> node sums                                                         earlier backwards

Residuals are kept without the loss scale, which may change between steps. They become current when a step is applied:
a skipped step must leave them as they were.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zcomm import LayoutError, NodeSums, Residual, Span, Topology, Work, reduce_scatter_single
from zcomm._residuals.grad_scaler import UserLossScale
from zcomm._transport.call_context import in_bucket
from zero._config.settings import UNQUANTIZED, Effective, ZeroSettings
from zero._gradients.bucket_gradients import BucketGrads
from zero._optim.loss_scale import LossScale
from zero._sharding.layout import Slot

WIRE_NAMES = {torch.float32: "none", torch.float64: "none", torch.bfloat16: "bf16", torch.float16: "fp16"}


class GradientReduceScatter:
    """The exchanges of gradients over ``topology``."""

    def __init__(self, topology: Topology, settings: ZeroSettings, effective: Effective) -> None:
        self._topology, self._settings, self._effective = topology, settings, effective
        # Without overlap each exchange is waited for right away, but with a limit: a rank that has no gradient for this
        # bucket joins only at the end of its backward, so an unlimited wait would deadlock (see ReductionWait).
        self._is_async = settings.overlap_comm or topology.world_size > 1
        self.stays_in_node = effective.sums_in_node
        """Whether backwards before the last of a step reduce inside the node only."""
        self.loss_scale: LossScale | None = None
        """The loss scale of gradients, if this library has one."""
        self.is_unscaled = False
        """Whether the gradients of this step are unscaled already."""
        self._scaling = UserLossScale("auto", self._forget)
        self._residuals: list[Residual] = []

    def _forget(self) -> None:
        for residual in self._residuals:
            residual.reset()

    def prepare(self, grads: BucketGrads) -> None:
        """Create the node sums and the residual of this bucket, if the mode needs them.

        Raises:
            LayoutError: The mode sums in float32, and the parameters are float64.
        """
        if not self.stays_in_node:
            return
        bucket, formats = grads.bucket, self._effective.gradient_formats
        assert formats is not None, 'mode="delta_hpz" without gradient formats'
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
        grads.node_sums = NodeSums(self._topology, numel, formats, device=bucket.device, residual=residual)

    def start(self, grads: BucketGrads, full: Tensor, output: Tensor | None) -> list[Work]:
        """Start reducing ``full`` to ``output``; None: to the node sums."""
        sums = grads.node_sums
        if sums is None:
            assert output is not None, "a reduction without an output buffer"
            return self._reduce_scatter(grads, full, output)
        if output is None:
            work = sums.add(full, async_op=self._is_async)
        else:
            scale = 1.0 if self.loss_scale is None or self.is_unscaled else self.loss_scale.scale
            if self.loss_scale is None and sums.residual is not None:
                sums.residual.set_loss_scale(self._scaling.current_scale())  # that of the user's own GradScaler
            work = sums.reduce(output, full, scale=scale, async_op=self._is_async)
        return [] if work is None else [work]

    def travel_dtype(self, grads: BucketGrads) -> torch.dtype:
        """The dtype of a buffer of local gradients that this backward reduces: the exchange rounds to it anyway.

        Autograd sums a parameter's several uses before. With several reentrant checkpoints, the first gradient is
        rounded to this dtype, and the sum with the others again; gradients that arrive after the bucket was reduced are
        rounded on their own.
        """
        is_plain = self._effective.gradient_formats is None and grads.node_sums is None
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
    """The step is applied: what its exchanges lost to rounding is added in the next ones."""
    for grads in all_grads:
        if grads.node_sums is not None and grads.node_sums.residual is not None:
            grads.node_sums.residual.commit()


def forget_slot(grads: BucketGrads, slot: Slot) -> None:
    """Drop one parameter from the node sums; all of them, if no other has a gradient."""
    if not any(grads.used):
        roll_back(grads)
    elif grads.node_sums is not None:
        grads.node_sums.forget(slot.offset, slot.end)


def roll_back(grads: BucketGrads) -> None:
    """Drop the node sums, and what exchanges since the last applied step lost to rounding."""
    if grads.node_sums is not None:
        grads.node_sums.clear()
        if grads.node_sums.residual is not None:
            grads.node_sums.residual.rollback()
