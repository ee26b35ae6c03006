"""Released parameters and other stand-ins for values that this rank does not hold: using one raises an error.

A released parameter keeps its identity, logical shape, dtype and autograd hooks, but its class becomes a subclass whose
``__torch_function__`` refuses every use of its values. Its memory is one NaN, so that code which bypasses Python
cannot compute a plausible number. A gathered parameter has its own class back, so access to it costs nothing. The
``.grad`` of a parameter whose gradient is sharded is a :class:`ReducedGradient` in the same way:
``torch.nn.utils.clip_grad_norm_`` raises instead of clipping by a wrong norm. ``mark_stale`` does the same to views of
a parameter that has changed since.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zcomm import StateError

METADATA = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "output_nr"),
        *("grad", "grad_fn", "grad_dtype", "requires_grad", "retains_grad", "is_leaf", "_backward_hooks"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_nested", "is_quantized", "is_mkldnn"),
        *("is_complex", "is_floating_point", "is_inference", "is_neg", "is_conj", "_is_view", "__hash__", "__len__"),
        *("numel", "nelement", "size", "dim", "element_size"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    }
)
"""Attributes and methods of a released parameter that may be used: none depends on its values or its storage."""
SETTABLE = frozenset({"grad", "requires_grad", "grad_dtype", "_backward_hooks"})


def nan_filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ``shape`` whose memory is one NaN; integers have no NaN, and get their largest value."""
    is_number = dtype.is_floating_point or dtype.is_complex
    nothing = float("nan") if is_number else dtype == torch.bool or torch.iinfo(dtype).max
    return torch.full((), nothing, dtype=dtype, device=device).expand(tuple(shape))


def is_released(param: Tensor) -> bool:
    """Whether ``param`` is released: it has a shape and no values."""
    return getattr(type(param), "is_released", False)


def _requested(func: Callable[..., Any]) -> tuple[str, bool]:
    """The name of the requested attribute or function, and whether it is being set."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return str(getattr(func, "__self__", func).__name__), name != "__get__"
    return name, False


class StateDictHooks(Protocol):
    """What makes ``model.state_dict()`` and ``load_state_dict()`` work on released parameters."""

    def answer(self, param: nn.Parameter, name: str, args: Any) -> Any:
        """The result of method ``name`` of a released ``param`` when torch's state dict code calls it, else None."""

    def saving(self, left_out: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Inside, ``model.state_dict()`` has the last update, also a delayed one, and leaves out ``left_out``.

        Every rank calls it.
        """


def stack() -> Iterator[FrameType]:
    """The running frames, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running(method: Any) -> list[Any]:
    """The objects whose ``method`` is on the stack, innermost first.

    A flag set by hooks would stay set after a call that raised, because torch calls no hook then.
    """
    return [frame.f_locals.get("self") for frame in stack() if frame.f_code is method.__code__]


Refusal = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]
"""Called with a function that is not allowed, and its arguments."""


def _subclass(cls: type, refuse: Refusal, **own: Any) -> type:
    """A class that looks like ``cls`` and answers by :func:`_torch_function`; ``own``: its other attributes."""
    guard = {"__module__": cls.__module__, "__torch_function__": _torch_function(refuse)}
    return type(cls.__name__, (cls,), guard | own)


def _torch_function(refuse: Refusal) -> Any:
    """A ``__torch_function__`` that allows access to metadata such as shape and dtype, and ``refuse`` all else."""

    def answer(cls: type, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:  # noqa: ARG001
        name, is_written = _requested(func)
        if name in (SETTABLE if is_written else METADATA):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return refuse(func, args, kwargs or {})

    return classmethod(answer)


def _refuse_values(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    released = [a for a in tree_leaves((args, kwargs)) if is_released(a)]
    info = getattr(released[0], "zero_shard", None) if released else None
    state_dicts = getattr(getattr(info, "owner", None), "state_dicts", None)
    answer = None if state_dicts is None else state_dicts.answer(released[0], _requested(func)[0], args)
    if answer is not None:
        return answer
    if released and args and args[0] is released[0] and _is_same(_requested(func)[0], args, kwargs):
        return args[0] if func is not torch._has_compatible_shallow_copy_type else True
    if _gather_for_use(released):
        return func(*args, **kwargs)
    name = repr(info.name) if info is not None else "a parameter"
    raise StateError(
        f"{name} is released (stage 3 holds a shard of it on each rank) and was used by {_requested(func)[0]} outside "
        "the forward of its own module. Remedies: read or change it inside zero.GatheredParameters([param]), or "
        "declare the use with zero.register_external_parameter(module, param) for the module that uses it"
    )


def _is_same(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a module's ``to`` asks for the device and dtype that the parameter has, so that nothing is to be done."""
    param = args[0]
    if name in ("_has_compatible_shallow_copy_type", "data"):
        return len(args) > 1 and args[1] is param
    if name != "to" or kwargs.get("copy") or "other" in kwargs or any(isinstance(one, Tensor) for one in args[1:]):
        return False
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    return device in (None, param.device) and dtype in (None, param.dtype) and memory_format is None


def _gather_for_use(released: Sequence[nn.Parameter]) -> bool:
    """Ask the owner of ``released`` parameters to gather them for this use, if that is allowed here."""
    owner = getattr(getattr(released[0], "zero_shard", None), "owner", None) if released else None
    return owner is not None and bool(owner.gather_for_use(released))


def _copy(self: nn.Parameter, memo: dict[int, Any]) -> Any:
    if _gather_for_use([self]):
        return copy.deepcopy(self, memo)  # it is gathered and has its own class again
    return _refuse_values(copy.deepcopy, (self,), {})


def _refuse_pickle(self: nn.Parameter, protocol: object) -> Any:  # noqa: ARG001
    raise not_picklable(repr(self.zero_shard.name))  # type: ignore[attr-defined]


def not_picklable(what: str) -> StateError:
    """The error for an attempt to pickle ``what``, of which this rank has only a shard."""
    return StateError(
        f"{what} cannot be pickled at stage 3, where each rank holds a shard: save model.state_dict(), which every "
        "rank must call, or a checkpoint by zero.save_checkpoint()"
    )


def _describe(self: nn.Parameter) -> str:
    info = self.zero_shard  # type: ignore[attr-defined]
    return f"<released parameter {info.name!r}, shape {tuple(info.shape)}, {info.dtype}>"


@cache
def _released_class(cls: type) -> type:
    methods = {"__repr__": _describe, "__deepcopy__": _copy, "__reduce_ex__": _refuse_pickle}
    return _subclass(cls, _refuse_values, **methods, is_released=True, gathered_class=cls)


def make_released(param: nn.Parameter, placeholder: Tensor) -> None:
    """Take the values of ``param`` away; ``placeholder`` is a :func:`nan_filled` tensor of its shape."""
    param.data = placeholder
    param.__class__ = _released_class(type(param))


def make_full(param: nn.Parameter, data: Tensor) -> None:
    """Give ``param`` its own class back, with the values ``data``."""
    cls = type(param)
    if getattr(cls, "is_released", False):
        param.__class__ = cls.gathered_class  # type: ignore[attr-defined]
    param.data = data


def mark_stale(view: Tensor, name: str) -> None:
    """Make any use of ``view`` raise: it shows values that parameter ``name`` no longer has.

    The view keeps its memory: a NumPy array may share it.
    """
    view.__class__ = _stale_class(type(view))
    view.zero_view_of = name  # type: ignore[attr-defined]


@cache
def _stale_class(cls: type) -> type:
    return _subclass(cls, _refuse_stale, __repr__=_describe_stale, is_stale=True)


def _refuse_stale(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    view = next(a for a in tree_leaves((args, kwargs)) if getattr(type(a), "is_stale", False))
    raise StateError(
        f"a view of {view.zero_view_of!r} was used by {_requested(func)[0]} after that parameter had changed (stage 3 "
        "holds a shard of it on each rank, and the view has the old values). Remedies: make the view again from the "
        "parameter in each forward, or inside zero.GatheredParameters([param]); or clone() what is to keep its values"
    )


def _describe_stale(self: Tensor) -> str:
    return f"<stale view of {self.zero_view_of!r}, shape {tuple(self.shape)}>"  # type: ignore[attr-defined]


def _refuse_gradient(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    grad = next((a for a in tree_leaves((args, kwargs)) if isinstance(a, ReducedGradient)), None)
    name, place = getattr(grad, "zero_name", "a parameter"), getattr(grad, "zero_place", "not here")
    raise StateError(
        f"the gradient of {name!r} is {place}, so {_requested(func)[0]} on param.grad cannot see it. Use "
        "optimizer.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_, optimizer.zero_grad() to "
        "clear gradients, zero.utils.safe_get_full_grad(param) to read one, param.grad = value to replace it, or "
        "stage 0, where param.grad is the full averaged gradient"
    )


class ReducedGradient(Tensor):
    """The ``.grad`` of a parameter whose gradient is sharded over the ranks: it exists, but not on this rank."""

    zero_name: str
    zero_place: str
    __torch_function__ = _torch_function(_refuse_gradient)

    @classmethod
    def of(
        cls, name: str, like: Tensor, dtype: torch.dtype, *, place: str = "sharded over the ranks"
    ) -> ReducedGradient:
        """The stand-in for the gradient of parameter ``name``, of the shape of ``like``; ``place``: where it is."""
        grad = nan_filled(like.shape, dtype, like.device).as_subclass(cls)
        grad.zero_name, grad.zero_place = name, place
        return grad

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the parameter's name instead of values."""
        return f"<gradient of {self.zero_name!r}, {self.zero_place}>"
