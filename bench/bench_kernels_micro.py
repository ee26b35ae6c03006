"""Latency of one kernel on small and medium arrays, for every operation and format.

    pytest bench/bench_kernels_micro.py --benchmark-max-time=0.1     times; --benchmark-disable: each once

For a bucket of a few thousand elements the call itself dominates: argument conversion, dispatch, and above 64 Ki
elements the wake-up of the workers. Arrays are on the GPU if there is one. Each result is compared with the reference
(``zcomm._formats.reference``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zcomm._bench.torch_calls import finish
from zcomm._formats import reference
from zcomm._formats.formats import FORMATS, get_format
from zcomm._formats.message import layout_of
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels
from zero import CPUAdagrad, CPUAdam, CPULion

OPTIONS = ("int8:asym", "int4:asym", "int8:hadamard", "int4:hadamard", "int8:stochastic", "int4:stochastic")
NUM_MESSAGES = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
of_sizes = pytest.mark.parametrize("numel", [4096, 69632])


@pytest.fixture(params=[name for name in (*FORMATS, *OPTIONS) if name != "none"])
def format(request: pytest.FixtureRequest) -> str:
    """Every format with every option; ``none`` has no kernels."""
    return str(request.param)


@lru_cache(maxsize=4)
class Arrays:
    """``NUM_MESSAGES`` arrays of [numel] elements and their messages in ``format``; no test changes them."""

    def __init__(self, format: str, numel: int) -> None:
        wire = get_format(format)
        self.numel, self.draw = numel, Draw(seed=1) if wire.is_random else None
        self.layout = layout_of("bench", wire, torch.float32, 1, numel)
        generator = torch.Generator().manual_seed(0)
        self.x, self.held = (torch.randn(NUM_MESSAGES, numel, generator=generator).to(DEVICE) for _ in range(2))
        self.messages = self.layout.new(NUM_MESSAGES, self.x.device)
        reference.quantize(self.x, self.layout, self.messages, numel, numel, self.draw)

    def new_message(self) -> Tensor:
        """Allocate one message."""
        return self.layout.new(1, self.x.device)


def _run(benchmark: Any, kernel: Callable[[], object], out: Tensor) -> Tensor:
    """Time ``kernel``, zero ``out``, call it once more, and return ``out``."""

    def call() -> None:
        kernel()
        finish()

    benchmark(call)
    out.zero_()
    call()
    return out


@of_sizes
def test_quantize(benchmark: Any, format: str, numel: int) -> None:
    """Encode one array."""
    a = Arrays(format, numel)
    out = a.new_message()
    _run(benchmark, lambda: kernels.quantize(a.x[0], a.layout, out, numel, numel, a.draw), out)
    assert torch.equal(out, a.messages[:1])


@of_sizes
def test_decode(benchmark: Any, format: str, numel: int) -> None:
    """Decode one message."""
    a = Arrays(format, numel)
    out, expected = torch.zeros_like(a.x[0]), torch.zeros_like(a.x[0])
    _run(benchmark, lambda: kernels.decode(a.messages[:1], a.layout, out, numel, numel), out)
    reference.decode(a.messages[:1], a.layout, expected, numel, numel)
    assert torch.equal(out, expected)


@of_sizes
def test_decode_sum(benchmark: Any, format: str, numel: int) -> None:
    """Decode the mean of all messages: the last hop of a reduction."""
    a = Arrays(format, numel)
    out, expected = torch.zeros_like(a.x[0]), torch.zeros_like(a.x[0])
    _run(benchmark, lambda: kernels.decode_sum(a.messages, a.layout, out, numel, NUM_MESSAGES), out)
    reference.decode_sum(a.messages, a.layout, expected, numel, NUM_MESSAGES)
    assert torch.equal(out, expected)


@of_sizes
def test_decode_sum_requantize(benchmark: Any, format: str, numel: int) -> None:
    """Encode the sum of all messages: between the hops of a reduction."""
    a = Arrays(format, numel)
    out, expected = a.new_message(), a.new_message()
    _run(benchmark, lambda: kernels.decode_sum_requantize(a.messages, a.layout, out, a.layout, a.draw), out)
    reference.decode_sum_requantize(a.messages, a.layout, expected, a.layout, a.draw)
    assert torch.equal(out, expected)


@of_sizes
def test_quantize_difference(benchmark: Any, format: str, numel: int) -> None:
    """Encode a delta: the weights of delta-hpZ."""
    a = Arrays(format, numel)
    out, expected = a.new_message(), a.new_message()
    _run(benchmark, lambda: kernels.quantize_difference(a.x[0], a.held[0], a.layout, out, a.draw), out)
    reference.quantize(a.x[0] - a.held[0], a.layout, expected, numel, numel, a.draw)
    assert torch.equal(out, expected)


@of_sizes
def test_decode_add(benchmark: Any, format: str, numel: int) -> None:
    """Add the deltas of all messages to their rows: the receiving side."""
    a = Arrays(format, numel)
    out, expected = torch.zeros_like(a.x), torch.zeros_like(a.x)
    _run(benchmark, lambda: kernels.decode_add(a.messages, a.layout, out), out)
    reference.decode(a.messages, a.layout, expected, numel, numel)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", [CPUAdam, CPULion, CPUAdagrad])
@of_sizes
def test_optimizer_step(benchmark: Any, optimizer: Any, dtype: torch.dtype, numel: int) -> None:
    """Update one parameter in host memory."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(numel).to(dtype))
    before, param.grad = param.detach().clone(), torch.randn(numel).to(dtype)
    step = optimizer([param], lr=0.1)
    benchmark(step.step)
    assert param.isfinite().all()
    assert (param != before).any()
