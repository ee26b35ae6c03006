"""``mode="delta_hpz"``, stage 3 on several nodes: 4-bit messages cross the network once a step, not per micro-batch.

    forward, backward   parameters are gathered inside the node from its ranks' replicas       Replica
    each micro-batch    gradients are summed inside the node, in float32               NodeSumReduction
    the last one        these sums are reduced between the nodes, bucket by bucket     NodeSumReduction
    step()              norm and clipping; then bucket by bucket the sharded update. The       BucketwiseUpdate
                        delta of the updated shard goes to the ranks of equal local rank of
                        the other nodes while the next bucket is updated; the bucket's next
                        use waits for it

A replica is this rank's 1 / L of its node's copy of the parameters, in their dtype. The sender knows what receivers
hold, so errors do not accumulate, and all nodes hold the same bits. Writes outside of a step (loading,
GatheredParameters, safe_set_*) update replicas exactly. What the last hop of the reduction loses is kept as a
residual, without the loss scale, and committed when the step is applied. Frozen parameters are never sent, nor are
buckets that no rank used in the step. A bucket whose shards differ in length, since an optimizer updates whole tensors
(Muon), is gathered by one exchange, and never in parts.

Bytes for each parameter and rank beyond stage 3: 2 / L replica, 1 / L residual, and with accumulation 4 / L sums.

    full buffer --hop 1--> node sums, float32 --hop 2 with residual--> mean in the shard     the last backward of a step
    full buffer --hop 1--> node sums                                                         earlier backwards

Residuals become current when a step is applied: a skipped step must leave them as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zcomm import ConfigError, LayoutError, NodeReplica, NodeSums, Residual, Span, Topology, Work
from zcomm._residuals.grad_scaler import UserLossScale
from zero._config.settings import UNQUANTIZED, Effective, ZeroSettings
from zero._gather.gather_sources import BucketSources, GatherOptions, Primary
from zero._gradients.bucket_gradients import BucketGrads
from zero._gradients.bucket_reduce_scatter import GradientReduceScatter
from zero._modes.deltas import CHANGE_FORMAT, DeltaMode
from zero._modes.mode import MemoryShape, StepSchedule
from zero._sharding.bucket import Bucket
from zero._sharding.layout import Slot
from zero._sharding.stages import Stage
from zero._storage.tier_settings import Tier

GRADIENT_FORMAT = ("int8", "nf4")
"""The formats of gradients inside the node and between nodes, unless ``gradient_format`` is given."""


class DeltaHpz(DeltaMode):
    """A replica in every node, and gradients that are summed in the node."""

    name, stages, deltas_over = "delta_hpz", (3,), "nodes"
    has_own_formats, is_chunked = True, False
    needs, instead = "stage 3, where parameters are gathered", "mode='delta' is of stages 1 and 2"

    def refused(self, settings: ZeroSettings) -> dict[str, bool]:
        is_encoded = settings.quantized_nontrainable_weights
        return {
            "offload_param (replicas are on the device)": settings.tiers.parameters.tier is not Tier.DEVICE,
            "zero_quantized_nontrainable_weights (replicas have the parameters' dtype)": is_encoded,
            "gradient_allreduce_op='sum' (nodes exchange means)": settings.gradient_allreduce_op == "sum",
            "hpz_secondary_device='cpu' (replicas are on the device)": settings.hpz_secondary_device == "cpu",
        }

    def check(self, settings: ZeroSettings) -> None:
        given = settings.gradient_format
        if settings.gradient_error and given is not None and (given if isinstance(given, str) else given[1]) != "none":
            raise ConfigError(
                f"gradient_error={settings.gradient_error:g} chooses what is sent between nodes: leave out "
                f"gradient_format={given!r}, or make it (inside the node, 'none')"
            )

    def remaining(self, settings: ZeroSettings, inactive: list[str]) -> ZeroSettings:
        default = (GRADIENT_FORMAT[0], "none") if settings.gradient_error else GRADIENT_FORMAT
        gradients = settings.gradient_format or default
        self.check_rounding(*((gradients,) if isinstance(gradients, str) else gradients))
        if settings.quantized_gradients:
            error = settings.gradient_error
            sent = f"with gradient_error={error:g}" if error else f"as {gradients}; set gradient_format for others"
            inactive.append(f"quantized_gradients (mode={self.name!r}: gradients are sent {sent})")
        if settings.hpz_partition_size > 1:
            inactive.append(f"hpz_partition_size (mode={self.name!r}: every node has a replica already)")
        return replace(settings, gradient_format=gradients, quantized_gradients=False, hpz_partition_size=1)

    def text(self, changes: str) -> str:
        return f"replicas in every node (delta-hpZ), their deltas as {changes}"

    def sources_of(self, buckets: Sequence[Bucket], options: GatherOptions, format: str) -> BucketSources:
        primary = [Primary(bucket, options) for bucket in buckets]
        replicas = {
            # Frozen parameters have no deltas: only their values are ever sent, in any dtype.
            bucket.index: Replica(bucket, options, format if bucket.is_trainable else CHANGE_FORMAT, source.exchanges)
            for bucket, source in zip(buckets, primary, strict=True)
            if not bucket.is_persistent
        }
        return BucketSources(options, [replicas.get(b.index, primary[i]) for i, b in enumerate(buckets)], replicas)

    def reduction(self, topology: Topology, settings: ZeroSettings, effective: Effective) -> GradientReduceScatter:
        return NodeSumReduction(topology, settings, effective)

    def memory(self, shape: MemoryShape) -> dict[str, float]:
        return {
            "secondary partition": shape.param_nbytes * shape.node_numel,
            "residuals": (1 + 2 / 256) * shape.node_trainable,
            "sums of the node": 4 * shape.node_trainable if shape.sums_gradients else 0,
        }

    def schedule(self, stage: Stage, num_micro: int, *, has_secondary: bool) -> StepSchedule:
        return StepSchedule(0, 2 * num_micro, num_micro, 1)


class Replica:
    """The node's replica in ``mode="delta_hpz"``, divided like the exchanges of the primary partition.

    Every write back updates it, so it is always valid.
    """

    reads_shard, keeps_values = False, True

    def __init__(self, bucket: Bucket, options: GatherOptions, format: str, exchanges: Sequence[int]) -> None:
        self._bucket, self._is_async, self.exchanges = bucket, options.is_async, exchanges
        topology, sizes = options.topology, bucket.layout.sizes
        self.node = NodeReplica(
            topology, bucket.shard_numel, bucket.dtype, format=format, device=bucket.device, shard_sizes=sizes
        )
        self._ends = [end // topology.ranks_per_node for end in accumulate(exchanges)]
        if sizes is not None:  # ranks of the node have parts of their own length, and one exchange
            self._ends = [self.node.part_numel]

    @property
    def nbytes(self) -> int:
        return self.node.nbytes

    def gathered(self, full: Tensor) -> None: ...

    def values_changed(self) -> None: ...

    @property
    def held(self) -> Tensor:
        """What every node holds of this rank's shard, [n]."""
        return self.node.held

    def start(self, index: int, full: Tensor) -> Work | None:
        """Start exchange number ``index``."""
        start = self._ends[index - 1] if index else 0
        return self.node.gather(full, start, self._ends[index], async_op=self._is_async)

    def send_change(self) -> None:
        """Send the change of the shard to all nodes after a step."""
        self.node.update(self._bucket.shard, async_op=self._is_async)

    def refresh(self, values: Tensor | None = None) -> None:
        """Send the shard, or other values for it, to all nodes unquantized."""
        self.node.refresh(self._bucket.shard if values is None else values, async_op=self._is_async)

    def wait(self) -> None:
        """Wait for the exchange in flight, and raise its error."""
        self.node.wait()

    def close(self) -> None:
        """Wait until no exchange uses the replica, and raise its error. Not collective."""
        self.node.abandon()


class NodeSumReduction(GradientReduceScatter):
    """Sums inside the node in every backward; the last one of a step reduces these sums between the nodes."""

    stays_in_node = True

    def __init__(self, topology: Topology, settings: ZeroSettings, effective: Effective) -> None:
        super().__init__(topology, settings, effective)
        self._sums: dict[int, NodeSums] = {}
        """By bucket."""
        self._scaling = UserLossScale("auto", self._forget)

    def _forget(self) -> None:
        for residual in self.residuals:
            residual.reset()

    @property
    def sums_nbytes(self) -> int:
        return sum(sums.nbytes for sums in self._sums.values())

    def prepare(self, grads: BucketGrads) -> None:
        """Create the node sums and the residual of a bucket.

        Raises:
            LayoutError: The sums are in float32, and the parameters are float64.
        """
        bucket, formats = grads.bucket, self.effective.gradient_formats
        assert formats is not None, 'mode="delta_hpz" without gradient formats'
        if grads.dtype == torch.float64:
            name = bucket.layout.slots[0].name
            raise LayoutError(
                f"mode={self.settings.mode!r} sums gradients in float32: parameter {name!r} has float64 gradients; "
                "use float32, bfloat16 or float16, or leave out the mode"
            )
        residual, sizes, error = None, bucket.layout.sizes, self.effective.gradient_error
        if error and sizes is None:  # rows that are coded lie as if they differed
            sizes = (bucket.shard_numel,) * self.topology.world_size
        if error or formats[1] not in UNQUANTIZED:
            spans = [Span(slot.name, slot.offset, slot.numel) for slot in bucket.layout.slots]
            residual = Residual(
                self.topology, spans, bucket.layout.numel, numbering="local", device=bucket.device,
                beta=self.settings.residual_beta, reset_interval=self.settings.residual_reset_interval,
                shard_sizes=sizes,
            )  # fmt: skip
            self.residuals.append(residual)
        options: dict[str, Any] = {"device": bucket.device, "residual": residual, "shard_sizes": sizes}
        self._sums[bucket.index] = NodeSums(self.topology, bucket.shard_numel, formats, relative_error=error, **options)

    def start(self, grads: BucketGrads, full: Tensor, output: Tensor | None) -> list[Work]:
        """Start reducing ``full`` to ``output``; None: to the node sums."""
        sums = self._sums[grads.bucket.index]
        if output is None:
            work = sums.add(full, async_op=self.is_async)
        else:
            scale = 1.0 if self.loss_scale is None or self.is_unscaled else self.loss_scale.scale
            if self.loss_scale is None and sums.residual is not None:
                # That of the user's own GradScaler.
                sums.residual.set_loss_scale(self._scaling.current_scale(grads.bucket.index))
            work = sums.reduce(output, full, scale=scale, async_op=self.is_async)
        return [] if work is None else [work]

    def travel_dtype(self, grads: BucketGrads) -> torch.dtype:
        return grads.dtype

    def has_sums(self, grads: BucketGrads) -> bool:
        return not self._sums[grads.bucket.index].is_empty

    def commit(self) -> None:
        """The step is applied: what its exchanges lost to rounding is added in the next ones."""
        for residual in self.residuals:
            residual.commit()

    def forget_slot(self, grads: BucketGrads, slot: Slot) -> None:
        """Drop one parameter from the node sums; all of them, if no other has a gradient."""
        if any(grads.used):
            self._sums[grads.bucket.index].forget(slot.offset, slot.end)
        else:
            self.roll_back(grads)

    def roll_back(self, grads: BucketGrads) -> None:
        """Drop the node sums, and what exchanges since the last applied step lost to rounding."""
        sums = self._sums[grads.bucket.index]
        sums.clear()
        if sums.residual is not None:
            sums.residual.rollback()
