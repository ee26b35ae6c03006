"""Malicious files: every reader raises a named error, executes nothing and writes nothing outside its folder."""

# covers zero/_checkpoint/durability.py zero/_checkpoint/plain_weights.py zero/_storage/pretrained_reader.py

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zero
from zcomm import ConfigError, LayoutError
from zcomm._bench import probe
from zcomm._collectives.auto_format import FormatTable
from zcomm._kernels import kernels
from zero import CheckpointError
from zero._checkpoint.durability import read_latest
from zero._checkpoint.plain_weights import index_of_weights
from zero._config import read_source
from zero._storage.file_store import FileStore
from zero._storage.pretrained_reader import open_tensors
from zero._storage.process_folder import ClaimedFolder
from zero._storage.tier_settings import FileSettings
from zero.cli import main
from zero.plan import command


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def payloads(trace: Path) -> dict[str, bytes]:
    """The malicious contents given to each reader."""
    nested = b'{"a":' * 50_000
    return {
        "pickle": pickle.dumps(Evil(trace)),
        "pickle of protocol 0": pickle.dumps(Evil(trace), 0),
        "empty": b"",
        "deep": b"[" * 100_000,
        "deep object": len(nested).to_bytes(8, "little") + nested,
        "another form": b"[1, [2]]",
        "no object": b"null",
        "infinite": b'{"weight_map": 1e999, "version": 1, "topologies": {"1x1": 1e999}, "num_hidden_layers": true}',
        "no text": b"\xff\xfe\x00{",
        "large": b"9" * 10_000,
        "long header": (2**63).to_bytes(8, "little") + b"{}",
    }


def _probed(path: Path) -> object:
    with patch.object(command, "probe_path", lambda: path):
        return command._probed_links()


def _model_of(path: Path) -> object:
    parser = argparse.ArgumentParser()
    command.add_plan(parser)
    return command.run(parser.parse_args(["--model", str(path)]))


READERS: dict[str, tuple[str, Callable[[Path], object], type[Exception]]] = {
    "configuration": ("ds.json", read_source, ConfigError),
    "probe": (
        "probe.json",
        lambda p: FormatTable.parse(str(p), p.read_text(errors="replace"), shape="1x1"),
        ConfigError,
    ),
    "probe for a plan": ("probe.json", _probed, ConfigError),
    "probe to be added to": ("probe.json", lambda p: probe.check_output(p, "1x1"), ConfigError),
    "model for a plan": ("config.json", _model_of, ConfigError),
    "weights": ("model.safetensors", open_tensors, LayoutError),
    "weights by torch": ("pytorch_model.bin", open_tensors, LayoutError),
    "index of weights": ("model.safetensors.index.json", open_tensors, LayoutError),
    "folder of weights": ("pytorch_model.bin", lambda p: open_tensors(p.parent), LayoutError),
    "module's weights": ("model.safetensors", lambda p: index_of_weights(p, None), CheckpointError),
    "module's weights by torch": ("model.pt", lambda p: index_of_weights(p, None), CheckpointError),
    "module's index": ("a.safetensors.index.json", lambda p: index_of_weights(p, None), CheckpointError),
    "checkpoint": ("metadata.json", lambda p: zero._checkpoint.index.read_index(p.parent), CheckpointError),
    "export": ("metadata.json", lambda p: zero.checkpoints.export_checkpoint(p.parent, p.parent / "o.safetensors"),
               CheckpointError),
    "latest": ("latest", lambda p: zero.checkpoints.export_checkpoint(p.parent, p.parent / "o.safetensors"),
               CheckpointError),
    "file with checksums": ("file", lambda p: kernels.file_queue(1, 4096).open(str(p), is_checked=True), OSError),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_a_malicious_file_is_refused_by_name_and_runs_nothing(tmp_path: Path, reader: str) -> None:
    name, read, errors = READERS[reader]
    for kind, content in payloads(tmp_path / "trace").items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / name).write_bytes(content)
        with pytest.raises(errors):
            read(folder / name)
        assert not (tmp_path / "trace").exists(), kind


def test_the_pickle_works_where_it_is_loaded(tmp_path: Path) -> None:
    pickle.loads(payloads(tmp_path / "trace")["pickle"])
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize("command_line", ["export", "config explain", "plan --model"])
def test_the_commands_say_what_is_wrong(tmp_path: Path, command_line: str, capsys: pytest.CaptureFixture[str]) -> None:
    for number, content in enumerate(payloads(tmp_path / "trace").values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        is_export = command_line == "export"
        path = folder / ("metadata.json" if is_export else "file.json")
        path.write_bytes(content)
        words = [str(folder), str(folder / "out.safetensors")] if is_export else [str(path)]
        assert main([*command_line.split(), *words]) == 1
        assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("text", ["inf", "1e999GB", "nan", "", "B", "KB", "-1", "0x10", "1e400"])
def test_a_size_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "a", "b.safetensors", "--max-shard-size", text])
    assert "a size must be" in capsys.readouterr().err or text == "-1"


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, ["x"]])
@pytest.mark.parametrize("reads", [open_tensors, lambda path: index_of_weights(path, None)], ids=["init", "load"])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: Any, reads: Callable[[Path], object]) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    zero._checkpoint.plain_weights.WeightsWriter(tmp_path / "secret.safetensors", {}).finish()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises((LayoutError, CheckpointError), match=r"outside|own folder|not (the|an) index"):
        reads(index)


def _saved(folder: Path) -> tuple[nn.Module, zero.ZeroOptimizer]:
    model = nn.Linear(4, 4)
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, stage=1)
    zero.save_checkpoint(optimizer, folder, "good")
    return model, optimizer


def _link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_a_checkpoint_has_no_links_and_no_pipes(tmp_path: Path) -> None:
    _, optimizer = _saved(tmp_path)
    for change, words in ((_link, r"is a symbolic link.*cp -rL"), (_pipe, "must be a regular file")):
        for name in ("metadata.json", "shard"):
            tag = f"{name}{change.__name__}"
            shutil.copytree(tmp_path / "good", tmp_path / tag)
            change(next((tmp_path / tag).glob(f"{name}*")))
            with pytest.raises(CheckpointError, match=words):
                zero.load_checkpoint(optimizer, tmp_path, tag)
        shutil.copytree(tmp_path / "good", tmp_path / change.__name__ / "good")
        (tmp_path / change.__name__ / "latest").write_text("good")
        change(tmp_path / change.__name__ / "latest")
        with pytest.raises(CheckpointError, match=words):
            zero.load_checkpoint(optimizer, tmp_path / change.__name__)
    assert zero.load_checkpoint(optimizer, tmp_path, "good").path == tmp_path / "good"
    optimizer.close()


def test_no_flipped_bit_and_no_cut_of_latest_names_another_checkpoint(tmp_path: Path) -> None:
    for tag in ("step1", "step2", "step12", "step14", "step16"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "metadata.json").write_text("{}")
    line = b"crc32=%08x step12" % zlib.crc32(b"step12")
    (tmp_path / "latest").write_bytes(line)
    assert read_latest(tmp_path) == "step12"
    flipped = [line[: i // 8] + bytes([line[i // 8] ^ 1 << i % 8]) + line[i // 8 + 1 :] for i in range(8 * len(line))]
    for damaged in (*flipped, *(line[:stop] for stop in range(len(line)))):
        (tmp_path / "latest").write_bytes(damaged)
        try:
            named = read_latest(tmp_path)
        except CheckpointError:
            continue
        assert not (tmp_path / str(named) / "metadata.json").exists(), damaged
    (tmp_path / "latest").write_text("step2\n")  # by hand, or by an older release
    assert read_latest(tmp_path) == "step2"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_files_on_nvme_are_their_owners_alone(tmp_path: Path) -> None:
    with umask(0):
        store = FileStore(
            tmp_path, files=FileSettings(request_nbytes=4096, num_requests=1), name="states", topology=None
        )
        store.create("moments", 10_000)
    assert _mode(store.folder) == 0o700
    assert {path.name: _mode(path) for path in store.folder.iterdir()} == {"owner": 0o600, "moments": 0o600}
    store.close()


def test_the_probe_file_is_its_owners_unless_opened(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "zcomm" / "probe.json"
    facts = {"device": "cpu", "choices": {}}
    with umask(0):
        probe._write(path, "1x1", facts)
        assert (_mode(path.parent), _mode(path)) == (0o700, 0o600)
        path.chmod(0o644)
        probe._write(path, "1x2", facts)
    assert _mode(path) == 0o644
    assert [child.name for child in path.parent.iterdir()] == ["probe.json"]
    assert json.loads(path.read_text())["topologies"].keys() == {"1x1", "1x2"}


def test_a_checkpoint_has_the_modes_of_the_umask_also_while_it_is_written(tmp_path: Path) -> None:
    seen = set()
    before = os.replace

    with umask(0o077), pytest.MonkeyPatch.context() as changed:
        changed.setattr(os, "replace", lambda a, b, **k: (seen.add(_mode(Path(a))), before(a, b, **k)))
        _, optimizer = _saved(tmp_path / "saves")
        zero.checkpoints.export_checkpoint(tmp_path / "saves", tmp_path / "out.safetensors")
        optimizer.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {_mode(path) for path in files} == {0o600}
    assert {_mode(path) for path in tmp_path.rglob("*") if path.is_dir()} == {0o700}
    assert seen <= {0o600}


def _claims(parent: Path) -> None:
    ClaimedFolder(parent, "mine").remove()


def test_another_users_folder_beside_ours_harms_nobody(tmp_path: Path) -> None:
    boot, host = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.uname().nodename
    (tmp_path / "stat").write_text("1 (x) R 0\n")
    owner = {"host": host, "boot": boot, "pid": f"../..{tmp_path}", "start_time": "1"}
    contents = [*payloads(tmp_path / "trace").values(), json.dumps(owner).encode()]
    for number, content in enumerate(contents):
        folder = tmp_path / f"zero-{number}"
        folder.mkdir()
        (folder / "owner").write_bytes(content)
    (tmp_path / "zero-pipe").mkdir()
    os.mkfifo(tmp_path / "zero-pipe" / "owner")
    (tmp_path / "zero-link").symlink_to(tmp_path / "zero-0")
    _claims(tmp_path)
    assert len(list(tmp_path.glob("zero-*"))) == len(contents) + 2
    assert not (tmp_path / "trace").exists()


def test_what_another_user_wrote_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "zero-dead"
    folder.mkdir()
    owner = {"host": os.uname().nodename, "boot": "another", "pid": 1, "start_time": "1"}
    (folder / "owner").write_text(json.dumps(owner))
    with monkeypatch.context() as changed:
        changed.setattr(os, "geteuid", lambda: os.getuid() + 1)
        _claims(tmp_path)
    assert folder.exists()
    _claims(tmp_path)
    assert not folder.exists(), "its own user's process is gone"
