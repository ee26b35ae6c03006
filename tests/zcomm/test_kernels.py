"""The PyTorch reference against the NumPy oracle, and the native kernels against the reference; golden vectors."""

# covers zcomm/_formats/formats.py zcomm/_formats/message.py zcomm/_formats/philox.py
# covers zcomm/_formats/codec_nf4.py zcomm/_formats/codec_fp8_e4m3.py

from __future__ import annotations

import os
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import make
from tests.zcomm import oracle
from tests.zcomm.data import KINDS, mixture, same_values, values_of
from tests.zcomm.oracle import Wire
from zcomm._formats import reference
from zcomm._formats.formats import CODECS, FORMATS, Format, get_format
from zcomm._formats.message import MessageLayout, layout_of
from zcomm._formats.philox import Draw
from zcomm._kernels import kernels
from zcomm.errors import MessageError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODEC_NAMES = ["f32", "bf16", "fp16", "int8", "int4"]
NUM_DRAWS = int(os.environ.get("ZCOMM_TEST_DRAWS", "200"))
"""The number of hypothesis cases; set it to 10,000 for a thorough run."""
SIZES = [0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4097]


def _layout(codec: str, num_segments: int, numel: int, block: int | None = None) -> MessageLayout:
    default = {"int8": 256, "int4": 128}.get(codec, 0)
    return MessageLayout("test", CODECS[codec], block or default if default else 0, num_segments, numel)


def _quantized(module: ModuleType, x: torch.Tensor, layout: MessageLayout, num_messages: int) -> torch.Tensor:
    out = layout.new(num_messages, x.device).fill_(0xAB)
    module.quantize(x, layout, out, layout.numel, layout.segment_numel)
    return out


@st.composite
def wires(draw: st.DrawFn) -> Wire:
    name = draw(st.sampled_from(["int8", "int4", "nf4", "fp8_e4m3"]))
    is_int = name in ("int8", "int4")
    hadamard = draw(st.booleans())
    word = st.integers(0, 2**32 - 1)
    return Wire(
        name,
        draw(st.sampled_from([2, 16, 64] if hadamard else [2, 16, 48, 128, 256])),
        symmetric=not is_int or draw(st.booleans()),
        hadamard=hadamard,
        random=(draw(word), draw(word), draw(word), draw(st.integers(0, 1)), draw(word))
        if is_int and draw(st.booleans())
        else None,
    )


def _format_of(wire: Wire) -> Format:
    return get_format(
        wire.name,
        block=wire.block or None,
        symmetric=wire.symmetric,
        rotation="hadamard" if wire.hadamard else None,
        rounding="stochastic" if wire.random else "nearest",
    )


def _check_oracle(module: ModuleType, wire: Wire, segments: list[np.ndarray]) -> None:
    """Messages and decoded values must have the oracle's bits."""
    layout = layout_of("test", _format_of(wire), torch.float32, len(segments), len(segments[0]))
    x = torch.from_numpy(np.concatenate(segments))
    message = layout.new(1, x.device).fill_(0xAB)
    module.quantize(x, layout, message, 0, layout.segment_numel, Draw(*wire.random) if wire.random else None)
    assert bytes(message[0].tolist()) == oracle.encode(segments, wire, "test")
    decoded = torch.empty_like(x)
    module.decode(message, layout, decoded, 0, layout.segment_numel)
    assert same_values(decoded, torch.from_numpy(oracle.decode(segments, wire).reshape(-1).copy()))


@given(
    wire=wires(),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    numel=st.integers(0, 300),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_reference_equals_the_contract(wire: Wire, kinds: list[str], numel: int, seed: int) -> None:
    _check_oracle(reference, wire, [values_of(kind, numel, seed + i) for i, kind in enumerate(kinds)])


def test_fp8_codes_are_the_nearest_values() -> None:
    """Every float8 code and every midpoint between two, by search, in one block whose scale is 1."""
    magnitudes = oracle.fp8_values()
    middles = [(a + b) / 2 for a, b in pairwise(magnitudes)]
    beside = [float(np.nextafter(np.float32(m), np.float32(s))) for m in middles for s in (0, 448)]
    values = np.array([*magnitudes, *middles, *beside], np.float32)
    _check_oracle(reference, Wire("fp8_e4m3", 2048), [np.concatenate([values, -values])])


def test_stochastic_rounding_is_right_on_average_and_repeats() -> None:
    layout = layout_of("test", get_format("int4", rounding="stochastic"), torch.float32, 1, 128)
    x = torch.linspace(-1, 1, 128)
    mean, decoded = torch.zeros(128), torch.empty(128)
    messages = []
    for step in range(400):
        message = layout.new(1, x.device)
        reference.quantize(x, layout, message, 0, 0, Draw(5, 0, step))
        reference.decode(message, layout, decoded, 0, 0)
        mean += decoded / 400
        messages.append(message)
    assert (mean - x).abs().max() < 5 * (1 / 7) / 2 / 400**0.5  # five standard deviations of a coin's mean
    again = layout.new(1, x.device)
    reference.quantize(x, layout, again, 0, 0, Draw(5, 0, 17))
    assert torch.equal(again, messages[17])
    assert not torch.equal(messages[16], messages[17])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_native_equals_reference(codec: str, dtype: torch.dtype) -> None:
    assert kernels.native_unavailable_reason() == ""
    for seed, numel in enumerate(SIZES):
        for num_messages, num_segments in ((1, 1), (3, 2)):
            layout = _layout(codec, num_segments, numel)
            x = mixture(num_messages * layout.numel, seed, dtype)
            expected, got = (_quantized(m, x, layout, num_messages) for m in (reference, kernels))
            if codec in ("int8", "int4"):
                assert torch.equal(got, expected), (numel, num_messages)
            else:
                wire = CODECS[codec].dtype
                assert same_values(got.view(-1).view(wire), expected.view(-1).view(wire))
            for out_dtype in DTYPES:
                outs = []
                for module in (reference, kernels):
                    flat = torch.full((num_messages * layout.numel,), 7, dtype=out_dtype)
                    module.decode(expected, layout, flat, layout.numel, numel)
                    total = torch.full((layout.numel,), 7, dtype=out_dtype)
                    module.decode_sum(expected, layout, total, numel, 3)
                    outs += [flat, total]
                assert same_values(outs[0], outs[2]), (numel, out_dtype)
                assert same_values(outs[1], outs[3]), (numel, out_dtype)


def _draw_of(wire: Wire) -> Draw | None:
    return Draw(*wire.random, first=5) if wire.random else None


@pytest.mark.timeout(300 + NUM_DRAWS / 10)
@given(
    wire=wires(),
    out_wire=wires(),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 700)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=NUM_DRAWS, deadline=None)
def test_native_equals_reference_on_every_wire(
    wire: Wire, out_wire: Wire, dtypes: tuple[torch.dtype, torch.dtype], sizes: tuple[int, int, int], seed: int
) -> None:
    _check_native(wire, out_wire, dtypes, sizes, seed)


@pytest.mark.parametrize(
    "wire",
    [
        *(Wire("int8", 256), Wire("fp8_e4m3", 128), Wire("int8", 256, symmetric=False), Wire("nf4", 64, hadamard=True)),
        Wire("int4", 32, symmetric=False, hadamard=True, random=(6, 7, 8, 1, 2)),
    ],
    ids=str,
)
def test_native_equals_reference_on_ten_thousand_blocks(wire: Wire) -> None:
    """A large case: 2 messages of 2 segments of 2,500 blocks, and a short one; test_many_blocks.py has all formats."""
    _check_native(wire, wire, (torch.float32, torch.bfloat16), (2, 2, 2500 * wire.block + 7), 11)


def _check_native(
    wire: Wire, out_wire: Wire, dtypes: tuple[torch.dtype, torch.dtype], sizes: tuple[int, int, int], seed: int
) -> None:
    """All operations must have the reference's bits."""
    assert kernels.native_unavailable_reason() == ""
    num_messages, num_segments, numel = sizes
    layout = layout_of("test", _format_of(wire), torch.float32, num_segments, numel)
    out_layout = layout_of("test", _format_of(out_wire), torch.float32, 1, numel)
    x = mixture(num_messages * layout.numel, seed, dtypes[0])
    results: list[list[torch.Tensor]] = []
    for module in (reference, kernels):
        messages = layout.new(num_messages, x.device).fill_(0xAB)
        module.quantize(x, layout, messages, layout.numel, numel, _draw_of(wire))
        decoded = torch.full((num_messages * layout.numel,), 7, dtype=dtypes[1])
        module.decode(messages, layout, decoded, layout.numel, numel)
        total = torch.full((layout.numel,), 7, dtype=dtypes[1])
        module.decode_sum(messages, layout, total, numel, num_messages)
        again = out_layout.new(num_segments, x.device).fill_(0xAB)
        module.decode_sum_requantize(messages, layout, again, out_layout, _draw_of(out_wire))
        results.append([messages, decoded, total, again])
    for expected, got in zip(*results, strict=True):
        assert same_values(got, expected)


@pytest.mark.parametrize("out_codec", CODEC_NAMES)
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_native_requantizes_as_the_reference(codec: str, out_codec: str) -> None:
    for seed, numel in enumerate(SIZES):
        layout, out_layout = _layout(codec, 3, numel), _layout(out_codec, 1, numel)
        messages = _quantized(reference, mixture(4 * layout.numel, seed), layout, 4)
        outs = [out_layout.new(3, messages.device).fill_(0xAB) for _ in range(2)]
        for module, out in zip((reference, kernels), outs, strict=True):
            module.decode_sum_requantize(messages, layout, out, out_layout)
        wire = CODECS[out_codec].dtype
        expected, got = outs if wire is None else [out.view(-1).view(wire) for out in outs]
        assert same_values(got, expected), numel


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "native"])
def test_strides_permute(module: ModuleType) -> None:
    numel, nodes, locals_ = 300, 3, 2
    x = torch.arange(nodes * locals_ * numel, dtype=torch.float32)
    layout = _layout("f32", nodes, numel)
    messages = layout.new(locals_, x.device)
    module.quantize(x, layout, messages, numel, locals_ * numel)  # rank-major shards, one message a local rank
    expected = x.view(nodes, locals_, numel).transpose(0, 1).contiguous()
    assert torch.equal(messages.view(torch.float32).view(locals_, nodes, numel), expected)
    back = torch.empty_like(x)
    module.decode(messages, layout, back, numel, locals_ * numel)
    assert torch.equal(back, x)


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "native"])
def test_another_layout_is_refused_before_anything_is_written(module: ModuleType) -> None:
    layout = _layout("int8", 1, 100)
    message = _quantized(reference, torch.ones(100), layout, 1)
    other = MessageLayout("another operation", layout.codec, 256, 1, 100)
    out = torch.full((100,), 5.0)
    with pytest.raises(MessageError, match="another operation"):
        module.decode(message, other, out, 100, 0)
    assert torch.equal(out, torch.full((100,), 5.0))


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "native"])
@pytest.mark.parametrize("path", sorted(make.FOLDER.glob("*.npz")), ids=lambda p: p.stem)
def test_golden_vectors(module: ModuleType, path: object) -> None:
    """The wire format is a specification: these bytes never change."""
    golden = np.load(str(path))
    dtype = getattr(torch, str(golden["dtype"]))
    x = torch.from_numpy(golden["input"]).view(dtype)
    segments = int(golden["num_segments"])
    options = {key: bool(golden[key]) for key in ("symmetric", "hadamard") if key in golden}
    wire = _format_of(Wire(str(golden["format"]), int(golden["block"]), **options))
    layout = layout_of(str(golden["operation"]), wire, dtype, segments, x.numel() // segments)
    random = golden["random"].tolist() if "random" in golden else []
    message = layout.new(1, x.device).fill_(0xAB)
    module.quantize(x, layout, message, 0, layout.segment_numel, Draw(*random) if random else None)
    assert np.array_equal(message[0].numpy(), golden["message"])
    decoded = torch.empty(x.numel())
    module.decode(message, layout, decoded, 0, x.numel() // segments)
    assert same_values(decoded, torch.from_numpy(golden["decoded"]))


def test_golden_vectors_cover_every_format_and_option() -> None:
    goldens = [np.load(path) for path in make.FOLDER.glob("*.npz")]
    assert {str(golden["format"]) for golden in goldens} == set(FORMATS)
    options = {
        (str(g["format"]), key) for g in goldens for key in ("hadamard", "random") if key in g and np.any(g[key])
    }
    options |= {(str(g["format"]), "asym") for g in goldens if "symmetric" in g and not g["symmetric"]}
    assert options >= {(name, option) for name in ("int8", "int4") for option in ("asym", "hadamard", "random")}
    assert options >= {("nf4", "hadamard"), ("fp8_e4m3", "hadamard")}
