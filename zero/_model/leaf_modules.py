"""Leaf modules: stage 3 gathers all their parameters together, so ranks may run different parts (mixture of experts).

All parameters of a leaf module are gathered at the start of its forward, and again at the start of its backward,
whatever runs inside. If each expert were gathered when it runs, ranks with different experts would deadlock, each in
another gather. Names and signatures are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from zcomm import ConfigError, StateError
from zero._config.zero_section import LeafModule
from zero._model.init_shards import is_built
from zero._sharding.bucket import is_managed
from zero._sharding.units import LEAF, is_leaf


def set_configured(model: nn.Module, leaves: LeafModule) -> None:
    """Set the leaf modules of a configuration's ``leaf_module`` section; ConfigError if an entry matches no module."""
    if leaves.classes:
        set_z3_leaf_modules(model, leaves.classes)
    if leaves.names:
        set_z3_leaf_modules_by_name(model, leaves.names)
    if leaves.name_suffixes:
        set_z3_leaf_modules_by_suffix(model, leaves.name_suffixes)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether ``model`` itself is a leaf module."""
    return is_leaf(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules in ``model``."""
    return [module for module in model.modules() if is_leaf(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:  # noqa: FBT001  (DeepSpeed's signature)
    """Make ``model`` itself a leaf module, or an ordinary one.

    Raises:
        StateError: A ZeroOptimizer manages ``model`` already, and has fixed how it is gathered.
    """
    if is_leaf(model) != flag:
        for param in model.parameters():
            if is_managed(param) and not is_built(param):
                raise StateError(
                    f"leaf modules must be set before ZeroOptimizer is constructed: {type(model).__name__} is managed"
                )
    model.__dict__[LEAF] = flag


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
) -> list[nn.Module]:
    """Make the modules in ``model`` of these classes leaf modules, and return them.

    Args:
        model: The model, itself included.
        leaf_module_classes: Classes, or their names: "Experts" or "package.module.Experts".
        raise_if_not_found: Raise if no module is found.

    Raises:
        ConfigError: No module was found.
        StateError: See :func:`set_z3_leaf_module`.
    """
    return _flag(model, _of_classes(leaf_module_classes), leaf_module_classes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`."""
    return _flag(model, _of_classes(leaf_module_classes), leaf_module_classes, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    raise_if_not_found: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
) -> list[nn.Module]:
    """Like :func:`set_z3_leaf_modules`, for modules with these dotted names."""
    return _flag(model, lambda name, _: name in module_names, module_names, raise_if_not_found, flag=True)


def unset_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    raise_if_not_found: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules_by_name`."""
    return _flag(model, lambda name, _: name in module_names, module_names, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    suffixes: Sequence[str],
    raise_if_not_found: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
) -> list[nn.Module]:
    """Like :func:`set_z3_leaf_modules`, for modules whose dotted names end with one of ``suffixes``."""
    return _flag(model, lambda name, _: name.endswith(tuple(suffixes)), suffixes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules_by_suffix(
    model: nn.Module,
    suffixes: Sequence[str],
    raise_if_not_found: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules_by_suffix`."""
    return _flag(model, lambda name, _: name.endswith(tuple(suffixes)), suffixes, raise_if_not_found, flag=False)


def _of_classes(classes: Sequence[type[nn.Module] | str]) -> Callable[[str, nn.Module], bool]:
    names = {cls for cls in classes if isinstance(cls, str)}
    types = tuple(cls for cls in classes if not isinstance(cls, str))

    def is_one(_: str, module: nn.Module) -> bool:
        cls = type(module)
        return isinstance(module, types) or bool(names & {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"})

    return is_one


def _flag(
    model: nn.Module,
    is_meant: Callable[[str, nn.Module], bool],
    asked: Sequence[object],
    raise_if_not_found: bool,  # noqa: FBT001
    *,
    flag: bool,
) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if is_meant(name, module)]
    if not found and raise_if_not_found:
        raise ConfigError(
            f"leaf modules must be in the model: there is none of {list(asked)} in {type(model).__name__}"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
