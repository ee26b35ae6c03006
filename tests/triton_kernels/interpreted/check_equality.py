"""Triton's kernels in its interpreter against the PyTorch reference, bit for bit, through the dispatch table.

Run by ../test_interpreter.py. ZCOMM_TEST_DRAWS sets how many cases hypothesis draws.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.zcomm.data import mixture, same_values
from zcomm._formats import reference
from zcomm._formats.formats import Format, get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels, on_triton

DRAWS = int(os.environ.get("ZCOMM_TEST_DRAWS", "200"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [
    "none", "bf16", "fp16", "int8", "int4", "nf4", "fp8_e4m3", "int8:asym", "int4:asym", "int4:hadamard",
    "int8:asym:hadamard", "nf4:hadamard", "fp8_e4m3:hadamard", "int8:stochastic", "int4:asym:hadamard:stochastic",
]  # fmt: skip
GUARD = 40


def _draw_of(format: Format, first: int = 0) -> Draw | None:
    return Draw(2**32 - 5, 6, 2**31 + 7, 1, 9, first) if format.is_random else None


def _guarded(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A view of numel elements in the middle of a tensor filled with 7."""
    room = torch.full((numel + 2 * GUARD,), 7, dtype=dtype)
    return room, room[GUARD : GUARD + numel]


def _same_messages(a: Tensor, b: Tensor, layout: MessageLayout) -> bool:
    wire = layout.codec.dtype
    return torch.equal(a, b) if wire is None else same_values(a.flatten().view(wire), b.flatten().view(wire))


@dataclass(frozen=True)
class Case:
    """One input that every operation is tried on."""

    format: str
    out_format: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    num_messages: int
    num_segments: int
    numel: int
    permuted: bool
    seed: int

    @property
    def strides(self) -> tuple[int, int]:
        """The strides of an array between messages and between segments."""
        if self.permuted:
            return self.numel, self.num_messages * self.numel
        return self.num_segments * self.numel, self.numel

    def check(self) -> None:
        """Check that all four operations have the reference's bits, and write nothing else."""
        layout = layout_of("test", get_format(self.format), self.dtype, self.num_segments, self.numel)
        x = mixture(self.num_messages * layout.numel, self.seed, self.dtype)
        draw = _draw_of(get_format(self.format), 2**34 + self.seed)
        rooms = [_guarded_messages(layout, self.num_messages) for _ in range(2)]
        for module, (_, messages) in zip((reference, kernels), rooms, strict=True):
            module.quantize(x, layout, messages, *self.strides, draw)
        assert _same_messages(rooms[0][1], rooms[1][1], layout), "quantize"
        assert torch.equal(rooms[0][0][:16], rooms[1][0][:16])
        assert torch.equal(rooms[0][0][-16:], rooms[1][0][-16:])
        self._check_decode(rooms[0][1], layout)
        self._check_requantize(rooms[0][1], layout)

    def _check_decode(self, messages: Tensor, layout: MessageLayout) -> None:
        values = [_guarded(self.num_messages * layout.numel, self.out_dtype) for _ in range(2)]
        sums = [_guarded(layout.numel, self.out_dtype) for _ in range(2)]
        for module, (_, flat), (_, total) in zip((reference, kernels), values, sums, strict=True):
            module.decode(messages, layout, flat, *self.strides)
            module.decode_sum(messages, layout, total, self.numel, 3)
        assert same_values(values[0][0], values[1][0]), "decode"
        assert same_values(sums[0][0], sums[1][0]), "decode_sum"

    def _check_requantize(self, messages: Tensor, layout: MessageLayout) -> None:
        format = get_format(self.out_format)
        out_layout = layout_of("after", format, self.dtype, 1, self.numel)
        outs = [_guarded_messages(out_layout, self.num_segments) for _ in range(2)]
        for module, (_, out) in zip((reference, kernels), outs, strict=True):
            module.decode_sum_requantize(messages, layout, out, out_layout, _draw_of(format, self.seed))
        assert _same_messages(outs[0][1], outs[1][1], out_layout), "decode_sum_requantize"
        assert torch.equal(outs[0][0][-16:], outs[1][0][-16:])


def _guarded_messages(layout: MessageLayout, num_messages: int) -> tuple[Tensor, Tensor]:
    room = torch.full((num_messages * layout.nbytes + 32,), 0xAB, dtype=torch.uint8)
    return room, room[16:-16].view(num_messages, layout.nbytes)


def _formats() -> st.SearchStrategy[str]:
    """Every format, with odd and extreme blocks as well as the usual ones."""
    blocks = st.sampled_from([2, 6, 16, 48, 64, 128, 256, 300, 512])
    powers = st.sampled_from([2, 16, 64, 128, 512])
    asym, rounding = st.sampled_from(["", ":asym"]), st.sampled_from(["", ":stochastic"])
    int_name, name = st.sampled_from(["int8", "int4"]), st.sampled_from(["nf4", "fp8_e4m3"])
    return st.one_of(
        st.sampled_from(["none", "bf16", "fp16"]),
        st.builds("{}/{}{}{}".format, int_name, blocks, asym, rounding),
        st.builds("{}/{}{}:hadamard{}".format, int_name, powers, asym, rounding),
        st.builds("{}/{}".format, name, blocks),
        st.builds("{}/{}:hadamard".format, name, powers),
    )


@given(
    st.builds(
        Case,
        _formats(), _formats(), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 2),
        st.one_of(st.integers(0, 300), st.sampled_from([511, 512, 513, 1023, 1025, 2053])), st.booleans(),
        st.integers(0, 10**6),
    )
)  # fmt: skip
@settings(max_examples=DRAWS, deadline=None)
def test_equals_the_reference(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("format", FORMATS)
def test_ten_thousand_blocks(format: str) -> None:
    """Tens of tiles: results must not depend on a tile's place, and rare values occur."""
    name, *options = format.split(":")
    block = "/64" if get_format(name).block else ""
    format = ":".join([name + block, *options])
    Case(format, "int8/64", torch.bfloat16, torch.float32, 1, 1, 10_000 * 64 - 3, permuted=False, seed=1).check()


def test_the_largest_block() -> None:
    for format in ("int4/65536", "int4/65534:asym", "nf4/65536:hadamard"):
        Case(format, "int8/2", torch.float32, torch.float16, 1, 1, 65536 + 100, permuted=False, seed=2).check()


def test_the_dispatch_chooses_triton() -> None:
    layout = layout_of("test", get_format("int8"), torch.float32, 1, 10)
    assert on_triton.serves(torch.empty(10), layout)
    assert not on_triton.serves(torch.empty(10, dtype=torch.float64), layout)
    none = layout_of("test", get_format("none"), torch.float64, 1, 10)
    assert not on_triton.serves(torch.empty(10), none)
