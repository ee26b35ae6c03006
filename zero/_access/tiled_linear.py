"""``zero.TiledLinear``: a linear layer as a grid of smaller ones, each gathered and released on its own at stage 3.

    weight [out, in]:   | linears.0.0 | linears.0.1 |     out_splits = 2 rows of tiles, in_splits = 2 columns
                        | linears.1.0 | linears.1.1 |     y = cat over rows of (sum over columns of x_column @ tile.T)
    bias [out]:         with the last tile of each row

A rank then holds one gathered tile at a time in place of the full layer: 1 / (in_splits * out_splits) of it, and
another tile where stage 3 prefetches (``stage3_prefetch_bucket_size``).

Compared with the untiled layer, "the same sums" are equal bit for bit if the matrix product sums each element in an
order that does not depend on the others, which torch does not promise. All else is equal up to rounding:

    =================  ======================  ==============================================
                       out_splits              in_splits
    =================  ======================  ==============================================
    output             the same sums           sums of parts, each rounded to the output dtype
    input's gradient   sums of parts           the same sums
    tile's gradient    the same sums           the same sums
    =================  ======================  ==============================================

The names of classes, arguments and parameters are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zcomm import ConfigError, LayoutError
from zero._access.gathered_parameters import GatheredParameters


def split_evenly(numel: int, num_parts: int) -> list[int]:
    """The bounds of ``num_parts`` consecutive parts of ``numel``, [num_parts + 1]; the first parts are one longer."""
    size, longer = divmod(numel, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


class TiledLinear(nn.Module):
    """``nn.Linear(in_features, out_features)`` in ``out_splits`` x ``in_splits`` tiles.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Whether the layer has a bias.
        in_splits: Number of tiles side by side, of ``in_features / in_splits`` columns; if it does not divide, sizes
            differ by one.
        out_splits: Number of tiles one below the other, of ``out_features / out_splits`` rows.
        input_is_already_split: forward takes a list of the ``in_splits`` parts of the input.
        combine_out_splits: False: forward returns a list of the ``out_splits`` parts of the output.
        linear_cls: Builds a tile: ``linear_cls(in_features, out_features, bias=bool, **options)``.
        init_linear: A layer whose values are copied: see :meth:`copy_params_from`.
        options: For ``linear_cls``: device, dtype and the like.

    Raises:
        ConfigError: A number of splits is less than 1, or more than the features.

    ``linear_cls`` initializes each tile. The standard deviation of nn.Linear depends on the columns of a tile, so it is
    larger with ``in_splits`` than without.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # noqa: FBT001  (DeepSpeed's signature)
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,  # noqa: FBT001
        combine_out_splits: bool = True,  # noqa: FBT001
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ConfigError(f"{name} must be 1 to the {features} features that are split: {name}={splits}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = split_evenly(in_features, in_splits)
        """The first column of each column of tiles, and ``in_features``."""
        self.out_parts = split_evenly(out_features, out_splits)
        """The first row of each row of tiles, and ``out_features``."""
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == in_splits - 1, **options)
                for column, width in enumerate(_sizes(self.in_parts))
            )
            for height in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:
        """Map [..., in_features], or the list of its parts, to [..., out_features], or to the list of its parts.

        Raises:
            LayoutError: The input does not have ``in_features`` columns, or not ``in_splits`` parts.
        """
        parts = self._parts_of(input_)
        outputs = []
        for row in self.linears:
            assert isinstance(row, nn.ModuleList), "a row of tiles"
            output = None
            for tile, part in zip(row, parts, strict=True):
                # Each tile gets a view of its own, whose gradient is complete once the tile's backward has run: stage 3
                # releases the tile then. With one shared input the tiles of all rows would stay gathered until the
                # last of them has added its gradient (test_a_tile_is_in_memory_at_a_time).
                output = self._add(output, tile(part.view_as(part)))
            outputs.append(output)
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _parts_of(self, given: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(given, Tensor) and not self.input_is_already_split:
            if given.shape[-1] != self.in_features:
                raise LayoutError(
                    f"the input must have in_features={self.in_features} columns: got shape {tuple(given.shape)}"
                )
            return torch.split(given, _sizes(self.in_parts), dim=-1)
        parts = [given] if isinstance(given, Tensor) else list(given)
        if [part.shape[-1] for part in parts] != _sizes(self.in_parts):
            raise LayoutError(
                f"the input must be in parts of {_sizes(self.in_parts)} columns: got "
                f"{[tuple(part.shape) for part in parts]}"
            )
        return parts

    def _add(self, output: Any, more: Any) -> Any:
        """Add the output of the next tile of a row to the sum so far."""
        return more if output is None else output + more

    def _combine(self, outputs: list[Any]) -> Any:
        """Concatenate the outputs of the rows."""
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the values of a layer with ``weight`` [out_features, in_features] and, if this has one, ``bias``.

        Collective if either layer is sharded; rank 0's values are used then. Memory: ``other`` in full, and one tile.

        Raises:
            LayoutError: ``other`` has another shape, or only one of the two layers has a bias.
        """
        weight, bias = _tensor(other, "weight"), _tensor(other, "bias")
        shape = (self.out_features, self.in_features)
        if weight is None or weight.shape != shape or (bias is not None) != self.use_bias:
            raise LayoutError(
                f"a layer with weight {shape} {'and' if self.use_bias else 'without'} bias is needed: got weight "
                f"{None if weight is None else tuple(weight.shape)}, bias {None if bias is None else tuple(bias.shape)}"
            )
        with GatheredParameters(other.parameters(recurse=False)):
            for rows, (start, stop) in zip(self.linears, pairwise(self.out_parts), strict=True):
                assert isinstance(rows, nn.ModuleList), "a row of tiles"
                for tile, (left, right) in zip(rows, pairwise(self.in_parts), strict=True):
                    with GatheredParameters(tile.parameters(recurse=False), modifier_rank=0):
                        _required(tile, "weight").copy_(weight[start:stop, left:right])
                        own_bias = _tensor(tile, "bias")
                        if own_bias is not None and bias is not None:
                            own_bias.copy_(bias[start:stop])

    def extra_repr(self) -> str:
        """The arguments, for ``repr()``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )


class TiledLinearReturnBias(TiledLinear):
    """TiledLinear for layers such as Megatron's, whose forward returns ``(output without bias, bias or None)``."""

    def _add(self, output: Any, more: Any) -> Any:
        if output is None:
            return more
        return output[0] + more[0], output[1] if more[1] is None else more[1]

    def _combine(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._combine([output for output, _ in outputs]), super()._combine(biases) if biases else None


def _sizes(bounds: list[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def _required(module: nn.Module, name: str) -> Tensor:
    value = _tensor(module, name)
    if value is None:
        raise LayoutError(f"a tile must have a {name}: {type(module).__name__} has none")
    return value
