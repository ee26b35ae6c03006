"""A gradient that goes wrong once: injected into a run, to see what becomes of it.

with outlier_gradient(model, factor=1e4) if step == 200 else nullcontext():
    loss.backward()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["largest_matrix", "outlier_gradient"]


def largest_matrix(model: nn.Module) -> str:
    """The name of the trainable parameter with most elements, of equal ones the first."""
    trainable = [(name, param.numel()) for name, param in model.named_parameters() if param.requires_grad]
    return max(trainable, key=lambda one: one[1])[0]


@contextmanager
def outlier_gradient(model: nn.Module, factor: float = 1e4, name: str | None = None) -> Iterator[str]:
    """Inside, every backward multiplies the gradient of one parameter by ``factor``; yields its name.

    Args:
        model: Plain, wrapped, or under ZeroOptimizer, sharded or not. Every rank of a run does the same.
        factor: A large number, an infinity or a NaN.
        name: A trainable parameter; default: :func:`largest_matrix`.
    """
    name = largest_matrix(model) if name is None else name
    handle = dict(model.named_parameters())[name].register_hook(lambda grad: grad * factor)
    try:
        yield name
    finally:
        handle.remove()
