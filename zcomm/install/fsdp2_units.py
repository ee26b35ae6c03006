"""The parameter groups of FSDP2: what each FSDPModule gathers and reduces as one; found, named and checked.

torch has no public access to these groups. So this is the only module that reads FSDP2's private state, as it is in
torch 2.11 to 2.13. A group's flat buffers hold the parameters in order, each padded to ``padded_numel`` elements over
all ranks; over G ranks a parameter has ``padded_numel / G`` columns in every rank's row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zcomm.errors import ConfigError, LayoutError, StateError
from zcomm.install.choices import NamedParameter, clean_name

DEFAULT_COMMS = ("DefaultAllGather", "DefaultReduceScatter")


@dataclass(frozen=True)
class FSDPUnit:
    """One FSDPModule and its parameter group."""

    name: str
    module: Any
    """The FSDPModule."""
    group: Any
    """torch's FSDPParamGroup."""
    parameters: tuple[NamedParameter, ...]
    padded_numels: tuple[int, ...]
    gather_dtypes: frozenset[torch.dtype]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group that the parameters are sharded over."""
        group: dist.ProcessGroup = self.group.mesh_info.shard_process_group
        return group

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that the parameters are sharded over."""
        return tuple(dist.get_process_group_ranks(self.process_group))

    @property
    def trained(self) -> tuple[int, ...]:
        """The parameters that train now, by index: a script may freeze some and train others at any time."""
        return tuple(i for i, p in enumerate(self.group.fsdp_params) if p.sharded_param.requires_grad)

    @property
    def label(self) -> str:
        """The module's name, for messages."""
        return f"module {self.name or '(root)'!r}"


def units_of(model: nn.Module) -> list[FSDPUnit]:
    """Return every parameter group of ``model``, in order.

    Raises:
        ConfigError: No module is sharded.
        LayoutError: A group is not supported; its module is named.
        StateError: A group already has a custom communication.
    """
    names = {id(module): clean_name(name) for name, module in model.named_modules(remove_duplicate=False)}
    units, seen = [], set()
    for module in filter(_is_sharded, model.modules()):
        groups = _groups_of(module)
        if len(groups) > 1:
            raise LayoutError(
                f"module {names[id(module)] or '(root)'!r} has {len(groups)} parameter groups (shard_placement_fn with "
                "several meshes): call fully_shard on its children, one mesh each"
            )
        for group in groups:
            if id(group) not in seen and group.fsdp_params:
                seen.add(id(group))
                units.append(_unit(module, group, names))
    if not units:
        raise ConfigError(f"{type(model).__name__} has no module with sharded parameters: call fully_shard first")
    return units


def _is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` is an FSDPModule. FSDP2 takes a second to import, and whoever uses it has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def process_groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the groups that parameters are sharded over, in order; also for models that :func:`units_of` refuses."""
    sharing = [group for module in filter(_is_sharded, model.modules()) for group in _groups_of(module)]
    return [group.mesh_info.shard_process_group for group in sharing if group.fsdp_params]


def _groups_of(module: Any) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return list(groups)


def _unit(module: nn.Module, group: Any, names: dict[int, str]) -> FSDPUnit:
    name = names[id(module)]
    label = f"module {name or '(root)'!r}"
    mesh_info = group.mesh_info
    if getattr(mesh_info, "replicate_mesh_dim", None) is not None:
        raise LayoutError(
            f"{label} is sharded over a 2-D mesh (HSDP), whose all-reduce between replicas cannot be replaced: shard "
            'over the 1-D mesh of a node, fully_shard(module, mesh=mesh["shard"]), and pass '
            'replicate_group=mesh["replicate"].get_group()'
        )
    for comm in (group._all_gather_comm, group._reduce_scatter_comm):
        if type(comm).__name__ not in DEFAULT_COMMS:
            raise StateError(
                f"{label} already has a custom communication, {type(comm).__name__}: uninstall() or remove it first"
            )
    named = []
    for parameter in group.fsdp_params:
        known = NamedParameter(tuple(_names_of(parameter, names)), parameter._orig_size.numel())
        named.append(known)
        if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
            raise LayoutError(
                f"{label}: parameter {known.names[0]!r} is a tensor subclass with its own all-gather "
                "(fsdp_pre_all_gather), which cannot be replaced"
            )
        dtype = parameter.sharded_param.dtype
        if not dtype.is_floating_point:
            raise LayoutError(f"{label}: parameter {known.names[0]!r} must be real floating point: dtype={dtype}")
    shard_size = mesh_info.shard_process_group.size()
    padded_numels = tuple(p.padded_sharded_param_size.numel() * shard_size for p in group.fsdp_params)
    gather_dtypes = frozenset(p.mp_policy.param_dtype or p.sharded_param.dtype for p in group.fsdp_params)
    return FSDPUnit(name, module, group, tuple(named), padded_numels, gather_dtypes)


def _names_of(parameter: Any, names: dict[int, str]) -> Iterator[str]:
    info = parameter._module_info
    owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    for module, name in owners:
        yield ".".join(part for part in (names.get(id(module), ""), name) if part)
