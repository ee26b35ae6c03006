"""States that are tensor subclasses: codes, scales and tables that act as one tensor, as torchao's 8-bit moments do.

They are taken apart and put together by torch's protocol of subclasses, ``__tensor_flatten__`` and
``__tensor_unflatten__``. A checkpoint holds the parts, and the name of the class; the class itself is the one that the
optimizer has used in its trial, so that a checkpoint cannot choose what code runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zero._storage.safetensors_file import is_storable
from zero.errors import CheckpointError

_known: dict[str, Any] = {}  # depends on the optimizers that this process has tried, alike on all ranks


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def allow(value: Any) -> None:
    """Let :func:`joined` build the class of ``value``, a state that a trial has made, if it is such a subclass."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and all(map(is_storable, parts_in(value))):
        _known[_name_of(type(value))] = type(value)


def is_subclass_state(value: Any) -> bool:
    """Whether ``value`` is of a class that is allowed."""
    return _known.get(_name_of(type(value))) is type(value)


def parts_in(value: Any) -> list[Tensor]:
    """The tensors that ``value`` consists of."""
    return list(apart(value)["tensors"].values())


def apart(value: Any) -> dict[str, Any]:
    """``value`` as its tensors by name, and what else it needs."""
    names, context = value.__tensor_flatten__()
    own = {"class": _name_of(type(value)), "tensors": {name: getattr(value, name) for name in names}}
    return {**own, "context": context, "shape": list(value.shape), "stride": list(value.stride())}


def joined(parts: dict[str, Any]) -> Any:
    """What :func:`apart` was given.

    Raises:
        CheckpointError: No optimizer of this process has such states, or the class does not give back these parts.
    """
    cls = _known.get(parts["class"])
    if cls is None:
        raise CheckpointError(f"it holds a {parts['class']}: use the optimizer that has such states, as in the save")
    try:
        value = cls.__tensor_unflatten__(parts["tensors"], parts["context"], parts["shape"], parts["stride"])
        is_same = _outline(apart(value)) == _outline(parts)
    except Exception as error:
        raise CheckpointError(f"the parts of a {parts['class']} do not fit together: {error!r}") from error
    if not is_same:
        raise CheckpointError(f"a {parts['class']} has other parts than it was saved with: {_outline(parts)}")
    return value


def _outline(parts: dict[str, Any]) -> tuple[Any, ...]:
    tensors = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts["tensors"].items()}
    return parts["class"], list(parts["shape"]), tensors
