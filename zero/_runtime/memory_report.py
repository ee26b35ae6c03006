"""The memory report: bytes of model states on this rank, measured from allocated storages, beside the formula's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from zero._optim.masters import tensors_in
from zero._runtime.runtime import Runtime
from zero._runtime.suspended_memory import new_storages
from zero._sharding.stages import model_state_nbytes


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Allocated bytes on this rank by kind."""

    parameters: int
    """What the forward reads: full parameters, or the shard at stage 3; both with ``mode="delta"``."""
    gradients: int
    """Between steps: full below stage 2, the shard from there."""
    states: int
    """Optimizer states and float32 masters in memory."""
    buffers: dict[str, int]
    """Named buffers beyond the formula: the pool of full buffers, the secondary partition or replica, residuals and
    node sums of ``mode="delta_hpz"``, host buffers between files and parameters, what a delayed update reads and
    writes, persistent parameters of stage 3."""
    unreduced_gradients: int
    """Of the pool's bytes, those that hold full local gradients of ``no_sync`` at stages 2 and 3."""
    shards: dict[str, int]
    """Where parameters are stored, by tier: on the "device", in host memory ("cpu"), in files ("nvme")."""
    gradients_in_files: int
    """Reduced gradients that are not in memory: the bytes of the file, with room for sums."""
    states_in_files: int
    """Masters and moments that are not in memory: the bytes of the files, with room for the previous values."""
    formula: float
    """Parameters, gradients and states as :func:`zero.model_state_nbytes` has them, with two moments."""

    @property
    def model_states(self) -> int:
        """Parameters, gradients and states: what the formula predicts."""
        return self.parameters + self.gradients + self.states

    @property
    def total(self) -> int:
        """Model states and buffers."""
        return self.model_states + sum(self.buffers.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """Every kind with its bytes."""
        own = {"parameters": self.parameters, "gradients": self.gradients, "states": self.states}
        return own | self.buffers


def _nbytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages under ``tensors``, each counted once."""
    return sum(storage.nbytes() for storage in new_storages(tensors, seen))


def measure(runtime: Runtime, optimizer: Optimizer) -> MemoryReport:
    """Measure what ``runtime`` and the inner ``optimizer`` hold."""
    seen: set[int] = set()
    buckets, stage = runtime.buckets, runtime.stage
    held = {kind: nbytes for part in runtime.parts for kind, nbytes in part.held().items()}
    parameters = _nbytes([b.shard for b in buckets if b.storage.is_in_memory], seen)
    if not stage.shards_parameters:
        parameters += _nbytes([b.full for b in buckets if b.full is not None], seen)
    parameters += sum(b.storage.nbytes.get("device", 0) for b in buckets if not b.storage.is_in_memory)
    stored = [b.storage.nbytes for b in buckets]
    masters = _nbytes([b.master for b in buckets if b.master is not b.shard], seen)
    states = [v for state in optimizer.state.values() for value in state.values() for v in tensors_in(value)]
    grads = [g.full for g in runtime.reducer.all if g.full is not None and not stage.shards_gradients]
    grads += [tensor for g in runtime.reducer.all for tensor in g.store.tensors]
    moments = _nbytes(states, seen)
    spares = [t for g in runtime.reducer.all if g.spare is not None for t in g.spare.tensors]
    unreduced = [g.full for g in runtime.reducer.all] if stage.shards_gradients else []
    trainable = [b for b in buckets if b.is_trainable]
    numel = sum(slot.numel for b in trainable for slot in b.layout.slots)
    formula = 0.0
    if numel:
        b = trainable[0]
        sizes = {"gradient_nbytes": runtime.reducer.all[0].dtype.itemsize, "param_nbytes": b.dtype.itemsize}
        sizes["state_nbytes"] = b.master.dtype.itemsize * (2 if b.master is b.shard else 3)
        formula = model_state_nbytes(numel, stage.number, runtime.topology.world_size, **sizes)
    return MemoryReport(
        parameters=parameters,
        gradients=_nbytes(grads, seen),
        states=masters + moments,
        buffers={
            **held,
            "gradients of a delayed update": _nbytes(spares, seen),
            "persistent parameters": _nbytes([b.full for b in buckets if b.is_persistent and b.full is not None], seen),
        },
        gradients_in_files=runtime.state_files.gradients.nbytes,
        states_in_files=runtime.state_files.nbytes,
        unreduced_gradients=sum(full.numel() * full.element_size() for full in unreduced if full is not None),
        formula=formula,
        shards={tier: sum(of_tier.get(tier, 0) for of_tier in stored) for tier in ("device", "cpu", "nvme")},
    )
