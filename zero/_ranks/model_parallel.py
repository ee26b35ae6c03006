"""The ranks that hold the other parts of the same model: what a norm or an overflow must be agreed on with them.

A parameter is one of three things, as in Megatron-LM, by an attribute that its layer sets:

    param.tensor_model_parallel = True    this rank has a part of it; every rank's part counts in the norm
    no attribute                          replicated over the tensor-parallel ranks; the first of them counts it
    param.shared = True                   a copy of a parameter of another pipeline stage (tied embeddings); not counted

Without tensor-parallel ranks (pipeline stages alone) every parameter but the shared ones counts.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zcomm import ConfigError, Topology, control

TENSOR_AXES = ("tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel")
PIPELINE_AXES = ("pp", "pipe", "pipeline", "pipeline_parallel")
RANK_METHODS = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")


class ModelParallel:
    """The model-parallel ranks of this one.

    Args:
        group: They, tensor- and pipeline-parallel ones together; None: this rank has the whole model.
        counts_replicated: Whether this rank is the first of those that hold the same replicated parameters.
        tensor_group: Those of them that have the same activations; None: this rank is the only one.
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

    @cached_property
    def everyone(self) -> Topology:
        """The ranks of all parts of the model, which are all there are; made at the first use, which is collective."""
        return Topology(ranks_per_node=dist.get_world_size())

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, data_axis: str) -> ModelParallel:
        """All axes but ``data_axis``. Parameters are replicated over those that are not named as pipeline axes."""
        names = tuple(name for name in mesh.mesh_dim_names or () if name != data_axis)
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        if math.prod(sizes[name] for name in names) == 1:
            return cls()
        is_first = all(mesh.get_local_rank(name) == 0 for name in names if name not in PIPELINE_AXES)
        group = mesh.get_group(names[0]) if len(names) == 1 else mesh[names]._flatten().get_group()
        return cls(group, counts_replicated=is_first, tensor_group=tensor_parallel_group(mesh))

    @classmethod
    def of_mpu(cls, mpu: Any) -> ModelParallel:
        """By Megatron's methods, as far as ``mpu`` has them.

        Raises:
            ConfigError: It has several model-parallel ranks and does not say their group.
        """
        if getattr(mpu, "get_model_parallel_world_size", lambda: 1)() == 1:
            return cls()
        if not hasattr(mpu, "get_model_parallel_group"):
            raise ConfigError(
                "mpu must have get_model_parallel_group() beside get_model_parallel_world_size() = "
                f"{mpu.get_model_parallel_world_size()}, for norms and overflows of the whole model: got {mpu!r}"
            )
        rank_of = next((getattr(mpu, name) for name in RANK_METHODS if hasattr(mpu, name)), None)
        group = mpu.get_model_parallel_group()
        rank = dist.get_rank(group) if rank_of is None else rank_of()
        return cls(group, counts_replicated=rank == 0, tensor_group=tensor_parallel_group(mpu))

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank's part of ``param`` belongs in the norm of the whole model."""
        if self._topology is None:
            return True
        if getattr(param, "tensor_model_parallel", False):
            return True
        return self._counts_replicated and not getattr(param, "shared", False)

    def gather(self, value: float) -> list[float]:
        """``value`` of every rank, in their order. Collective over them."""
        if self._topology is None:
            return [value]
        mine = torch.tensor([value], dtype=torch.float64)
        of_ranks: list[float] = control.gather_float64(mine, self._topology).flatten().tolist()
        return of_ranks

    def gather_beside(self, value: Tensor) -> Tensor:
        """The scalar ``value`` of every rank, [world_size], in their order, on its device. Collective over them."""
        mine = value.view(1)
        return mine if self._topology is None else control.gather_beside(mine, self._topology).view(-1)

    def any(self, flag: bool) -> bool:  # noqa: FBT001  (one flag)
        """Whether it is true on any of them. Collective over them."""
        return any(self.gather(float(flag)))

    def close(self) -> None:
        """Free what belongs to it."""
        if "everyone" in self.__dict__:
            self.__dict__.pop("everyone").close()
        if self._topology is not None:
            self._topology.close()


def tensor_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """The ranks that compute the same activations with parts of each layer, by ``mpu``; None: this one alone.

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
