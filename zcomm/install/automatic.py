"""The recipe ``"auto"``: formats that ``zcomm probe`` found fastest on these links for the largest exchange.

Chosen once, at the installation, from the table that the first rank has (:mod:`zcomm.auto`): all ranks have the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from zcomm.auto import Choice, table_of
from zcomm.recipes import AUTO_RECIPE, Recipe
from zcomm.topology import Topology

__all__ = ["for_all_reduce", "for_shards"]


def for_all_reduce(topology: Topology, nbytes: int, device: torch.device) -> Recipe:
    """What averages whole gradients of ``nbytes`` fastest. Collective."""
    chosen = table_of(topology).choose("all_reduce", nbytes, device)
    # One format brings values back over both hops, as it is: that of the hop which is rounded least.
    name = f"auto ({_text(chosen)} for {nbytes:,} bytes)"
    return replace(AUTO_RECIPE, name=name, gradients=(chosen.inside, chosen.between), reduced=chosen.inside)


def for_shards(topology: Topology | None, nbytes: tuple[int, int], device: torch.device) -> Recipe:
    """What gathers and reduces ``nbytes`` of weights, of gradients, fastest. Collective.

    Without a Topology nothing is known of the links, and nothing is quantized.
    """
    if topology is None:
        return replace(AUTO_RECIPE, name="auto (none: no topology, and so no probe)")
    table = table_of(topology)
    weights = table.choose("all_gather", nbytes[0], device)
    gradients = table.choose("reduce_scatter", nbytes[1], device)
    name = f"auto (weights {weights.between} for {nbytes[0]:,}, gradients {_text(gradients)} for {nbytes[1]:,} bytes)"
    return replace(AUTO_RECIPE, name=name, weights=weights.between, gradients=(gradients.inside, gradients.between))


def _text(choice: Choice) -> str:
    return str(choice.inside) if choice.inside == choice.between else f"{choice.inside},{choice.between}"
