"""Functional collectives: differentiable, and for ``torch.compile`` registered operators without graph breaks.

    full = zcomm.functional.all_gather_single(shard, topology, format="int8")

Each function returns a new tensor, mutates nothing, and gives the bits of the collective of the same name. A compiled
function holds the name of its group, not the group itself: keep a Topology alive as long as the functions that were
traced with it. A :class:`zcomm.RandomKey` may be created inside the compiled function; its numbers are arguments of the
operator, so a new step does not recompile it.

Backward makes the transposed exchange. The loss is the sum of all ranks' losses, as in torch.distributed:

    all_gather                       reduce_scatter, sum
    reduce_scatter, sum or avg       all_gather, of the gradient or of gradient / world_size
    all_reduce, sum or avg           all_reduce, sum or avg
    all_to_all                       all_to_all, with the split sizes swapped

``grad_format`` is the format of that exchange, as its collective takes it; None: ``"none"``. It must not round
stochastically, since backward has no random key. Gradients are those of the exact collective: rounding by ``format``
counts as the identity (a straight-through estimator). A second backward works, in ``"none"``. Under ``no_grad()`` the
result requires no gradient, and ``grad_format`` is refused, since it would have no effect.

Every rank must use the result in its loss, and in the same order relative to other results: a rank whose backward makes
no exchange, or another one first, leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zcomm._collectives.all_gather import all_gather_single as gather_into
from zcomm._collectives.all_reduce import all_reduce as all_reduce_into
from zcomm._collectives.all_to_all import all_to_all_single as exchange_into
from zcomm._collectives.auto_format import AUTO
from zcomm._collectives.encoder import check_random
from zcomm._collectives.reduce_scatter import reduce_scatter_single as reduce_into
from zcomm._collectives.uneven_all_to_all import check_split_sizes
from zcomm._formats.formats import get_format
from zcomm._formats.philox import RandomKey
from zcomm._transport import backend
from zcomm._transport.route import (
    Group,
    GroupOrMesh,
    WireFormat,
    as_group,
    check_arguments,
    check_numbering,
    divisor_of,
    find_route,
)
from zcomm._transport.topology import Numbering, Topology
from zcomm.errors import ConfigError, FormatError, LayoutError

__all__ = ["all_gather_single", "all_reduce", "all_to_all_single", "reduce_scatter_single"]

SEPARATOR, BACKWARD = "|", ">"
"""In an operator's text: between the formats of a pair, and before the format of backward."""


def all_gather_single(
    input: Tensor,
    group: GroupOrMesh = None,
    *,
    format: WireFormat = "none",
    grad_format: WireFormat | None = None,
    numbering: Numbering = "rank",
    random: RandomKey | None = None,
) -> Tensor:
    """Every rank's ``input`` [n, ...] as one tensor [world_size * n, ...] of the same dtype; see
    :func:`zcomm.all_gather_single`."""
    key, world_size, formats = _checked(input, group, format, grad_format, numbering=numbering)
    return _gather(input, key, world_size, formats, numbering, _key_words(random))


def reduce_scatter_single(
    input: Tensor,
    op: str = "sum",
    group: GroupOrMesh = None,
    *,
    format: WireFormat = "none",
    grad_format: WireFormat | None = None,
    numbering: Numbering = "rank",
    dtype: torch.dtype | None = None,
    random: RandomKey | None = None,
) -> Tensor:
    """This rank's shard [n, ...] of the sum or mean of ``input`` [world_size * n, ...], in ``dtype`` (default: its
    own); see :func:`zcomm.reduce_scatter_single`."""
    key, world_size, formats = _checked(input, group, format, grad_format, op=op, numbering=numbering, dtype=dtype)
    dtype = dtype or input.dtype
    return _reduce(input, _op_name(op), key, world_size, formats, numbering, dtype, _key_words(random))


def all_reduce(
    input: Tensor,
    op: str = "sum",
    group: GroupOrMesh = None,
    *,
    format: WireFormat = "none",
    grad_format: WireFormat | None = None,
    random: RandomKey | None = None,
) -> Tensor:
    """The sum or mean of ``input``, of any shape, over all ranks; see :func:`zcomm.all_reduce`."""
    key, _, formats = _checked(input, group, format, grad_format, op=op)
    return _all_reduce(input, _op_name(op), key, formats, _key_words(random))


def all_to_all_single(
    input: Tensor,
    group: GroupOrMesh = None,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    format: WireFormat = "none",
    grad_format: WireFormat | None = None,
    random: RandomKey | None = None,
) -> Tensor:
    """Part j [n, ...] of the result is what rank j had for this rank in ``input`` [world_size * n, ...]; see
    :func:`zcomm.all_to_all_single`. With split sizes, both or none of them, parts may have different numbers of rows.
    """
    key, world_size, formats = _checked(input, group, format, grad_format)
    splits = output_split_sizes, input_split_sizes
    if output_split_sizes is not None or input_split_sizes is not None:
        _check_splits(input, group, world_size, splits, format=format, random=random)
    return _all_to_all(input, key, formats, _key_words(random), *splits)


def _checked(
    tensor: Tensor,
    group: GroupOrMesh,
    format: WireFormat,
    grad_format: WireFormat | None,
    *,
    op: Any = "sum",
    numbering: Numbering = "rank",
    dtype: Any = None,
) -> tuple[str, int, str]:
    """The group's name and size and the formats, for the operator.

    Checks what the operator cannot, since it only receives text and plain tensors.
    """
    if grad_format is not None and not torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
        raise ConfigError(
            f"input requires a gradient, which is lost while none are recorded, as under no_grad(): grad_format="
            f"{grad_format!r}; leave it out there, or pass input.detach()"
        )
    group = as_group(group)
    if not torch.compiler.is_compiling():
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise LayoutError(f"dtype must be a torch.dtype: dtype={dtype!r}")
        divisor_of(op, 1)
        tensors: dict[str, object] = {"input": tensor.detach() if isinstance(tensor, Tensor) else tensor}
        if isinstance(tensor, Tensor) and not _has_memory(tensor):
            tensors = {}  # the operator's fake implementation takes it
        for text in (format, grad_format):
            if isinstance(text, str) and (SEPARATOR in text or BACKWARD in text):
                raise FormatError(f"format must be one format or a pair of them, as a tuple: format={text!r}")
        check_arguments(group, format, "none" if grad_format is None else grad_format, numbering=numbering, **tensors)
    return *_group_key(group), _format_text(format, grad_format)


def _check_splits(input: Tensor, group: GroupOrMesh, world_size: int, splits: tuple[Any, Any], **options: Any) -> None:
    """Raise LayoutError, on every rank if there is memory, unless ``splits`` of output and input are what they must be.

    Whether they fit is checked by the operator.
    """
    output_sizes, input_sizes = splits
    has_both = output_sizes is not None and input_sizes is not None
    if has_both and torch.compiler.is_compiling():
        return
    try:
        if not has_both:
            raise LayoutError("pass both output_split_sizes and input_split_sizes, or neither")
        check_split_sizes("input", input_sizes, world_size)
        check_split_sizes("output", output_sizes, world_size)
    except LayoutError:
        if not torch.compiler.is_compiling() and _has_memory(input):  # the call itself reports it to the other ranks
            sizes: dict[str, Any] = {"output_split_sizes": output_sizes, "input_split_sizes": input_sizes}
            sizes = {name: () if value is None else value for name, value in sizes.items()}
            with nullcontext() if has_both else suppress(LayoutError):  # then this rank's own text says more
                exchange_into(torch.empty_like(input), input.detach().contiguous(), group, **sizes, **options)
        raise


def _check_call(
    input: Tensor,
    key: str,
    format: str,
    *,
    op: str = "sum",
    numbering: str = "rank",
    random: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    divides: bool = False,
) -> int:
    """The checks that an operator and its fake implementation share; returns the number of ranks.

    A size that is known only at run time is checked by the operator.
    """
    group, (wire, grad_wire) = _group_of(key), _formats_of(format)
    check_numbering(numbering)
    route = find_route("functional", group, "none" if wire == AUTO else wire, first="intra")
    _check_grad_format(grad_wire, group)
    divisor_of(op, route.world_size)
    for name, one in (("input", input.dtype), ("the result", dtype or input.dtype)):
        if not one.is_floating_point:
            raise LayoutError(f"{name} must be real floating point, got dtype={one}")
    route.check_dtype(input.dtype)
    is_traced = random is not None and any(isinstance(word, torch.SymInt) for word in random)
    check_random(RandomKey(0, 0, 0) if is_traced else _key_of(random), "none" if wire == AUTO else wire)
    rows = input.shape[0] if input.ndim else 1
    is_known = not isinstance(rows, torch.SymInt) or rows.node.has_hint()
    if divides and is_known and rows % route.world_size:
        raise LayoutError(
            f"input must divide over the ranks: shape={tuple(input.shape)}, world_size={route.world_size}"
        )
    return route.world_size


def _check_grad_format(wire: str | tuple[str, str], group: Group) -> None:
    """Raise FormatError in forward: in backward it would be too late."""
    if wire == AUTO:
        return
    find_route("functional", group, wire, first="intra")
    if any(get_format(part).is_random for part in (wire if isinstance(wire, tuple) else (wire,))):
        raise FormatError(f"grad_format must not round stochastically, backward has no random key: grad_format={wire}")


def _op_name(op: Any) -> str:
    """The reduction as text, for the operator's schema."""
    return op if isinstance(op, str) else "avg" if divisor_of(op, 2) == 2 else "sum"


def _group_key(group: Group) -> tuple[str, int]:
    """The name of a group, and its number of ranks. The default group's name is empty."""
    if isinstance(group, Topology):
        return group.key, group.world_size
    if group is None:
        return "", dist.get_world_size() if dist.is_initialized() else 1
    return f"group:{group.group_name}", group.size()


def _group_of(key: str) -> Any:
    if not key:
        return None
    kind, _, name = key.partition(":")
    return backend.group_named(name) if kind == "group" else Topology.of_key(key)


def _shape(input: Tensor, numerator: int, denominator: int) -> list[int]:
    """The shape of ``input`` with ``numerator / denominator`` times as many rows."""
    rows = input.shape[0] if input.ndim else 1
    return [rows * numerator // denominator, *input.shape[1:]]


def _format_text(format: WireFormat, grad_format: WireFormat | None = None) -> str:
    """A format, or both formats of a pair, and those of backward, as text for the operator's schema."""
    text = SEPARATOR.join(str(part) for part in (format if isinstance(format, tuple) else (format,)))
    return text if grad_format is None else f"{text}{BACKWARD}{_format_text(grad_format)}"


def _formats_of(text: str) -> list[str | tuple[str, str]]:
    """The format of the call, and that of its backward."""
    wires: list[str | tuple[str, str]] = []
    for part in (text if BACKWARD in text else f"{text}{BACKWARD}none").split(BACKWARD):
        first, separator, second = part.partition(SEPARATOR)
        wires.append((first, second) if separator else first)
    return wires


def _key_words(random: RandomKey | None) -> list[int] | None:
    """A key as integers, for the operator's schema."""
    if random is not None and not isinstance(random, RandomKey):
        raise FormatError(f"random must be a zcomm.RandomKey(seed, tensor, step): random={random!r}")
    return None if random is None else [random.seed, random.tensor, random.step]


def _key_of(words: Sequence[int] | None) -> RandomKey | None:
    return None if words is None else RandomKey(*words)


# The same function is an operator's implementation and its fake one, which only makes the output.


def _has_memory(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _new_gathered(
    input: Tensor, key: str, world_size: int, format: str, numbering: str, random: Sequence[int] | None = None
) -> Tensor:
    _check_call(input, key, format, numbering=numbering, random=random)
    output = input.new_empty(_shape(input, world_size, 1))
    if _has_memory(input):
        gather_into(output, input.contiguous(), _group_of(key), **_options(format, random, numbering))
    return output


def _new_reduced(
    input: Tensor,
    op: str,
    key: str,
    world_size: int,
    format: str,
    numbering: str,
    dtype: torch.dtype,
    random: Sequence[int] | None = None,
) -> Tensor:
    _check_call(input, key, format, op=op, numbering=numbering, random=random, dtype=dtype, divides=True)
    output = input.new_empty(_shape(input, 1, world_size), dtype=dtype)
    if _has_memory(input):
        reduce_into(output, input.contiguous(), op, group=_group_of(key), **_options(format, random, numbering))
    return output


def _new_total(input: Tensor, op: str, key: str, format: str, random: Sequence[int] | None = None) -> Tensor:
    _check_call(input, key, format, op=op, random=random)
    output = input.clone(memory_format=torch.contiguous_format)
    if _has_memory(input):
        all_reduce_into(output, op, _group_of(key), **_options(format, random))
    return output


def _new_exchanged(
    input: Tensor,
    key: str,
    format: str,
    random: Sequence[int] | None = None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    is_even = output_split_sizes is None
    world_size = _check_call(input, key, format, random=random, divides=is_even)
    if output_split_sizes is None or input_split_sizes is None:
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
    else:
        output = input.new_empty([sum(output_split_sizes), *input.shape[1:]])
        if not _has_memory(input) and all(isinstance(n, int) for n in (input.shape[0], *input_split_sizes)):
            check_split_sizes("input", input_split_sizes, world_size, input.shape[0])
    if _has_memory(input):
        sizes: dict[str, Any] = {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
        exchange_into(output, input.contiguous(), _group_of(key), **sizes, **_options(format, random))
    return output


def _options(format: str, random: Sequence[int] | None, numbering: str | None = None) -> dict[str, Any]:
    options = {"format": _formats_of(format)[0], "random": _key_of(random)}
    return options if numbering is None else options | {"numbering": numbering}


# Of each operator the transposed exchange: the gradient of its input by that of its output and its other arguments.


def _of_gather(grad: Tensor, key: str, world_size: int, format: str, numbering: str, _: Any) -> Tensor:
    return _reduce(grad, "sum", key, world_size, _of_backward(format), numbering, grad.dtype)


def _of_reduce(grad: Tensor, op: str, key: str, world_size: int, format: str, numbering: str, *_: Any) -> Tensor:
    return _gather(grad / divisor_of(op, world_size), key, world_size, _of_backward(format), numbering)


def _of_total(grad: Tensor, op: str, key: str, format: str, _: Any) -> Tensor:
    return _all_reduce(grad, op, key, _of_backward(format))


def _of_exchange(grad: Tensor, key: str, format: str, _: Any, output_sizes: Any, input_sizes: Any) -> Tensor:
    return _all_to_all(grad, key, _of_backward(format), None, input_sizes, output_sizes)


def _of_backward(format: str) -> str:
    return _format_text(_formats_of(format)[1])


def _operator(name: str, function: Callable[..., Tensor], transposed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  (passed by name)
        ctx.arguments = inputs[1:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # torch converts it to the dtype and shape of the input
        return transposed(grad, *ctx.arguments), *[None] * len(ctx.arguments)

    operator = torch.library.custom_op(f"zcomm::{name}", function, mutates_args=())
    operator.register_fake(function)
    operator.register_autograd(backward, setup_context=remember)
    return operator


_gather = _operator("all_gather_single", _new_gathered, _of_gather)
_reduce = _operator("reduce_scatter_single", _new_reduced, _of_reduce)
_all_reduce = _operator("all_reduce", _new_total, _of_total)
_all_to_all = _operator("all_to_all_single", _new_exchanged, _of_exchange)
