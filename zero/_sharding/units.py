"""Which parameters are gathered and released together: the model cut into units, module by module.

A unit is a module that is used as a whole: each layer of a ``ModuleList`` (or of a ``Sequential`` of composite layers),
and every other child of the modules above them. The parameters that such an upper module holds itself are a unit of
their own, with those of its ``ParameterList`` and ``ParameterDict``, which nobody calls. A leaf module
(:mod:`zero._model.leaf_modules`) is one unit, whatever is in it. The cut depends on the model's structure alone, never on a
stage, a bucket size or a world size.

A unit with more elements than may be gathered at a time is cut into its children, too, down to single layers; but not
the modules of torch.nn that use their children's parameters without calling them.

    GPT                          units:  wte | wpe | blocks.0 | blocks.1 | ... | ln_f
      wte, wpe, ln_f, lm_head            (lm_head, tied to wte, is served by wte's unit)
      blocks: ModuleList
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
USING_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
EXTERNAL = "zero_external_parameters"
"""The attribute of a module that holds the parameters it uses and does not own."""
LEAF = "zero_is_leaf_module"
"""The attribute of a module that says whether it is gathered as a whole."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together, and the module whose forward needs them."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def find_units(model: nn.Module, max_numel: int = sys.maxsize) -> list[Unit]:
    """Cut ``model`` into units. Each parameter is in one unit; a tied one belongs to its first owner.

    ``max_numel``: elements of a unit, where a module that holds others has more.
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
    """The parameters that ``module``'s own forward uses, those in its lists and dicts of parameters too."""
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if isinstance(child, PARAMETER_CONTAINERS):
            yield from child.named_parameters(prefix=name)


def is_leaf(module: nn.Module) -> bool:
    """Whether ``module`` is gathered as a whole, however many layers are in it."""
    return bool(module.__dict__.get(LEAF, False))


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that ``module``'s forward uses though others own them, as far as that was declared."""
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
    """Whether ``module`` was made by torch.compile, or compiled in place: it is used as a whole."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _is_too_large(module: nn.Module, max_numel: int) -> bool:
    if isinstance(module, USING_THEIR_CHILDREN):
        return False
    return sum(param.numel() for param in module.parameters()) > max_numel


def _is_divisible(module: nn.Module) -> bool:
    """Whether somewhere in ``module`` there is a list of layers, or a leaf module, which ends the cut."""
    return any(is_leaf(descendant) or _is_list_of_layers(descendant) for descendant in module.modules())


def _is_list_of_layers(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return _has_parameters(module)
    if isinstance(module, nn.Sequential):  # an MLP written as a Sequential of leaves stays whole
        return any(_has_parameters(child) and any(True for _ in child.children()) for child in module)
    return False
