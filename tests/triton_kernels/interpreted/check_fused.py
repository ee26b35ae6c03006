"""Triton's fused kernels in its interpreter: residuals (N10) and deltas (N11) against the reference's single steps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.zcomm.data import mixture, same_values
from zcomm._collectives.encoder import Encoder
from zcomm._formats import reference
from zcomm._formats.formats import FORMATS, get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw, RandomKey
from zcomm._kernels import kernels
from zcomm._residuals.residual import Residual
from zcomm._transport.route import Route, find_route
from zcomm._transport.topology import Topology
from zcomm.errors import MessageError
from zcomm.triton_kernels import _layout, launch

WIRES = ["int4", "nf4", "int8", "fp8_e4m3", "int4:asym", "int4/512:hadamard", "int8/2", "int4:asym:hadamard:stochastic"]
SIZES = [1, 255, 256, 257, 1000, 2053]
BETA = 0.9


def _quantized(x: Tensor, layout: MessageLayout, draw: Draw | None = None) -> Tensor:
    """Encode the rows of ``x`` with the reference."""
    out = layout.new(x.shape[0], x.device)
    reference.quantize(x, layout, out, x.shape[1], 0, draw)
    return out


def _decoded(messages: Tensor, layout: MessageLayout) -> Tensor:
    out = torch.empty(messages.shape[0], layout.numel)
    reference.decode(messages, layout, out, layout.numel, 0)
    return out


def _random(format: str) -> Draw | None:
    return Draw(3, 4, 5) if get_format(format).is_random else None


def _blocks_of(messages: Tensor, layout: MessageLayout) -> tuple[Tensor, Tensor]:
    """Codes int8 [rows, blocks, 256], zeros after the end, and scales bf16 [rows, blocks] of int8 messages."""
    num_rows, num_blocks = messages.shape[0], layout.blocks_per_segment
    codes = torch.zeros(num_rows, num_blocks * 256, dtype=torch.int8)
    codes[:, : layout.numel] = messages[:, layout.codes_offset :][:, : layout.numel].view(torch.int8)
    scales = messages[:, : 2 * num_blocks].contiguous().view(torch.bfloat16)
    return codes.view(num_rows, num_blocks, 256), scales


class _Expected:
    """A residual of ``numel`` columns, and the step-by-step result of one exchange of ``values``."""

    def __init__(self, values: Tensor, layout: MessageLayout, draw: Draw | None) -> None:
        num_rows, numel = values.shape
        stored = layout_of("residual", FORMATS["int8"], torch.float32, 1, numel)
        old = _quantized(mixture(num_rows * numel, 3).nan_to_num(0, 1, -1).view(num_rows, numel), stored)
        self.codes, self.scales = _blocks_of(old, stored)
        summed = values + _decoded(old, stored) * torch.tensor(BETA)
        self.messages = _quantized(summed, layout, draw)
        lost = _quantized(summed - _decoded(self.messages, layout), stored)
        codes, scales = _blocks_of(lost, stored)
        is_kept = scales.isnan()
        self.new_codes = torch.where(is_kept.unsqueeze(-1), self.codes, codes)
        self.new_scales = torch.where(is_kept, self.scales, scales)
        self.num_kept = int(is_kept.sum())

    def check(self, messages: Tensor, residual: launch.ResidualArguments) -> None:
        assert torch.equal(messages, self.messages)
        assert torch.equal(residual.codes, self.new_codes)
        assert same_values(residual.scales, self.new_scales)

    def residual(self) -> launch.ResidualArguments:
        """The residual in wider rows, as the blocks of a chunk are."""
        wide = [
            torch.full((t.shape[0], t.shape[1] + 3, *t.shape[2:]), 7, dtype=t.dtype) for t in (self.codes, self.scales)
        ]
        views = [w[:, 2:-1] for w in wide]
        views[0].copy_(self.codes)
        views[1].copy_(self.scales)
        return launch.ResidualArguments(views[0], views[1], BETA)


@pytest.mark.parametrize("format", WIRES)
def test_residual_of_an_array(format: str) -> None:
    for seed, numel in enumerate(SIZES):
        values = mixture(2 * numel, seed).view(2, numel)
        layout = layout_of("test", get_format(format), torch.float32, 1, numel)
        expected = _Expected(values, layout, _random(format))
        residual, out = expected.residual(), layout.new(2, values.device).fill_(0xAB)
        launch.quantize(values, layout, out, numel, 0, _random(format), residual=residual)
        expected.check(out, residual)
        assert numel < 1000 or expected.num_kept  # NaN and infinity among the values


@pytest.mark.parametrize("format", ["int4/256", "int8:asym"])
def test_ten_thousand_blocks(format: str) -> None:
    """A residual and a delta of tens of tiles, each in one launch."""
    numel = 10_000 * 256 - 3
    layout = layout_of("test", get_format(format), torch.float32, 1, numel)
    values, out = mixture(numel, 6).view(1, numel), layout.new(1, torch.device("cpu")).fill_(0xAB)
    expected = _Expected(values, layout, None)
    residual = expected.residual()
    launch.quantize(values, layout, out, numel, 0, residual=residual)
    expected.check(out, residual)
    _check_delta(values[0], mixture(numel, 7, torch.bfloat16), format)


@pytest.mark.parametrize("received", ["int8", "bf16", "int4:asym", "int8/48"])
@pytest.mark.parametrize("format", ["nf4", "int4/512:hadamard"])
def test_residual_of_a_sum(format: str, received: str) -> None:
    is_valid = torch.ones(1, dtype=torch.int32)
    for seed, numel in enumerate([255, 257, 1000]):
        incoming = layout_of("test", get_format(received), torch.float32, 2, numel)
        x = mixture(3 * incoming.numel, seed)
        messages = incoming.new(3, x.device)
        reference.quantize(x, incoming, messages, incoming.numel, numel)
        total = torch.empty(2, numel)
        reference.decode_sum(messages, incoming, total, numel, 1)
        layout = layout_of("after", get_format(format), torch.float32, 1, numel)
        expected = _Expected(total, layout, None)
        residual, out = expected.residual(), layout.new(2, x.device).fill_(0xAB)
        launch.decode_sum_requantize(messages, incoming, out, layout, is_valid=is_valid, residual=residual)
        expected.check(out, residual)
    assert is_valid.item() == 1


@pytest.mark.parametrize("received", ["int8", "bf16"])
@pytest.mark.parametrize("format", ["int4", "int8/48", "int4:stochastic"])
def test_a_collective_keeps_the_same_residual(format: str, received: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece and in chunks, over three steps, with and without the fused kernels."""
    numel, cut = 1000, 512
    incoming = [layout_of("test", get_format(received), torch.float32, 1, n) for n in (numel, cut, numel - cut)]
    layouts = [layout_of("after", get_format(format), torch.float32, 1, n) for n in (numel, cut, numel - cut)]
    outcomes = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(kernels, "fuses_residual", lambda *_, **__: False)
        residual = Residual(Topology.single(), [("all", 0, numel)], numel, beta=BETA)
        for step in range(3):
            route = find_route("test", residual.route.hops[0][0].group, format, first="intra")
            encoder = Encoder(_two_hops(route), numel, RandomKey(1, step=step) if ":" in format else None, residual)
            sent = []
            for columns, layout, of_sum in zip(
                (slice(0, numel),) if step < 2 else (slice(0, cut), slice(cut, numel)),
                layouts[:1] if step < 2 else layouts[1:], incoming[:1] if step < 2 else incoming[1:], strict=True,
            ):  # fmt: skip
                values = mixture(2 * numel, step).nan_to_num(0, 2, -2).view(2, numel)[:, columns].contiguous()
                messages, out = _quantized(values, of_sum), layout.new(1, values.device)
                encoder.at(columns.start).encode_sum(1, messages, of_sum, out, layout, expected=out)
                sent.append(out)
            residual.commit()
            outcomes.append((*sent, residual.values()))
    for fused, stepwise in zip(outcomes[:3], outcomes[3:], strict=True):
        assert all(same_values(a, b) for a, b in zip(fused, stepwise, strict=True))


def test_a_residual_needs_blocks_that_fit() -> None:
    values = torch.ones(1, 100)
    blocks = launch.ResidualArguments(
        torch.zeros(1, 1, 256, dtype=torch.int8), torch.zeros(1, 1, dtype=torch.bfloat16), 1.0
    )
    for format, named in (("int8/48", "block=48"), ("bf16", "codec=bf16")):
        layout = layout_of("test", get_format(format), torch.float32, 1, 100)
        with pytest.raises(ValueError, match=named):
            launch.quantize(values, layout, layout.new(1, values.device), 100, 0, residual=blocks)


def _two_hops(route: Route) -> Route:
    return replace(route, hops=(route.hops[-1], route.hops[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["int4", "bf16", "int4:asym:hadamard:stochastic"])
def test_delta(format: str, dtype: torch.dtype) -> None:
    """The message of new - held; and held plus what it decodes to, in float32 and then in held's dtype."""
    for seed, numel in enumerate(SIZES):
        _check_delta(mixture(numel, seed, torch.float32), mixture(numel, seed + 20, dtype), format)


def _check_delta(new: Tensor, held: Tensor, format: str) -> None:
    layout = layout_of("test", get_format(format), torch.float32, 1, new.numel())
    expected = _quantized((new - held.float()).unsqueeze(0), layout, _random(format))
    out = layout.new(1, new.device).fill_(0xAB)
    kernels.quantize_difference(new, held, layout, out, _random(format))
    wire = layout.codec.dtype or torch.uint8
    assert same_values(out.view(wire), expected.view(wire))
    applied = (held.float() + _decoded(out, layout)[0]).to(held.dtype)
    rows = held.repeat(2, 2)[:, : held.numel()]  # two, apart
    kernels.decode_add(out.repeat(2, 1), layout, rows)
    assert all(same_values(row, applied) for row in rows)


def test_a_message_of_another_layout_clears_the_flag() -> None:
    """The flag is all that a GPU's host can read later, as it does not wait for the kernel."""
    x = torch.ones(600)
    layout, other = (layout_of(name, FORMATS["int8"], torch.float32, 1, 300) for name in ("one", "another"))
    messages, after = _quantized(x.view(2, 300), layout), layout.new(1, x.device)
    wrong = messages.clone()
    wrong[1] = _quantized(x.view(2, 300), other)[1]
    for received, expected in ((messages, 1), (wrong, 0)):
        for name, arguments in (
            ("decode", (x, 300, 0)), ("decode_sum", (x, 300, 1)), ("decode_sum_requantize", (after, layout)),
        ):  # fmt: skip
            is_valid = torch.ones(1, dtype=torch.int32)
            getattr(launch, name)(received, layout, *arguments, is_valid=is_valid)
            assert is_valid.item() == expected, name


@pytest.mark.parametrize(
    ("received", "format", "has_residual"),
    [("int8", "int4", False), ("int4:asym", "nf4", True), ("int8/48", "int4", False), ("nf4", "int8:hadamard", True)],
)
def test_what_is_made_of_a_refused_message_is_refused(received: str, format: str, *, has_residual: bool) -> None:
    """A later decode refuses it, even if a right message was there before; in one launch, and in two.

    What is made of right messages is not, though the flag is cleared since another call.
    """
    numel, num_segments, count = 1000, 3, 4
    incoming = layout_of("test", get_format(received), torch.float32, num_segments, numel)
    layout = layout_of("after", get_format(format), torch.float32, 1, numel)
    messages = incoming.new(count, torch.device("cpu"))
    reference.quantize(torch.ones(count * incoming.numel), incoming, messages, incoming.numel, numel)
    for damaged in range(count + 1):
        got, decoded = layout.new(num_segments, messages.device), []
        is_valid = torch.tensor([int(damaged < count)], dtype=torch.int32)
        reference.decode_sum_requantize(messages, incoming, got, layout)
        wrong = messages.clone()
        if damaged < count:
            wrong[damaged, -8] ^= 1
        codes = torch.zeros(num_segments, 4, 256, dtype=torch.int8)
        residual = launch.ResidualArguments(codes, torch.zeros(num_segments, 4, dtype=torch.bfloat16), 1.0)
        launch.decode_sum_requantize(
            wrong, incoming, got, layout, is_valid=is_valid, residual=residual if has_residual else None
        )
        for message in got.split(1):
            with suppress(MessageError):
                decoded.append(_decoded(message, layout))
        assert len(decoded) == (0 if damaged < count else num_segments)
        assert is_valid.item() == 0


@pytest.mark.parametrize("format", ["int8", "int4", "int8:asym"])
@pytest.mark.parametrize(("count", "own"), [(1, 0), (2, 1), (129, 128), (300, 0), (3, None)])
def test_expected_messages_lose_their_trailers_and_nothing_else(format: str, count: int, own: int | None) -> None:
    """Messages that the kernel writes keep their trailers, with either encoding kernel."""
    x = torch.randn(300)
    layout = layout_of("test", get_format(format), torch.float32, 1, 300)
    written = _quantized(x.view(1, 300), layout)
    coming = layout.new(count + 1, x.device).fill_(0xAB)  # another behind them
    cleared = coming.clone()
    cleared[:count, -8:] = 0
    for encode in (
        lambda out, expected: kernels.quantize(x, layout, out, 300, 0, expected=expected),
        lambda out, expected: kernels.decode_sum_requantize(written, layout, out, layout, expected=expected),
    ):
        got = coming.clone()
        out = layout.new(1, x.device) if own is None else got[own : own + 1]
        encode(out, got[:count])
        assert out[0, -8:-4].view(torch.int32).item() == _layout.signed(layout.hash)
        if own is not None:
            got[own] = cleared[own]
        assert torch.equal(got, cleared)
