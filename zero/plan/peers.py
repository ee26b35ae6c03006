"""Other ways to train the same model, for comparison: DDP, FSDP2 and HSDP of torch, in bf16, with AdamW.

P elements, T of them trainable, N nodes of L ranks, W = N L; b bytes of an element sent; k micro-batches, and gradients
are sent after each of them, or ``once``, as a sum: by no_sync, set_requires_gradient_sync, set_requires_all_reduce.

    bytes of a rank             gathers of parameters        sums of gradients
      DDP                       -                            all-reduce of b P, b = 4, or 2 with a hook
      FSDP2                     2 k of 2 P over W ranks;     reduce-scatter of 2 P over W ranks
                                reshard=False: k; and
                                once: 1
      HSDP                      as often, over L ranks       reduce-scatter of 2 P over L ranks, then all-reduce of
                                                             2 P / L over N ranks
    a ring of R ranks           (R - 1) / R of the bytes for a gather or reduce-scatter, twice that for an all-reduce;
                                of one over all ranks, one link of L leaves the node
    an all-reduce on 2 nodes    NCCL's tree: the bytes once between the nodes. Over gloo always a ring, and a
                                reduce-scatter is an all-reduce

    bytes in memory, over S = 1 (DDP), W (FSDP2) or L (HSDP) ranks; U elements in the largest unit
      parameters, gradients     4 P / S, 4 T / S: float32
      states                    8 T / S
      gathered                  DDP: 2 P, which autocast keeps; 4 U: a layer and the next; reshard=False: 2 P
      buckets                   gradients in flight: 6 U; DDP with a hook: 2 bytes of the elements of a bucket
      summed gradients          once: 2 T; HSDP that reshards: 2 T / L
    and activations as in :mod:`zero.plan.formulas`.

The links of a ring are busy at the same time, so its slower class counts. A gather or a reduce-scatter counts as one
exchange, as this library's do, and an all-reduce as two, though a ring has more steps: this favours the peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from zcomm.volume import Exchanged, Sent
from zero._runtime.exchanges import NOTHING, MovedBytes, times, total
from zero.plan.formulas import NUM_GRADIENT_BUFFERS, Activations, Counts, MemoryUsage, TrainingSetup, usage_of
from zero.plan.times import StepTimes

__all__ = ["ONCE", "PEERS", "Peer", "PeerMemory", "in_rings", "memory_of", "peer_kernel_nbytes", "peer_moved"]

DDP_FIRST_NBYTES, DDP_NBYTES = 2**20, 25 * 2**20
"""Sizes of DistributedDataParallel's buckets, in bytes of float32 gradients."""


class Peer(NamedTuple):
    """One way to train."""

    stage: int
    """The stage of ZeRO that shards as much."""
    shards_over: str
    """``"none"``, ``"world"``, or ``"node"``: the ranks that the model is divided over."""
    keeps: bool = False
    """Whether parameters stay full from forward to backward (reshard_after_forward=False)."""
    gradient_nbytes: int = 2
    """Bytes of a gradient's element that is sent."""
    param_nbytes: int = 2
    """Bytes of a parameter's element that is gathered."""
    is_once: bool = False
    """Whether gradients of micro-batches are summed locally, and sent once a step."""

    def num_gathers(self, num_micro: int) -> int:
        """Gathers of the parameters in a step."""
        if self.shards_over == "none":
            return 0
        return (1 if self.is_once else num_micro) if self.keeps else 2 * num_micro


ONCE = ", once"
_EACH = {
    "DDP": Peer(0, "none", gradient_nbytes=4),
    "DDP bf16 gradients": Peer(0, "none"),
    "FSDP2": Peer(3, "world"),
    "FSDP2 reshard=False": Peer(2, "world", keeps=True),
    "HSDP": Peer(3, "node"),
    "HSDP reshard=False": Peer(2, "node", keeps=True),
}
PEERS = _EACH | {
    name + ONCE: peer._replace(is_once=True) for name, peer in _EACH.items() if name != "FSDP2"
}  # which would keep the full gradients of a model whose parameters it shards
"""Peers by name. Those that sum ``once`` differ from the others only with several micro-batches."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory usage of one rank, with the methods of an estimate."""

    usages: tuple[MemoryUsage, ...]
    notes: tuple[str, ...] = ()

    def usage(self) -> list[MemoryUsage]:
        """Return the bytes of every kind."""
        return list(self.usages)

    def nbytes(self, place: str = "device") -> float:
        """Return the bytes in ``place``."""
        return sum(usage.nbytes for usage in self.usages if usage.place == place)


def peer_moved(
    peer: Peer, counts: Counts, shape: tuple[int, int], num_units: int, num_micro: int = 1, *, is_gloo: bool = False
) -> dict[str, MovedBytes]:
    """Return the bytes that a rank sends in a step, a mean over the ranks, and its exchanges, by kind.

    Args:
        peer: One of :data:`PEERS`.
        counts: Elements of the model.
        shape: Nodes, and ranks of each.
        num_units: Layers and other units that FSDP2 gathers one at a time.
        num_micro: Micro-batches in the step.
        is_gloo: Whether gloo's algorithms count, and not NCCL's.
    """
    nodes, per_node = shape
    sums, trainable = 1 if peer.is_once else num_micro, counts.num_trained
    gradients, params = peer.gradient_nbytes * trainable, peer.param_nbytes * counts.numel
    if peer.shards_over == "none":
        num_buckets = 1 + -(-max(4 * trainable - DDP_FIRST_NBYTES, 0) // DDP_NBYTES)
        return {"reductions": times(_all_reduce(gradients, nodes, per_node, num_buckets, is_gloo=is_gloo), sums)}
    divided = nodes if peer.shards_over == "world" else 1
    gathers = times(_ring(params, divided, per_node, num_units), peer.num_gathers(num_micro))
    scattered = times(_ring(gradients, divided, per_node, num_units), 1 + is_gloo)
    found = {"gathers": gathers, "reductions": times(scattered, sums)}
    if peer.shards_over == "node":  # HSDP that reshards keeps sums divided over the node
        in_node = sums if peer.keeps else num_micro
        between = _all_reduce(gradients // per_node, nodes, 1, num_units, is_gloo=is_gloo)
        found["reductions"] = total([times(scattered, in_node), times(between, sums)])
    return found


def _ring(nbytes: int, num_nodes: int, ranks_per_node: int, num_exchanges: int) -> MovedBytes:
    """A gather or reduce-scatter of ``nbytes`` over a ring: one of the node's links leaves it."""
    world_size = num_nodes * ranks_per_node
    if world_size == 1:
        return NOTHING
    sent = nbytes * (world_size - 1) // world_size
    between = sent // ranks_per_node if num_nodes > 1 else 0
    within = sent - between
    return MovedBytes(Sent(within, between), Exchanged(num_exchanges * (within > 0), num_exchanges * (between > 0)))


def _all_reduce(nbytes: int, num_nodes: int, ranks_per_node: int, num_exchanges: int, *, is_gloo: bool) -> MovedBytes:
    ring = times(_ring(nbytes, num_nodes, ranks_per_node, num_exchanges), 2)
    if num_nodes == 2 and not is_gloo:
        ring = ring._replace(sent=ring.sent._replace(inter=nbytes // ranks_per_node))
    return ring


def peer_kernel_nbytes(peer: Peer, counts: Counts, shape: tuple[int, int], num_micro: int = 1) -> float:
    """Return the bytes that summing in a ring reads and writes: two operands and their sum."""
    ranks = shape[1] if peer.shards_over == "node" else shape[0] * shape[1]
    return 3 * peer.gradient_nbytes * counts.num_trained * (ranks - 1) / ranks * (1 if peer.is_once else num_micro)


def in_rings(peer: Peer, found: StepTimes) -> StepTimes:
    """Count only the slower links of rings over all ranks; HSDP's are one after the other."""
    if peer.shards_over == "node":
        return found
    return replace(found, within=0.0) if found.between >= found.within else replace(found, between=0.0)


def memory_of(
    peer: Peer, counts: Counts, shape: tuple[int, int], activations: Activations | None = None, num_micro: int = 1
) -> PeerMemory:
    """Return the bytes of each kind on a rank; arguments as in :func:`peer_moved`."""
    ranks = {"none": 1, "world": shape[0] * shape[1], "node": shape[1]}[peer.shards_over]
    numel, trainable, unit = counts.numel, counts.num_trained, min(counts.largest_unit, counts.numel)
    if peer.shards_over == "none":
        bucket = DDP_NBYTES // 4 if peer.gradient_nbytes == 2 else 0
        gathered, buckets, summed = 2.0 * numel, 2.0 * min(trainable, bucket), 0.0
    else:
        gathered = 2.0 * numel if peer.keeps else 2.0 * (unit + min(unit, numel - unit))
        buckets = 2.0 * min(NUM_GRADIENT_BUFFERS * unit, trainable)
        is_divided = peer.shards_over == "node" and not peer.keeps
        summed = 2.0 * trainable / (ranks if is_divided else 1) if peer.is_once and num_micro > 1 else 0.0
    of_kinds: Mapping[str, float] = {
        "parameters": 4 * numel / ranks, "gradients": 4 * trainable / ranks, "states": 8 * trainable / ranks,
        "gathered": gathered, "buckets": buckets, "summed gradients": summed,
    }  # fmt: skip
    found = [MemoryUsage(kind, "device", nbytes) for kind, nbytes in of_kinds.items() if nbytes]
    return PeerMemory((*found, *usage_of(Counts(numel=0), TrainingSetup(stage=0), activations)))
