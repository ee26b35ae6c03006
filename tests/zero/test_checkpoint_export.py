"""Weights exported from checkpoints and imported again, read by the safetensors library and by transformers."""

# covers zero/_checkpoint/export.py zero/_checkpoint/index.py zero/_checkpoint/model_parallel_parts.py

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.training import full_values, train, zero_optimizer
from zero import CheckpointError
from zero._checkpoint import dcp, index
from zero._checkpoint.plain_weights import WeightsWriter
from zero.cli import main


def _model() -> nn.Module:
    model = new_model(torch.bfloat16, has_frozen=True)
    model.register_buffer("seen", torch.arange(3))
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4, dtype=torch.bfloat16)))
    return model


def _check_exported(rank: int, path: str, stage: int) -> None:
    folder, model = Path(path), _model()
    with zero_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=stage) as optimizer:
        train(model, optimizer, rank, steps=2)
        zero.save_checkpoint(optimizer, folder, "x")
        zero.save_checkpoint(optimizer, folder, "trained", save_latest=False, exclude_frozen_parameters=True)
        zero.checkpoints.save_model_file(optimizer, folder / "live.safetensors")
        zero.checkpoints.save_model_file(optimizer, folder / "live.bin")
        expected = full_values(model) | {"seen": torch.arange(3)}
        if rank == 0:
            torch.save(expected, folder / "expected.pt")
        for name in ("missing/../expected.pt/live.safetensors", "expected.pt/live.bin"):
            with pytest.raises(CheckpointError, match=r"expected\.pt"):
                zero.checkpoints.save_model_file(optimizer, folder / name)


def test_a_second_export_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    """In one file after several, and the other way round: whoever reads the folder gets the weights of the second."""
    for is_first_whole in (False, True):
        folder = tmp_path / str(is_first_whole)
        for value, is_whole in ((1.0, is_first_whole), (2.0, not is_first_whole)):
            layout = dict.fromkeys(("a", "b"), (torch.float32, (300,)))
            writer = WeightsWriter(folder / "model.safetensors", layout, 10_000 if is_whole else 1_300)
            for name in layout:
                writer.write(name, torch.full((300,), value))
            files = writer.finish()
            writer.discard()
        assert sorted(folder.iterdir()) == sorted(files)
        weights = [path for path in files if path.suffix == ".safetensors"]
        assert len(weights) == (2 if is_first_whole else 1)
        _assert_file(weights, {name: torch.full((300,), 2.0) for name in layout})


def _assert_file(files: list[Path], expected: dict[str, Tensor]) -> None:
    got = {name: value for file in files for name, value in safetensors.torch.load_file(file).items()}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("stage", [1, 3])
def test_export_is_what_the_model_holds(tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, _check_exported, str(tmp_path), stage)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert "head.weight" not in expected, "tied"
    _assert_file([tmp_path / "live.safetensors"], expected)
    pickled = torch.load(tmp_path / "live.bin", weights_only=True)
    assert pickled.pop("head.weight") is not None
    assert all(torch.equal(pickled.pop(name), value) for name, value in expected.items())
    assert not pickled
    assert main(["export", str(tmp_path), str(tmp_path / "whole.safetensors")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/whole.safetensors\n"
    _assert_file([tmp_path / "whole.safetensors"], expected)
    more = ["--max-shard-size", "4KB", "--dtype", "fp32", "--tag", "x"]
    assert main(["export", str(tmp_path), str(tmp_path / "parts.safetensors"), *more]) == 0
    *files, last = map(Path, capsys.readouterr().out.split())
    assert len(files) > 3
    assert [file.name for file in files[:1]] == [f"parts-00001-of-{len(files):05d}.safetensors"]
    wide = {name: value for file in files for name, value in safetensors.torch.load_file(file).items()}
    assert {value.dtype for value in wide.values()} == {torch.float32, torch.int64}
    assert all(torch.equal(wide[name].to(value.dtype), value) for name, value in expected.items())
    assert not torch.equal(wide["position"], expected["position"].float()), "the masters, not their rounding"
    document = json.loads(last.read_text())
    assert document["metadata"]["total_size"] == sum(v.nbytes for v in wide.values())
    assert all(name in safetensors.torch.load_file(tmp_path / f) for name, f in document["weight_map"].items())
    assert all(f.stat().st_size < 4000 + 2000 or len(safetensors.torch.load_file(f)) == 1 for f in files)
    for arguments, message in (
        ([str(tmp_path), "x.bin"], "must end with .safetensors"),
        ([str(tmp_path), "x.safetensors", "--tag", "y"], "there is no checkpoint 'y'"),
        ([str(tmp_path / "x" / "no"), "x.safetensors"], "no file 'latest'"),
        ([str(tmp_path), str(tmp_path / "x.safetensors"), "--tag", "trained"], "exclude_frozen_parameters"),
    ):
        assert main(["export", *arguments]) == 1
        assert message in capsys.readouterr().err


def test_export_holds_one_chunk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp, "CHUNK_NUMEL", 2**16)
    assert index.CHUNK_NUMEL == 2**24
    model = nn.Linear(1024, 2048)
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    zero.save_checkpoint(optimizer, tmp_path, "x")
    tracemalloc.start()
    zero.export_checkpoint(tmp_path, tmp_path / "x.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    optimizer.close()
    assert peak < 3 * 4 * 2**16 < model.weight.nbytes / 8
    _assert_file([tmp_path / "x.safetensors"], dict(model.named_parameters()))


def _check_reads_weights(rank: int, path: str, stage: int) -> None:
    folder = Path(path)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    for source in ("one/model.safetensors", "one", "several", "several/model.safetensors.index.json"):
        model = new_model(torch.float32, seed=5)
        with zero_optimizer(model, stage=stage) as optimizer:
            assert zero.load_checkpoint(optimizer, folder / source, load_module_only=True).client_state == {}
            for name, value in full_values(model).items():
                assert torch.equal(value, expected[name].float()), name
            train(model, optimizer, rank, steps=1)
    model = new_model(has_unused=True)
    with zero_optimizer(model, stage=stage) as optimizer:
        with pytest.raises(CheckpointError, match=r"'unused\.weight' is missing"):
            zero.load_checkpoint(optimizer, folder / "one", load_module_only=True)
        with pytest.raises(CheckpointError, match="weights_only=True"):
            zero.load_checkpoint(optimizer, folder / "expected.pt", load_module_only=True)
        with pytest.raises(CheckpointError, match="is truncated"):
            zero.load_checkpoint(optimizer, folder / "cut.safetensors", load_module_only=True)


def test_safetensors_are_read_into_sharded_models(tmp_path: Path) -> None:
    state: dict[str, Any] = dict(new_model(torch.float16, seed=9).state_dict())
    torch.save(state, tmp_path / "expected.pt")
    del state["wte.weight"]  # tied: stored under its other name
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    safetensors.torch.save_file(state, tmp_path / "one" / "model.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "one" / "model.safetensors").read_bytes()[:-10])
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        part = {name: value for name, value in state.items() if weight_map[name] == file}
        safetensors.torch.save_file(part, tmp_path / "several" / file)
    (tmp_path / "several" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for stage in (2, 3):
        run_ranks(2, _check_reads_weights, str(tmp_path), stage)


def test_exported_gpt2_has_the_same_logits_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=83, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(83, (2, 9))
    engine, *_ = zero.initialize(
        model=model, config={"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    )
    for _ in range(2):
        engine.backward(engine(tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(tmp_path / "checkpoints")
    engine.save_16bit_model(tmp_path / "live", "model.safetensors")
    engine.eval()
    with torch.no_grad():
        expected = engine(tokens).logits.clone()
    engine.destroy()
    torch.distributed.destroy_process_group()  # which initialize() has initialized in this process
    assert main(["export", str(tmp_path / "checkpoints"), str(tmp_path / "one" / "model.safetensors")]) == 0
    several = [str(tmp_path / "several" / "model.safetensors"), "--max-shard-size", "10KB"]
    assert main(["export", str(tmp_path / "checkpoints"), *several]) == 0
    for name in ("one", "several", "live"):
        config.save_pretrained(tmp_path / name)
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            assert torch.equal(loaded.eval()(tokens).logits, expected), name
