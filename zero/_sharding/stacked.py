"""Several matrices in one parameter, stacked along its rows: fused projections (q, k, v), the experts of a layer.

An optimizer that updates whole tensors updates each of them by itself, where ``param.stacked_parts`` says so:

    3                    three matrices with the same number of rows
    (2048, 512, 512)     as many rows each

A parameter of three dimensions [E, m, n] is E * m rows of n elements: ``E`` says that it is E matrices [m, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from zcomm import ConfigError

__all__ = ["parts_of"]


def parts_of(param: nn.Parameter, name: str = "") -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors that an optimizer of whole tensors updates: of ``param``, if nothing is declared.

    Raises:
        ConfigError: ``param.stacked_parts`` does not fit; ``name`` is its name for the message.
    """
    shape, declared = tuple(param.shape), getattr(param, "stacked_parts", None)
    if declared is None:
        return (shape,)
    rows = _rows(declared)
    num_rows = prod(shape[:-1])
    if isinstance(declared, int) and rows is not None and num_rows % declared == 0:
        rows = [num_rows // declared] * declared
    if len(shape) not in (2, 3) or rows is None or sum(rows) != num_rows:
        raise ConfigError(
            "stacked_parts must divide the rows of a matrix, or of a stack of matrices, as a number of equal parts or "
            f"the rows of each: {name!r} has shape {shape}, so {num_rows} rows, and stacked_parts={declared!r}"
        )
    if rows == [num_rows] and len(shape) == 2:
        return (shape,)
    return tuple((number, shape[-1]) for number in rows)


def _rows(declared: object) -> list[int] | None:
    """The rows of each part; of a number of equal parts, that number; None: it is neither."""
    rows = [declared] if isinstance(declared, int) else list(declared) if isinstance(declared, Sequence) else []
    return rows if rows and all(type(each) is int and each > 0 for each in rows) else None
