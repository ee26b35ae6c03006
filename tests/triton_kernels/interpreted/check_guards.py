"""The kernels stay within bounds: every array of every launcher lies inside a larger, guarded one.

Those bytes are 0xFF (a NaN in every floating dtype, a NaN scale, codes of -1) in one run and 0 in the other. Neither
may change, and both runs must give the same bits: what surrounds an array is neither written nor read into a result.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.zcomm.data import mixture
from zcomm._formats import reference
from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw
from zcomm.triton_kernels import launch

GUARD = 4096
"""Guard bytes before and after; a multiple of 16, to which messages are aligned."""
FORMATS = ["int8/64", "int4/64", "nf4/64", "fp8_e4m3/64", "int8/48:asym", "int4/64:asym:hadamard:stochastic", "bf16"]
SIZES = [1, 63, 64, 65, 256, 257]
BOTH = (0xFF, 0x00)


class Guarded:
    """Arrays surrounded by guard bytes of value ``fill``."""

    def __init__(self, fill: int) -> None:
        self._fill = fill
        self._rooms: list[tuple[Tensor, int]] = []
        self.results: list[Tensor] = []

    def array(self, values: Tensor) -> Tensor:
        """A contiguous copy of ``values``."""
        values = values.contiguous()
        room = torch.full((GUARD + values.nbytes + GUARD + 16,), self._fill, dtype=torch.uint8)
        room = room[-room.data_ptr() % 16 :][: GUARD + values.nbytes + GUARD]
        inside = room[GUARD : GUARD + values.nbytes].view(values.dtype).view(values.shape)
        inside.copy_(values)
        self._rooms.append((room, values.nbytes))
        return inside

    def written(self, values: Tensor) -> Tensor:
        """The same, for an array that the launcher writes."""
        self.results.append(self.array(values))
        return self.results[-1]

    def residual(self, num_rows: int, numel: int) -> launch.ResidualArguments:
        num_blocks = -(-numel // 256)
        codes = torch.arange(num_rows * num_blocks * 256).remainder(255).sub(127).to(torch.int8)
        scales = torch.full((num_rows, num_blocks), 0.01, dtype=torch.bfloat16)
        return launch.ResidualArguments(self.written(codes.view(num_rows, num_blocks, 256)), self.written(scales), 0.9)

    def is_whole(self) -> bool:
        """Whether all guard bytes are unchanged."""
        fill = torch.tensor(self._fill, dtype=torch.uint8)
        return all(
            bool((room[:GUARD] == fill).all()) and bool((room[GUARD + nbytes :] == fill).all())
            for room, nbytes in self._rooms
        )


def _draw(format: str) -> Draw | None:
    return Draw(3, 4, 5, first=1) if get_format(format).is_random else None


def _messages(layout: MessageLayout, num_messages: int) -> Tensor:
    x = mixture(num_messages * layout.numel, 1)
    out = layout.new(num_messages, x.device)
    reference.quantize(x, layout, out, layout.numel, layout.segment_numel)
    return out


def _layout(format: str, numel: int, num_segments: int = 2) -> MessageLayout:
    return layout_of("test", get_format(format), torch.float32, num_segments, numel)


def _quantize(guarded: Guarded, format: str, numel: int, dtype: torch.dtype) -> None:
    layout = _layout(format, numel)
    x = guarded.array(mixture(2 * layout.numel, 1, dtype))
    launch.quantize(x, layout, guarded.written(layout.new(2, x.device)), layout.numel, numel, _draw(format))


def _quantize_difference(guarded: Guarded, format: str, numel: int, dtype: torch.dtype) -> None:
    layout = _layout(format, numel)
    x, held = (guarded.array(mixture(2 * layout.numel, seed, dtype)) for seed in (1, 2))
    out = guarded.written(layout.new(2, x.device))
    launch.quantize(x, layout, out, layout.numel, numel, _draw(format), held=held)


def _quantize_with_residual(guarded: Guarded, format: str, numel: int, dtype: torch.dtype) -> None:
    if _has_no_residual(format):
        return
    layout = _layout(format, numel, 1)
    x, residual = guarded.array(mixture(2 * numel, 1, dtype)), guarded.residual(2, numel)
    launch.quantize(x, layout, guarded.written(layout.new(2, x.device)), numel, 0, _draw(format), residual=residual)


def _decode(guarded: Guarded, format: str, numel: int, dtype: torch.dtype, *, added: bool = False) -> None:
    layout, is_valid = _layout(format, numel), guarded.written(torch.ones(1, dtype=torch.int32))
    out = guarded.written(mixture(2 * layout.numel, 3, dtype))
    messages = guarded.array(_messages(layout, 2))
    launch.decode(messages, layout, out, layout.numel, numel, is_valid=is_valid, added=added)


def _decode_added(guarded: Guarded, format: str, numel: int, dtype: torch.dtype) -> None:
    _decode(guarded, format, numel, dtype, added=True)


def _decode_sum(guarded: Guarded, format: str, numel: int, dtype: torch.dtype) -> None:
    layout, is_valid = _layout(format, numel), guarded.written(torch.ones(1, dtype=torch.int32))
    out, messages = guarded.written(torch.zeros(layout.numel, dtype=dtype)), guarded.array(_messages(layout, 3))
    launch.decode_sum(messages, layout, out, numel, 3, is_valid=is_valid)


def _requantize(guarded: Guarded, format: str, numel: int, _: torch.dtype, *, has_residual: bool = False) -> None:
    incoming, layout = _layout("int4/64", numel), layout_of("after", get_format(format), torch.float32, 1, numel)
    messages, is_valid = guarded.array(_messages(incoming, 3)), guarded.written(torch.ones(1, dtype=torch.int32))
    residual = guarded.residual(2, numel) if has_residual else None
    out = guarded.written(layout.new(2, messages.device))
    launch.decode_sum_requantize(messages, incoming, out, layout, _draw(format), is_valid=is_valid, residual=residual)


def _requantize_with_residual(guarded: Guarded, format: str, numel: int, dtype: torch.dtype) -> None:
    if not _has_no_residual(format):
        _requantize(guarded, format, numel, dtype, has_residual=True)


def _has_no_residual(format: str) -> bool:
    block = get_format(format).block
    return block == 0 or bool(block & (block - 1))


CALLS: list[Callable[[Guarded, str, int, torch.dtype], None]] = [
    _quantize, _quantize_difference, _quantize_with_residual, _decode, _decode_added, _decode_sum, _requantize,
    _requantize_with_residual,
]  # fmt: skip


def test_every_launcher_is_called() -> None:
    names = {name for name in launch.__all__ if name != "ResidualArguments"}
    assert names == {"quantize", "decode", "decode_sum", "decode_sum_requantize"}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.lstrip("_"))
def test_nothing_beside_an_array_is_written_or_read(
    call: Callable[[Guarded, str, int, torch.dtype], None], format: str
) -> None:
    for index, numel in enumerate(SIZES):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        rooms = [Guarded(fill) for fill in BOTH]
        for room in rooms:
            call(room, format, numel, dtype)
            assert room.is_whole(), (format, numel)
        for ones, zeros in zip(rooms[0].results, rooms[1].results, strict=True):
            assert torch.equal(ones.view(torch.uint8), zeros.view(torch.uint8)), (format, numel)
