"""What every rank must be given alike for a training to be one: the configuration and the optimizer's settings.

Another learning rate on one rank would be no error anywhere, and a wrong result: that rank's shards would be updated
with it. So are the members of parameter groups. Folders may differ, and what only reports.
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
from zcomm._transport.fingerprint import differing
from zcomm._transport.store_exchange import meet
from zero._config.parse import Configuration

MAY_DIFFER = {
    "aio", "autotuning", "comet", "comms_logger", "csv_monitor", "dump_state", "flops_profiler", "log_level",
    "memory_breakdown", "nebula", "steps_per_print", "tensorboard", "timers", "wall_clock_breakdown", "wandb",
    "activations_nvme_path", "nvme_path",
}  # fmt: skip
MAX_TOLD = 5
"""Differences that an error tells."""
PLAIN = (bool, int, float, str, type(None))


def check_same(
    model: nn.Module,
    configuration: Configuration,
    optimizer: Optimizer | type[Optimizer] | None,
    options: Mapping[str, Any],
    ranks: Topology | dist.ProcessGroup | None,
) -> None:
    """Raise ConfigError on every rank, with the keys, values and ranks, unless all were given the same. Collective.

    Args:
        model: Names the parameters.
        configuration: Read and checked.
        optimizer: Its class, and the settings and the members of its parameter groups are compared.
        options: More settings of an optimizer that is yet to be made.
        ranks: Who is asked; None: all ranks of torch.distributed.

    Cost for each rank: 8 bytes to every other rank; where they differ a meeting in torch.distributed's store.
    """
    mine = (
        dict(_flat("", configuration.values)) | dict(_of_optimizer(optimizer, model)) | dict(_flat("option ", options))
    )
    if control.are_equal(json.dumps(mine, sort_keys=True), ranks):
        return
    found = what_differs(mine, ranks, lane="configuration")
    raise ConfigError(f"every rank must be given the same configuration and optimizer: {told(found)}")


def what_differs(mine: Mapping[str, str], ranks: Topology | dist.ProcessGroup | None, *, lane: str) -> list[str]:
    """Of each fact, by name, that is not the same on all ranks a line with its values and their ranks. Collective.

    A meeting in torch.distributed's store, named ``lane``: for ranks that are about to raise.
    """
    group = ranks.world.group if isinstance(ranks, Topology) else ranks or dist.group.WORLD
    assert group is not None, "a rank alone is equal to itself"
    members = dist.get_process_group_ranks(group)
    texts = meet(members, json.dumps(mine, sort_keys=True), lane=lane, timeout=timeout_of(group))
    return differing(dict(zip(members, map(json.loads, texts), strict=True)))


def told(lines: Sequence[str]) -> str:
    """The first few ``lines``, and how many more there are."""
    more = f"; and {len(lines) - MAX_TOLD} more" if len(lines) > MAX_TOLD else ""
    return "; ".join(lines[:MAX_TOLD]) + more


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """By path, as text, what can be compared as text."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in MAY_DIFFER:
                yield from _flat(f"{path}.{name}" if path and not path.endswith(" ") else f"{path}{name}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _flat(f"{path}[{index}]", inner)
    elif isinstance(value, PLAIN):
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
        for param in group["params"]:  # in any order
            yield f"the parameter group of {names[param]!r}", str(index)
