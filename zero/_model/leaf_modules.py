"""Leaf modules: stage 3 gathers all their parameters together, so ranks may run different parts (mixture of experts).

All parameters of a leaf module are gathered at the start of its forward, and again at the start of its backward,
whatever runs inside. If each expert were gathered when it runs, ranks with different experts would deadlock, each in
another gather. Names, signatures and what is returned are DeepSpeed's; it has no ``unset_z3_leaf_modules_by_*``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from zcomm import ConfigError, StateError
from zero._config.zero_section import MOE_BLOCKS, LeafModule
from zero._model.init_shards import is_built
from zero._sharding.bucket import is_managed
from zero._sharding.units import LEAF, is_leaf

Found = tuple[list[nn.Module], list[str]]
"""The modules that were found, and the names that were not."""


def set_configured(model: nn.Module, leaves: LeafModule, *, stage: int) -> None:
    """Set the leaf modules of a configuration's ``leaf_module`` section.

    Default classes are set at stage 3 alone, if they are in the model; ConfigError if another entry matches nothing.
    """
    if leaves.classes != MOE_BLOCKS:
        if leaves.classes:
            set_z3_leaf_modules(model, leaves.classes)
    elif stage == 3:
        set_z3_leaf_modules(model, MOE_BLOCKS, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, leaves.names)
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
    return _flag_classes(model, leaf_module_classes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`, and return the same."""
    return _flag_classes(model, leaf_module_classes, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
    raise_if_not_found: bool = True,  # noqa: FBT001
) -> Found:
    """Make the modules in ``model`` with these dotted names leaf modules.

    Args:
        model: The model.
        module_names: Names as in ``model.named_modules()``.
        flag: False: make them ordinary modules.
        raise_if_not_found: Raise if a name is not found.

    Returns:
        The modules, in the order of their names here, and the names that were not found.

    Raises:
        ConfigError: A name was not found, so no module is changed.
        StateError: See :func:`set_z3_leaf_module`.
    """
    return _flag_named(model, module_names, str.__eq__, raise_if_not_found, flag=flag)


def unset_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    raise_if_not_found: bool = True,  # noqa: FBT001
) -> Found:
    """Undo :func:`set_z3_leaf_modules_by_name`, and return the same."""
    return _flag_named(model, module_names, str.__eq__, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
    raise_if_not_found: bool = True,  # noqa: FBT001
) -> Found:
    """Like :func:`set_z3_leaf_modules_by_name`, for modules whose dotted names end with one of the suffixes.

    Returns:
        The modules, each once, and the suffixes that no name has.
    """
    return _flag_named(model, module_name_suffixes, str.endswith, raise_if_not_found, flag=flag)


def unset_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    raise_if_not_found: bool = True,  # noqa: FBT001
) -> Found:
    """Undo :func:`set_z3_leaf_modules_by_suffix`, and return the same."""
    return _flag_named(model, module_name_suffixes, str.endswith, raise_if_not_found, flag=False)


def _of_classes(classes: Sequence[type[nn.Module] | str]) -> Callable[[nn.Module], bool]:
    names = {cls for cls in classes if isinstance(cls, str)}
    types = tuple(cls for cls in classes if not isinstance(cls, str))

    def is_one(module: nn.Module) -> bool:
        cls = type(module)
        return isinstance(module, types) or bool(names & {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"})

    return is_one


def _flag_classes(
    model: nn.Module,
    classes: Sequence[type[nn.Module] | str],
    raise_if_not_found: bool,  # noqa: FBT001
    *,
    flag: bool,
) -> list[nn.Module]:
    is_meant = _of_classes(classes)
    found = [module for module in model.modules() if is_meant(module)]
    if not found and raise_if_not_found:
        raise _not_found(model, classes)
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _flag_named(
    model: nn.Module,
    asked: Sequence[str],
    is_meant: Callable[[str, str], bool],
    raise_if_not_found: bool,  # noqa: FBT001
    *,
    flag: bool,
) -> Found:
    named = list(model.named_modules())
    found = {one: [module for name, module in named if is_meant(name, one)] for one in asked}
    missing = [one for one in asked if not found[one]]
    if missing and raise_if_not_found:
        raise _not_found(model, missing)
    modules = list(dict.fromkeys(module for one in asked for module in found[one]))
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules, missing


def _not_found(model: nn.Module, asked: Sequence[object]) -> ConfigError:
    return ConfigError(f"leaf modules must be in the model: there is none of {list(asked)} in {type(model).__name__}")
