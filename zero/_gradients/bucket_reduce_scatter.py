"""The reduce-scatter of a bucket's gradients: formats and chunks. A mode may reduce in another way (zero/_modes).

full buffer --reduce-scatter--> mean in the shard                                        every backward that reduces
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm import Residual, Topology, Work, reduce_scatter_single
from zcomm._transport.call_context import in_bucket
from zero._config.settings import Effective, ZeroSettings
from zero._gradients.bucket_gradients import BucketGrads
from zero._optim.loss_scale import LossScale
from zero._sharding.layout import Slot

WIRE_NAMES = {torch.float32: "none", torch.float64: "none", torch.bfloat16: "bf16", torch.float16: "fp16"}


class GradientReduceScatter:
    """The exchanges of gradients over ``topology``."""

    stays_in_node = False
    """Whether backwards before the last of a step reduce inside the node only."""

    def __init__(self, topology: Topology, settings: ZeroSettings, effective: Effective) -> None:
        self.topology, self.settings, self.effective = topology, settings, effective
        self.op = "sum" if settings.gradient_allreduce_op == "sum" else "avg"
        # Without overlap each exchange is waited for right away, but with a limit: a rank that has no gradient for this
        # bucket joins only at the end of its backward, so an unlimited wait would deadlock (see ReductionWait).
        self.is_async = settings.overlap_comm or topology.world_size > 1
        self.loss_scale: LossScale | None = None
        """The loss scale of gradients, if this library has one."""
        self.is_unscaled = False
        """Whether the gradients of this step are unscaled already."""
        self.residuals: list[Residual] = []
        """What exchanges lost to rounding, and later ones add."""

    @property
    def sums_nbytes(self) -> int:
        """Bytes of sums that this rank holds for its node."""
        return 0

    def prepare(self, grads: BucketGrads) -> None:
        """Create what the reductions of a bucket need.

        Raises:
            LayoutError: Its gradients cannot be reduced so.
        """

    def has_sums(self, grads: BucketGrads) -> bool:
        """Whether there are gradients that are summed inside the node only."""
        return False

    def commit(self) -> None:
        """The step is applied."""

    def forget_slot(self, grads: BucketGrads, slot: Slot) -> None:
        """Forget the gradients of one parameter since the last step."""

    def roll_back(self, grads: BucketGrads) -> None:
        """Forget the gradients of a bucket since the last step."""

    def start(self, grads: BucketGrads, full: Tensor, output: Tensor | None) -> list[Work]:
        """Start reducing ``full`` to ``output``; that is None only if :attr:`stays_in_node`."""
        assert output is not None, "a reduction without an output buffer"
        narrow = "none" if grads.dtype == grads.bucket.dtype else WIRE_NAMES[grads.bucket.dtype]
        wire = self.effective.gradient_formats or (narrow, narrow)
        works, layout = [], grads.bucket.layout
        chunks = layout.chunks(self.settings.reduce_bucket_size)
        for start, stop in chunks:
            with in_bucket(grads.bucket.name):
                work = reduce_scatter_single(
                    output[start:stop],
                    full if len(chunks) == 1 else full.view(layout.world_size, -1)[:, start:stop],
                    self.op,
                    input_split_sizes=layout.sizes,
                    group=self.topology,
                    format=wire,
                    numbering="local",
                    async_op=self.is_async,
                )
            if work is not None:
                works.append(work)
        return works

    def travel_dtype(self, grads: BucketGrads) -> torch.dtype:
        """The dtype of a buffer of local gradients that this backward reduces: the exchange rounds to it anyway.

        Autograd sums a parameter's several uses before. With several reentrant checkpoints, the first gradient is
        rounded to this dtype, and the sum with the others again; gradients that arrive after the bucket was reduced are
        rounded on their own.
        """
        is_plain = self.effective.gradient_formats is None
        is_narrower = grads.bucket.dtype.itemsize < grads.dtype.itemsize
        return grads.bucket.dtype if is_plain and is_narrower else grads.dtype
