"""The model that ``zero plan`` plans for: its parameters' sizes by unit, and its shape for activations and FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zcomm import ConfigError
from zero._sharding.layout import BucketLayout, group_consecutive
from zero._sharding.units import find_units
from zero.plan.families import PlannedUnit, shape_of
from zero.plan.formulas import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The units of a transformer and its shape."""

    units: tuple[PlannedUnit, ...]
    num_layers: int
    hidden: int
    sequence: int
    idle_numel: int = 0
    """Elements of each layer that a token does not use: experts that it is not routed to."""
    read: str = ""
    """What was read from a configuration, as text for the user."""

    @classmethod
    def of_shape(cls, num_layers: int, hidden: int, *, vocabulary: int = 50257, sequence: int = 1024) -> Model:
        """Make a GPT with tied embeddings: 12 h^2 + 13 h elements in a layer, and (vocabulary + sequence + 2) h."""
        if min(num_layers, hidden, vocabulary, sequence) < 1:
            raise ConfigError(
                f"a model's shape must be positive: layers={num_layers}, hidden={hidden}, vocabulary={vocabulary}, "
                f"sequence={sequence}"
            )
        h = hidden
        norms, attention = (h, h, h, h), (3 * h * h, 3 * h, h * h, h)
        block = PlannedUnit((*norms, *attention, 4 * h * h, 4 * h, 4 * h * h, h), num_layers, is_layer=True)
        ends = (PlannedUnit((vocabulary * h,)), PlannedUnit((sequence * h,)))
        return cls(units=(*ends, block, PlannedUnit((h, h))), num_layers=num_layers, hidden=h, sequence=sequence)

    @classmethod
    def of_numel(cls, numel: float, num_layers: int, *, sequence: int = 1024) -> Model:
        """Make a model of ``numel`` elements in equal layers of 12 h^2, without embeddings; h follows."""
        of_layer = int(numel / num_layers)
        if of_layer < 1:
            raise ConfigError(f"there must be parameters and layers: parameters={numel}, layers={num_layers}")
        hidden = max(int((of_layer / 12) ** 0.5), 1)
        layers = PlannedUnit((of_layer,), num_layers, is_layer=True)
        return cls(units=(layers,), num_layers=num_layers, hidden=hidden, sequence=sequence)

    @classmethod
    def of_module(
        cls, module: nn.Module, *, num_layers: int, hidden: int, sequence: int = 1024, idle_numel: int = 0
    ) -> Model:
        """Take the parameters of ``module``, also on the meta device, in the units of :class:`zero.ZeroOptimizer`."""
        units = []
        for unit in find_units(module):
            kinds: dict[Any, list[int]] = {}
            for _, param in unit.parameters:
                kinds.setdefault((param.dtype, param.requires_grad), []).append(param.numel())
            units += [PlannedUnit(tuple(n), is_trainable=is_trainable) for (_, is_trainable), n in kinds.items()]
        return cls(units=tuple(units), num_layers=num_layers, hidden=hidden, sequence=sequence, idle_numel=idle_numel)

    @classmethod
    def of_config(cls, config: Any, *, sequence: int | None = None) -> Model:
        """Make a language model from its transformers configuration, or the dict of a ``config.json``.

        Args:
            config: A configuration of one of :data:`zero.plan.families.FAMILIES`.
            sequence: Tokens of a sequence; default: the longest that the model takes.

        Raises:
            ConfigError: The family, or a field that adds parameters, is unknown; a field is missing; or the sequence is
                longer than the model's position embeddings.
        """
        shape = shape_of(config if isinstance(config, dict) else config.to_dict())
        length = shape.positions if sequence is None else sequence
        if length < 1 or (shape.has_table and length > shape.positions):
            raise ConfigError(
                f"sequence must be 1 to {shape.positions} tokens for this model: sequence={length}; set --sequence"
            )
        return cls(
            units=shape.units,
            num_layers=shape.num_layers,
            hidden=shape.hidden,
            sequence=length,
            idle_numel=shape.idle_numel,
            read=shape.read,
        )

    def of_layers(self, num_layers: int) -> Model:
        """Return this model with another number of layers."""
        if not any(unit.is_layer for unit in self.units):
            raise ConfigError("the model must have equal layers to be made larger: give its layers and hidden size")
        units = tuple(replace(unit, repeats=num_layers) if unit.is_layer else unit for unit in self.units)
        return replace(self, units=units, num_layers=num_layers)

    def cut(self, max_numel: int) -> Model:
        """Return this model with units of more than ``max_numel`` elements split into parameters, as stage 3 does."""
        units: list[PlannedUnit] = []
        for unit in self.units:
            if unit.numel <= max_numel:
                units.append(unit)
            else:
                units += [replace(unit, numels=(numel,)) for numel in unit.numels]
        return replace(self, units=tuple(units))

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(unit.numel * unit.repeats for unit in self.units)

    @property
    def active_numel(self) -> int:
        """Elements that one token uses: FLOPs are proportional to them."""
        return self.numel - self.num_layers * self.idle_numel

    def layouts(self, world_size: int, merged_numel: int = 0) -> Iterator[tuple[BucketLayout, int, bool]]:
        """Yield each bucket: layout, repeats, whether it is trainable. Units up to ``merged_numel`` share buckets."""
        small: list[PlannedUnit] = []
        for unit in self.units:
            if unit.numel <= merged_numel:
                small += [replace(unit, repeats=1)] * unit.repeats
                continue
            yield from _merged(small, world_size, merged_numel)
            small = []
            yield _layout(unit.numels, world_size), unit.repeats, unit.is_trainable
        yield from _merged(small, world_size, merged_numel)

    def counts(self, world_size: int) -> Counts:
        """Return the counts for :func:`zero.estimate`, with padding."""
        found = list(self.layouts(world_size))
        return Counts(
            numel=sum(layout.numel * repeats for layout, repeats, _ in found),
            trainable=sum(layout.numel * repeats for layout, repeats, is_trainable in found if is_trainable),
            largest_unit=max((layout.numel for layout, _, _ in found), default=0),
        )


def _merged(units: list[PlannedUnit], world_size: int, max_numel: int) -> Iterator[tuple[BucketLayout, int, bool]]:
    for run in group_consecutive([unit.numel for unit in units], max_numel):
        for is_trainable in (True, False):
            numels = tuple(n for i in run if units[i].is_trainable == is_trainable for n in units[i].numels)
            if numels:
                yield _layout(numels, world_size), 1, is_trainable


def _layout(numels: tuple[int, ...], world_size: int) -> BucketLayout:
    return BucketLayout.of([""] * len(numels), [(n,) for n in numels], world_size)


MODELS = {
    "gpt2-1.5b": (48, 1600),
    "megatron-10b": (50, 4096),
    "13b": (40, 5120),
    "18b": (40, 6144),
    "49b": (60, 8192),
    "70b": (80, 8192),
    "91b": (72, 10240),
    "138b": (76, 12288),
    "1t": (128, 25600),
}
"""Layers and hidden size by name, from Megatron's examples and the papers' tables."""
