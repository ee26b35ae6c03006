"""Compares the configuration and the optimizer's settings between ranks, at construction.

A learning rate that differs on one rank raises no error anywhere: that rank's shards are updated with it, and the
result is wrong. Parameters in different groups have the same effect. Folders, and keys that only report, may differ.
Settings that change later are compared by :mod:`zero._gradients.step_consistency`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zcomm import ConfigError, Topology, control
from zcomm._transport.backend import timeout_of
from zcomm._transport.environment_check import differing
from zcomm._transport.store_exchange import exchange_texts
from zero._config.parse import Configuration

MAY_DIFFER = {
    "aio", "autotuning", "comet", "comms_logger", "csv_monitor", "dump_state", "flops_profiler", "log_level",
    "memory_breakdown", "nebula", "steps_per_print", "tensorboard", "timers", "wall_clock_breakdown", "wandb",
    "activations_nvme_path", "nvme_path",
}  # fmt: skip
MAX_REPORTED = 5
"""Differences that an error lists."""
COMPARED_TYPES = (bool, int, float, str, type(None))


def check_same(
    model: nn.Module,
    configuration: Configuration,
    optimizer: Optimizer | type[Optimizer] | None,
    options: Mapping[str, Any],
    ranks: Topology | dist.ProcessGroup | None,
) -> None:
    """Raise ConfigError on every rank, with keys, values and ranks, if the ranks were given different settings.

    Collective.

    Args:
        model: For the names of parameters.
        configuration: As read and checked.
        optimizer: Compared by its class, and by the settings and parameters of its parameter groups.
        options: Settings of an optimizer that is built later.
        ranks: The ranks to compare; None: all ranks of torch.distributed.

    Cost for each rank: 8 bytes to every other rank; if they differ, also an exchange through torch.distributed's store.
    """
    mine = (
        dict(_flat("", configuration.values)) | dict(_of_optimizer(optimizer, model)) | dict(_flat("option ", options))
    )
    # Agree first: a rank that raised alone would leave the others in their next collective, a deadlock.
    if control.are_equal(json.dumps(mine, sort_keys=True), ranks):
        return
    found = differences_between_ranks(mine, ranks, lane="configuration")
    raise ConfigError(f"every rank must be given the same configuration and optimizer: {summarize(found)}")


def differences_between_ranks(
    mine: Mapping[str, str], ranks: Topology | dist.ProcessGroup | None, *, lane: str
) -> list[str]:
    """A line for each fact that differs between ranks: its name, its values and their ranks. Collective.

    It exchanges through torch.distributed's store, under keys named by ``lane``, so only ranks that are about to raise
    should call it.
    """
    group = ranks.process_group if isinstance(ranks, Topology) else ranks or dist.group.WORLD
    assert group is not None, "a single rank has nothing to compare"
    members = dist.get_process_group_ranks(group)
    texts = exchange_texts(members, json.dumps(mine, sort_keys=True), lane=lane, timeout=timeout_of(group))
    return differing(dict(zip(members, map(json.loads, texts), strict=True)))


def summarize(lines: Sequence[str], most: int = MAX_REPORTED) -> str:
    """The first few ``lines``, and the number of the others."""
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Path and text of every value that can be compared as text."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in MAY_DIFFER:
                yield from _flat(f"{path}.{name}" if path and not path.endswith(" ") else f"{path}{name}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _flat(f"{path}[{index}]", inner)
    elif isinstance(value, COMPARED_TYPES):
        yield path, repr(value)


def _of_optimizer(optimizer: Optimizer | type[Optimizer] | None, model: nn.Module) -> Iterator[tuple[str, str]]:
    if optimizer is None:
        return
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    yield "optimizer class", cls.__name__
    names = {param: name for name, param in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups if isinstance(optimizer, Optimizer) else []):
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for name, value in settings.items():
            of_one = isinstance(value, Tensor) and value.numel() == 1
            yield from _flat(f"parameter group {index} {name}", value.item() if of_one else value)
        for param in group["params"]:  # compared by group alone, so that their order in it may differ
            yield f"the parameter group of {names[param]!r}", str(index)
