"""Validate the arguments of ZeroOptimizer before anything is changed, and choose what is ``"auto"``.

``weight_format="auto"`` and ``gradient_format="auto"`` mean what ``zcomm probe`` found fastest on these links: one
format for all weights and one for all gradients, by the model's largest exchange of each. It is chosen once, at
construction, from the first rank's table (:mod:`zcomm._collectives.auto_format`), so all ranks have the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zcomm import ConfigError, Topology
from zcomm._collectives.auto_format import AUTO, table_of
from zcomm._kernels import ulps
from zcomm._transport.route import check_backend
from zero._config.parse import Configuration, Source
from zero._config.rank_consistency import check_same
from zero._config.resolved import ResolvedConfig, resolve_config
from zero._config.setting_keys import EXACT
from zero._config.settings import ZeroSettings
from zero._model.model_checks import check_is_plain
from zero._model.model_layout import check_model, plan_model
from zero._optim.elementwise_check import check_states, updates_tensors
from zero._optim.masters import GivenOptimizer, Groups, as_groups, build_inner, check_options
from zero._optim.muon import check_matrices, is_divisible
from zero._optim.optimizer_clone import check_is_new
from zero._optim.several import as_one, optimizers_of
from zero._optim.updaters import updater_of
from zero._ranks.rank_errors import on_every_rank
from zero._runtime.runtime import Runtime
from zero._sharding.bucket import Bucket
from zero._sharding.stacked import parts_of
from zero._sharding.stages import get_stage
from zero._storage.tier_settings import Tier

logger = logging.getLogger("zero")


def check_inputs(
    model: nn.Module,
    optimizer: type[Optimizer] | Optimizer | Sequence[Optimizer],
    config: Source | Configuration | None,
    options: dict[str, Any],
    ranks: Topology | dist.ProcessGroup | None,
) -> tuple[ResolvedConfig, GivenOptimizer]:
    """The plan for what a user gave, and several optimizers as one. Nothing is changed.

    Raises on every rank if something is invalid or ranks differ. Collective over ``ranks``; None: all of
    torch.distributed.
    """
    given = ranks if isinstance(ranks, Topology) else None

    def understand() -> tuple[ResolvedConfig, GivenOptimizer]:
        one: GivenOptimizer = as_one(optimizer)
        return _understand(model, one, config, options, given), one

    plan, one = on_every_rank(understand, ranks)
    check_same(model, plan.configuration, one, plan.optimizer_options, ranks)
    return plan, one


def _check_is_unwrapped(model: nn.Module) -> None:
    """Refuse DistributedDataParallel and DTensors: gradients would be averaged, or parameters sharded, twice."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not its parameters: got {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            where = f"its module {name!r}" if name else "model"
            raise ConfigError(
                f"{where} is a DistributedDataParallel, which averages gradients itself: give its .module"
            )
    for name, param in model.named_parameters():
        if hasattr(param, "placements"):  # a DTensor; importing its class takes megabytes
            raise ConfigError(
                f"parameter {name!r} is sharded already, by fully_shard or tensor parallelism: give a plain model"
            )


def _understand(
    model: nn.Module,
    optimizer: type[Optimizer] | Optimizer,
    config: Source | Configuration | None,
    options: dict[str, Any],
    topology: Topology | None,
) -> ResolvedConfig:
    if not (isinstance(optimizer, Optimizer) or (isinstance(optimizer, type) and issubclass(optimizer, Optimizer))):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer class or instance: got {optimizer!r}")
    _check_is_unwrapped(model)
    check_is_plain(model)
    plan = resolve_config(config, options)
    as_groups(model, optimizer)
    for name, param in model.named_parameters():
        parts_of(param, name)
    for one in optimizers_of(optimizer) if isinstance(optimizer, Optimizer) else ():
        check_is_new(one)
        check_matrices(one, model)
    device = check_model(model)
    check_backend("training", topology, plan.settings.backend, plan.settings.kernels, device)
    check_options(optimizer, plan.optimizer_options)
    tier = plan.settings.tiers.states
    if tier.tier is not Tier.DEVICE and tier.ratio == 1:
        device = torch.device("cpu")
    own_options = plan.optimizer_options
    if isinstance(optimizer, type):
        trial = build_inner(optimizer, [{"params": []}], [], own_options)
        is_whole = _updates_tensors(optimizer, trial, own_options, device, model)
        if is_whole:
            _check_takes(optimizer, own_options, model)
            check_matrices(optimizer, model)
        return replace(plan, whole_groups=(is_whole,))
    of_groups: list[bool] = []
    for one in optimizers_of(optimizer):
        of_groups += [_updates_tensors(one, one, {}, device, model)] * len(one.param_groups)
    return replace(plan, whole_groups=tuple(of_groups))


def _updates_tensors(
    optimizer: Optimizer | type[Optimizer],
    trial: Optimizer,
    options: dict[str, Any],
    device: torch.device,
    model: nn.Module,
) -> bool:
    """Whether ``optimizer`` updates whole tensors. Raises ConfigError if it cannot be sharded; ``trial``: it, built."""
    updater = updater_of(trial)
    updater.check_placement(device, [p.dtype for p in model.parameters() if p.requires_grad])
    if updater.is_fused:
        return False
    is_whole = updates_tensors(optimizer, options, device)
    check_states(trial, device, is_whole=is_whole)
    return is_whole


def _check_takes(optimizer: type[Optimizer], options: dict[str, Any], model: nn.Module) -> None:
    """Raise ConfigError if ``optimizer`` refuses a trainable parameter: Muon takes matrices only."""
    for name, param in model.named_parameters():
        if param.requires_grad:
            try:
                optimizer([torch.empty(shape, device="meta") for shape in parts_of(param, name)], **options)
            except (ValueError, TypeError, RuntimeError) as error:
                raise ConfigError(
                    f"{optimizer.__name__} refuses parameter {name!r} of shape {tuple(param.shape)}: {error}. Give a "
                    "list of two optimizers, it with the parameters that it takes and another one with the others; "
                    "zero.split_for_muon(model) divides them"
                ) from error


def described_placement(buckets: Sequence[Bucket]) -> tuple[str, ...]:
    """What is done with whole tensors, for ``optimizer.effective``; empty without any."""
    num_tensors = sum(len(slot.parts) for bucket in buckets for slot in bucket.layout.slots)
    if not num_tensors:
        return ()
    dealt = [bucket.layout.sizes for bucket in buckets if bucket.layout.sizes is not None]
    if not dealt:
        return (f"{num_tensors} tensors are updated as a whole",)
    of_ranks = [sum(sizes) for sizes in zip(*dealt, strict=True)]
    share = max(of_ranks) * len(of_ranks) / sum(of_ranks)
    return (
        f"{num_tensors} tensors are updated as a whole, dealt out to the ranks; the largest shard is {share:.2f} times "
        "the mean",
    )


def whole_parameters(groups: Groups, plan: ResolvedConfig, optimizer: GivenOptimizer) -> dict[nn.Parameter, bool]:
    """The parameters that their optimizer updates as whole tensors, and whether a node could do it together."""
    owners: list[GivenOptimizer] = [optimizer]
    if isinstance(optimizer, Optimizer):
        owners = [one for one in optimizers_of(optimizer) for _ in one.param_groups]
    is_allowed = plan.settings.tiers.states.allows_joint_updates
    return {
        param: is_allowed and is_divisible(owner, param)
        for owner, group, is_whole in zip(owners, groups, plan.whole_groups, strict=True)
        if is_whole
        for param in group["params"]
        if param.requires_grad
    }


def announce(plan: ResolvedConfig, runtime: Runtime) -> None:
    """Log on one rank the inactive and the effective settings."""
    if runtime.is_log_rank:
        if not logger.hasHandlers():
            logger.addHandler(logging.StreamHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        for note in plan.notes:
            logger.warning("%s", note)
        logger.info("%s", runtime.effective)


def choose_changes(model: nn.Module, settings: ZeroSettings, topology: Topology) -> tuple[ZeroSettings, list[str]]:
    """``settings`` with what the mode sends of parameters in place of ``changes="auto"``, and why, in words.

    Exact for trained parameters of 16 bits in host memory, where it was measured to win or to be level. Compiled
    kernels have no say: they decide how long a training takes, not its bits.
    """
    if settings.mode is None or settings.changes != AUTO or topology.num_nodes == 1:
        return settings, []
    quantized = replace(settings, changes="quantized")
    if settings.weight_format is not None:
        return quantized, []
    for name, param in model.named_parameters():
        if param.requires_grad and (param.dtype not in ulps.DTYPES or param.device.type != "cpu"):
            return quantized, [f"changes auto: quantized, as {name!r} is {param.dtype} on {param.device.type}"]
    slow = "" if ulps.is_compiled() else ", by the reference coder, which is slow: no compiled one was found"
    return replace(settings, changes=EXACT), [f"changes auto: exact{slow}"]


def choose_formats(
    model: nn.Module, settings: ZeroSettings, topology: Topology, whole: Mapping[nn.Parameter, bool]
) -> tuple[ZeroSettings, list[str]]:
    """``settings`` with formats in place of ``"auto"``, and what was chosen, in words. Collective if any is.

    ``whole``: see :func:`zero._model.model_layout.plan_model`.

    Raises:
        ConfigError: The first rank's probe file is invalid; on every rank.
    """
    plain = settings.with_formats(None, None)
    if plain == settings:
        return settings, []
    if not get_stage(settings.stage).shards_states:
        return plain, ["formats auto: none (stage 0 has no sharded exchange)"]
    planned = on_every_rank(lambda: plan_model(model, plain, topology, whole), topology)
    device, table, lines = check_model(model), table_of(topology), list[str]()
    buckets = [bucket for bucket in planned.buckets if bucket.dtype.is_floating_point]
    weights = max((min(b.layout.numel, settings.allgather_bucket_size) * b.dtype.itemsize for b in buckets), default=0)
    summed = (settings.gradient_dtype or torch.float32).itemsize
    trained = (min(b.layout.numel, settings.reduce_bucket_size) * summed for b in buckets if b.is_trainable)
    gradients = max(trained, default=0)
    # One format, forwarded as it is: that of the slower links.
    weight = str(table.choose("all_gather", weights, device).between)
    found = table.choose("reduce_scatter", gradients, device)
    hops = str(found.inside), str(found.between)
    if settings.weight_format == AUTO:
        lines.append(f"weight_format auto: {weight} for {weights:,} bytes")
    if settings.gradient_format == AUTO:
        lines.append(f"gradient_format auto: {','.join(dict.fromkeys(hops))} for {gradients:,} bytes")
        settings = replace(settings, quantized_gradients=False)  # "none" would leave it on
    return settings.with_formats(weight, None if set(hops) == {"none"} else hops), lines
