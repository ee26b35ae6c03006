"""Measure the quantization error of a format on given tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zcomm._formats.formats import Format, get_format
from zcomm._formats.message import layout_of
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels
from zcomm.errors import LayoutError


@torch.no_grad()
def relative_error(tensor: Tensor, format: str | Format) -> float:
    """|decoded - x| / |x| in Euclidean norms, for ``tensor`` encoded once in ``format``.

    0 if both norms are 0; NaN if the tensor, or its decoded values, are not finite. With stochastic rounding the error
    is that of one draw. Cost: one encoding and decoding, a float32 copy, one host sync.

    Raises:
        LayoutError: The tensor is not floating point, not dense, or on the meta device.
    """
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta:
        facts = f"dtype={tensor.dtype}, layout={tensor.layout}, device={tensor.device}"
        raise LayoutError(f"tensor must be dense floating point, on a device with memory: {facts}")
    x = tensor.detach().reshape(-1).contiguous()
    wire = get_format(format)
    layout = layout_of("sample", wire, x.dtype, 1, x.numel())
    message, decoded = layout.new(1, x.device), torch.empty(x.numel(), dtype=torch.float32, device=x.device)
    kernels.quantize(x, layout, message, 0, 0, Draw(seed=0) if wire.is_random else None)
    kernels.decode(message, layout, decoded, 0, 0)
    norm, error = x.double().norm(), (decoded.double() - x.double()).norm()
    return float(error / norm) if norm != 0 else float(error)


def relative_errors(tensors: Mapping[str, Tensor | None], format: str | Format) -> dict[str, float]:
    """:func:`relative_error` of each of ``tensors``, such as all parameters' gradients; None values are skipped."""
    return {name: relative_error(x, format) for name, x in tensors.items() if x is not None}
