"""What a mode decides. The base class :class:`Mode` is no mode: parameters and gradients travel as the stage says.

resolve      which settings take effect        sources     where the parameters of each bucket come from
reduction    where their gradients go          memory, schedule, deltas_over     what that costs, for the estimate
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from zcomm import Topology
from zero._config.settings import Effective, ZeroSettings, resolve
from zero._gather.gather_sources import BucketSources, GatherOptions, ParameterSource, Primary, Secondary
from zero._gradients.bucket_reduce_scatter import GradientReduceScatter
from zero._sharding.bucket import Bucket
from zero._sharding.stages import Stage


class MemoryShape(NamedTuple):
    """What the memory of a mode depends on."""

    numel: float
    """Elements of all parameters."""
    trainable: float
    """Elements of the rank's shards that are trained."""
    node_numel: float
    """Elements of the rank's part of its node's copy of the parameters."""
    node_trainable: float
    """Those that are trained."""
    param_nbytes: int
    """Bytes of a parameter's element."""
    sums_gradients: bool
    """Whether a step has several micro-batches."""


class StepSchedule(NamedTuple):
    """How often a step sends a trainable bucket."""

    gathers: int
    """Of the full parameters, over all ranks."""
    node_gathers: int
    """The same inside the node."""
    node_reductions: int
    """Hops of reductions inside the node."""
    reductions: int
    """Hops of reductions between nodes."""


class Mode:
    """The stage alone. A mode overrides what it changes."""

    name: ClassVar[str | None] = None
    stages: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)
    """Those that it can be combined with; at others it is refused, and takes no memory in an estimate."""
    needs: ClassVar[str] = ""
    """These stages in words, and why these."""
    instead: ClassVar[str] = "leave out the mode"
    """The remedy at others."""
    needs_nodes: ClassVar[bool] = False
    """Whether it has an effect on several nodes only."""
    has_own_formats: ClassVar[bool] = False
    """Whether gradients have formats of the mode where none is given."""
    keeps_exact_shards: ClassVar[bool] = False
    """Below stage 3: whether trainable shards have memory beside the full parameters."""
    is_chunked: ClassVar[bool] = True
    """Whether gradients of a bucket are sent in pieces of at most ``reduce_bucket_size``."""
    deltas_over: ClassVar[Literal["nodes", "world"] | None] = None
    """The ranks to which the deltas of a shard are sent after a step: those of the same local rank, or all."""

    def resolve(self, settings: ZeroSettings, topology: Topology) -> Effective:
        """The settings that take effect. The same on every rank."""
        return resolve(settings, topology)

    def sources(self, buckets: Sequence[Bucket], options: GatherOptions, effective: Effective) -> BucketSources:
        """Where the parameters of ``buckets`` come from. Without a stage that shards them only shards are gathered."""
        sources = [
            self.source(bucket, Primary(bucket, options), options, effective)
            if effective.stage.shards_parameters and not bucket.is_persistent
            else Primary(bucket, options)
            for bucket in buckets
        ]
        return BucketSources(options, sources, {})

    def source(self, bucket: Bucket, primary: Primary, options: GatherOptions, effective: Effective) -> ParameterSource:
        """The source of a bucket that is gathered and released."""
        return Secondary(primary, bucket, options) if effective.has_secondary else primary

    def reduction(self, topology: Topology, settings: ZeroSettings, effective: Effective) -> GradientReduceScatter:
        """What reduces the gradients of buckets over ``topology``."""
        return GradientReduceScatter(topology, settings, effective)

    def memory(self, shape: MemoryShape) -> dict[str, float]:
        """Bytes on a rank beyond those of the stage, by kind of :class:`zero.plan.MemoryUsage`."""
        return {}

    def schedule(self, stage: Stage, num_micro: int, *, has_secondary: bool) -> StepSchedule:
        """What a step of ``num_micro`` micro-batches sends; at stage 3 at most."""
        gathers = 2 * num_micro if stage.shards_parameters else 0
        global_gathers = 1 if has_secondary and gathers else gathers
        reductions = num_micro if stage.reduces_every_micro_batch else 1
        return StepSchedule(global_gathers, gathers - global_gathers, reductions, reductions)
