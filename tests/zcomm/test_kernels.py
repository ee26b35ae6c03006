"""The PyTorch reference against the NumPy oracle, and the native kernels against the reference; golden vectors."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden import make
from tests.zcomm import oracle
from tests.zcomm.data import KINDS, mixture, same_values, values_of
from zcomm import kernels, quant
from zcomm.errors import MessageError
from zcomm.formats import CODECS, get_format
from zcomm.message import MessageLayout, layout_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODEC_NAMES = ["f32", "bf16", "fp16", "int8", "int4"]
SIZES = [0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4097]


def _layout(codec: str, num_segments: int, numel: int, block: int | None = None) -> MessageLayout:
    default = {"int8": 256, "int4": 128}.get(codec, 0)
    return MessageLayout("test", CODECS[codec], block or default if default else 0, num_segments, numel)


def _quantized(module: ModuleType, x: torch.Tensor, layout: MessageLayout, num_messages: int) -> torch.Tensor:
    out = layout.new(num_messages, x.device).fill_(0xAB)
    module.quantize(x, layout, out, layout.numel, layout.segment_numel)
    return out


@given(
    name=st.sampled_from(["int8", "int4"]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    numel=st.integers(0, 300),
    block=st.sampled_from([2, 16, 128, 256]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_reference_equals_the_contract(name: str, kinds: list[str], numel: int, block: int, seed: int) -> None:
    segments = [values_of(kind, numel, seed + i) for i, kind in enumerate(kinds)]
    layout = _layout(name, len(segments), numel, block)
    x = torch.from_numpy(np.concatenate(segments))
    message = _quantized(quant, x, layout, 1)
    assert bytes(message[0].tolist()) == oracle.encode(segments, name, block, "test")
    decoded = torch.empty_like(x)
    quant.decode(message, layout, decoded, 0, numel)
    assert same_values(decoded, torch.from_numpy(oracle.decode(segments, name, block).reshape(-1).copy()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_native_equals_reference(codec: str, dtype: torch.dtype) -> None:
    assert kernels.native_unavailable_reason() == ""
    for seed, numel in enumerate(SIZES):
        for num_messages, num_segments in ((1, 1), (3, 2)):
            layout = _layout(codec, num_segments, numel)
            x = mixture(num_messages * layout.numel, seed, dtype)
            expected, got = (_quantized(m, x, layout, num_messages) for m in (quant, kernels))
            if codec in ("int8", "int4"):
                assert torch.equal(got, expected), (numel, num_messages)
            else:
                wire = CODECS[codec].dtype
                assert same_values(got.view(-1).view(wire), expected.view(-1).view(wire))
            for out_dtype in DTYPES:
                outs = []
                for module in (quant, kernels):
                    flat = torch.full((num_messages * layout.numel,), 7, dtype=out_dtype)
                    module.decode(expected, layout, flat, layout.numel, numel)
                    total = torch.full((layout.numel,), 7, dtype=out_dtype)
                    module.decode_sum(expected, layout, total, numel, 3)
                    outs += [flat, total]
                assert same_values(outs[0], outs[2]), (numel, out_dtype)
                assert same_values(outs[1], outs[3]), (numel, out_dtype)


@pytest.mark.parametrize("out_codec", CODEC_NAMES)
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_native_requantizes_as_the_reference(codec: str, out_codec: str) -> None:
    for seed, numel in enumerate(SIZES):
        layout, out_layout = _layout(codec, 3, numel), _layout(out_codec, 1, numel)
        messages = _quantized(quant, mixture(4 * layout.numel, seed), layout, 4)
        outs = [out_layout.new(3, messages.device).fill_(0xAB) for _ in range(2)]
        for module, out in zip((quant, kernels), outs, strict=True):
            module.decode_sum_requantize(messages, layout, out, out_layout)
        wire = CODECS[out_codec].dtype
        expected, got = outs if wire is None else [out.view(-1).view(wire) for out in outs]
        assert same_values(got, expected), numel


@pytest.mark.parametrize("module", [quant, kernels], ids=["reference", "native"])
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


@pytest.mark.parametrize("module", [quant, kernels], ids=["reference", "native"])
def test_another_layout_is_refused_before_anything_is_written(module: ModuleType) -> None:
    layout = _layout("int8", 1, 100)
    message = _quantized(quant, torch.ones(100), layout, 1)
    other = MessageLayout("another operation", layout.codec, 256, 1, 100)
    out = torch.full((100,), 5.0)
    with pytest.raises(MessageError, match="another operation"):
        module.decode(message, other, out, 100, 0)
    assert torch.equal(out, torch.full((100,), 5.0))


@pytest.mark.parametrize("module", [quant, kernels], ids=["reference", "native"])
@pytest.mark.parametrize("path", sorted(make.FOLDER.glob("*.npz")), ids=lambda p: p.stem)
def test_golden_vectors(module: ModuleType, path: object) -> None:
    """The wire format is a specification: these bytes never change."""
    golden = np.load(str(path))
    dtype = getattr(torch, str(golden["dtype"]))
    x = torch.from_numpy(golden["input"]).view(dtype)
    segments = int(golden["num_segments"])
    wire = get_format(str(golden["format"]), block=int(golden["block"]) or None)
    layout = layout_of(str(golden["operation"]), wire, dtype, segments, x.numel() // segments)
    message = _quantized(module, x, layout, 1)
    assert np.array_equal(message[0].numpy(), golden["message"])
    decoded = torch.empty(x.numel())
    module.decode(message, layout, decoded, 0, x.numel() // segments)
    assert same_values(decoded, torch.from_numpy(golden["decoded"]))


def test_golden_vectors_cover_every_format() -> None:
    covered = {str(np.load(path)["format"]) for path in make.FOLDER.glob("*.npz")}
    assert covered == {"none", "bf16", "fp16", "int8", "int4"}
