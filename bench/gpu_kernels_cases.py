"""The operations that gpu_kernels.py times, with their bytes and the check against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_forms import CODECS, CodecSpec
from torch_forms import decode_sum as torch_decode_sum
from torch_forms import encode as torch_encode

from zcomm._formats import reference
from zcomm._formats.formats import get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._kernels import kernels, native_calls, on_cuda, on_triton
from zcomm.triton_kernels import unavailable_reason

__all__ = ["NUM_SUMMED", "Case", "Data", "device_nbytes", "kernels_of", "make_cases", "reason_against"]

NUM_SUMMED = (4, 8)
CHECKED_NUMEL = 1 << 16
"""Elements at the start and at the end that are compared with the reference on the CPU."""
Call = Callable[[], object]


def kernels_of(name: str) -> ModuleType:
    """The module with the operations of ``cuda``, ``triton`` or, on the CPU, ``native`` kernels."""
    return {"cuda": on_cuda, "triton": on_triton, "native": kernels}[name]


def reason_against(name: str) -> str:
    """Why the ``cuda``, ``triton`` or ``native`` kernels cannot be used here; empty if they can."""
    if name == "triton":
        return unavailable_reason("cuda")
    if native_calls.module is None:
        return native_calls.UNBUILT_REASON
    if name == "cuda" and not native_calls.module.build_info()["cuda"]:
        return "the native module is built without CUDA"
    return ""


def device_nbytes(format_name: str, dtype: torch.dtype, numel: int, num_summed: int) -> int:
    """Return the approximate device memory of :class:`Data`, including temporaries."""
    layout = _layout(format_name, dtype, numel)
    return numel * dtype.itemsize * 3 + (num_summed + 1) * layout.nbytes


def _layout(format_name: str, dtype: torch.dtype, numel: int) -> MessageLayout:
    return layout_of("bench", get_format(format_name), dtype, 1, numel)


class Data:
    """Random numbers of one dtype, messages of them in one format, and buffers for the results."""

    def __init__(
        self, format_name: str, dtype: torch.dtype, numel: int, device: torch.device, num_messages: int
    ) -> None:
        """``numel`` is a multiple of 1024; message i is made from x * (1 + i / 8)."""
        self.layout = _layout(format_name, dtype, numel)
        self.spec: CodecSpec = CODECS[format_name]
        generator = torch.Generator(device).manual_seed(numel)
        self.x = torch.randn(numel, dtype=dtype, device=device, generator=generator)
        self.out = torch.zeros_like(self.x)
        self.messages = self.layout.new(num_messages, device)
        self.message = torch.zeros(1, self.layout.nbytes, dtype=torch.uint8, device=device)

    def fill(self, module: ModuleType) -> None:
        """Make the messages with the kernels of ``module``."""
        for index, message in enumerate(self.messages):
            module.quantize(self.scaled(self.x, index), self.layout, message.view(1, -1), 0, 0, None)

    @staticmethod
    def scaled(x: Tensor, index: int) -> Tensor:
        """Return the values of message ``index``."""
        return x * (1 + index / 8)

    def slices(self) -> Iterator[slice]:
        """The elements that are checked."""
        count = min(CHECKED_NUMEL, self.x.numel())
        yield slice(0, count)
        if self.x.numel() > count:
            yield slice(self.x.numel() - count, self.x.numel())

    def parts(self, index: int = 0) -> tuple[Tensor, Tensor]:
        """Scales [blocks, 1] and codes [blocks, bytes] of a message, for torch's own operations."""
        return _split(self.messages[index], self.layout, self.spec, slice(0, self.x.numel()))

    def wrong_bytes(self, expected_of: Callable[[list[Tensor], MessageLayout, Tensor], None]) -> int:
        """Count bytes of ``message`` that differ from what ``expected_of(values of messages, layout, out)`` writes."""
        wrong = 0
        for where in self.slices():
            small, values = self._reference(where)
            out = small.new(1, values[0].device)
            expected_of(values, small, out)
            of_slice = _split(self.message[0], self.layout, self.spec, where)
            for got, expected in zip(of_slice, _split(out[0], small, self.spec, slice(0, small.numel)), strict=True):
                wrong += int((got.cpu().view(torch.uint8) != expected.view(torch.uint8)).sum())
        return wrong

    def wrong_elements(self, expected_of: Callable[[list[Tensor], MessageLayout, Tensor], None]) -> int:
        """Count elements of ``out`` that differ from what ``expected_of`` writes."""
        wrong = 0
        for where in self.slices():
            small, values = self._reference(where)
            expected = torch.zeros(small.numel, dtype=self.out.dtype)
            expected_of(values, small, expected)
            wrong += int((self.out[where].cpu() != expected).sum())
        return wrong

    def _reference(self, where: slice) -> tuple[MessageLayout, list[Tensor]]:
        """Return the layout of a message of only these elements, and each message's values, on the CPU."""
        x = self.x[where]
        values = [self.scaled(x, index).cpu() for index in range(len(self.messages))]
        return _layout(self.layout.codec.name, x.dtype, x.numel()), values


def _split(message: Tensor, layout: MessageLayout, spec: CodecSpec, where: slice) -> tuple[Tensor, Tensor]:
    """Scales [blocks, 1] and codes [blocks, bytes] of the blocks of elements ``where``."""
    first, last, row = where.start // layout.block, where.stop // layout.block, spec.row_nbytes
    scales = message[2 * first : 2 * last].view(torch.bfloat16).view(-1, 1)
    return scales, message[layout.codes_offset :][first * row : last * row].view(-1, row)


def _messages(values: list[Tensor], layout: MessageLayout) -> Tensor:
    made = layout.new(len(values), values[0].device)
    for value, message in zip(values, made, strict=True):
        reference.quantize(value, layout, message.view(1, -1), 0, 0)
    return made


@dataclass(frozen=True)
class Case:
    """One operation on one :class:`Data`."""

    operation: str
    nbytes: int
    """Bytes read and written."""
    call: Callable[[ModuleType], Any]
    """Run the operation with the kernels of a module."""
    count_wrong: Callable[[], int]
    torch_form: Call
    """The same in torch's operations; its bits are not compared."""


def make_cases(data: Data) -> Iterator[Case]:
    """Yield quantize, decode, and decode-sum and requantize of each number of ``NUM_SUMMED`` messages available."""
    x, out, layout, spec, numel = data.x, data.out, data.layout, data.spec, data.x.numel()
    blocks, first, of_first = x.view(-1, layout.block), data.messages[:1], data.parts()
    encode = partial(torch_encode, blocks, spec)
    yield Case(
        "quantize",
        x.nbytes + layout.nbytes,
        lambda module: module.quantize(x, layout, data.message, 0, 0, None),
        lambda: data.wrong_bytes(lambda values, small, to: reference.quantize(values[0], small, to, 0, 0)),
        encode,
    )
    yield Case(
        "decode",
        x.nbytes + layout.nbytes,
        lambda module: module.decode(first, layout, out, 0, 0),
        lambda: data.wrong_elements(
            lambda values, small, to: reference.decode(_messages(values[:1], small), small, to, 0, 0)
        ),
        lambda: torch_decode_sum([of_first], spec, 1).to(x.dtype),
    )
    for count in NUM_SUMMED:
        if count > len(data.messages):
            continue
        summed = data.messages[:count]
        parts = [data.parts(index) for index in range(count)]
        yield Case(
            f"decode_sum of {count}",
            x.nbytes + count * layout.nbytes,
            partial(_decode_sum, summed, layout, out, numel, count),
            partial(data.wrong_elements, partial(_expected_sum, count)),
            partial(_torch_sum, parts, spec, count, x.dtype),
        )
        yield Case(
            f"requantize of {count}",
            (count + 1) * layout.nbytes,
            partial(_requantize, summed, layout, data.message),
            partial(data.wrong_bytes, partial(_expected_requantized, count)),
            partial(_torch_requantize, parts, spec),
        )


def _decode_sum(messages: Tensor, layout: MessageLayout, out: Tensor, numel: int, count: int, module: Any) -> None:
    module.decode_sum(messages, layout, out, numel, count)


def _requantize(messages: Tensor, layout: MessageLayout, message: Tensor, module: Any) -> None:
    module.decode_sum_requantize(messages, layout, message, layout, None)


def _expected_sum(count: int, values: list[Tensor], small: MessageLayout, to: Tensor) -> None:
    reference.decode_sum(_messages(values[:count], small), small, to, small.numel, count)


def _expected_requantized(count: int, values: list[Tensor], small: MessageLayout, to: Tensor) -> None:
    reference.decode_sum_requantize(_messages(values[:count], small), small, to, small)


def _torch_sum(parts: list[Any], spec: CodecSpec, count: int, dtype: torch.dtype) -> Tensor:
    return torch_decode_sum(parts, spec, count).to(dtype)


def _torch_requantize(parts: list[Any], spec: CodecSpec) -> Any:
    return torch_encode(torch_decode_sum(parts, spec, 1), spec)
