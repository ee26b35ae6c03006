"""Replace torch's Adam and AdamW by :class:`zero.CPUAdam`, with their settings, when masters are off the device.

Also those in a list of optimizers.

torch makes one pass over memory for each operation of a step; CPUAdam moves each value once. The rule and the names of
the states are the same, so each loads checkpoints of the other.

    torch's option                               here
    lr, betas, eps, weight_decay, amsgrad,       the same, by parameter group
      maximize, decoupled_weight_decay
    foreach, fused                               ignored: they say how torch loops
    capturable, differentiable, betas as         torch's own optimizer is kept; ``optimizer.effective`` says why
      tensors, hooks of step or state dict,
      a class derived from torch's, float64
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from zero._config.resolved import ResolvedConfig
from zero._optim.cpu_optimizers import CPUAdam
from zero._optim.masters import GivenOptimizer, Groups, MasterPiece, build_inner
from zero._optim.several import Several, optimizers_of
from zero._optim.updaters import updater_of
from zero._sharding.bucket import Bucket


def build_updater(
    optimizer: GivenOptimizer, groups: Groups, pieces: list[MasterPiece], plan: ResolvedConfig, buckets: list[Bucket]
) -> Optimizer:
    """The inner optimizer over ``pieces``, this rank's masters: ``optimizer``, or a CPUAdam in place of each Adam.

    The choice depends on ``plan`` and ``buckets`` only, so it is the same on every rank.
    """
    inner = build_inner(optimizer, groups, pieces, plan.optimizer_options)
    trainable = [bucket for bucket in buckets if bucket.is_trainable]
    is_on_host = all(b.states.is_on_host and b.dtype != torch.float64 for b in trainable)
    is_wanted = plan.configuration.values.zero_force_ds_cpu_optimizer
    if not (is_wanted and is_on_host):
        return inner
    if isinstance(inner, Several):
        inner.optimizers = [_replaced(one) for one in inner.optimizers]
        inner.share()
        return inner
    return _replaced(inner)


def _replaced(inner: Optimizer) -> Optimizer:
    return _as_cpu_adam(inner) if isinstance(inner, Adam) and not any(_reasons(inner)) else inner


def _as_cpu_adam(inner: Adam) -> CPUAdam:
    """A CPUAdam in place of ``inner``; they have the same groups and states: see ``Updater.share``."""
    for group in inner.param_groups:
        group["adamw_mode"] = group["decoupled_weight_decay"]
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
    new = CPUAdam(inner.param_groups, **{name: inner.defaults[name] for name in names})
    new.stands_for, new.given = f"torch.optim.{type(inner).__name__}", ref(inner)
    if "step" in vars(inner):  # else a scheduler would warn that step() was never called
        inner._opt_called = True  # type: ignore[attr-defined]
    return new


def describe_update(inner: Optimizer) -> str:
    """The optimizer that updates masters off the device, for ``optimizer.effective``."""
    if isinstance(inner, Several):
        return " and ".join(map(describe_update, inner.optimizers))
    text = f"{type(inner).__module__.partition('.')[0]}'s {type(inner).__name__}"
    if given := updater_of(inner).stands_for:
        return f"{text} in place of the {given} that was given"
    reasons = list(_reasons(inner)) if isinstance(inner, Adam) else []
    return f"{text} ({', '.join(reasons)})" if reasons else text


def is_same_rule(inner: Optimizer, saved: str, options: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ``inner`` can load the states of an optimizer of the class ``saved`` with these groups.

    True for the same class, or if both are Adam and every group has the same kind of weight decay in both; of several,
    if it is true for each.
    """
    own, names = optimizers_of(inner), saved.split(" + ")
    ends = accumulate((len(one.param_groups) for one in own), initial=0)
    parts = [options[first:end] for first, end in pairwise(ends)]
    return len(own) == len(names) and all(map(_is_same, own, names, parts))


def _is_same(inner: Optimizer, saved: str, options: Sequence[Mapping[str, Any]]) -> bool:
    if type(inner).__name__ == saved:
        return True
    groups = inner.param_groups
    return (
        type(inner) in (Adam, AdamW, CPUAdam)
        and saved in ("Adam", "AdamW", "CPUAdam")
        and all(group.get("bias_correction", True) for group in (*groups, *options))
        and [_decouples(group, type(inner).__name__) for group in groups] == [_decouples(o, saved) for o in options]
    )


def _decouples(group: Mapping[str, Any], name: str) -> bool:
    return bool(group.get("adamw_mode", group.get("decoupled_weight_decay", name == "AdamW")))


def _reasons(optimizer: Optimizer) -> Iterator[str]:
    """Why CPUAdam cannot replace it."""
    if type(optimizer) not in (Adam, AdamW):
        yield "a custom class"
    if getattr(optimizer, "torch_adam", False):
        yield "optimizer.params.torch_adam is true"
    groups = [optimizer.defaults, *optimizer.param_groups]
    for name in ("capturable", "differentiable"):
        if any(group.get(name) for group in groups):
            yield f"{name}=True"
    if any(isinstance(beta, Tensor) for group in groups for beta in group["betas"]):
        yield "betas are tensors"
    if any(hooks for name, hooks in vars(optimizer).items() if name.startswith("_optimizer_") and "hooks" in name):
        yield "it has hooks"
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        yield "its step() was replaced"
