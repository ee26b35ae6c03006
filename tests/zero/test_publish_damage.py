"""What a subscriber refuses: damaged, malicious and foreign files. The last good weights stay, and errors are named."""

# covers zero/_publish/subscriber.py zero/_publish/manifest.py

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.security.test_untrusted_files import payloads
from tests.zero.publications import model_at, publish, publish_all, values_of
from zcomm import LayoutError
from zero._publish import manifest as manifests

SEED = int(time.strftime("%Y%m%d"))
sys.stdout.write(f"{SEED=}\n")


def _damages(folder: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Damages, each with a title."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "publisher"):
        name, size = path.relative_to(folder), path.stat().st_size
        for bit in (random.Random(f"{SEED} {path.name}").randrange(8 * size), 8 * size - 1):

            def flip(to: Path, name: Path = name, bit: int = bit) -> None:
                data = bytearray((to / name).read_bytes())
                data[bit // 8] ^= 1 << bit % 8
                (to / name).write_bytes(data)

            yield f"bit {bit} of {name}", flip
        yield f"no {name}", lambda to, name=name: (to / name).unlink()  # type: ignore[misc]
        for keeps in {0, size // 2, size - 1}:
            yield f"{keeps} bytes of {name}", lambda to, name=name, n=keeps: os.truncate(to / name, n)  # type: ignore[misc]
        yield f"link {name}", lambda to, name=name: _link(to / name)  # type: ignore[misc]
        yield f"pipe {name}", lambda to, name=name: (to / name).unlink() or os.mkfifo(to / name)  # type: ignore[misc]


def _link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def test_no_damage_of_any_file_is_read_as_weights(tmp_path: Path) -> None:
    at = {version: tmp_path / str(version) for version in range(1, 5)}

    def keep(version: int) -> None:
        shutil.copytree(tmp_path / "good", at[version])

    publish_all(tmp_path / "good", last=4, snapshot_every=3, keep=9, done=keep)  # snapshots at 1 and 4
    refused, folder = [0, 0], tmp_path / "damaged"
    for last in (3, 4):
        for title, damage in _damages(at[last]):
            for start in (None, 2):
                ours = model_at(-1)
                subscriber = zero.Subscriber(folder, ours)
                if start is not None:
                    shutil.copytree(at[start], folder)
                    subscriber.update()
                    shutil.rmtree(folder)
                shutil.copytree(at[last], folder)
                damage(folder)
                try:
                    subscriber.update()
                except zero.PublicationError:
                    refused[last - 3] += 1
                assert values_of(ours) == [-1 if subscriber.version is None else subscriber.version], title
                assert start is None or start <= (subscriber.version or 0), title
                shutil.rmtree(folder)
    assert refused[0] > refused[1] > 15


@pytest.mark.parametrize("name", ["manifest.json", "layout", "patch-00000.bin", "model.safetensors"])
def test_malicious_files_are_refused_by_name_and_run_nothing(tmp_path: Path, name: str) -> None:
    publish_all(tmp_path / "good", last=2, snapshot_every=9, keep=9)
    trace, folder = tmp_path / "trace", tmp_path / "damaged"
    for kind, content in payloads(trace).items():
        shutil.copytree(tmp_path / "good", folder)
        for path in folder.rglob(f"{name}*"):
            path.write_bytes(content)
        subscriber = zero.Subscriber(folder, model_at(-1))
        with pytest.raises(zero.PublicationError, match=r"stay at version (None|1)"):
            subscriber.update()
        assert not trace.exists(), kind
        shutil.rmtree(folder)


def _resealed(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a document, and make its checksum fit."""
    document = json.loads(path.read_text())
    change(document["content"])
    content = json.dumps(document["content"], sort_keys=True, separators=(",", ":")).encode()
    document["crc32"] = zlib.crc32(content)
    path.write_text(json.dumps(document, separators=(",", ":")))


HOSTILE: dict[str, tuple[Callable[[Any], object], str]] = {
    "bomb": (lambda c: c["changes"].__setitem__(0, [0, 2**50, "0" * 64]), "takes at most"),
    "nothing": (lambda c: c["changes"].__setitem__(0, [0, 0, "0" * 64]), "takes at most"),
    "no such chunk": (lambda c: c["changes"].__setitem__(0, [7, 9, "0" * 64]), "does not have"),
    "negative": (lambda c: c["changes"].__setitem__(0, [-1, 9, "0" * 64]), "a size or number is expected"),
    "no number": (lambda c: c["changes"].__setitem__(0, [0.0, 9, "0" * 64]), "a size or number is expected"),
    "twice": (lambda c: c["changes"].append(c["changes"][0]), "in the order"),
    "path": (lambda c: c.update(layout="../../etc/passwd"), "a digest is expected"),
    "other layout": (lambda c: c.update(layout="0" * 64), "another layout"),
    "other digest": (lambda c: c["changes"][0].__setitem__(2, "0" * 64), "its digest"),
    "other root": (lambda c: c.update(root="0" * 64), "their digest"),
    "other number": (lambda c: c.update(number=3), "not that of publication 2"),
    "other run": (lambda c: c.update(run="another"), "a patch is missing"),
    "other base": (lambda c: c.update(base=9), "a patch is missing"),
    "neither": (lambda c: c.update(base=None), "not that of publication 2"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_refused_before_memory_is_allocated(tmp_path: Path, kind: str) -> None:
    change, words = HOSTILE[kind]
    publish_all(tmp_path, last=2, snapshot_every=9, keep=9)
    _resealed(tmp_path / "n0000000002" / "manifest.json", change)
    ours = model_at(-1)
    with pytest.raises(zero.PublicationError, match=rf"stay at version 1: .*{words}"):
        zero.Subscriber(tmp_path, ours).update()
    assert values_of(ours) == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["tensors"][0].__setitem__(2, [2**40, 2**40]),
        lambda c: c["tensors"].append(["more", "BF16", [3]]),
        lambda c: c["tensors"].append(c["tensors"][0]),
        lambda c: c["chunks"][0][1].append([0, 0, 5]),
        lambda c: c["chunks"][0][1].pop(),
        lambda c: c["chunks"][0].__setitem__(1, []),
        lambda c: c["chunks"][0][1][0].__setitem__(2, 2**40),
        lambda c: c["tensors"][0].__setitem__(1, "F32"),
        lambda c: c["tensors"][0].__setitem__(1, "PICKLE"),
    ],
)
def test_a_hostile_layout_is_refused(tmp_path: Path, change: Callable[[Any], object]) -> None:
    publish_all(tmp_path, last=1)
    path = next(tmp_path.glob("layout-*"))
    _resealed(path, change)
    with pytest.raises(zero.PublicationError, match=r"stay at version None: .*layout-.* is damaged"):
        zero.Subscriber(tmp_path, {}).update()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()  # by somebody who knows the format
    path.rename(path.with_name(f"layout-{digest}.json"))
    _resealed(tmp_path / "n0000000001" / "manifest.json", lambda content: content.update(layout=digest))
    with pytest.raises(zero.PublicationError, match=rf"stay at version None: .*layout-{digest}.json is damaged"):
        zero.Subscriber(tmp_path, {}).update()


def test_another_version_of_the_format_is_named(tmp_path: Path) -> None:
    publish_all(tmp_path, last=1)
    path = tmp_path / "n0000000001" / "manifest.json"
    for version in (0, 2, "2"):
        document = json.loads(path.read_text())
        document["version"] = version
        path.write_text(json.dumps(document))
        with pytest.raises(
            zero.PublicationError, match=rf"has version {version!r} of the format, this library reads 1"
        ):
            zero.Subscriber(tmp_path, model_at()).update()
    document["version"], document["content"]["version"] = 1, 7  # not that of the format: the training's
    path.write_text(json.dumps(document))
    with pytest.raises(zero.PublicationError, match="its checksum does not match"):
        zero.Subscriber(tmp_path, model_at()).update()
    (tmp_path / "n0000000009").symlink_to(tmp_path / "n0000000001")
    assert manifests.numbers_in(tmp_path) == [1]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 21)).bfloat16(), r"'1.weight' is torch.bfloat16 \(20, 30\)"),
        (nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)), "here torch.float32"),
        (nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).half(), "here torch.float16"),
        (nn.Sequential(nn.Linear(40, 30)).bfloat16(), "no such tensor"),
        (nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20), nn.Linear(20, 3)).bfloat16(), "does not have .*2.weight"),
        ({"0.weight": torch.zeros(40, 30).t()}, "strides"),
    ],
)
def test_another_model_is_named_and_left_unchanged(tmp_path: Path, target: Any, words: str) -> None:
    publish_all(tmp_path, last=2)
    state = target if isinstance(target, dict) else target.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    with pytest.raises(LayoutError, match=words):
        zero.Subscriber(tmp_path, target).update()
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_a_patch_with_one_damaged_chunk_changes_nothing(tmp_path: Path) -> None:
    """The first chunk of the patch, in bfloat16, is whole. The last is float32, which no coder's checksum covers."""
    model = nn.Sequential(nn.Linear(40, 30).bfloat16(), nn.Linear(30, 20))
    ours = nn.Sequential(nn.Linear(40, 30).bfloat16(), nn.Linear(30, 20))
    subscriber = zero.Subscriber(tmp_path, ours)
    with zero.Publisher(model, tmp_path) as publisher:
        publish(model, publisher, 1)
        subscriber.update()
        publish(model, publisher, 2)
    (patch,) = tmp_path.glob("n*/patch-00000.bin")
    data = bytearray(patch.read_bytes())
    for at in (-1, -4 * 30 * 20):
        patch.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at:][1:])
        with pytest.raises(zero.PublicationError, match=r"does not give '1.*its digest"):
            subscriber.update()
        assert (subscriber.version, [param.unique().tolist() for param in ours.parameters()]) == (1, [[1]] * 4)
    patch.write_bytes(data)
    subscriber.update()
    assert (subscriber.version, [param.unique().tolist() for param in ours.parameters()]) == (2, [[2]] * 4)
