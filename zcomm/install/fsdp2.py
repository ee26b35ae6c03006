"""``zcomm.install_fsdp2``: quantized, two-hop all-gathers and reduce-scatters for FSDP2.

    forward, backward    shards --quantize--> gather between nodes, inside the node --decode--> parameters
    backward             gradients --> reduce-scatter inside the node, between nodes, summed in float32 --> shards

Each FSDPModule gets its own all-gather and reduce-scatter objects (:mod:`zcomm.install.fsdp2_comms`). FSDP2 must reduce
with a plain sum (``set_force_sum_reduction_for_comms``): otherwise it passes a PREMUL_SUM, whose factor cannot be read.
Streams stay FSDP2's: each object is called on the stream that torch's own would be called on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zcomm._formats.formats import codec_for
from zcomm._formats.recipes import AUTO_RECIPE, DEFAULT_RECIPE, Recipe, get_recipe
from zcomm._residuals.grad_scaler import ScalerSetting, scaler_kind
from zcomm._transport.backend_choice import BackendWish, KernelsName
from zcomm._transport.nccl_communicators import close_communicators
from zcomm._transport.route import check_backend
from zcomm._transport.topology import Topology
from zcomm.errors import ConfigError, FormatError, LayoutError, StateError, TopologyError
from zcomm.install import fsdp2_comms as comms
from zcomm.install.agreement import agree, settings_of
from zcomm.install.choices import FormatChoice, Overrides, choose_formats, closed_on_error, for_shards
from zcomm.install.fsdp2_units import FSDPUnit, process_groups_of, units_of
from zcomm.install.report import Installation, InstallationRecord, title_of, topology_text


def install_fsdp2(
    model: nn.Module,
    recipe: str | Recipe = DEFAULT_RECIPE,
    *,
    overrides: Overrides | None = None,
    topology: Topology | None = None,
    replicate_group: dist.ProcessGroup | None = None,
    shadow: bool = False,
    backend: BackendWish = "auto",
    kernels: KernelsName = "auto",
    scaler: ScalerSetting = "auto",
) -> Installation:
    """Make a model under ``fully_shard`` communicate in ``recipe``'s formats, over two hops.

    Mixed precision, ``reshard_after_forward``, CPU offload, tied and frozen parameters and gradient accumulation work
    as before. Sums are in float32, whatever the reduce dtype. With ``reshard_after_forward=<int>`` backward gathers the
    decoded values of forward, uncompressed, over the smaller group.

    Args:
        model: with ``fully_shard`` applied to it or to modules in it, over a 1-D mesh.
        recipe: a name in :data:`zcomm.RECIPES`, or a :class:`zcomm.Recipe`: ``weights`` is the format of the gathers,
            ``gradients`` that of the reduce-scatters (inside the node, between nodes). ``"auto"``: the formats that
            ``zcomm probe`` found fastest for the largest module. The same on every rank.
        overrides: other formats (or recipes) for modules by name, such as ``{"lm_head": "bf16"}``; the longest prefix
            of a parameter's name wins, ``"none"`` sends it uncompressed.
        topology: nodes and ranks, if parameters are sharded over all of them; default: as torchrun started them.
            Parameters sharded over a subset of the ranks are exchanged over one hop.
        replicate_group: this rank's peers in the other replicas, if parameters are sharded inside a node only. The
            mean over replicas is taken in the formats ``gradients[1]`` and ``reduced``;
            ``set_requires_all_reduce(False)`` defers it, as in HSDP.
        shadow: train as if nothing were installed, bit for bit, but also run the compressed exchanges on copies, and
            report their bytes and errors. Costs time.
        backend: as in :class:`zcomm.Topology`; "auto": that of ``topology``, if it is given.
        kernels: as ``backend``; only "auto" where parameters are sharded over a subset of the ranks.
        scaler: as in :func:`zcomm.install_ddp`.

    Returns: An Installation; its ``uninstall()`` ends the mean over replicas, too.

    Raises:
        ConfigError, FormatError: A recipe, format or module name does not exist (the nearest is given); settings
            differ between ranks (all are named); weights would be rounded stochastically; no module is sharded.
        BackendUnavailableError: The backend or the kernels are not available, or do not support the parameters' device.
        LayoutError: A module is not supported; the message gives its name and the remedy.
        StateError: A module already has a custom communication.
        TopologyError: ``topology`` or ``replicate_group`` does not fit the ranks.

    Collective: the ranks compare their settings first. If one rank cannot install, all raise its error, with its rank,
    and nothing is installed. Cost: for each module, one collective for each format instead of one in all; where small
    or overridden parameters are between others, one copy each way.
    """
    options = _InstallOptions(topology, replicate_group, shadow, backend, kernels, scaler)
    replicates = replicate_group is not None
    given = settings_of(
        recipe, overrides, topology, shadow=shadow, replicates=replicates, backend=backend, kernels=kernels,
        scaler=scaler_kind(scaler),
    )  # fmt: skip
    checked = partial(_checked, model, recipe, overrides or {}, options)
    agreed = agree("install_fsdp2", given, _groups(model, options), checked)
    return _installed(agreed, overrides or {}, options)


def _installed(agreed: _Checked, overrides: Overrides, options: _InstallOptions) -> Installation:
    units, recipe, unit_choices = agreed
    replicate_group, topology = options.replicate_group, options.topology
    owned = None
    if topology is None and replicate_group is None and _are_over_all_ranks(units):
        topology = owned = Topology.from_env(backend=options.backend, kernels=options.kernels)
    if recipe is AUTO_RECIPE:
        with closed_on_error(owned):
            recipe = for_shards(topology, _largest_exchanges(units), units[0].group.device)
            unit_choices = _choices(units, recipe, overrides)
    record = InstallationRecord((choice.name for chosen in unit_choices for choice in chosen), recipe, options.scaler)
    before = [_restorer_of(unit, replaces_hook=replicate_group is not None) for unit in units]
    last_hop = comms.ZcommReduceScatter if replicate_group is None else comms.ReplicaAllReduce
    backend = options.backend if topology is None else topology.backend
    for unit, choices in zip(units, unit_choices, strict=True):
        planner = comms.UnitPlanner(unit, choices, _topology_of(unit, topology), record, last_hop, backend)
        _install(planner, replicate_group, shadow=options.shadow)
    groups = [unit.process_group for unit in units] + ([] if replicate_group is None else [replicate_group])

    def uninstall() -> None:
        for restore in before:
            restore()
        for group in groups if backend == "nccl" else []:
            close_communicators(group)
        if owned is not None:
            owned.close()

    one_hop = f"one hop, backend {'nccl' if backend == 'nccl' else 'torch'}"
    over = one_hop if topology is None else topology_text(topology)
    return Installation(title_of("install_fsdp2", recipe, over, shadow=options.shadow), record, uninstall)


class _InstallOptions(NamedTuple):
    """The arguments besides the model and its formats."""

    topology: Topology | None
    replicate_group: dist.ProcessGroup | None
    shadow: bool
    backend: BackendWish
    kernels: KernelsName
    scaler: ScalerSetting


_Checked = tuple[list[FSDPUnit], Recipe, list[Sequence[FormatChoice]]]
"""The units, the recipe, and the formats of every unit's parameters."""


def _checked(model: nn.Module, recipe: str | Recipe, overrides: Overrides, options: _InstallOptions) -> _Checked:
    """Look the arguments up; raise if this rank cannot install. No communication: other ranks may not get here."""
    units, recipe = units_of(model), get_recipe(recipe)
    unit_choices = _choices(units, recipe, overrides)
    _check_replicas(units, options)
    if options.topology is not None and all(_topology_of(unit, options.topology) is None for unit in units):
        raise TopologyError(
            f"the topology must be over the ranks that share parameters: {options.topology}, but {units[0].label} is "
            f"sharded over ranks {units[0].ranks}"
        )
    _check_kernels(units, options)
    for device in dict.fromkeys(unit.group.device for unit in units):
        check_backend("install_fsdp2", options.topology, options.backend, options.kernels, device)
    return units, recipe, unit_choices


def _groups(model: nn.Module, options: _InstallOptions) -> list[dist.ProcessGroup]:
    """The groups whose ranks must agree: those that share parameters, in the order of the model, and the replicas."""
    others = (options.topology.process_group if options.topology is not None else None, options.replicate_group)
    return [*process_groups_of(model), *(group for group in others if group is not None)]


def _largest_exchanges(units: Sequence[FSDPUnit]) -> tuple[int, int]:
    """Bytes of the largest all-gather of weights and of the largest reduce-scatter of gradients."""
    weights, gradients = 0, 0
    for unit in units:
        gathered = max(unit.gather_dtypes, key=lambda dtype: dtype.itemsize)
        reduced: torch.dtype = unit.group.mp_policy.reduce_dtype or gathered
        weights = max(weights, sum(unit.padded_numels) * gathered.itemsize)
        gradients = max(gradients, sum(unit.padded_numels) * reduced.itemsize)
    return weights, gradients


def _check_kernels(units: Sequence[FSDPUnit], options: _InstallOptions) -> None:
    """Kernels belong to a Topology; exchanges over a process group use those that ``ZCOMM_KERNELS`` names."""
    has_topology = options.topology is not None or _are_over_all_ranks(units)
    if options.kernels != "auto" and (options.replicate_group is not None or not has_topology):
        raise ConfigError(
            f"kernels={options.kernels!r} needs parameters that are sharded over all ranks, or those of topology=: use "
            "kernels='auto' and set ZCOMM_KERNELS"
        )


def _restorer_of(unit: FSDPUnit, *, replaces_hook: bool) -> Callable[[], None]:
    """What uninstall() calls to put the unit's own communication back: that which it has now."""
    module, group = unit.module, unit.group
    gather, reduce = group._all_gather_comm, group._reduce_scatter_comm
    hook, force_sum = group._all_reduce_hook, group.force_sum_reduction_for_comms

    def restore() -> None:
        module.reshard()  # full parameters now hold decoded, rounded values: the next use must gather exact ones
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
        module.set_force_sum_reduction_for_comms(force_sum)
        if replaces_hook:
            module.set_all_reduce_hook(hook)

    return restore


def _install(planner: comms.UnitPlanner, replicate_group: dist.ProcessGroup | None, *, shadow: bool) -> None:
    module, group = planner.unit.module, planner.unit.group
    gather, reduce = comms.ZcommAllGather(planner), comms.ZcommReduceScatter(planner)
    if shadow:
        module.set_custom_all_gather(comms.ShadowAllGather(group._all_gather_comm, gather))
        module.set_custom_reduce_scatter(comms.ShadowReduceScatter(group._reduce_scatter_comm, reduce))
        return
    module.reshard()  # or the next forward would use parameters that torch's all-gather filled, unquantized
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(reduce)
    module.set_force_sum_reduction_for_comms(True)
    if replicate_group is not None:
        module.set_all_reduce_hook(comms.ReplicaAllReduce(planner, replicate_group))


def _choices(units: Sequence[FSDPUnit], recipe: Recipe, overrides: Overrides) -> list[Sequence[FormatChoice]]:
    """The formats of every unit's parameters."""
    chosen = iter(choose_formats((named for unit in units for named in unit.parameters), recipe, overrides))
    parts: list[Sequence[FormatChoice]] = []
    for unit in units:
        parts.append(list(islice(chosen, len(unit.parameters))))
        _check_dtypes(unit, parts[-1])
    return parts


def _are_over_all_ranks(units: Sequence[FSDPUnit]) -> bool:
    """Whether some unit is sharded over all ranks, so that it can use the topology as torchrun has started them."""
    everyone = tuple(range(dist.get_world_size()))
    return any(unit.ranks == everyone for unit in units)


def _topology_of(unit: FSDPUnit, topology: Topology | None) -> Topology | None:
    return topology if topology is not None and topology.global_ranks == unit.ranks else None


def _check_dtypes(unit: FSDPUnit, choices: Sequence[FormatChoice]) -> None:
    """Raise if the unit's dtypes cannot be sent in the chosen formats."""
    if len(unit.gather_dtypes) > 1:
        dtypes = ", ".join(sorted(str(dtype) for dtype in unit.gather_dtypes))
        raise LayoutError(
            f"{unit.label} gathers parameters of several dtypes as bytes ({dtypes}): give it one with "
            "MixedPrecisionPolicy(param_dtype=...), or call fully_shard on the modules that differ"
        )
    for choice in choices:
        if choice.wires.weights.is_random:
            raise FormatError(
                f"{unit.label} gathers its weights for forward and again for backward, and both must give the same "
                f"values: weights={str(choice.wires.weights)!r} rounds stochastically; use rounding='nearest'"
            )
        for dtype in unit.gather_dtypes:
            codec_for(choice.wires.weights, dtype)


def _check_replicas(units: Sequence[FSDPUnit], options: _InstallOptions) -> None:
    group = options.replicate_group
    if group is None:
        return
    if options.topology is not None:
        raise ConfigError("replicate_group= and topology= cannot be combined: with replicas, each node is one replica")
    if options.shadow:
        raise ConfigError("replicate_group= and shadow=True cannot be combined: FSDP2 has no all-reduce to keep")
    peers = set(dist.get_process_group_ranks(group))
    for unit in units:
        if len(peers & set(unit.ranks)) != 1:
            raise TopologyError(
                f"replicate_group must share one rank, this one, with the ranks of {unit.label}: "
                f"group={sorted(peers)}, ranks={list(unit.ranks)}"
            )
        if unit.group._all_reduce_hook is not None:
            raise StateError(f"{unit.label} already has an all-reduce hook: remove it; replicate_group= sets its own")
