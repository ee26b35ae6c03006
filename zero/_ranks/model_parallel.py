"""Model-parallel ranks: those that hold other parts of the same model, and agree on its gradient norm and overflow.

An attribute that its layer sets says what a parameter is, as in Megatron-LM:

    param.tensor_model_parallel = True    this rank has a part of it; every rank counts its part in the norm
    no attribute                          replicated over the tensor-parallel ranks; the first of them counts it
    param.shared = True                   a copy of a parameter of another pipeline stage (tied embeddings); not counted

With pipeline stages alone, every parameter but the shared ones counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zcomm import ConfigError, Topology, control
from zcomm._base.lazy import lazy

TENSOR_AXES = ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel")
PIPELINE_AXES = ("pp", "pipe", "pipeline", "pipeline_parallel")
RANK_METHODS = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")


class ModelParallel:
    """The model-parallel ranks of this one.

    Args:
        group: The tensor- and pipeline-parallel ranks together; None: this rank has the full model.
        counts_replicated: Whether this rank is the first of those that hold the same replicated parameters.
        tensor_group: The ranks with the same activations; None: this rank is the only one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        counts_replicated: bool = True,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.tensor_group = tensor_group
        self._topology = None if group is None else Topology(ranks_per_node=dist.get_world_size(group), group=group)
        self._counts_replicated = counts_replicated
        self.rank = 0 if self._topology is None else self._topology.rank
        self.world_size = 1 if group is None else dist.get_world_size(group)

    @lazy
    def all_ranks(self) -> Topology:
        """All ranks of the job. Created at the first use, which is collective."""
        return Topology(ranks_per_node=dist.get_world_size())

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, data_axis: str) -> ModelParallel:
        """All axes but ``data_axis``. Parameters are replicated over every axis that is not a pipeline axis by name."""
        names = tuple(name for name in mesh.mesh_dim_names or () if name != data_axis)
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        if math.prod(sizes[name] for name in names) == 1:
            return cls()
        is_first = all(mesh.get_local_rank(name) == 0 for name in names if name not in PIPELINE_AXES)
        group = mesh.get_group(names[0]) if len(names) == 1 else mesh[names]._flatten().get_group()
        return cls(group, counts_replicated=is_first, tensor_group=tensor_parallel_group(mesh))

    @classmethod
    def of_mpu(cls, mpu: Any) -> ModelParallel:
        """Read the groups from those of Megatron's methods that ``mpu`` has.

        Raises:
            ConfigError: There are several model-parallel ranks, and ``mpu`` does not give their group.
        """
        if getattr(mpu, "get_model_parallel_world_size", lambda: 1)() == 1:
            return cls()
        if not hasattr(mpu, "get_model_parallel_group"):
            raise ConfigError(
                "mpu must have get_model_parallel_group(), for norms and overflows of the full model: "
                f"get_model_parallel_world_size()={mpu.get_model_parallel_world_size()}, mpu={mpu!r}"
            )
        rank_of = next((getattr(mpu, name) for name in RANK_METHODS if hasattr(mpu, name)), None)
        group = mpu.get_model_parallel_group()
        rank = dist.get_rank(group) if rank_of is None else rank_of()
        return cls(group, counts_replicated=rank == 0, tensor_group=tensor_parallel_group(mpu))

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank adds its part of ``param`` to the norm of the full model."""
        if self._topology is None or getattr(param, "tensor_model_parallel", False):
            return True
        return self._counts_replicated and not getattr(param, "shared", False)

    def gather(self, value: float) -> list[float]:
        """``value`` of every rank, in rank order. Collective over the model-parallel ranks."""
        if self._topology is None:
            return [value]
        of_ranks: list[float] = self.gather_beside(torch.tensor(value, dtype=torch.float64, device="cpu")).tolist()
        return of_ranks

    def gather_beside(self, value: Tensor) -> Tensor:
        """As :meth:`gather`, of a scalar tensor: [world_size], on its device."""
        mine = value.view(1)
        return mine if self._topology is None else control.gather_beside(mine, self._topology).view(-1)

    @property
    def has_stages(self) -> bool:
        """Whether some ranks may hold other layers: then their backwards are not at the same place."""
        return self.world_size > (1 if self.tensor_group is None else dist.get_world_size(self.tensor_group))

    def any_beside(self, flag: Tensor) -> Tensor:
        """Whether ``flag``, a bool scalar, is true on any rank: one on its device. Collective, as :meth:`gather`."""
        return flag if self._topology is None else self.gather_beside(flag.double()).bool().any()

    def any(self, flag: bool) -> bool:  # noqa: FBT001  (one flag)
        """Whether ``flag`` is true on any model-parallel rank. Collective over them."""
        return any(self.gather(float(flag)))

    def close(self) -> None:
        """Free the topologies."""
        if "all_ranks" in self.__dict__:
            self.__dict__.pop("all_ranks").close()
        if self._topology is not None:
            self._topology.close()


def tensor_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """The ranks that hold parts of the same layers, and so have the same activations; None: this rank alone.

    Args:
        mpu: None, an object with Megatron's methods, or a DeviceMesh with an axis of :data:`TENSOR_AXES`.
    """
    if isinstance(mpu, DeviceMesh):
        name = next((name for name in TENSOR_AXES if name in (mpu.mesh_dim_names or ())), None)
        group = None if name is None else mpu.get_group(name)
    else:
        names = (f"get_{kind}_group" for kind in ("tensor_model_parallel", "slice_parallel", "model_parallel"))
        group = next((getattr(mpu, name)() for name in names if hasattr(mpu, name)), None)
    return None if group is None or dist.get_world_size(group) == 1 else group
