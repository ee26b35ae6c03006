"""Latency of one native call on small and middling arrays: ``pytest bench --benchmark-only``.

What a bucket of a few thousand elements costs is the call itself: argument conversion, dispatch, and above 64 Ki
elements the wake-up of the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zcomm import _native

CODECS = {"int8": (3, 256, False), "int4": (4, 128, False)}
LAYOUT_HASH = 1


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> tuple[int, int, bool]:
    """Codec number, block, rotation."""
    return CODECS[request.param]


@pytest.fixture(params=[256, 16384, 262144])
def values(request: pytest.FixtureRequest) -> torch.Tensor:
    """Float32 data."""
    return torch.randn(request.param, generator=torch.Generator().manual_seed(0))


def _message(codec: tuple[int, int, bool], values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(_native.message_nbytes(*codec, 1, values.numel()), dtype=torch.uint8)


def _quantize(
    function: Callable[..., None], codec: tuple[int, int, bool], values: torch.Tensor, message: torch.Tensor
) -> None:
    numel = values.numel()
    function(
        *codec, 1, 1, numel, 0, values.data_ptr(), numel, numel, message.data_ptr(), message.numel(), LAYOUT_HASH,
        None, torch.get_num_threads(),
    )  # fmt: skip


def _decode(
    function: Callable[..., None], codec: tuple[int, int, bool], message: torch.Tensor, out: torch.Tensor
) -> None:
    numel = out.numel()
    function(
        *codec, 1, 1, numel, message.data_ptr(), message.numel(), LAYOUT_HASH, 0, out.data_ptr(), numel, numel,
        torch.get_num_threads(),
    )  # fmt: skip


def test_quantize(benchmark: Any, codec: tuple[int, int, bool], values: torch.Tensor) -> None:
    """One message from a contiguous array."""
    message, expected = _message(codec, values), _message(codec, values)
    benchmark(_quantize, _native.quantize, codec, values, message)
    _quantize(_native.quantize_ref, codec, values, expected)
    assert torch.equal(message, expected)


def test_decode(benchmark: Any, codec: tuple[int, int, bool], values: torch.Tensor) -> None:
    """One message into a contiguous array."""
    message, out, expected = _message(codec, values), torch.zeros_like(values), torch.zeros_like(values)
    _quantize(_native.quantize, codec, values, message)
    benchmark(_decode, _native.decode, codec, message, out)
    _decode(_native.decode_ref, codec, message, expected)
    assert torch.equal(out, expected)
