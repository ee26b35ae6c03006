"""Divides a model into units: the modules whose parameters are gathered and released together.

Each layer of a ``ModuleList`` (or of a ``Sequential`` of composite layers) is a unit, and so is every other child of
the modules above them. The parameters that such an upper module holds directly are a unit of their own, together with
those of its ``ParameterList`` and ``ParameterDict``, which have no forward. A leaf module (``_model/leaf_modules.py``)
is one unit, whatever is in it. The division depends on the model's structure alone, never on a stage, a bucket size or
a world size.

A unit with more elements than may be gathered at a time is divided into its children, down to single layers, except
for modules of torch.nn that use their children's parameters without calling the children: their hooks would never run.

    GPT                          units:  wte | wpe | blocks.0 | blocks.1 | ... | ln_f
      wte, wpe, ln_f, lm_head            (lm_head is tied to wte, so its weight is in wte's unit)
      blocks: ModuleList
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
USING_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
EXTERNAL = "zero_external_parameters"
"""The attribute of a module that holds the parameters it uses and does not own."""
LEAF = "zero_is_leaf_module"
"""The attribute of a module that says whether it is gathered as one unit."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together, and the module whose forward needs them."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def find_units(model: nn.Module, max_numel: int = sys.maxsize) -> list[Unit]:
    """Divide ``model`` into units. Each parameter is in one unit; a tied one is in that of its first owner.

    Args:
        model: The model.
        max_numel: A module with more elements than this is divided into its children.
    """
    return [unit for unit in _visit("", model, set(), max_numel, is_root=True) if unit.parameters]


def _visit(
    name: str, module: nn.Module, seen: set[nn.Parameter], max_numel: int, *, is_root: bool = False
) -> Iterator[Unit]:
    children = [
        (child_name, child)
        for child_name, child in module.named_children()
        if _has_parameters(child) and not isinstance(child, PARAMETER_CONTAINERS)
    ]
    is_divided = is_root or (not is_compiled(module) and (_is_divisible(module) or _is_too_large(module, max_numel)))
    if not children or is_leaf(module) or not is_divided:
        yield Unit(name, module, _take(name, module.named_parameters(), seen))
        return
    yield Unit(name, module, _take(name, own_parameters(module), seen))
    for child_name, child in children:
        yield from _visit(f"{name}.{child_name}".lstrip("."), child, seen, max_numel)


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that ``module``'s own forward uses, with those in its ParameterList and ParameterDict."""
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if isinstance(child, PARAMETER_CONTAINERS):
            yield from child.named_parameters(prefix=name)


def by_kind(
    named: Iterable[tuple[str, nn.Parameter]],
) -> dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]]:
    """``named`` parameters by dtype and requires_grad, each of which gets a bucket of its own."""
    kinds = defaultdict(list)
    for name, param in named:
        kinds[param.dtype, param.requires_grad].append((name, param))
    return kinds


def is_leaf(module: nn.Module) -> bool:
    """Whether ``module`` is gathered as one unit, however many layers are in it."""
    return bool(module.__dict__.get(LEAF, False))


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of other modules that ``module``'s forward was declared to use."""
    return list(module.__dict__.get(EXTERNAL, ()))


def _take(
    prefix: str, named: Iterator[tuple[str, nn.Parameter]], seen: set[nn.Parameter]
) -> tuple[tuple[str, nn.Parameter], ...]:
    taken = [(f"{prefix}.{name}".lstrip("."), param) for name, param in named if param not in seen]
    seen.update(param for _, param in taken)
    return tuple(taken)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was compiled by torch.compile, in place or not: its children's hooks may not run."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _is_too_large(module: nn.Module, max_numel: int) -> bool:
    numel = sum(param.numel() for param in module.parameters())
    return numel > max_numel and not isinstance(module, USING_THEIR_CHILDREN)


def _is_divisible(module: nn.Module) -> bool:
    """Whether ``module`` has a list of layers in it, or a leaf module, at which the division ends."""
    return any(is_leaf(descendant) or _is_list_of_layers(descendant) for descendant in module.modules())


def _is_list_of_layers(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return _has_parameters(module)
    if isinstance(module, nn.Sequential):  # an MLP written as a Sequential of single layers is one unit
        return any(_has_parameters(child) and any(True for _ in child.children()) for child in module)
    return False
