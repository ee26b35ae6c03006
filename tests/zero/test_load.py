"""zero.load_pretrained loads a plain state dict, from memory or files, into a sharded model."""

# covers zero/_checkpoint/streamed_load.py zero/_storage/poison.py

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.zero.models import TinyGPT, new_model
from tests.zero.test_init import DEPTH, WIDTH, LiveBytes, Wide
from tests.zero.training import assert_same_bits, full_values, train, zero_optimizer
from zcomm import LayoutError, StateError
from zero import Init, load_pretrained

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def _write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Written from the format's specification."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(content), len(content) + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        content += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def _write_all(folder: Path, tensors: dict[str, Tensor]) -> list[Any]:
    """Write the same tensors in every format."""
    _write_safetensors(folder / "one.safetensors", tensors)
    torch.save(tensors, folder / "saved.pt")
    (folder / "hub").mkdir()
    names = list(tensors)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, of_file in files.items():
        _write_safetensors(folder / "hub" / file, {name: tensors[name] for name in of_file})
    weight_map = {name: file for file, of_file in files.items() for name in of_file}
    (folder / "hub" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [tensors, folder / "one.safetensors", str(folder / "saved.pt"), folder / "hub"]


class WithBuffers(nn.Module):
    def __init__(self, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gpt = TinyGPT()
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(float(seed))
        self.again = self.norm
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def _check_sources(rank: int, folder: Path) -> None:
    other = WithBuffers(seed=5)
    tensors = {name: value for name, value in other.state_dict().items() if name != "gpt.head.weight"}  # it is tied
    expected = {name: param.detach() for name, param in other.named_parameters()}
    sources = _write_all(folder, tensors) if rank == 0 else [None] * 4
    for source in sources:
        with Init():
            model = WithBuffers(seed=rank)
        assert load_pretrained(model, source) == ([], [])
        assert_same_bits(full_values(model), expected)
        assert model.norm.running_mean.tolist() == [5.0] * 3
    for stage in (1, 3):
        model = new_model(torch.bfloat16)
        with zero_optimizer(model, stage=stage) as optimizer:
            train(model, optimizer, rank, steps=1)
            prefixed = {f"model.{k}": v for k, v in other.gpt.state_dict().items()}
            load_pretrained(model, prefixed if rank == 0 else None, rename=lambda name: name.removeprefix("model."))
            wanted = {name: value.detach().bfloat16() for name, value in other.gpt.named_parameters()}
            assert_same_bits(full_values(model), wanted)
            for param in model.parameters():
                param.grad = None
            optimizer.step()  # writes the masters back, which must have the loaded values, too
            assert_same_bits(full_values(model), wanted)


def test_every_kind_of_source(tmp_path: Path) -> None:
    run_ranks(2, _check_sources, tmp_path)


def _check_errors(rank: int, folder: Path) -> None:
    with Init():
        model = new_model()
    before = full_values(model)
    whole = new_model(seed=7).state_dict()
    damaged = folder / "damaged.safetensors"
    if rank == 0:
        _write_safetensors(damaged, {"wte.weight": whole["wte.weight"]})
        damaged.write_bytes(damaged.read_bytes()[:-4])
    wrong = [
        ("1 missing, first \\['position'\\]", {k: v for k, v in whole.items() if k != "position"}),
        ("1 unexpected, first \\['more'\\]", {**whole, "more": torch.ones(1)}),
        (r"'position' must have shape \(6, 24\): got \(3,\)", {**whole, "position": torch.ones(3)}),
        ("is damaged", damaged),
        ("source=None", None),
    ]
    for text, source in wrong:
        with pytest.raises(LayoutError, match=text):
            load_pretrained(model, source if rank == 0 else {})
    assert_same_bits(full_values(model), before)
    part = {"position": whole["position"], "more": torch.ones(1)}
    loaded = load_pretrained(model, part if rank == 0 else None, strict=False)
    assert loaded.unexpected_keys == ["more"]
    assert sorted(loaded.missing_keys) == sorted(whole.keys() - {"position"})
    assert torch.equal(full_values(model)["position"], whole["position"])
    with pytest.raises(StateError, match=r"use model\.load_state_dict"):
        load_pretrained(new_model(), whole)


def test_errors_are_the_same_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, _check_errors, tmp_path)


def _check_memory(rank: int, folder: Path) -> None:
    numel = DEPTH * (2 * 2 * WIDTH * WIDTH + 3 * WIDTH)
    path = folder / "wide.safetensors"
    if rank == 0:
        _write_safetensors(path, Wide().state_dict())
    with Init():
        model = Wide()
    with LiveBytes() as live:
        load_pretrained(model, path)
    assert live.peak <= 1.05 * (4 * numel / 2 + 2 * 4 * 2 * WIDTH * WIDTH), "shards; a module whole, and what is read"


def test_no_rank_holds_a_copy(tmp_path: Path) -> None:
    run_ranks(2, _check_memory, tmp_path)
