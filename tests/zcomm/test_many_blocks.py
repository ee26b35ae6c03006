"""Every operation on 10,000 blocks of every format and option, in few launches: the reference's bits.

Native kernels here; Triton's, in its interpreter, when ../triton_kernels/test_interpreter.py runs this file.
"""

# covers zcomm/_formats/blocks.py zcomm/_residuals/residual.py

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.zcomm.data import mixture, same_values
from zcomm._base import env
from zcomm._collectives.encoder import Encoder
from zcomm._formats import reference
from zcomm._formats.formats import FORMATS, get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw, RandomKey
from zcomm._kernels import kernels
from zcomm._residuals.residual import Residual
from zcomm._transport.route import find_route
from zcomm._transport.topology import Topology

BLOCK, NUM_BLOCKS = 16, 10_000
INTS = [f"{name}/16{asym}{rotated}{drawn}" for name in ("int8", "int4") for asym in ("", ":asym")
        for rotated in ("", ":hadamard") for drawn in ("", ":stochastic")]  # fmt: skip
WIRES = [*INTS, *(f"{name}/16{rotated}" for name in ("nf4", "fp8_e4m3") for rotated in ("", ":hadamard"))]
CASTS = ["none", "bf16", "fp16"]
KEY, BETA = RandomKey(3, 4, 5), 0.75
ONE = Topology.single()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: the reference's many small operations are slower with more on a busy machine."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


def _draw(wire: str, hop: int = 0) -> Draw | None:
    return Draw(KEY.seed, KEY.tensor, KEY.step, hop) if get_format(wire).is_random else None


def _layout(wire: str, num_segments: int, numel: int) -> MessageLayout:
    return layout_of("test", get_format(wire), torch.float32, num_segments, numel)


def _same(got: Tensor, expected: Tensor, layout: MessageLayout) -> bool:
    dtype = layout.codec.dtype
    return (
        torch.equal(got, expected)
        if dtype is None
        else same_values(got.view(-1).view(dtype), expected.view(-1).view(dtype))
    )


def _encoded(values: Tensor, layout: MessageLayout, draw: Draw | None = None) -> Tensor:
    """Encode ``values`` with the reference."""
    out = layout.new(1, values.device)
    reference.quantize(values, layout, out, 0, layout.segment_numel, draw)
    return out


def _decoded(message: Tensor, layout: MessageLayout) -> Tensor:
    out = torch.empty(layout.numel)
    reference.decode(message, layout, out, 0, layout.segment_numel)
    return out


def test_the_kernels_are_not_the_reference() -> None:
    assert env.value("ZCOMM_KERNELS") == "triton" or kernels.native_unavailable_reason() == ""


@pytest.mark.parametrize("wire", [*WIRES, *CASTS])
def test_messages_and_sums(wire: str) -> None:
    """Two messages of two segments, in order and permuted, the last block of each short; sums are encoded again."""
    numel = NUM_BLOCKS // 4 * BLOCK - 3
    layout, after = _layout(wire, 2, numel), _layout(wire, 1, numel)
    x = mixture(4 * numel, 7)
    found: list[list[Tensor]] = []
    for module in (reference, kernels):
        results: list[Tensor] = []
        for strides in ((2 * numel, numel), (numel, 2 * numel)):
            messages, values = layout.new(2, x.device).fill_(0xAB), torch.full_like(x, 7)
            module.quantize(x, layout, messages, *strides, _draw(wire))
            module.decode(messages, layout, values, *strides)
            results += [messages, values]
        total, again = torch.full((2 * numel,), 7, dtype=torch.bfloat16), after.new(2, x.device).fill_(0xAB)
        module.decode_sum(messages, layout, total, numel, 3)
        module.decode_sum_requantize(messages, layout, again, after, _draw(wire, 1))
        found.append([*results, total, again])
    for index, (expected, got) in enumerate(zip(*found, strict=True)):
        assert _same(got, expected, layout) if got.dtype == torch.uint8 else same_values(got, expected), index


@pytest.mark.parametrize("wire", [*WIRES, *CASTS])
def test_deltas(wire: str) -> None:
    numel = NUM_BLOCKS * BLOCK - 3
    layout = _layout(wire, 1, numel)
    new, held = mixture(numel, 8), mixture(numel, 9, torch.bfloat16)
    message = layout.new(1, new.device).fill_(0xAB)
    kernels.quantize_difference(new, held, layout, message, _draw(wire))
    assert _same(message, _encoded(new - held.float(), layout, _draw(wire)), layout)
    expected = (held.float() + _decoded(message, layout)).to(held.dtype)
    kernels.decode_add(message, layout, held.view(1, -1))
    assert same_values(held, expected)


@pytest.mark.parametrize("wire", WIRES)
def test_residuals(wire: str) -> None:
    """N10 step by step; a block that is not finite keeps its residual."""
    numel = NUM_BLOCKS * BLOCK - 3
    layout, stored = _layout(wire, 1, numel), layout_of("residual", FORMATS["int8"], torch.float32, 1, numel)
    residual = Residual(ONE, [("all", 0, numel)], numel, beta=BETA)
    residual.set_values(mixture(numel, 10).nan_to_num(0, 1, -1).view(1, -1))
    old, values = residual.values()[0], mixture(numel, 11)
    assert same_values(old, _decoded(_encoded(mixture(numel, 10).nan_to_num(0, 1, -1), stored), stored))
    message = layout.new(1, values.device).fill_(0xAB)
    encoder = Encoder(find_route("test", ONE, wire, first="intra"), numel, KEY, residual)
    encoder.encode(0, values.clone().view(1, -1), message, layout)
    residual.commit()
    summed = values + old * torch.tensor(BETA)
    expected = _encoded(summed, layout, _draw(wire))
    assert _same(message, expected, layout)
    lost = _decoded(_encoded(summed - _decoded(expected, layout), stored), stored)
    assert lost.isnan().any()
    assert same_values(residual.values()[0], torch.where(lost.isnan(), old, lost))
