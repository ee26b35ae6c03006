"""``zcomm.install_fsdp2``: FSDP2's all-gathers and reduce-scatters in quantized formats over two hops.

    forward, backward    shards --quantize--> gather between nodes, inside the node --decode--> parameters
    backward             gradients --> reduce-scatter inside the node, between nodes, summed in float32 --> shards

Each FSDPModule gets objects of its own for both (:mod:`zcomm.install.fsdp2_comms`). FSDP2 is told to sum: it would
otherwise fold a divide factor into an operation that no one else can read. The order of streams is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zcomm._formats.formats import codec_for
from zcomm._formats.recipes import AUTO_RECIPE, DEFAULT_RECIPE, Recipe, get_recipe
from zcomm._residuals.loss_scaling import ScalerWish, kind_of
from zcomm._transport.backend_choice import BackendWish, KernelsName
from zcomm._transport.nccl_communicators import close_communicators
from zcomm._transport.route import check_carrier
from zcomm._transport.topology import Topology
from zcomm.errors import ConfigError, FormatError, LayoutError, StateError, TopologyError
from zcomm.install.agreement import agree, settings_of
from zcomm.install.choices import FormatChoice, Override, choose, for_shards
from zcomm.install.fsdp2_comms import Gather, Plans, Reduce, ReplicaMean, ShadowGather, ShadowReduce
from zcomm.install.fsdp2_units import FSDPUnit, process_groups_of, units_of
from zcomm.install.report import Installation, InstallationTally, described_topology


def install_fsdp2(
    model: nn.Module,
    recipe: str | Recipe = DEFAULT_RECIPE,
    *,
    overrides: Mapping[str, Override] | None = None,
    topology: Topology | None = None,
    replicate_group: dist.ProcessGroup | None = None,
    shadow: bool = False,
    backend: BackendWish = "auto",
    kernels: KernelsName = "auto",
    scaler: ScalerWish = "auto",
) -> Installation:
    """Let a model under ``fully_shard`` communicate in ``recipe``'s formats, over two hops.

    Mixed precision, ``reshard_after_forward``, CPU offload, tied and frozen parameters and gradient accumulation work
    as before; sums are in float32 whatever the reduce dtype. With ``reshard_after_forward=<int>`` backward gathers the
    very values of forward, as they are, over the smaller group.

    Args:
        model: with ``fully_shard`` applied to it or to modules in it, over a 1-D mesh.
        recipe: a name in :data:`zcomm.RECIPES`, or a :class:`zcomm.Recipe`: ``weights`` is the format of the gathers,
            ``gradients`` that of the reduce-scatters (inside the node, between nodes). ``"auto"``: what ``zcomm
            probe`` found fastest for the largest module. The same on every rank.
        overrides: other formats (or recipes) for modules by name, such as ``{"lm_head": "bf16"}``; the longest prefix
            of a parameter's name wins, ``"none"`` leaves it as it is.
        topology: nodes and ranks, if parameters are sharded over all of them; default: as torchrun started them.
            Parameters sharded over part of the ranks are exchanged over one hop.
        replicate_group: this rank's peers in the other replicas, if parameters are sharded inside a node only: the
            mean over replicas is taken in ``gradients[1]`` and ``reduced``. ``set_requires_all_reduce(False)`` defers
            it, as in HSDP.
        shadow: train as if nothing were installed, bit for bit, but carry out the compressed exchanges beside it and
            report their bytes and errors. Costs time.
        backend: as in :class:`zcomm.Topology`; "auto": that of ``topology``, if it is given.
        kernels: the same. Over process groups without a Topology, which part of the ranks have, "auto" alone.
        scaler: as in :func:`zcomm.install_ddp`.

    Returns: An Installation; its ``uninstall()`` ends the mean over replicas, too.

    Raises:
        ConfigError, FormatError: A recipe, format or module name does not exist (the nearest is given), or differs
            between ranks (all are named); weights would be rounded stochastically; there is nothing to install on.
        BackendUnavailableError: The backend or the kernels cannot be had, or do not serve the parameters' device.
        LayoutError: A module cannot be served; its name is given, and what to do.
        StateError: A module has a communication of its own already.
        TopologyError: ``topology`` or ``replicate_group`` does not fit the ranks.

    Collective: the ranks compare their settings first, and what one of them refuses all raise, with its rank; nothing
    is installed then. Cost: one collective for each kind of format in a module instead
    of one; where small or overridden parameters lie between others, one copy each way.
    """
    ways, replicates = _Ways(topology, replicate_group, backend, kernels, scaler), replicate_group is not None
    given = settings_of(
        recipe, overrides, topology, shadow=shadow, replicates=replicates, backend=backend, kernels=kernels,
        scaler=kind_of(scaler),
    )  # fmt: skip
    checked = partial(_checked, model, recipe, overrides or {}, ways, shadow=shadow)
    agreed = agree("install_fsdp2", given, _groups(model, topology, replicate_group), checked)
    return _installed(agreed, overrides or {}, ways, shadow=shadow)


def _installed(agreed: _Checked, overrides: Mapping[str, Override], ways: _Ways, *, shadow: bool) -> Installation:
    units, recipe, of_units = agreed
    replicate_group, topology = ways.replicate_group, ways.topology
    owned = _topology_of_job(units, ways) if topology is None and replicate_group is None else None
    topology = topology or owned
    if recipe is AUTO_RECIPE:
        recipe, of_units = _automatic(units, overrides, topology, owned)
    account = InstallationTally((choice.name for chosen in of_units for choice in chosen), recipe, ways.scaler)
    before = [_Before(unit, replaces_hook=replicate_group is not None) for unit in units]
    last_hop = (Reduce if replicate_group is None else ReplicaMean) if recipe.residual else None
    backend = ways.backend if topology is None else topology.backend
    of_each = zip(units, of_units, (_topology_of(unit, topology) for unit in units), strict=True)
    for one in of_each:
        _install(Plans(*one, account, residual_of=last_hop, backend=backend), replicate_group, shadow=shadow)
    groups = [unit.process_group for unit in units] + ([] if replicate_group is None else [replicate_group])
    remove = partial(_uninstall, before, owned, groups if backend == "nccl" else [])
    return Installation(_title(recipe, topology, backend, shadow=shadow), account, remove)


class _Ways(NamedTuple):
    """What exchanges are to go over."""

    topology: Topology | None
    replicate_group: dist.ProcessGroup | None
    backend: BackendWish
    kernels: KernelsName
    scaler: ScalerWish


class _Checked(NamedTuple):
    units: list[FSDPUnit]
    recipe: Recipe
    of_units: list[Sequence[FormatChoice]]


def _checked(
    model: nn.Module,
    recipe: str | Recipe,
    overrides: Mapping[str, Override],
    ways: _Ways,
    *,
    shadow: bool,
) -> _Checked:
    """What was given, looked up; raises what this rank refuses."""
    units, recipe = units_of(model), get_recipe(recipe)
    of_units = _choices(units, recipe, overrides)
    _check_replicas(units, ways.replicate_group, ways.topology, shadow=shadow)
    _check_topology(units, ways.topology)
    _check_kernels(units, ways)
    for device in dict.fromkeys(unit.group.device for unit in units):
        check_carrier("install_fsdp2", ways.topology, ways.backend, ways.kernels, device)
    return _Checked(units, recipe, of_units)


def _groups(
    model: nn.Module, topology: Topology | None, replicate_group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """Who must agree: those that share parameters, in the order of the model, and the replicas."""
    others = (topology.world.group if topology is not None else None, replicate_group)
    return [*process_groups_of(model), *(group for group in others if group is not None)]


def _automatic(
    units: Sequence[FSDPUnit], overrides: Mapping[str, Override], topology: Topology | None, owned: Topology | None
) -> tuple[Recipe, list[Sequence[FormatChoice]]]:
    """The recipe for ``"auto"``, and the formats of every unit's parameters; ``owned`` is closed if there is none."""
    weights = max(sum(unit.padded_numels) * max(dtype.itemsize for dtype in unit.gather_dtypes) for unit in units)
    gradients = max(sum(unit.padded_numels) * _gradient_nbytes(unit) for unit in units)
    try:
        recipe = for_shards(topology, (weights, gradients), units[0].group.device)
        return recipe, _choices(units, recipe, overrides)
    except BaseException:
        if owned is not None:
            owned.close()
        raise


def _gradient_nbytes(unit: FSDPUnit) -> int:
    """Bytes of an element on its way to the shards."""
    wanted: torch.dtype | None = unit.group.mp_policy.reduce_dtype
    return wanted.itemsize if wanted is not None else max(dtype.itemsize for dtype in unit.gather_dtypes)


def _check_kernels(units: Sequence[FSDPUnit], ways: _Ways) -> None:
    """Exchanges over a process group take the kernels that ``ZCOMM_KERNELS`` says: there is no Topology to own any."""
    everyone = tuple(range(dist.get_world_size()))
    has_topology = ways.topology is not None or any(unit.ranks == everyone for unit in units)
    if ways.kernels != "auto" and (ways.replicate_group is not None or not has_topology):
        raise ConfigError(
            f"kernels={ways.kernels!r} needs parameters that are sharded over all ranks, or over those of topology=: "
            "use kernels='auto' and ZCOMM_KERNELS"
        )


def _title(recipe: Recipe, topology: Topology | None, backend: BackendWish, *, shadow: bool) -> str:
    if topology is not None:
        return f"install_fsdp2, recipe {recipe.name}, {described_topology(topology, shadow=shadow)}"
    over = f"one hop, backend {'nccl' if backend == 'nccl' else 'torch'}"
    return f"install_fsdp2, recipe {recipe.name}, {over}" + (", shadow: nothing is changed" if shadow else "")


def _uninstall(before: Sequence[_Before], topology: Topology | None, groups: Sequence[dist.ProcessGroup]) -> None:
    for one in before:
        one.restore()
    for group in groups:
        close_communicators(group)
    if topology is not None:
        topology.close()


class _Before:
    """What a unit had before, to be given back."""

    def __init__(self, unit: FSDPUnit, *, replaces_hook: bool) -> None:
        self._unit, self._replaces_hook = unit, replaces_hook
        group = unit.group
        self._gather, self._reduce = group._all_gather_comm, group._reduce_scatter_comm
        self._hook, self._force_sum = group._all_reduce_hook, group.force_sum_reduction_for_comms

    def restore(self) -> None:
        """Give it back; parameters that are whole now were decoded, and are gathered anew."""
        module: Any = self._unit.module
        module.reshard()
        module.set_custom_all_gather(self._gather)
        module.set_custom_reduce_scatter(self._reduce)
        module.set_force_sum_reduction_for_comms(self._force_sum)
        if self._replaces_hook:
            module.set_all_reduce_hook(self._hook)


def _install(plans: Plans, replicate_group: dist.ProcessGroup | None, *, shadow: bool) -> None:
    unit = plans.unit
    if shadow:
        group = unit.group
        unit.module.set_custom_all_gather(ShadowGather(group._all_gather_comm, Gather(plans)))
        unit.module.set_custom_reduce_scatter(ShadowReduce(group._reduce_scatter_comm, Reduce(plans), unit))
        return
    unit.module.reshard()
    unit.module.set_custom_all_gather(Gather(plans))
    unit.module.set_custom_reduce_scatter(Reduce(plans))
    unit.module.set_force_sum_reduction_for_comms(True)
    if replicate_group is not None:
        unit.module.set_all_reduce_hook(ReplicaMean(plans, replicate_group))


def _choices(
    units: Sequence[FSDPUnit], recipe: Recipe, overrides: Mapping[str, Override]
) -> list[Sequence[FormatChoice]]:
    """The formats of every unit's parameters."""
    choices = choose((named for unit in units for named in unit.parameters), recipe, overrides)
    parts: list[Sequence[FormatChoice]] = []
    start = 0
    for unit in units:
        parts.append(choices[start : start + len(unit.parameters)])
        start += len(unit.parameters)
        _check_dtypes(unit, parts[-1])
    return parts


def _topology_of_job(units: Sequence[FSDPUnit], ways: _Ways) -> Topology | None:
    """As torchrun has it, if anything is sharded over all ranks."""
    everyone = tuple(range(dist.get_world_size()))
    if all(unit.ranks != everyone for unit in units):
        return None
    return Topology.from_env(backend=ways.backend, kernels=ways.kernels)


def _topology_of(unit: FSDPUnit, topology: Topology | None) -> Topology | None:
    return topology if topology is not None and topology.global_ranks == unit.ranks else None


def _check_topology(units: Sequence[FSDPUnit], topology: Topology | None) -> None:
    if topology is not None and all(_topology_of(unit, topology) is None for unit in units):
        raise TopologyError(
            f"the topology must be over the ranks that share parameters: {topology}, but {units[0].label} is sharded "
            f"over ranks {units[0].ranks}"
        )


def _check_dtypes(unit: FSDPUnit, choices: Sequence[FormatChoice]) -> None:
    """Refuse what only turns out with the formats known."""
    if len(unit.gather_dtypes) > 1:
        dtypes = ", ".join(sorted(str(dtype) for dtype in unit.gather_dtypes))
        raise LayoutError(
            f"{unit.label} gathers parameters of several dtypes as bytes ({dtypes}): give it one with "
            "MixedPrecisionPolicy(param_dtype=...), or call fully_shard on the modules that differ"
        )
    for choice in choices:
        if choice.wires.weights.is_random:
            raise FormatError(
                f"{unit.label} gathers its weights for forward and again for backward, and both must be the same: "
                f"weights={str(choice.wires.weights)!r} rounds stochastically; use rounding='nearest'"
            )
        for dtype in unit.gather_dtypes:
            codec_for(choice.wires.weights, dtype)


def _check_replicas(
    units: Sequence[FSDPUnit], group: dist.ProcessGroup | None, topology: Topology | None, *, shadow: bool
) -> None:
    if group is None:
        return
    if topology is not None:
        raise ConfigError("replicate_group= and topology= cannot go together: replicas are the nodes")
    if shadow:
        raise ConfigError("replicate_group= has no plain counterpart that shadow=True could leave unchanged")
    peers = set(dist.get_process_group_ranks(group))
    for unit in units:
        if len(peers & set(unit.ranks)) != 1:
            raise TopologyError(
                f"replicate_group must share one rank, this one, with the ranks of {unit.label}: {sorted(peers)}, "
                f"{unit.ranks}"
            )
        if unit.group._all_reduce_hook is not None:
            raise StateError(f"{unit.label} has an all-reduce hook already, which replicate_group= would replace")
