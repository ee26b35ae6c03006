"""The time of a step, by formulas; P parameters, N ranks, L of them on a node.

    computation    6 P + 12 l h s FLOPs a token, a third more with activation       Megatron-LM, appendix;
                   checkpoints; over the peak x COMPUTE_EFFICIENCY;                 zero.plan.formulas
                   of experts, P counts those of a token
      Muon         5 iterations of 4 m^2 n + 2 m^3 FLOPs for a matrix [m, n],      torch.optim.Muon
                   m <= n, of the rank with most; also where states are offloaded
    links          bytes sent inside the node over its rate, bytes of all L ranks   zero.plan.exchanges
                   between nodes over the node's; both x LINK_EFFICIENCY; where
                   shards differ in length, of the rank or node with most
    latency        exchanges of a rank, each with the latency of its link class     zero.plan.exchanges;
                                                                                    zero.plan.cluster
    kernels        bytes that encoding, decoding and summing of messages read       zero.plan.exchanges
                   and write on the device, over its memory's rate
    PCIe           offloaded states: gradients down, k times 2 P / N, new           ZeRO-Offload, section 4.1:
                   parameters up, 2 P / N;  offloaded parameters: 2 k x 2 P / N     4 M bytes a step, the least there is
    host           offloaded states: b_s read and written, gradients read,          ZeRO-Offload, section 5.1
                   parameters written, over the memory's rate
    NVMe           states read and written once a step, parameters read 2 k         ZeRO-Infinity, section 5.1
                   times and written once; of all L ranks over the node's rate
    step           the sum of all, without overlap. If k ranks share a processor, the shorter of its time and that of
                   the links between nodes counts 1 / k: while one rank's messages are in flight, another computes

The sum, with k = 1, agrees with published runs on slow networks (``bench/results/plan.md``). The most that prefetching
could hide is given as the overlap: the smaller of computation and all other parts. Two constants are the same for every
machine and model, and not fitted to any table. COMPUTE_EFFICIENCY, 0.45, is about the share of the peak, recomputation
included, in the papers' fastest, compute-bound runs (55 of 125 TFLOPS). LINK_EFFICIENCY, 0.9, allows for headers and
the start of each transfer on links, buses and disks.

Sources: ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857; Megatron-LM, arXiv:2104.04473.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zero._sharding.layout import BucketLayout
from zero.plan.cluster import Cluster
from zero.plan.exchanges import MovedBytes
from zero.plan.formulas import RECOMPUTATION, Activations, TrainingSetup
from zero.plan.model import Model

COMPUTE_EFFICIENCY = 0.45
"""Share of a device's peak that a transformer's layers reach."""
LINK_EFFICIENCY = 0.9
"""Share of the peak rate that data has on a link, a bus or a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step, by part."""

    computation: float
    within: float
    """Sending bytes inside the node."""
    between: float
    """Sending bytes between nodes."""
    latency: float
    """Latency of all exchanges, in addition to the time of their bytes."""
    kernels: float
    """Kernels that encode, decode and sum messages."""
    pcie: float
    host: float
    """The update of offloaded states on the CPU."""
    nvme: float
    ranks_per_processor: float = 1.0
    """Ranks that share a processor."""

    @property
    def communication(self) -> float:
        """Time of both link classes, with latency."""
        return self.within + self.between + self.latency

    @property
    def transfers(self) -> float:
        """Time of all parts but the computation."""
        return self.communication + self.kernels + self.pcie + self.host + self.nvme

    @property
    def step(self) -> float:
        """Time of the step: the sum of the parts, less what is hidden."""
        return self.computation + self.transfers - self.hidden

    @property
    def hidden(self) -> float:
        """Time during which some ranks of a processor compute while messages of its other ranks are in flight."""
        on_processor = self.computation + self.transfers - self.between
        return (1 - 1 / self.ranks_per_processor) * min(on_processor, self.between)

    @property
    def overlap(self) -> float:
        """The most that overlap could hide, as a share of the step."""
        return min(self.computation, self.transfers) / self.step if self.step else 0.0


@dataclass(frozen=True, slots=True)
class WholeUpdate:
    """What an update of whole tensors adds to a step."""

    flops: float = 0.0
    """Of the rank that has most."""
    within: float = 1.0
    """The most that a rank sends inside the node over the mean, of each exchange, which takes as long as that rank."""
    between: float = 1.0
    """The same of what a node sends to others."""


def whole_update(buckets: Iterable[tuple[BucketLayout, bool]], num_nodes: int, ranks_per_node: int) -> WholeUpdate:
    """Muon's update of the whole tensors in ``buckets``, each with whether it is trainable, over these ranks."""
    of_rows, total, of_ranks, of_nodes = [0.0] * (num_nodes * ranks_per_node), 0, 0, 0
    for layout, _ in buckets:
        sizes, total = layout.sizes, total + layout.numel
        of_ranks += ranks_per_node * max(layout.node_numel(row, num_nodes) for row in range(0, len(of_rows), num_nodes))
        ranges = map(layout.shard_range, range(len(of_rows)))
        rows = [stop - start for start, stop in ranges]
        of_nodes += num_nodes * max(sum(rows[node::num_nodes]) for node in range(num_nodes))
        for row in range(len(of_rows)):
            if sizes is None or sizes[row]:
                slots = (layout.slots[piece.slot] for piece in layout.pieces(None if sizes is None else row))
                of_rows[row] += sum(newton_schulz_flops(slot.shape) for slot in slots if slot.is_whole)
    return WholeUpdate(max(of_rows), of_ranks / total, of_nodes / total)


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """FLOPs of the five iterations of torch.optim.Muon on a matrix: three products each."""
    m, n = sorted(shape)
    return 5.0 * (4 * m * m * n + 2 * m**3)


def flops_of(numel: int, tokens: float, shape: Activations) -> float:
    """Return the FLOPs of forward and backward over ``tokens``, and of recomputation if there are checkpoints."""
    of_token = 6 * numel + 12 * shape.num_layers * shape.hidden * shape.sequence
    return of_token * tokens * (1 + RECOMPUTATION * shape.is_checkpointed)


def times_of(
    model: Model,
    shape: Activations,
    setup: TrainingSetup,
    cluster: Cluster,
    moved: Mapping[str, MovedBytes],
    *,
    kernels_nbytes: float,
    num_micro: int,
    update: WholeUpdate | None = None,
) -> StepTimes:
    """Predict the times of a step of ``num_micro`` micro-batches.

    Args:
        model: What is trained.
        shape: The shape of one micro-batch of a rank.
        setup: How the model is trained.
        cluster: The hardware.
        moved: Bytes that a rank sends in the step, and its exchanges.
        kernels_nbytes: Bytes that kernels read and write to encode, decode and sum messages.
        num_micro: Micro-batches in the step.
        update: Of whole tensors, if there are any.
    """
    update = update or WholeUpdate()
    flops = flops_of(model.active_numel, shape.batch * shape.sequence * num_micro, shape) + update.flops
    per_node, own = cluster.ranks_per_node, model.numel / cluster.world_size
    sent, counts = [part.sent for part in moved.values()], [part.exchanges for part in moved.values()]
    pcie, host, read, written = 0.0, 0.0, 0.0, 0.0
    if setup.offloads_states:
        share = own * setup.offloaded_share
        pcie += (setup.sent_nbytes * num_micro + setup.param_nbytes) * share
        host = (2 * setup.state_nbytes + setup.gradient_nbytes + setup.param_nbytes) * share * per_node
        if setup.tier.states == "nvme":
            read, written = (setup.state_nbytes * share * per_node,) * 2
    if setup.stage == 3 and setup.tier.parameters != "device":
        pcie += 2 * num_micro * setup.param_nbytes * own
        if setup.tier.parameters == "nvme":
            read += 2 * num_micro * setup.param_nbytes * own * per_node
            written += setup.param_nbytes * own * per_node
    return StepTimes(
        ranks_per_processor=cluster.ranks_per_processor,
        computation=flops / _rate(cluster.tflops * 1e12, COMPUTE_EFFICIENCY),
        within=update.within * sum(part.intra for part in sent) / _rate(cluster.within_gbps * 1e9),
        between=update.between * sum(part.inter for part in sent) * per_node / _rate(cluster.between_gbit * 1e9 / 8),
        latency=1e-6 * sum(p.intra * cluster.within_us + p.inter * cluster.between_us for p in counts),
        kernels=kernels_nbytes / _rate(cluster.device_gbps * 1e9),
        pcie=pcie / _rate(cluster.pcie_gbps * 1e9),
        host=host / _rate(cluster.host_gbps * 1e9),
        nvme=read / _rate(cluster.nvme_read_gbps * 1e9) + written / _rate(cluster.nvme_write_gbps * 1e9),
    )


def _rate(peak: float, efficiency: float = LINK_EFFICIENCY) -> float:
    return max(peak * efficiency, 1e-9)
