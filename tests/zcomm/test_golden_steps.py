"""Golden sums, deltas and residuals: results of messages are as much a specification as their bytes."""

# covers zcomm/_collectives/encoder.py zcomm/_formats/reference.py zcomm/_kernels/kernels.py

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.golden import make
from tests.zcomm.data import same_values
from zcomm._collectives.encoder import Encoder
from zcomm._formats import reference
from zcomm._formats.formats import Format, get_format
from zcomm._formats.message import layout_of
from zcomm._formats.philox import Draw, RandomKey
from zcomm._kernels import kernels
from zcomm._residuals.residual import Residual
from zcomm._transport.route import find_route
from zcomm._transport.topology import Topology

ONE = Topology.single()
PATHS = sorted((make.FOLDER / "steps").glob("*.npz"))


def _format_of(golden: np.lib.npyio.NpzFile) -> Format:
    return get_format(
        str(golden["format"]),
        block=int(golden["block"]),
        symmetric=bool(golden["symmetric"]),
        rotation="hadamard" if golden["hadamard"] else None,
        rounding="stochastic" if golden["random"].size else "nearest",
    )


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "native"])
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_sums(module: ModuleType, path: Path) -> None:
    golden = np.load(path)
    inputs, numel = torch.from_numpy(golden["inputs"]), golden["inputs"].shape[1]
    layout = layout_of("golden", _format_of(golden), torch.float32, 1, numel)
    draw = Draw(*golden["random"].tolist()) if golden["random"].size else None
    messages = layout.new(3, inputs.device)
    for row in range(3):  # each as the first of its tensor: one random number an element
        module.quantize(inputs[row], layout, messages[row : row + 1], 0, numel, draw)
    assert np.array_equal(messages.numpy(), golden["messages"])
    mean, again = torch.empty(numel), layout.new(1, inputs.device)
    module.decode_sum(messages, layout, mean, numel, 3)
    assert same_values(mean, torch.from_numpy(golden["mean"]))
    module.decode_sum_requantize(messages, layout, again, layout, draw)
    assert np.array_equal(again.numpy(), golden["again"])


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_deltas(path: Path) -> None:
    golden = np.load(path)
    new, held = torch.from_numpy(golden["inputs"][0]), torch.from_numpy(golden["held"]).view(torch.bfloat16)
    layout = layout_of("golden", _format_of(golden), torch.float32, 1, new.numel())
    message = layout.new(1, new.device)
    draw = Draw(*golden["random"].tolist()) if golden["random"].size else None
    kernels.quantize_difference(new, held, layout, message, draw)
    assert np.array_equal(message.numpy(), golden["delta"])
    kernels.decode_add(message, layout, held.view(1, -1))
    assert same_values(held, torch.from_numpy(golden["applied"]).view(torch.bfloat16))


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_residuals(path: Path) -> None:
    golden = np.load(path)
    format, numel = _format_of(golden), golden["inputs"].shape[1]
    layout = layout_of("golden", format, torch.float32, 1, numel)
    residual = Residual(ONE, [("all", 0, numel)], numel, beta=float(golden["beta"]))
    key = RandomKey(*golden["random"].tolist()[:3]) if golden["random"].size else None
    encoder = Encoder(find_route("golden", ONE, format, first="intra"), numel, key, residual)
    for x, sent in zip(golden["inputs"][:2], golden["sent"], strict=True):
        message, decoded = layout.new(1, torch.device("cpu")), torch.empty(numel)
        encoder.encode(0, torch.from_numpy(x.copy()).view(1, -1), message, layout)
        residual.commit()
        kernels.decode(message, layout, decoded, 0, numel)
        assert same_values(decoded, torch.from_numpy(sent))
    assert same_values(residual.values()[0], torch.from_numpy(golden["residual"]))


def test_every_block_format_and_option_is_golden() -> None:
    found = {(wire.name, option) for wire in make.STEPS for option, has in (
        ("asym", not wire.symmetric), ("hadamard", wire.hadamard), ("random", wire.random is not None), ("", True)
    ) if has}  # fmt: skip
    assert {name for name, _ in found} == {"int8", "int4", "nf4", "fp8_e4m3"}
    assert {option for _, option in found} == {"", "asym", "hadamard", "random"}
    assert len(PATHS) == len(make.STEPS)
