"""The wire formats of each parameter: the recipe's, unless an override names its module or the parameter is small.

    override    {"lm_head": "bf16", "transformer.h.0": "none"}: the longest dotted prefix of the parameter's name wins
    small       fewer than ``recipe.min_numel`` elements: uncompressed

The recipe ``"auto"`` takes the formats that ``zcomm probe`` found fastest on these links for the largest exchange. They
are chosen once, at the installation, from the first rank's table (:mod:`zcomm._collectives.auto_format`). Ranks with
different tables would choose different formats, and could not decode each other's messages.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from zcomm._collectives.auto_format import ProbedChoice, table_of
from zcomm._formats.formats import FORMATS, Format, get_format
from zcomm._formats.recipes import AUTO_RECIPE, Recipe, Wires
from zcomm._transport.topology import Topology
from zcomm.errors import ConfigError, FormatError

Override = str | Format | Recipe
Overrides = Mapping[str, Override]
"""By the name of a module or parameter."""
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of module names that torch.compile, activation checkpointing and FSDP1 insert."""
UNCOMPRESSED = Wires(FORMATS["none"], (FORMATS["none"], FORMATS["none"]), FORMATS["none"])


class NamedParameter(NamedTuple):
    """A parameter's names (several if it is tied) and its size."""

    names: tuple[str, ...]
    numel: int


class FormatChoice(NamedTuple):
    """The formats of one parameter, and the reason if they are not the recipe's."""

    name: str
    numel: int
    wires: Wires
    reason: str


def clean_name(name: str) -> str:
    """Return ``name`` without the parts that wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def choose_formats(named: Iterable[NamedParameter], recipe: Recipe, overrides: Overrides) -> list[FormatChoice]:
    """Choose the formats of every parameter, in order.

    Raises:
        ConfigError: An override's name matches no parameter; the nearest name is given.
        FormatError: A format does not exist.
    """
    named = list(named)
    wires, by_name = recipe.wires(), {name: _wires_of(name, override) for name, override in overrides.items()}
    _check_matches(by_name, [name for parameter in named for name in parameter.names])
    return [_choice_for(parameter, recipe, wires, by_name) for parameter in named]


def _wires_of(name: str, override: Override) -> Wires:
    if isinstance(override, Recipe):
        return override.wires()
    try:
        wire = get_format(override)
    except FormatError as error:
        raise FormatError(f"overrides[{name!r}]: {error}") from error
    return Recipe(weights=wire, gradients=(wire, wire), reduced=wire).wires()


def _choice_for(
    parameter: NamedParameter, recipe: Recipe, wires: Wires, overrides: Mapping[str, Wires]
) -> FormatChoice:
    matches = [prefix for name in parameter.names for prefix in _prefixes(name) if prefix in overrides]
    name = parameter.names[0]
    if matches:
        longest = max(matches, key=len)
        return FormatChoice(name, parameter.numel, overrides[longest], f"override {longest!r}")
    if parameter.numel < recipe.min_numel:
        return FormatChoice(name, parameter.numel, UNCOMPRESSED, f"fewer than {recipe.min_numel} elements")
    return FormatChoice(name, parameter.numel, wires, "")


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _check_matches(overrides: Iterable[str], names: list[str]) -> None:
    known = {prefix for name in names for prefix in _prefixes(name)}
    for override in overrides:
        if override not in known:
            close = difflib.get_close_matches(override, known, n=1, cutoff=0)
            nearest = f"; the nearest name is {close[0]!r}" if close else ""
            raise ConfigError(f"overrides must name modules or parameters of the model: {override!r}{nearest}")


@contextmanager
def closed_on_error(topology: Topology | None) -> Iterator[None]:
    """Close ``topology`` if the block raises."""
    try:
        yield
    except BaseException:
        if topology is not None:
            topology.close()
        raise


def for_all_reduce(topology: Topology, nbytes: int, device: torch.device) -> Recipe:
    """Return the recipe that averages gradients of ``nbytes`` fastest. Collective."""
    chosen = table_of(topology).choose("all_reduce", nbytes, device)
    # The all-gather sends the reduced values in one format over both hops: the more precise one, that inside the node.
    name = f"auto ({_text(chosen)} for {nbytes:,} bytes)"
    return replace(AUTO_RECIPE, name=name, gradients=(chosen.inside, chosen.between), reduced=chosen.inside)


def for_shards(topology: Topology | None, nbytes: tuple[int, int], device: torch.device) -> Recipe:
    """Return the recipe that gathers weights and reduces gradients of ``nbytes`` (of each) fastest. Collective.

    A probe's table is by topology: without a Topology nothing is quantized.
    """
    if topology is None:
        return replace(AUTO_RECIPE, name="auto (none: a probe needs a topology)")
    table = table_of(topology)
    weights = table.choose("all_gather", nbytes[0], device)
    gradients = table.choose("reduce_scatter", nbytes[1], device)
    name = f"auto (weights {weights.between} for {nbytes[0]:,}, gradients {_text(gradients)} for {nbytes[1]:,} bytes)"
    return replace(AUTO_RECIPE, name=name, weights=weights.between, gradients=(gradients.inside, gradients.between))


def _text(choice: ProbedChoice) -> str:
    return str(choice.inside) if choice.inside == choice.between else f"{choice.inside},{choice.between}"
