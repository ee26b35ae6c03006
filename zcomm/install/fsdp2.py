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

import torch.distributed as dist
from torch import nn

from zcomm.adaptive import AdaptivePrecision
from zcomm.errors import ConfigError, FormatError, LayoutError, StateError, TopologyError
from zcomm.formats import codec_for
from zcomm.install.adapting import Adapting
from zcomm.install.agreement import agree, settings_of
from zcomm.install.choices import Choice, Override, choose
from zcomm.install.fsdp2_comms import Gather, Plans, Reduce, ReplicaMean, ShadowGather, ShadowReduce
from zcomm.install.fsdp2_units import Unit, process_groups_of, units_of
from zcomm.install.report import Account, Installation
from zcomm.recipes import DEFAULT_RECIPE, Recipe, get_recipe
from zcomm.topology import Topology

__all__ = ["install_fsdp2"]


def install_fsdp2(
    model: nn.Module,
    recipe: str | Recipe = DEFAULT_RECIPE,
    *,
    overrides: Mapping[str, Override] | None = None,
    topology: Topology | None = None,
    replicate_group: dist.ProcessGroup | None = None,
    shadow: bool = False,
    adaptive: AdaptivePrecision | Mapping[str, Any] | bool | None = None,
) -> Installation:
    """Let a model under ``fully_shard`` communicate in ``recipe``'s formats, over two hops.

    Mixed precision, ``reshard_after_forward``, CPU offload, tied and frozen parameters and gradient accumulation work
    as before; sums are in float32 whatever the reduce dtype. With ``reshard_after_forward=<int>`` backward gathers the
    very values of forward, as they are, over the smaller group.

    Args:
        model: with ``fully_shard`` applied to it or to modules in it, over a 1-D mesh.
        recipe: a name in :data:`zcomm.RECIPES`, or a :class:`zcomm.Recipe`: ``weights`` is the format of the gathers,
            ``gradients`` that of the reduce-scatters (inside the node, between nodes). The same on every rank.
        overrides: other formats (or recipes) for modules by name, such as ``{"lm_head": "bf16"}``; the longest prefix
            of a parameter's name wins, ``"none"`` leaves it as it is.
        topology: nodes and ranks, if parameters are sharded over all of them; default: as torchrun started them.
            Parameters sharded over part of the ranks are exchanged over one hop.
        replicate_group: this rank's peers in the other replicas, if parameters are sharded inside a node only: the
            mean over replicas is taken in ``gradients[1]`` and ``reduced``. ``set_requires_all_reduce(False)`` defers
            it, as in HSDP.
        shadow: train as if nothing were installed, bit for bit, but carry out the compressed exchanges beside it and
            report their bytes and errors. Costs time.
        adaptive: as in :func:`zcomm.install_ddp`, for gradients; not with ``replicate_group``.

    Returns:
        An Installation, with ``report()``, ``end_step()`` and ``uninstall()``, which ends the mean over replicas, too.

    Raises:
        ConfigError, FormatError: A recipe, format or module name does not exist (the nearest is given), or differs
            between ranks (all are named); weights would be rounded stochastically; there is nothing to install on.
        LayoutError: A module cannot be served; its name is given, and what to do.
        StateError: A module has a communication of its own already.
        TopologyError: ``topology`` or ``replicate_group`` does not fit the ranks.

    Collective: the ranks compare their settings first, and what one of them refuses all raise, with its rank; nothing
    is installed then. Cost: one collective for each kind of format in a module instead
    of one; where small or overridden parameters lie between others, one copy each way.
    """
    given = settings_of(recipe, overrides, adaptive, topology, shadow=shadow, replicates=replicate_group is not None)
    checked = partial(_checked, model, recipe, overrides or {}, adaptive, topology, replicate_group, shadow=shadow)
    units, recipe, settings, of_units = agree(
        "install_fsdp2", given, _groups(model, topology, replicate_group), checked
    )
    owned = _topology_of_job(units) if topology is None and replicate_group is None else None
    topology = topology or owned
    account = Account((choice.name for chosen in of_units for choice in chosen), recipe)
    account.adapting = _adapting(settings, model, recipe, topology)
    before = [_Before(unit, replaces_hook=replicate_group is not None) for unit in units]
    last_hop = (Reduce if replicate_group is None else ReplicaMean) if recipe.residual else None
    of_each = zip(units, of_units, (_topology_of(unit, topology) for unit in units), strict=True)
    _install([Plans(*one, account, residual_of=last_hop) for one in of_each], account, replicate_group, shadow=shadow)
    return Installation(_title(recipe, topology, shadow=shadow), account, partial(_uninstall, before, owned))


class _Checked(NamedTuple):
    units: list[Unit]
    recipe: Recipe
    settings: AdaptivePrecision | None
    of_units: list[Sequence[Choice]]


def _checked(
    model: nn.Module,
    recipe: str | Recipe,
    overrides: Mapping[str, Override],
    adaptive: AdaptivePrecision | Mapping[str, Any] | bool | None,  # noqa: FBT001
    topology: Topology | None,
    replicate_group: dist.ProcessGroup | None,
    *,
    shadow: bool,
) -> _Checked:
    """What was given, looked up; raises what this rank refuses."""
    units = units_of(model)
    recipe, settings = get_recipe(recipe), AdaptivePrecision.of(adaptive)
    of_units = _choices(units, recipe, overrides)
    _check_replicas(units, replicate_group, topology, shadow=shadow)
    _check_topology(units, topology)
    return _Checked(units, recipe, settings, of_units)


def _groups(
    model: nn.Module, topology: Topology | None, replicate_group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup]:
    """Who must agree: those that share parameters, in the order of the model, and the replicas."""
    others = (topology.world.group if topology is not None else None, replicate_group)
    return [*process_groups_of(model), *(group for group in others if group is not None)]


def _adapting(
    settings: AdaptivePrecision | None, model: nn.Module, recipe: Recipe, topology: Topology | None
) -> Adapting | None:
    if settings is not None and topology is None:
        raise ConfigError(
            "adaptive precision needs parameters that are sharded over all ranks, or over those of topology=, which "
            "decide together. It cannot go with replicate_group="
        )
    return None if settings is None or topology is None else Adapting(settings, model, recipe, topology)


def _title(recipe: Recipe, topology: Topology | None, *, shadow: bool) -> str:
    ways = "one hop" if topology is None else f"{topology.num_nodes} nodes x {topology.ranks_per_node} ranks"
    return f"install_fsdp2, recipe {recipe.name}, {ways}" + (", shadow: nothing is changed" if shadow else "")


def _uninstall(before: Sequence[_Before], topology: Topology | None) -> None:
    for one in before:
        one.restore()
    if topology is not None:
        topology.close()


class _Before:
    """What a unit had before, to be given back."""

    def __init__(self, unit: Unit, *, replaces_hook: bool) -> None:
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


def _install(
    planned: Sequence[Plans], account: Account, replicate_group: dist.ProcessGroup | None, *, shadow: bool
) -> None:
    reduces = [_install_on(plans.unit, plans, replicate_group, shadow=shadow) for plans in planned]
    if account.adapting is not None:
        account.adapting.adapts(reduces)


def _install_on(unit: Unit, plans: Plans, replicate_group: dist.ProcessGroup | None, *, shadow: bool) -> Reduce:
    reduce = Reduce(plans)
    if shadow:
        group = unit.group
        unit.module.set_custom_all_gather(ShadowGather(group._all_gather_comm, Gather(plans)))
        unit.module.set_custom_reduce_scatter(ShadowReduce(group._reduce_scatter_comm, reduce, unit))
        return reduce
    unit.module.reshard()
    unit.module.set_custom_all_gather(Gather(plans))
    unit.module.set_custom_reduce_scatter(reduce)
    unit.module.set_force_sum_reduction_for_comms(True)
    if replicate_group is not None:
        unit.module.set_all_reduce_hook(ReplicaMean(plans, replicate_group))
    return reduce


def _choices(units: Sequence[Unit], recipe: Recipe, overrides: Mapping[str, Override]) -> list[Sequence[Choice]]:
    """The formats of every unit's parameters."""
    choices = choose((named for unit in units for named in unit.parameters), recipe, overrides)
    parts: list[Sequence[Choice]] = []
    start = 0
    for unit in units:
        parts.append(choices[start : start + len(unit.parameters)])
        start += len(unit.parameters)
        _check_dtypes(unit, parts[-1])
    return parts


def _topology_of_job(units: Sequence[Unit]) -> Topology | None:
    """As torchrun has it, if anything is sharded over all ranks."""
    everyone = tuple(range(dist.get_world_size()))
    return Topology.from_env() if any(unit.ranks == everyone for unit in units) else None


def _topology_of(unit: Unit, topology: Topology | None) -> Topology | None:
    return topology if topology is not None and topology.global_ranks == unit.ranks else None


def _check_topology(units: Sequence[Unit], topology: Topology | None) -> None:
    if topology is not None and all(_topology_of(unit, topology) is None for unit in units):
        raise TopologyError(
            f"the topology must be over the ranks that share parameters: {topology}, but {units[0].label} is sharded "
            f"over ranks {units[0].ranks}"
        )


def _check_dtypes(unit: Unit, choices: Sequence[Choice]) -> None:
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
    units: Sequence[Unit], group: dist.ProcessGroup | None, topology: Topology | None, *, shadow: bool
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
