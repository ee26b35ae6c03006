"""Fused native kernels, compared with the PyTorch reference step by step (N10 and N11)."""

# covers zcomm/_formats/reference.py zcomm/_formats/formats.py zcomm/_formats/message.py

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.zcomm.data import mixture, same_values
from zcomm._formats import reference
from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels

SIZES = (1, 255, 256, 257, 2048, 5001)
FORMATS = ("int4", "nf4", "int8", "fp8_e4m3", "nf4:hadamard", "int4:asym", "int4/512", "int4:stochastic")
INT8 = get_format("int8")


def _layout(format: str, num_segments: int, numel: int, operation: str = "test") -> MessageLayout:
    return layout_of(operation, get_format(format), torch.float32, num_segments, numel)


def _draw(format: str) -> Draw | None:
    return Draw(1, 2, 3, 0, 1, 0) if "stochastic" in format else None


def _quantized(values: Tensor, layout: MessageLayout, draw: Draw | None = None) -> Tensor:
    out = layout.new(values.shape[0], values.device)
    reference.quantize(values, layout, out, values.stride(0), layout.segment_numel, draw)
    return out


def _decoded(messages: Tensor, layout: MessageLayout) -> Tensor:
    out = torch.empty(messages.shape[0], layout.numel)
    reference.decode(messages, layout, out, layout.numel, layout.segment_numel)
    return out


class _Rows:
    """A residual's rows inside wider ones, and the result of N10."""

    def __init__(self, num_rows: int, numel: int, beta: float) -> None:
        self.numel, self.beta, num_blocks = numel, beta, -(-numel // 256)
        self.codes = torch.zeros(num_rows, num_blocks + 2, 256, dtype=torch.int8)
        self.scales = torch.zeros(num_rows, num_blocks + 2, dtype=torch.bfloat16)
        self.codes[:, 1:-1] = torch.randint(-127, 128, (num_rows, num_blocks, 256), dtype=torch.int8)
        self.codes[:, -2, numel - (num_blocks - 1) * 256 :] = 0
        self.scales[:, 1:-1] = torch.rand(num_rows, num_blocks) / 64

    def blocks(self) -> tuple[Tensor, Tensor, float]:
        return self.codes[:, 1:-1], self.scales[:, 1:-1], self.beta

    def renewed(self, x: Tensor, layout: MessageLayout, draw: Draw | None) -> tuple[Tensor, Tensor, Tensor]:
        """Messages, codes and scales after ``x`` [num_rows, numel]."""
        codes, scales, _ = (part.clone() if isinstance(part, Tensor) else part for part in self.blocks())
        held = (codes.float() * scales.float().unsqueeze(-1)).flatten(1)[:, : self.numel]
        u = x + held * torch.tensor(self.beta)
        messages = _quantized(u, layout, draw)
        lost = u - _decoded(messages, layout)
        for row in range(x.shape[0]):
            for block in range(codes.shape[1]):
                of_block = lost[row, block * 256 : (block + 1) * 256].contiguous()
                small = _layout("int8", 1, of_block.numel())
                if of_block.isfinite().all():
                    message = _quantized(of_block.unsqueeze(0), small)[0]
                    scales[row, block] = message[:2].view(torch.bfloat16)[0]
                    content = message[small.codes_offset : small.codes_offset + of_block.numel()]
                    codes[row, block, : of_block.numel()] = content.view(torch.int8)
        return messages, codes, scales


@pytest.mark.parametrize("format", FORMATS)
def test_a_residual_is_added_and_renewed(format: str) -> None:
    for seed, numel in enumerate(SIZES):
        layout, draw = _layout(format, 1, numel), _draw(format)
        x = mixture(2 * numel, seed, torch.float32).view(2, numel)
        rows = _Rows(2, numel, (1.0, 0.9)[seed % 2])
        messages, codes, scales = rows.renewed(x, layout, draw)
        edges = rows.codes[:, 0].clone(), rows.codes[:, -1].clone()
        assert kernels.fuses_residual(x, layout, draw=draw)
        out = layout.new(2, x.device).fill_(0xAB)
        kernels.quantize(x, layout, out, x.stride(0), 0, draw, residual=rows.blocks())
        assert torch.equal(out, messages), numel
        assert torch.equal(rows.blocks()[0], codes), numel
        assert torch.equal(rows.blocks()[1], scales), numel
        assert torch.equal(rows.codes[:, 0], edges[0]), numel
        assert torch.equal(rows.codes[:, -1], edges[1]), numel


@pytest.mark.parametrize("received", ["int8", "bf16", "int8:hadamard"])
@pytest.mark.parametrize("format", ["nf4", "int4:hadamard"])
def test_a_sum_is_encoded_with_its_residual(format: str, received: str) -> None:
    for seed, numel in enumerate(SIZES):
        incoming, layout = _layout(received, 2, numel, "before"), _layout(format, 1, numel)
        x = mixture(3 * 2 * numel, seed, torch.float32).nan_to_num(0, 2, -2).view(3, 2 * numel)
        messages = _quantized(x, incoming)
        terms = _decoded(messages, incoming).view(3, 2, numel)
        rows = _Rows(2, numel, 1.0)
        expected, codes, scales = rows.renewed(terms[0] + terms[1] + terms[2], layout, None)
        out = layout.new(2, x.device).fill_(0xAB)
        kernels.decode_sum_requantize(messages, incoming, out, layout, residual=rows.blocks())
        assert torch.equal(out, expected), numel
        assert torch.equal(rows.blocks()[0], codes), numel
        assert torch.equal(rows.blocks()[1], scales), numel


def test_blocks_that_straddle_those_of_a_residual_are_encoded_in_steps() -> None:
    x = torch.ones(1, 100)
    assert not kernels.fuses_residual(x, _layout("int8/48", 1, 100))
    assert not kernels.fuses_residual(x, _layout("bf16", 1, 100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["int4", "bf16", "nf4:hadamard", "int4:asym:stochastic"])
def test_a_difference_and_its_sum(format: str, dtype: torch.dtype) -> None:
    for seed, numel in enumerate(SIZES):
        layout, draw = _layout(format, 1, numel), _draw(format)
        new, held = mixture(numel, seed, torch.float32), mixture(numel, seed + 20, dtype)
        expected = _quantized((new - held.float()).unsqueeze(0), layout, draw)
        out = layout.new(1, new.device).fill_(0xAB)
        kernels.quantize_difference(new, held, layout, out, draw)
        wire = layout.codec.dtype or torch.uint8
        assert same_values(out.view(wire), expected.view(wire)), numel
        applied = (held.float() + _decoded(out, layout)[0]).to(dtype)
        rows = held.repeat(2, 2)[:, :numel]  # two, apart
        kernels.decode_add(out.repeat(2, 1), layout, rows)
        assert all(same_values(row, applied) for row in rows), numel
