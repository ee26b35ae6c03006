"""The model that ``zero plan`` plans for: its parameters' sizes by unit, and its shape for activations and FLOPs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby, repeat
from math import prod
from typing import Any, cast

import torch
from torch import nn

from zcomm import ConfigError, Topology
from zero._model.model_layout import layouts_of_units
from zero._optim.muon import Muon, divide_by_role, is_divisible
from zero._runtime.exchanges import TopologyShape
from zero._sharding.layout import BucketLayout, group_consecutive
from zero._sharding.units import Unit, by_kind, find_units
from zero.plan.formulas import Counts

MAX_MODULES = 10_000
"""Layers and experts are built one by one: a damaged configuration must not keep the process busy."""
COUNTED = re.compile("layer|expert|depth")
REMEDY = (
    "give the model on the meta device to zero.plan.Model.of_module, or its size by --parameters and --layers"
    " (zero.plan.Model.of_numel)"
)


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """A unit: parameters of one dtype that are gathered as one; the model has ``repeats`` of them."""

    shapes: tuple[tuple[int, ...], ...]
    """Of each parameter."""
    repeats: int = 1
    is_trainable: bool = True
    is_layer: bool = False
    """Whether the model has one for each layer."""
    are_matrices: tuple[bool, ...] = ()
    """Which parameters are hidden matrices, for Muon; empty: none."""

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(map(prod, self.shapes))

    @property
    def numel(self) -> int:
        """Elements of one unit."""
        return sum(self.numels)


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
        norms, attention = ((h,),) * 4, ((3 * h, h), (3 * h,), (h, h), (h,))
        shapes = (*norms, *attention, (4 * h, h), (4 * h,), (h, 4 * h), (h,))
        are_matrices = tuple(len(shape) == 2 for shape in shapes)
        block = PlannedUnit(shapes, num_layers, is_layer=True, are_matrices=are_matrices)
        ends = (PlannedUnit(((vocabulary, h),)), PlannedUnit(((sequence, h),)))
        return cls(units=(*ends, block, PlannedUnit(((h,), (h,)))), num_layers=num_layers, hidden=h, sequence=sequence)

    @classmethod
    def of_numel(cls, numel: float, num_layers: int, *, sequence: int = 1024) -> Model:
        """Make a model of ``numel`` elements in equal layers of 12 h^2, without embeddings; h follows."""
        of_layer = int(numel / num_layers)
        if of_layer < 1:
            raise ConfigError(f"there must be parameters and layers: parameters={numel}, layers={num_layers}")
        hidden = max(int((of_layer / 12) ** 0.5), 1)
        layers = PlannedUnit(((of_layer,),), num_layers, is_layer=True)
        return cls(units=(layers,), num_layers=num_layers, hidden=hidden, sequence=sequence)

    @classmethod
    def of_module(
        cls, module: nn.Module, *, num_layers: int, hidden: int, sequence: int = 1024, idle_numel: int = 0
    ) -> Model:
        """Take the parameters of ``module``, also on the meta device, in the units of :class:`zero.ZeroOptimizer`.

        Args:
            module: The model.
            num_layers: The items of the ``ModuleList`` of this length are the layers, if they are alike.
            hidden: Width, for the activations.
            sequence: Tokens of a sequence.
            idle_numel: Elements of each layer that a token does not use.
        """
        lists = [one for one in module.modules() if isinstance(one, nn.ModuleList) and len(one) == num_layers]
        layers = {id(layer) for layer in lists[0]} if len(lists) == 1 else set()  # of two, either may be the layers
        matrices, units = set(divide_by_role(module).matrices), []
        for unit in find_units(module):
            for (_, is_trainable), named in by_kind(unit.parameters).items():
                shapes, is_layer = tuple(tuple(param.shape) for _, param in named), id(unit.module) in layers
                of_unit = tuple(param in matrices for _, param in named)
                units.append(PlannedUnit(shapes, is_trainable=is_trainable, is_layer=is_layer, are_matrices=of_unit))
        runs = [(unit, len(list(equal))) for unit, equal in groupby(units)]
        merged = [replace(unit, repeats=n, is_layer=unit.is_layer and n == num_layers) for unit, n in runs]
        return cls(units=tuple(merged), num_layers=num_layers, hidden=hidden, sequence=sequence, idle_numel=idle_numel)

    @classmethod
    def of_config(cls, config: Any, *, sequence: int | None = None) -> Model:
        """Make a model from its transformers configuration, or the dict of a ``config.json``.

        transformers builds it on the meta device: the class of ``architectures``, by default a language model.

        Args:
            config: Of a model with one stack of layers, of any family that transformers has. Code that comes with a
                model is never run.
            sequence: Tokens of a sequence; default: the longest that the model takes.

        Raises:
            ConfigError: transformers is missing or cannot build the model, the model has several stacks (an encoder and
                a decoder, or vision), it is not known how many experts a token uses, or the sequence is longer than the
                model's table of positions.
        """
        config, module = _build(config)
        positions: Any = getattr(config, "max_position_embeddings", None)
        length = positions if sequence is None else sequence
        if not isinstance(length, int) or length < 1:
            raise ConfigError(f"the configuration names no longest sequence: sequence={length}; set --sequence")
        tables = [one.num_embeddings for one in module.modules() if isinstance(one, nn.Embedding)]
        if isinstance(positions, int) and length > positions and {positions, positions + 2} & set(tables):
            raise ConfigError(f"sequence must be 1 to {positions} tokens for this model: sequence={length}")
        layers, idle = config.num_hidden_layers, _idle_numel(config, module)
        model = cls.of_module(module, num_layers=layers, hidden=config.hidden_size, sequence=length, idle_numel=idle)
        return replace(model, read=f"{type(module).__name__}, {layers} layers of {config.hidden_size}")

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
                are = unit.are_matrices or (False,) * len(unit.shapes)
                parts = zip(unit.shapes, are, strict=True)
                units += [replace(unit, shapes=(shape,), are_matrices=(one,)) for shape, one in parts]
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

    def dealt(
        self, num_nodes: int, ranks_per_node: int, merged_numel: int, *, deals: bool
    ) -> tuple[tuple[BucketLayout, bool], ...]:
        """The buckets if Muon updates the hidden matrices, and whether they are trainable; ``deals``: by shards.

        Raises:
            ConfigError: The model has no matrices.
        """
        if not any(any(unit.are_matrices) for unit in self.units):
            raise ConfigError(
                "Muon updates matrices, and none are known of this model: give --layers and --hidden, or a config.json"
            )
        return _dealt(self, num_nodes, ranks_per_node, merged_numel, deals=deals)

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


@lru_cache(maxsize=4)  # the rows of a plan differ in little else
def _dealt(
    model: Model, num_nodes: int, ranks_per_node: int, merged_numel: int, *, deals: bool
) -> tuple[tuple[BucketLayout, bool], ...]:
    units, whole, empty = [], dict[nn.Parameter, bool](), nn.Module()
    for unit in chain.from_iterable(repeat(one, one.repeats) for one in model.units):
        made = [nn.Parameter(torch.empty(s, device="meta"), requires_grad=unit.is_trainable) for s in unit.shapes]
        matrices = [param for param, is_matrix in zip(made, unit.are_matrices, strict=False) if is_matrix]
        whole |= {param: is_divisible(Muon, param) for param in matrices}
        units.append(Unit("", empty, tuple(("", param) for param in made)))
    topology = cast(Topology, TopologyShape(num_nodes, ranks_per_node))
    return tuple(layouts_of_units(units, whole, topology, merged_numel=merged_numel, deals=deals))


def _layout(numels: tuple[int, ...], world_size: int) -> BucketLayout:
    return BucketLayout.of([""] * len(numels), [(n,) for n in numels], world_size)


def _build(config: Any) -> tuple[Any, nn.Module]:
    """The configuration as transformers' object, and its module on the meta device."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"a config.json is read by transformers: pip install transformers, or {REMEDY}") from error
    try:
        if isinstance(config, dict):
            values = {name: value for name, value in config.items() if name != "model_type"}
            config = transformers.AutoConfig.for_model(config["model_type"], **values)
        config = deepcopy(config)  # a model sets fields of its configuration
        config._attn_implementation = "eager"  # no kernels need to be installed
        if (
            getattr(config, "is_encoder_decoder", False)
            or config.get_text_config() is not config
            or not config.hidden_size
        ):
            raise ValueError("it must have one stack of layers")
        numbers = [n for name, n in config.to_dict().items() if isinstance(n, int) and COUNTED.search(name)]
        if not 1 <= config.num_hidden_layers <= MAX_MODULES or max(numbers, default=0) > MAX_MODULES:
            raise ValueError(f"there must be 1 to {MAX_MODULES} layers and experts")
        kinds = [getattr(transformers, name) for name in config.architectures or ()]
        with torch.device("meta"):
            if not kinds:
                return config, transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
            if not issubclass(kinds[0], transformers.PreTrainedModel) or kinds[0].config_class is not type(config):
                raise ValueError(f"{kinds[0].__name__} is no model of {type(config).__name__}")
            return config, kinds[0](config)
    except Exception as error:  # whatever transformers raises for fields that do not fit
        found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise ConfigError(f"transformers cannot build model_type={found!r}: {error!r}; {REMEDY}") from error


def _idle_numel(config: Any, module: nn.Module) -> int:
    """Elements of experts that a token is not sent to, of a layer on average."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    num_experts = next((value for name in names if (value := getattr(config, name, None))), None)
    of_experts = sum(
        param.numel()
        for name, param in module.named_parameters()
        if ".experts." in name or (param.ndim == 3 and param.shape[0] == num_experts)
    )
    if not of_experts and num_experts is None:
        return 0
    used = getattr(config, "num_experts_per_tok", None)
    if not of_experts or num_experts is None or used is None or not 1 <= used <= num_experts:
        raise ConfigError(
            f"a token must use some of the experts: num_experts_per_tok={used}, num_experts={num_experts}, their "
            f"parameters={of_experts}; {REMEDY}"
        )
    idle: int = of_experts * (num_experts - used) // num_experts // config.num_hidden_layers
    return idle


MODELS = {
    "gpt2-1.5b": (48, 1600),
    "7b": (32, 4096),
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
