"""Checkpoints that cannot be saved or loaded: the same named error on every rank, no change, no code executed."""

# covers zero/_checkpoint/dcp.py zero/_checkpoint/other_files.py

from __future__ import annotations

import argparse
import errno
import json
import os
import pickle
import resource
import shutil
import sys
import unittest
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.ranks import run_ranks
from tests.security.test_untrusted_files import Evil
from tests.zero.models import groups_of, new_model
from tests.zero.test_checkpoint import assert_equal_bits, whole_state
from tests.zero.training import train, zero_optimizer
from zero import CheckpointError
from zero._checkpoint import dcp
from zero._checkpoint.dcp import SavePartsPlanner


def _refuses(rank: int, call: Callable[[], object], *words: str) -> None:
    """The call must raise the same text on every rank; the text must contain ``words``."""
    with pytest.raises(CheckpointError) as raised:
        call()
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, str(raised.value))
    assert len(set(of_ranks)) == 1, of_ranks
    missing = [word for word in words if word not in of_ranks[0]]
    assert not missing, (missing, of_ranks[0])


def _edit(folder: Path, name: str, edit: Callable[[Path], object]) -> Callable[[], None]:
    """Copy the checkpoint ``good`` to ``name`` and damage the copy."""

    def damage() -> None:
        shutil.copytree(folder / "good", folder / name)
        edit(folder / name)

    return damage


def _shard(path: Path) -> Path:
    return max(path.glob("shard_*"), key=lambda file: file.stat().st_size)


def _flip(path: Path) -> None:
    data = bytearray(_shard(path).read_bytes())
    data[-100] ^= 1
    _shard(path).write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "truncated": (lambda p: _shard(p).write_bytes(_shard(p).read_bytes()[:-8]), ("is truncated", "good")),
    "lost": (lambda p: _shard(p).unlink(), ("shard_", "is missing", "good")),
    "flipped": (_flip, ("is damaged", "checksum of tensor")),
    "unfinished": (lambda p: (p / "metadata.json").unlink(), ("unfinished is no complete checkpoint", "good")),
    "no_json": (lambda p: (p / "metadata.json").write_bytes(b"{..."), ("metadata.json is damaged",)),
    "edited": (
        lambda p: (p / "metadata.json").write_text((p / "metadata.json").read_text().replace("true", "false", 1)),
        ("metadata.json is damaged: its checksum",),
    ),
    "deepspeed": (
        lambda p: ((p / "metadata.json").unlink(), (p / "mp_rank_00_model_states.pt").touch()),
        ("DeepSpeed", "zero_to_fp32.py"),
    ),
}


def _check_load_errors(rank: int, folder: Path, stage: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=stage) as optimizer:
        train(model, optimizer, rank, steps=1)
        assert zero.load_checkpoint(optimizer, folder) == (None, {})
        zero.save_checkpoint(optimizer, folder, "good")
        train(model, optimizer, rank, steps=1)
        before = whole_state(optimizer, model)
        for name, (damage, words) in DAMAGES.items():
            if rank == 0:
                _edit(folder, name, damage)()
            torch.distributed.barrier()
            _refuses(rank, lambda name=name: zero.load_checkpoint(optimizer, folder, name), *words)
        _refuses(rank, lambda: zero.load_checkpoint(optimizer, folder, "bad"), "no checkpoint 'bad'", "'good'")
        _refuses(rank, lambda: zero.load_checkpoint(optimizer, folder, "../x"), "tag must be")
        _refuses(rank, lambda: zero.load_checkpoint(optimizer, folder / "no", "x"), "there is no folder")
        scheduler = {"lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}
        _refuses(
            rank, lambda: zero.load_checkpoint(optimizer, folder, stateful=scheduler), "no state of 'lr_scheduler'"
        )
        assert_equal_bits(whole_state(optimizer, model), before)
        zero.load_checkpoint(optimizer, folder)


def _check_other_models(rank: int, folder: Path, stage: int) -> None:
    def refuses(model: nn.Module, optimizer: Any, *words: str) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with zero_optimizer(model, optimizer, stage=stage) as wrapped:
            _refuses(rank, lambda: zero.load_checkpoint(wrapped, folder, "good"), "does not fit the model", *words)
            if stage < 3:
                assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    refuses(new_model(has_unused=True), None, "'unused.weight' is missing", "load_module_strict=False")
    refuses(
        new_model(torch.float64),
        None,
        "'wte.weight' is torch.float32 in the checkpoint and torch.float64 in the model",
        "converts",
        " more)",
    )
    wide = new_model()
    wide.shared = nn.Linear(24, 25)
    refuses(wide, None, "'shared.weight' has shape [24, 24] in the checkpoint and [25, 24] in the model")
    small = new_model()
    del small.blocks[2]
    refuses(small, None, "parameters are not in the model: 'blocks.2.norm.weight'")
    buffered = new_model()
    buffered.register_buffer("seen", torch.zeros(1))
    refuses(buffered, None, "buffer 'seen' is missing")
    same = new_model()
    refuses(same, torch.optim.SGD(groups_of(same), lr=1.0), "the optimizer is AdamW in the checkpoint and SGD here")
    same = new_model()
    refuses(same, torch.optim.AdamW(same.parameters()), "the checkpoint has 2 parameter groups and the optimizer 1")
    same = new_model()
    swapped = torch.optim.AdamW(groups_of(same)[::-1])
    refuses(same, swapped, "group 0 has other parameters", "load_optimizer_states=False")


def _check_loads_what_was_asked(rank: int, folder: Path, stage: int) -> None:
    """Loading with conversion, in part, and of weights alone gives the documented values."""
    expected = {
        key.removeprefix("master "): value
        for key, value in torch.load(folder / "good.pt", weights_only=True).items()
        if key.startswith("master ")
    }
    model = new_model(torch.float64, has_unused=True)
    options = {"load_module_strict": False, "load_module_only": True}
    with zero_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage) as optimizer:
        loaded = zero.load_checkpoint(optimizer, folder, "good", **options)
        assert loaded == (folder / "good", {})
        with zero.GatheredParameters(model.parameters()):
            for name, value in expected.items():
                assert torch.equal(model.get_parameter(name).detach().flatten(), value.double()), name


@contextmanager
def _disk_full_for(name: str) -> Iterator[None]:
    replace = dcp.replace_file

    def replace_if_there_is_room(path: Path, *arguments: Any) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        replace(path, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "replace_file", replace_if_there_is_room)
        yield


def _check_save_errors(rank: int, folder: Path, stage: int) -> None:
    model = new_model()
    with zero_optimizer(model, stage=stage) as optimizer:

        def save(tag: str = "new", **options: Any) -> Any:
            return zero.save_checkpoint(optimizer, folder, tag, **options)

        state = {"a": [1, {"args": argparse.Namespace()}]}
        if rank == 1:
            state = {}
        _refuses(
            rank, lambda: save(client_state=state), "client_state['a'][1]['args'] is a argparse.Namespace", "vars()"
        )
        _refuses(rank, lambda: save("a/b"), "tag must be", "a/b")
        for nothing in (None, "" if rank == 1 else folder):  # on one rank alone
            _refuses(rank, lambda to=nothing: zero.save_checkpoint(optimizer, to, "x"), "save_dir must be a folder")
        if rank == 0:
            (folder / "file").touch()
        torch.distributed.barrier()
        _refuses(rank, lambda: zero.save_checkpoint(optimizer, folder / "file", "x"), "file", "cannot be made")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # a full disk on this rank alone
        try:
            _refuses(rank, save, "shard_00001", "could not be written", "File too large", "GiB are free")
            saving = save(async_op=True)
            _refuses(rank, saving.wait, "could not be written")
            _refuses(rank, save, "could not be written")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with _disk_full_for("metadata.json"):
            _refuses(rank, save, "No space left on device")
        torch.distributed.barrier()
        assert (folder / "latest").read_text().split()[-1] == "good", "it named what is not complete"
        assert not list((folder / "new").glob("metadata.json"))
        assert zero.load_checkpoint(optimizer, folder).path == folder / "good"
        save()
        assert zero.load_checkpoint(optimizer, folder).path == folder / "new"
        save("good")
        assert (folder / "latest").read_text() == f"crc32={zlib.crc32(b'good'):08x} good"
        assert len(list((folder / "good").glob("shard_*"))) == 2, "shards of the save before are gone"
        _check_tags_of_ranks(rank, folder, optimizer)


def _check_tags_of_ranks(rank: int, folder: Path, optimizer: zero.ZeroOptimizer) -> None:
    """A tag made of the time, say: warned of, passed over, or refused before anything is written."""

    def save(tag: str, how: str) -> object:
        return zero.save_checkpoint(optimizer, folder, tag, tag_validation=how)

    _refuses(rank, lambda: save(f"f{rank}", "fail"), "rank 1 'f1'", "first rank's is 'f0'")
    _refuses(rank, lambda: save("f", "Fail" if rank else "warn"), "must be one of", "'Fail'")
    assert not list(folder.glob("f*[01]"))
    watch = unittest.TestCase()
    with watch.assertLogs("zero", "WARNING") if rank else watch.assertNoLogs("zero", "WARNING") as log:
        save(f"warn{rank}", "warn")
    assert log is None or log.output[0].endswith(
        "will be saved as 'warn0', the first rank's tag, not as 'warn1', that of rank 1"
    )
    with watch.assertNoLogs("zero", "WARNING"):
        save(f"ignore{rank}", "ignore")
        save("same", "fail")
    assert {path.name for path in folder.glob("*[01e]") if path.is_dir()} >= {"warn0", "ignore0", "same"}
    assert not list(folder.glob("*1"))


def _check_tags_of_engines(rank: int, folder: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 1},
        "checkpoint": {"tag_validation": "FAIL"},
    }
    engine = zero.initialize(model=new_model(), config=config).engine
    _refuses(rank, lambda: engine.save_checkpoint(folder, f"engine{rank}"), "the same tag")
    engine.save_checkpoint(folder, "engine")
    engine.destroy()


def _check_planning_errors(rank: int, folder: Path) -> None:
    """Errors in planning on any rank; a file of another save is refused and left unchanged."""
    model = new_model()
    with zero_optimizer(model, stage=2) as optimizer, pytest.MonkeyPatch.context() as patch:

        def fail(*_: Any) -> None:
            raise LookupError(f"of rank {rank}")

        for step, failing in (("create_local_plan", 1), ("create_global_plan", 0), ("finish_plan", 1)):
            with patch.context() as inside:
                if rank == failing:
                    inside.setattr(SavePartsPlanner, step, fail)
                _refuses(rank, lambda: zero.save_checkpoint(optimizer, folder, "x"), f"LookupError: of rank {failing}")
        patch.setattr("secrets.token_hex", lambda _: f"{rank:08x}")
        other = folder / "x" / "shard_00001_00000000.safetensors"
        other.parent.mkdir(exist_ok=True)
        other.write_text("of another save")
        torch.distributed.barrier()
        words = ("shard_00001_00000000.safetensors belongs to another save", "save again")
        _refuses(rank, lambda: zero.save_checkpoint(optimizer, folder, "x"), *words)
        assert other.read_text() == "of another save"
        patch.setattr("secrets.token_hex", lambda _: "12345678")
        zero.save_checkpoint(optimizer, folder, "x")
        assert zero.load_checkpoint(optimizer, folder).path == folder / "x"


def _check_all(rank: int, path: str, stage: int) -> None:
    folder = Path(path)
    _check_load_errors(rank, folder, stage)
    model = new_model(seed=3)
    with zero_optimizer(model, stage=stage) as optimizer:
        train(model, optimizer, rank, steps=1)
        zero.save_checkpoint(optimizer, folder, "good")
        state = whole_state(optimizer, model)
        if rank == 0:
            torch.save(state, folder / "good.pt")
        torch.distributed.barrier()
    _check_other_models(rank, folder, stage)
    _check_loads_what_was_asked(rank, folder, stage)
    _check_save_errors(rank, folder, stage)
    if stage == 1:
        _check_planning_errors(rank, folder)
        _check_tags_of_engines(rank, folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_errors_are_named_the_same_on_all_ranks_and_change_nothing(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _check_all, str(tmp_path), stage)


def _forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the metadata and give it a matching checksum, as an attacker would."""
    document = json.loads((path / "metadata.json").read_text())
    change(document["content"])
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":"))
    document["crc32"] = zlib.crc32(text.encode())
    (path / "metadata.json").write_text(json.dumps(document))


def test_tiles_of_a_removed_setting_are_not_exported_as_layers(tmp_path: Path) -> None:
    """Earlier versions recorded the layers that ``tile_linears_above`` had cut, and joined them on export."""
    optimizer = zero.ZeroOptimizer(torch.nn.Linear(4, 4), torch.optim.SGD, lr=0.1)
    zero.save_checkpoint(optimizer, tmp_path, "tiled")
    optimizer.close()
    _forge(tmp_path / "tiled", lambda content: content.update(tiles={"layer.weight": [["layer.linears.0.weight", 4]]}))
    with pytest.raises(CheckpointError, match=r"tile_linears_above .*tiled layers=\['layer.weight'\]; export it with"):
        zero.export_checkpoint(tmp_path, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def _first_chunk(content: dict[str, Any]) -> list[Any]:
    return content["tensors"]["weight/wte.weight"]["chunks"][0]


EVENTS: list[str] = []
WATCHED = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "compile", "marshal.loads")


def test_a_malicious_checkpoint_executes_nothing(tmp_path: Path) -> None:
    trace, pickled = tmp_path / "trace", pickle.dumps(Evil(tmp_path / "trace"))
    pickle.loads(pickled)
    assert trace.exists(), "the pickle works where it is loaded"
    trace.unlink()
    (tmp_path / "shard_00000_00000000.safetensors").write_bytes(bytes(10**5))
    model = new_model()
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, stage=3)
    zero.save_checkpoint(optimizer, tmp_path, "good")
    outside = "../shard_00000_00000000.safetensors"
    attacks: dict[str, Callable[[Path], object]] = {
        "metadata": lambda p: (p / "metadata.json").write_bytes(pickled),
        "dcp": lambda p: ((p / "metadata.json").unlink(), (p / ".metadata").write_bytes(pickled)),
        "shard": lambda p: _shard(p).write_bytes(pickled),
        "name": lambda p: _forge(
            p, lambda c: (c["files"].update({outside: 10**5}), _first_chunk(c).__setitem__(2, outside))
        ),
        "behind": lambda p: _forge(p, lambda c: _first_chunk(c).__setitem__(3, 10**9)),
        "negative": lambda p: _forge(p, lambda c: _first_chunk(c).__setitem__(3, -8)),
        "gap": lambda p: _forge(p, lambda c: _first_chunk(c).__setitem__(0, 8)),
        "dtype": lambda p: _forge(p, lambda c: c["tensors"]["weight/wte.weight"].update(dtype="__import__('os')")),
        "kind": lambda p: _forge(p, lambda c: c.update(client_state={"$": "eval", "key": "tree.0", "shape": []})),
        "tensor": lambda p: _forge(p, lambda c: c.update(client_state={"$": "tensor", "key": "tree.9", "shape": []})),
        "missing": lambda p: _forge(p, lambda c: c.pop("parameters")),
        "list": lambda p: (p / "metadata.json").write_text("[1]"),
    }
    assert zero.load_checkpoint is not None  # import, and compile without a cache, before the audit starts
    is_watching = True
    sys.addaudithook(lambda event, _: EVENTS.append(event) if is_watching and event in WATCHED else None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, attack in attacks.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        attack(tmp_path / name)
        with pytest.raises(CheckpointError):
            zero.load_checkpoint(optimizer, tmp_path, name)
    (tmp_path / "latest").write_text("../../etc")
    with pytest.raises(CheckpointError, match="tag must be"):
        zero.load_checkpoint(optimizer, tmp_path)
    assert zero.load_checkpoint(optimizer, tmp_path, "good").path == tmp_path / "good"
    is_watching = False
    assert EVENTS == []
    assert not trace.exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.close()


OTHERS = {
    "saved.pt": ("saved.pt", "it is a file; load it with zero.load_pretrained"),
    "one.safetensors": ("one.safetensors", "it is a file; pass load_module_only=True"),
    "of_torch/.metadata": ("of_torch", "holds .metadata; which torch.distributed.checkpoint has saved"),
    "of_torch_cut/__0_0.distcp": ("of_torch_cut", "holds __0_0.distcp"),
    "hub/pytorch_model-00001-of-00002.bin": ("hub", "holds pytorch_model-00001-of-00002.bin; load it with zero.load_"),
    "new_hub/model.safetensors": ("new_hub", "holds model.safetensors; pass load_module_only=True"),
    "step1/mp_rank_00_model_states.pt": ("step1", "holds mp_rank_00_model_states.pt; which DeepSpeed"),
    "step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": (
        "step2",
        "convert them to safetensors with the zero_to_fp",
    ),
    "logs/events.out": ("logs", None),
    "empty/deeper/saved.pt": ("empty", None),
}
"""A file, the path that is loaded from, and what the error says; None: a fresh start."""


def _check_what_else_is_there(rank: int, folder: Path) -> None:
    with zero_optimizer(new_model(), stage=3) as optimizer:
        for name, (path, words) in OTHERS.items():
            if rank == 0:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            torch.distributed.barrier()
            if words is None:
                assert zero.load_checkpoint(optimizer, folder / path) == (None, {})
            else:
                _refuses(rank, lambda path=path: zero.load_checkpoint(optimizer, folder / path), path, words)
        assert zero.load_checkpoint(optimizer, folder / "missing") == (None, {})
        zero.save_checkpoint(optimizer, folder / "own", "good", client_state={"best": torch.ones(2)})
        _refuses(rank, lambda: zero.load_checkpoint(optimizer, folder / "own" / "good"), "one checkpoint", "tag='good'")
        loaded = zero.load_checkpoint(optimizer, folder / "own", load_module_only=True)
        assert loaded.client_state["best"].tolist() == [1.0, 1.0]
        if rank == 0:
            (folder / "own" / "latest").unlink()
        torch.distributed.barrier()
        assert zero.load_checkpoint(optimizer, folder / "own") == (None, {}), "a job was killed in its first save"


def test_what_else_is_in_the_place_of_checkpoints_is_no_fresh_start(tmp_path: Path) -> None:
    run_ranks(2, _check_what_else_is_there, tmp_path)
