"""On a GPU: the CUDA and Triton kernels have the bits of the CPU reference, on fresh random data."""

# covers zcomm/_formats/reference.py zcomm/_formats/formats.py zcomm/_formats/message.py

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zcomm.data import FINITE, mixture, same_values
from zcomm._formats import reference
from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._kernels import native_calls, on_cuda, on_triton
from zcomm.triton_kernels import unavailable_reason

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HAS_CUDA_KERNELS = native_calls.module is not None and bool(native_calls.module.build_info()["cuda"])
WIRES = ["int8", "int4", "nf4", "fp8_e4m3", "none", "bf16", "int8/1024", "int4/8", "nf4/512", "fp8_e4m3/32"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (2, 3, 255), (1, 2, 1024), (3, 2, 4099), (2, 1, 65536), (1, 1, 3_000_001)]
"""Messages, segments of a message, elements of a segment."""


@pytest.fixture(params=["cuda", "triton"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda":
        if not HAS_CUDA_KERNELS:
            pytest.skip("the native module is not built, or without CUDA")
        return on_cuda
    if reason := unavailable_reason("cuda"):
        pytest.skip(reason)
    return on_triton


@pytest.fixture
def seed() -> int:
    """A seed that differs in every run, and is printed when a test fails."""
    number = random.SystemRandom().randrange(1 << 20)
    print(f"seed {number}")  # noqa: T201
    return number


def _layout(wire: str, dtype: torch.dtype, num_segments: int, numel: int) -> MessageLayout:
    name, _, block = wire.partition("/")
    return layout_of("gpu", get_format(name, block=int(block) if block else None), dtype, num_segments, numel)


def _same(call: Callable[[Any, Callable[[Tensor], Tensor]], tuple[Tensor, ...]], kernels: Any) -> None:
    """The results of ``call`` with the reference on the CPU, and with ``kernels`` on the GPU."""
    expected = call(reference, lambda tensor: tensor.clone())
    got = call(kernels, lambda tensor: tensor.cuda())
    for index, (left, right) in enumerate(zip(expected, got, strict=True)):
        assert same_values(left, right.cpu()), f"result {index}"


def _typed(messages: Tensor, layout: MessageLayout) -> Tensor:
    return messages if layout.codec.dtype is None else messages.view(-1).view(layout.codec.dtype)


def _values(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    part = mixture(min(numel, 30_011), seed, dtype)
    return part.repeat(-(-numel // part.numel()))[:numel]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", WIRES)
def test_messages_and_values(
    monkeypatch: pytest.MonkeyPatch, kernels: Any, wire: str, dtype: torch.dtype, seed: int
) -> None:
    if kernels is on_triton and dtype != torch.bfloat16:  # tuning compiles eight forms of each kernel
        monkeypatch.setattr("zcomm.triton_kernels._run.TUNED_NUMEL", 1 << 40)
    for index, shape in enumerate(SHAPES):
        _check_messages_and_values(kernels, wire, dtype, shape, seed + index)


def _check_messages_and_values(
    kernels: Any, wire: str, dtype: torch.dtype, shape: tuple[int, int, int], seed: int
) -> None:
    num_messages, num_segments, numel = shape
    gap = seed % 2 * 3  # rows that lie apart, and are not aligned
    strides = num_segments * (numel + gap), numel + gap
    layout = _layout(wire, dtype, num_segments, numel)
    last = _layout(WIRES[seed % 4], dtype, 1, numel)
    x = _values(num_messages * strides[0], seed, dtype)

    def call(module: Any, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        source, messages = to(x), to(layout.new(num_messages, x.device).fill_(7))
        values, total = to(torch.full_like(x, 7)), to(torch.full((strides[0],), 7, dtype=dtype))
        out = to(last.new(num_segments, x.device).fill_(7))
        module.quantize(source, layout, messages, *strides, None)
        module.decode(messages, layout, values, *strides)
        module.decode_sum(messages, layout, total, strides[1], 3)
        module.decode_sum_requantize(messages, layout, out, last, None)
        return _typed(messages, layout), values, total, out

    _same(call, kernels)


@pytest.mark.parametrize("wire", ["int8", "int4", "nf4", "fp8_e4m3", "int8/1024", "int4/8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_without_clamps(kernels: Any, wire: str, dtype: torch.dtype, seed: int) -> None:
    """Where no scale can overflow, the kernels fuse products with additions; just above they clamp."""
    limit = 2.0 ** (8 if wire == "fp8_e4m3" else 119)
    for numel, count in ((255, 2), (4099, 3), (65536, 8)):
        layout, last = _layout(wire, dtype, 1, numel), _layout("int8", dtype, 1, numel)
        x = mixture(count * numel, seed, torch.float32, FINITE, length=2048)
        x[:numel] *= -1.0  # a first term may be -0
        noise = torch.randn(count * numel, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1)
        for values in (x, *(noise * (limit * layout.codec.qmax * factor) for factor in (0.9, 1.3))):
            _check_sums(kernels, layout, last, values.view(count, numel), dtype)


def _check_sums(kernels: Any, layout: MessageLayout, last: MessageLayout, x: Tensor, dtype: torch.dtype) -> None:
    count, numel = x.shape
    messages = layout.new(count, x.device)
    reference.quantize(x, layout, messages, numel, 0)

    def call(module: Any, to: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        totals, out = to(torch.full((4, numel), 7, dtype=dtype)), to(last.new(1, x.device).fill_(7))
        for total, divisor in zip(totals, (1.0, 2.0, 0.125, 3.0), strict=True):
            module.decode_sum(to(messages), layout, total, numel, divisor)
        module.decode_sum_requantize(to(messages), layout, out, last, None)
        return totals, out

    _same(call, kernels)


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire not in ("none", "bf16")])
def test_deltas(kernels: Any, wire: str, seed: int) -> None:
    numel = 10_007
    x, held = mixture(numel, seed), mixture(numel, seed + 1, torch.bfloat16)
    layout = _layout(wire, torch.float32, 1, numel)
    expected, got = layout.new(1, x.device), layout.new(1, torch.device("cuda"))
    reference.quantize(x - held, layout, expected, 0, 0)
    kernels.quantize(x.cuda(), layout, got, 0, 0, None, held=held.cuda())
    assert torch.equal(expected, got.cpu())
    decoded, replica = torch.empty(numel), held.cuda()
    reference.decode(expected, layout, decoded, 0, 0)
    kernels.decode(got, layout, replica, 0, 0, added=True)
    assert same_values((held + decoded).to(torch.bfloat16), replica.cpu())


def test_residuals_are_those_of_triton(seed: int) -> None:
    if not HAS_CUDA_KERNELS or unavailable_reason("cuda"):
        pytest.skip("needs both kinds of kernels")
    numel, rows = 5000, 3
    for wire in ("int4", "nf4", "int8", "fp8_e4m3"):
        layout, summed = _layout(wire, torch.float32, 1, numel), _layout("int8", torch.float32, rows, numel)
        results = []
        for module in (on_cuda, on_triton):
            codes = torch.zeros(rows, -(-numel // 256), 256, dtype=torch.int8, device="cuda")
            scales = torch.zeros(codes.shape[:2], dtype=torch.bfloat16, device="cuda")
            messages = layout.new(rows, codes.device)
            received = summed.new(4, codes.device)
            for step in range(2):
                x = _values(rows * numel, seed + step).cuda()
                module.quantize(x, layout, messages, numel, 0, None, residual=(codes, scales, 0.9))
                x = _values(4 * rows * numel, seed + 7 + step).cuda()
                module.quantize(x, summed, received, rows * numel, numel, None)
                module.decode_sum_requantize(received, summed, messages, layout, None, residual=(codes, scales, 1.0))
            results.append((messages, codes, scales))
        for index, (left, right) in enumerate(zip(*results, strict=True)):
            assert same_values(left, right), f"{wire}: result {index}"


def test_large_offsets(kernels: Any) -> None:
    """Elements beyond 2^31: 4.3 GB of bfloat16."""
    numel = (1 << 31) + 1000
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    layout = _layout("int8", torch.bfloat16, 1, numel)
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    x[-1000:] = torch.arange(1000, dtype=torch.float32).to(torch.bfloat16)
    messages, out = layout.new(1, x.device), torch.empty_like(x)
    kernels.quantize(x, layout, messages, 0, 0, None)
    kernels.decode(messages, layout, out, 0, 0)
    assert (out[-1000:].float() - x[-1000:].float()).abs().max() <= 4
    assert not out[:-1256].any()


def test_a_message_of_another_kind_is_found(kernels: Any) -> None:
    layout, other = _layout("int8", torch.float32, 1, 1000), _layout("int8", torch.float32, 2, 500)
    messages = layout.new(1, torch.device("cuda"))
    kernels.quantize(torch.ones(1000, device="cuda"), layout, messages, 0, 0, None)
    decode = on_triton._launch().decode if kernels is on_triton else on_cuda._decode
    flag = torch.ones(1, dtype=torch.int32, device="cuda")
    decode(messages, other, torch.empty(1000, device="cuda"), 1000, 500, is_valid=flag, added=False)
    assert flag.item() == 0
    decode(messages, layout, torch.empty(1000, device="cuda"), 1000, 1000, is_valid=flag.fill_(1), added=False)
    assert flag.item() == 1


def test_ranks_as_threads_of_one_process(seed: int) -> None:
    """Each thread has its own stream: a reduce-scatter whose exchange reads the other threads' messages."""
    if not HAS_CUDA_KERNELS:
        pytest.skip("the native module is built without CUDA")
    world_size, numel = 4, 30_000
    layout = _layout("int8", torch.float32, 1, numel)
    inputs = [_values(world_size * numel, seed + rank) for rank in range(world_size)]
    sent: list[Tensor] = [torch.empty(0)] * world_size
    barrier = Barrier(world_size, timeout=30)

    def reduce_scatter(rank: int) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            sent[rank] = layout.new(world_size, torch.device("cuda"))
            on_cuda.quantize(inputs[rank].cuda(), layout, sent[rank], numel, 0, None)
            torch.cuda.current_stream().synchronize()
            barrier.wait()
            received = torch.stack([messages[rank] for messages in sent])
            out = torch.empty(numel, device="cuda")
            on_cuda.decode_sum(received, layout, out, numel, world_size)
            return out.cpu()

    with ThreadPoolExecutor(world_size) as threads:
        results = list(threads.map(reduce_scatter, range(world_size)))
    expected = [_reference_messages(x, layout, world_size) for x in inputs]
    for rank, result in enumerate(results):
        total = torch.empty(numel)
        reference.decode_sum(torch.stack([messages[rank] for messages in expected]), layout, total, numel, world_size)
        assert same_values(total, result), f"rank {rank}"


def _reference_messages(x: Tensor, layout: MessageLayout, count: int) -> Tensor:
    messages = layout.new(count, x.device)
    reference.quantize(x, layout, messages, layout.numel, 0)
    return messages


def test_a_graph_replays_the_kernels() -> None:
    if not HAS_CUDA_KERNELS:
        pytest.skip("the native module is built without CUDA")
    layout = _layout("int4", torch.float32, 1, 100_000)
    x, out = torch.randn(100_000, device="cuda"), torch.empty(100_000, device="cuda")
    messages, flag = layout.new(1, x.device), torch.ones(1, dtype=torch.int32, device="cuda")

    def both() -> None:
        on_cuda.quantize(x, layout, messages, 0, 0, None)
        on_cuda._decode(messages, layout, out, 0, 0, is_valid=flag, added=False)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    x.neg_()
    expected = -out
    graph.replay()
    assert torch.equal(out, expected)
