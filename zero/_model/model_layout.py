"""The layout of a model: its units, their buckets, the persistent parameters, and the check that all ranks agree.

Persistent parameters are small ones that stay full at stage 3 (``stage3_param_persistence_threshold``). They are in
buckets of their own, wherever in the model they are. After every step, and after any other change, they are gathered in
the same format as all others, so a forward reads the same bits as if each layer gathered them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from zcomm import BackendUnavailableError, ConfigError, LayoutError, StateError, Topology, control
from zero._config.rank_consistency import differences_between_ranks, summarize
from zero._config.settings import Effective, ZeroSettings
from zero._model.init_shards import is_built
from zero._modes import resolve_mode
from zero._sharding.bucket import Bucket, is_managed
from zero._sharding.layout import ALIGN, BucketLayout, group_consecutive
from zero._sharding.placement import PlacedTensor, place, work_of
from zero._sharding.stacked import parts_of
from zero._sharding.units import Unit, by_kind, find_units
from zero._storage.tier_settings import Tier

JOINED_NUMEL = 2**16
"""Elements of a parameter up to which it is in a bucket of whole tensors, as one of them: norms and biases."""
MAX_REPORTED = 4
"""Differences between the ranks' models that an error lists."""


class ModelPlan(NamedTuple):
    """The layout of a model."""

    effective: Effective
    units: list[Unit]
    buckets_of_unit: list[list[Bucket]]
    """Units that share an exchange have the same buckets."""
    buckets: list[Bucket]


def plan_model(
    model: nn.Module, settings: ZeroSettings, topology: Topology, whole: Mapping[nn.Parameter, bool] | None = None
) -> ModelPlan:
    """Divide ``model`` into units and buckets, without communication.

    ``whole``: parameters that their optimizer updates as whole tensors, and whether a node could do it together.

    Raises:
        ZcommError: The model cannot be sharded with these settings.
    """
    effective = resolve_mode(settings, topology)
    check_model(model)
    _check_renormalized(model, settings, effective, topology)
    if effective.stage.shards_parameters:
        _check_is_gatherable(model)
    units, runs, contents, rows = _divide(model, settings, effective, topology, whole or {})
    if rows and topology.backend == "nccl":
        raise BackendUnavailableError(
            "backend='nccl' does not exchange shards of different sizes, which an optimizer of whole tensors needs: "
            "leave out backend=, torch's own NCCL groups do"
        )
    buckets: list[Bucket] = []
    of_runs: list[list[Bucket]] = []
    for run, of_run in zip(runs, contents, strict=True):
        made = [
            _bucket(index, run, content, rows, topology, effective.align, is_persistent=not of_runs)
            for index, content in enumerate(of_run, len(buckets))
        ]
        buckets += made
        of_runs.append(made)
    buckets_of_unit = [made for run, made in zip(runs[1:], of_runs[1:], strict=True) for _ in run]
    return ModelPlan(effective, units, buckets_of_unit, buckets)


def layouts_of(
    model: nn.Module, settings: ZeroSettings, topology: Topology, whole: Mapping[nn.Parameter, bool]
) -> list[tuple[BucketLayout, bool]]:
    """The buckets of :func:`plan_model`, and whether they are trainable; ``model`` may be on the meta device."""
    effective = resolve_mode(settings, topology)
    division = _divide(model, settings, effective, topology, whole)
    return [
        (_layout(content, division.rows, topology.world_size, effective.align), content.named[0][1].requires_grad)
        for of_run in division.contents
        for content in of_run
    ]


def layouts_of_units(
    units: list[Unit], whole: Mapping[nn.Parameter, bool], topology: Topology, *, merged_numel: int, deals: bool
) -> list[tuple[BucketLayout, bool]]:
    """The same of these units, of which those of up to ``merged_numel`` elements share buckets.

    ``deals``: whether shards are divided.
    """
    contents = [_contents(run, set(whole), ALIGN) for run in _runs_of(units, merged_numel)]
    rows = _rows_of(contents, topology, ALIGN, whole) if deals else {}
    return [
        (_layout(content, rows, topology.world_size, ALIGN), content.named[0][1].requires_grad)
        for of_run in contents
        for content in of_run
    ]


def _runs_of(units: list[Unit], merged_numel: int) -> list[list[Unit]]:
    """Consecutive units that share exchanges."""
    numels = [sum(param.numel() for _, param in unit.parameters) for unit in units]
    return [[units[i] for i in run] for run in group_consecutive(numels, merged_numel)]


class Division(NamedTuple):
    """A model divided into what buckets hold."""

    units: list[Unit]
    """Without the persistent parameters."""
    runs: list[list[Unit]]
    """Units that share exchanges. The first run is that of the persistent parameters."""
    contents: list[list[Content]]
    """Of the buckets of each run."""
    rows: Rows
    """See :func:`_rows_of`; empty if shards are equal."""


def _divide(
    model: nn.Module,
    settings: ZeroSettings,
    effective: Effective,
    topology: Topology,
    whole: Mapping[nn.Parameter, bool],
) -> Division:
    units, persistent = _cut_into_units(model, settings, effective)
    runs = [[persistent], *_runs_of(units, effective.merged_numel)]
    contents = [_contents(run, set(whole), effective.align) for run in runs]
    deals = effective.stage.shards_states and topology.world_size > 1
    rows = _rows_of(contents, topology, effective.align, whole) if deals else {}
    return Division(units, runs, contents, rows)


def _cut_into_units(model: nn.Module, settings: ZeroSettings, effective: Effective) -> tuple[list[Unit], Unit]:
    """The units, without the persistent parameters, and these as a unit of their own.

    Persistent are those of fewer elements than the threshold, in order, up to the limit together.
    """
    if not effective.stage.shards_parameters:
        return find_units(model), Unit("persistent", model, ())
    units = find_units(model, effective.limits.live_numel)
    left, persistent = settings.stage3_model_persistence_threshold, dict[nn.Parameter, str]()
    for name, param in (named for unit in units for named in unit.parameters):
        if param.numel() < settings.stage3_param_persistence_threshold and param.numel() <= left:
            persistent[param] = name
            left -= param.numel()
    kept = [
        replace(unit, parameters=tuple(named for named in unit.parameters if named[1] not in persistent))
        for unit in units
    ]
    return kept, Unit("persistent", model, tuple((name, param) for param, name in persistent.items()))


def check_model(model: nn.Module) -> torch.device:
    """Return the device of ``model``'s parameters, or raise if the model cannot be sharded."""
    named = list(model.named_parameters())
    devices = {param.device: name for name, param in named}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise LayoutError(f"all parameters must be on one device: {where}")
    device = named[0][1].device
    if device.type == "meta":
        raise LayoutError(
            f"parameters must have values: {named[0][0]!r} is on meta; call model.to_empty(device=...) first"
        )
    for name, param in named:
        if is_managed(param) and not is_built(param):
            raise StateError(
                f"parameter {name!r} is managed by another ZeroOptimizer already: close() that one first, at stage 3 "
                "inside zero.GatheredParameters(model.parameters()), which keeps the full parameters"
            )
        if param.requires_grad and not param.is_floating_point():
            raise LayoutError(f"trainable parameters must be real floating point: {name!r} is {param.dtype}")
    return device


def _check_renormalized(model: nn.Module, settings: ZeroSettings, effective: Effective, topology: Topology) -> None:
    """Raise for embeddings with ``max_norm``, which write to their weight in forward, unless it is its own master."""
    is_alone = topology.world_size == 1 and not effective.stage.shards_parameters
    is_own_master = settings.tiers.states.tier is Tier.DEVICE and effective.weight_format == "none"
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            weight = module.weight
            is_exact = is_alone and is_own_master and weight.dtype in (torch.float32, torch.float64)
            if weight.requires_grad and not is_exact:
                raise ConfigError(
                    f"{name!r} was built with max_norm={module.max_norm}, with which each rank's forward would change "
                    "rows of its own copy, not of the masters: build it without, and renormalise after step() inside "
                    "zero.GatheredParameters([embedding.weight], modifier_rank=0)"
                )


def _check_is_gatherable(model: nn.Module) -> None:
    """Raise if a (frozen) parameter has a dtype that cannot be gathered."""
    for name, param in model.named_parameters():
        if not param.is_floating_point():
            raise LayoutError(
                f"stage 3 gathers real floating-point parameters only: {name!r} is {param.dtype}; use stage 1 or 2, or "
                "make it a buffer"
            )


Rows = Mapping[nn.Parameter, tuple[int, ...]]
"""The shard of each parameter of the buckets that have whole tensors, or those of its parts."""


class Content(NamedTuple):
    """The parameters of one bucket."""

    named: list[tuple[str, nn.Parameter]]
    whole: set[nn.Parameter]
    """Those that are updated as whole tensors; if there are any, every parameter of the bucket is in one shard."""
    is_spread: bool = False
    """Whether it is one parameter, whose parts may be in different shards."""


def _contents(run: list[Unit], whole: set[nn.Parameter], align: int) -> list[Content]:
    """What the buckets of a run of units hold: one for each dtype and requires_grad.

    Beside whole tensors, large parameters that may be cut have a bucket of their own, with equal shards; and so has
    each that is several tensors: theirs are adjacent, so those of shards between would have to be in the middle of it.
    """
    contents = []
    for (_, is_trainable), named in by_kind(named for unit in run for named in unit.parameters).items():
        dealt = {param for _, param in named if is_trainable and param in whole}
        spread = {param for param in dealt if _is_spread(param, align)}
        cut = {p for _, p in named if dealt and p not in dealt and p.numel() > JOINED_NUMEL}
        for own, of_own in (
            ([one for one in named if one[1] not in spread | cut], dealt - spread),
            ([one for one in named if one[1] in cut], set[nn.Parameter]()),
        ):
            if own:
                contents.append(Content(own, of_own))
        contents += [Content([one], {one[1]}, is_spread=True) for one in named if one[1] in spread]
    return contents


def _is_spread(param: nn.Parameter, align: int) -> bool:
    """Whether the tensors that are stacked in ``param`` are dealt out one by one: equal ones, where it pays."""
    shapes = parts_of(param)
    is_equal = len(shapes) > 1 and len(set(shapes)) == 1
    return is_equal and param.numel() > JOINED_NUMEL and prod(shapes[0]) % align == 0


def _rows_of(
    contents: list[list[Content]], topology: Topology, align: int, divisible: Mapping[nn.Parameter, bool]
) -> Rows:
    """The shard of each parameter of the buckets that have whole tensors; or those of its equal parts.

    A parameter that a node updates together gets a bucket of its own in ``contents``.
    """
    dealt = [content for of_run in contents for content in of_run if content.whole]
    owners: list[nn.Parameter] = []
    tensors: list[PlacedTensor] = []
    for index, content in enumerate(dealt):
        for param in (param for _, param in content.named):
            shapes = parts_of(param) if param in content.whole else (tuple(param.shape),)
            of_one = [PlacedTensor(index, prod(s), work_of(s, is_whole=param in content.whole)) for s in shapes]
            if not content.is_spread:
                is_divided = divisible.get(param, False) and _has_rows_for(param, topology.ranks_per_node, align)
                sides = tuple(sorted(param.shape)) if is_divided else ()
                of_one = [PlacedTensor(index, param.numel(), sum(one.work for one in of_one), sides)]
            tensors += of_one
            owners += [param] * len(of_one)
    rows: dict[nn.Parameter, list[int]] = {}
    for param, (node, rank) in zip(owners, place(tensors, topology.num_nodes, topology.ranks_per_node), strict=True):
        ranks = range(topology.ranks_per_node) if rank is None else (rank,)
        rows.setdefault(param, []).extend(each * topology.num_nodes + node for each in ranks)
        if rank is None:
            _set_apart(param, contents)
    # The parts of a parameter cost the same, and are laid out in their order.
    return {param: tuple(sorted(of_one)) for param, of_one in rows.items()}


def _has_rows_for(param: nn.Parameter, num_ranks: int, align: int) -> bool:
    """Whether each of ``num_ranks`` can have as many rows of ``param``, and of the products of its update."""
    return not any(size % num_ranks for size in param.shape) and param.numel() // num_ranks % align == 0


def _set_apart(param: nn.Parameter, contents: list[list[Content]]) -> None:
    """Give ``param`` a bucket of its own."""
    for of_run in contents:
        for index, content in enumerate(of_run):
            own = [one for one in content.named if one[1] is param]
            if own:
                left = [one for one in content.named if one[1] is not param]
                rest = [content._replace(named=left, whole=content.whole - {param})] if left else []
                of_run[index : index + 1] = [*rest, Content(own, {param}, is_spread=True)]
                return


def _bucket(
    index: int, run: list[Unit], content: Content, rows: Rows, topology: Topology, align: int, *, is_persistent: bool
) -> Bucket:
    """Bucket number ``index``, of a run of units; ``rows``: see :func:`_rows_of`."""
    title = " .. ".join(dict.fromkeys((run[0].name or content.named[0][0], run[-1].name or content.named[-1][0])))
    layout, params = _layout(content, rows, topology.world_size, align), _in_order(content, rows)
    return Bucket(
        index, title, layout, [p for _, p in params], row=topology.shard_index("local"), is_persistent=is_persistent
    )


def _is_dealt(content: Content, rows: Rows) -> bool:
    return bool(content.whole) and bool(rows)


def _in_order(content: Content, rows: Rows) -> list[tuple[str, nn.Parameter]]:
    """The parameters as they lie in the bucket."""
    return sorted(content.named, key=lambda one: rows[one[1]]) if _is_dealt(content, rows) else content.named


def _layout(content: Content, rows: Rows, world_size: int, align: int) -> BucketLayout:
    named = _in_order(content, rows)
    return BucketLayout.of(
        [name for name, _ in named],
        [tuple(param.shape) for _, param in named],
        world_size,
        align,
        parts=[parts_of(param) if param in content.whole else () for _, param in named],
        owners=[rows[param] for _, param in named] if _is_dealt(content, rows) else None,
    )


def check_ranks_agree(buckets: list[Bucket], settings: ZeroSettings, topology: Topology) -> None:
    """Raise on every rank unless model and settings are the same on all, before anything else is exchanged.

    Different layouts would deadlock, or exchange garbage. Folders may differ: each rank has its own files in them.
    """
    if topology.world_size == 1:
        return
    settings_text = repr(_without_folders(settings))
    layouts = "\n".join(f"{b.layout} {b.dtype} {b.is_trainable}" for b in buckets)
    if control.are_equal(f"{settings_text}\n{layouts}", topology):
        return
    order = f"of checksum {zlib.crc32(layouts.encode())}"
    known = {"the text of the settings": settings_text, "the order of parameters": order}
    for bucket in buckets:
        use = f"{bucket.dtype}, {'trained' if bucket.is_trainable else 'frozen'}"
        for slot in bucket.layout.slots:
            parts = f" in {len(slot.parts)} parts" if len(slot.parts) > 1 else ""
            known[f"parameter {slot.name!r}"] = f"{list(slot.shape)}{parts}, {use},"
    found = differences_between_ranks(known, topology, lane="model")
    found = [line for line in found if not line.startswith("the order")] or found
    raise LayoutError(
        "the model given to ZeroOptimizer must be the same on every rank, and its settings: "
        + summarize(found, MAX_REPORTED)
    )


def _without_folders(settings: ZeroSettings) -> ZeroSettings:
    tiers = settings.tiers
    states, parameters = replace(tiers.states, path=None), replace(tiers.parameters, path=None)
    return replace(settings, tiers=replace(tiers, states=states, parameters=parameters))
