"""What subscribers read has the bits of the training's state dict, whatever stage, ranks and way it took."""

# covers zero/_publish/publisher.py zero/_publish/subscriber.py zero/_publish/weights.py zero/_ranks/first_rank.py
# covers zero/_publish/snapshot_files.py zero/_publish/manifest.py zero/_publish/__init__.py zero/_publish/command.py

from __future__ import annotations

import copy
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from tests.zero.public_models import new_public, public_loss
from tests.zero.training import train, zero_optimizer
from zcomm import LayoutError, StateError
from zero._publish import command as commands
from zero._publish import manifest as manifests
from zero._publish.subscriber import replayed
from zero.cli import main

HPZ = {"stage": 3, "mode": "delta_hpz", "ranks_per_node": 2}
DELTA = {"stage": 2, "mode": "delta", "changes": "quantized", "ranks_per_node": 2}
QUANTIZED = {"stage": 2, "quantized_weights": True}
SETTINGS: list[dict[str, Any]] = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, QUANTIZED, HPZ, DELTA]


def _with_buffers(seed: int = 0) -> nn.Module:
    model = new_model(torch.bfloat16, seed=seed, has_frozen=True)
    model.register_buffer("count", torch.tensor(seed))
    model.register_buffer("rates", torch.full((70,), float(seed), dtype=torch.float32))
    model.register_buffer("passing", torch.zeros(3), persistent=False)
    return model


def bits(state: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Of every tensor; of tied ones one, because a subscriber may name another one of them."""
    found: dict[str, bytes] = {}
    for name, value in state.items():
        if name != "head.weight":
            found[name] = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def _state_of(model: nn.Module) -> dict[str, bytes]:
    return bits(model.state_dict())


def _check_round_trips(rank: int, folder: str, chunk_numel: int) -> None:
    world_size = torch.distributed.get_world_size()
    for number, settings in enumerate(SETTINGS):
        if settings.get("ranks_per_node", 1) > world_size:
            continue
        path, model = Path(folder) / str(number), _with_buffers()
        ours, empty = _with_buffers(seed=1), dict[str, Tensor]()
        subscribers = [zero.Subscriber(path, ours), zero.Subscriber(path, empty)]
        with (
            patch.object(manifests, "CHUNK_NUMEL", chunk_numel),
            zero_optimizer(model, **settings) as optimizer,
            zero.Publisher(optimizer, path, snapshot_every=3) as publisher,
        ):
            for step in range(4):
                publisher.publish(100 * step)
                publisher.wait()
                expected = _state_of(model)
                if rank == 0:
                    for subscriber in subscribers[: 2 if step % 2 else 1]:
                        assert "wte.weight" in subscriber.update()
                        assert subscriber.version == 100 * step
                        subscriber.verify()
                    assert _state_of(ours) == expected, (settings, step)
                    assert not step % 2 or bits(empty) == expected
                train(model, optimizer, rank, steps=1)
                model.count += 1
                model.rates[step] = -0.0 if step else float("nan")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_subscribers_read_the_bits_of_the_state_dict(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, _check_round_trips, str(tmp_path), 500)


def _check_large_states(rank: int, folder: str) -> None:
    """Parameters and states on NVMe, and a model of zero.Init."""
    tier = {"device": "nvme", "nvme_path": folder}
    states = {"offload_optimizer": tier}
    for number, settings in enumerate([{"offload_param": tier, **states}, states]):
        model = new_model(torch.bfloat16)
        if number:
            with zero.Init(dtype=torch.bfloat16):
                model = new_model(torch.bfloat16)
        path, read = Path(folder) / str(number), dict[str, Tensor]()
        with zero_optimizer(model, stage=3, **settings) as optimizer, zero.Publisher(optimizer, path) as publisher:
            for _ in range(2):
                train(model, optimizer, rank, steps=1)
                publisher.publish()
            publisher.wait()
            expected = _state_of(model)
            if rank == 0:
                zero.Subscriber(path, read).update()
                assert bits(read) == expected


def test_shards_in_files_are_published(tmp_path: Path) -> None:
    run_ranks(2, _check_large_states, str(tmp_path))


def changed(model: nn.Module, seed: int) -> None:
    """Change about a tenth of all elements a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.addcmul_(param, 0.01 * (torch.rand(param.shape, generator=generator) < 0.1))


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_transformers_and_safetensors_read_a_snapshot(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    import transformers

    monkeypatch.setattr("zero._publish.snapshot_files.MAX_SHARD_NBYTES", 20_000)  # several files
    model = new_public(name).bfloat16()
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=1e-3)
    served = type(model)(model.config).bfloat16()
    subscriber = zero.Subscriber(tmp_path, served)
    with zero.Publisher(optimizer, tmp_path) as publisher:
        for step in range(3):
            public_loss(model, name, step, 0).backward()
            optimizer.step()
            publisher.publish(step, snapshot=step == 2)
    subscriber.update()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "n0000000003", dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    expected = _state_of(model)
    optimizer.close()
    assert _state_of(loaded) == expected
    assert _state_of(served) == expected
    files = sorted((tmp_path / "n0000000003").glob("*.safetensors"))
    assert len(files) > 1
    stored = {name: value for file in files for name, value in safetensors.torch.load_file(file).items()}
    assert bits(stored) == {name: expected[name] for name in stored}
    assert stored.keys() == {name for name, _ in model.named_parameters()}  # tied ones once


def _maybe_wrapped(*, is_wrapped: bool) -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    if is_wrapped:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, (nn.Linear, nn.BatchNorm1d)))
    return model


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_names_are_those_of_the_state_dict_under_activation_checkpointing(tmp_path: Path, stage: int | None) -> None:
    model = _maybe_wrapped(is_wrapped=True)
    source = model if stage is None else zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=stage)
    with zero.Publisher(source, tmp_path) as publisher:
        publisher.publish()
    expected = _state_of(model)
    if isinstance(source, zero.ZeroOptimizer):
        source.close()
    for is_wrapped in (False, True):
        ours = _maybe_wrapped(is_wrapped=is_wrapped)
        zero.Subscriber(tmp_path, ours).update()
        assert _state_of(ours) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_plain_model_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model, ours = new_model(dtype), new_model(dtype, seed=1)
    subscriber = zero.Subscriber(tmp_path, ours)
    with zero.Publisher(model, tmp_path) as publisher:
        for version in range(4):
            publisher.publish(version)
            publisher.wait()
            subscriber.update()
            assert _state_of(ours) == _state_of(model)
            changed(model, version)


def test_a_float32_model_is_published_in_bfloat16(tmp_path: Path) -> None:
    model, ours = new_model(), new_model(torch.bfloat16)
    with zero.Publisher(model, tmp_path, dtype=torch.bfloat16) as publisher:
        for version in range(2):
            changed(model, version)
            publisher.publish()
    zero.Subscriber(tmp_path, ours).update()
    assert _state_of(ours) == _state_of(copy.deepcopy(model).bfloat16())
    with pytest.raises(LayoutError, match=r"must be the published model.*bfloat16.*here torch.float32"):
        zero.Subscriber(tmp_path, model).update()


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[nn.Module, zero.Publisher]]:
    model = new_model(torch.bfloat16)
    with zero.Publisher(model, tmp_path, snapshot_every=4, keep=2) as publisher:
        yield model, publisher


def _publish(model: nn.Module, publisher: zero.Publisher, version: int) -> dict[str, bytes]:
    changed(model, version)
    publisher.publish(version)
    publisher.wait()
    return _state_of(model)


def test_what_has_not_changed_is_not_sent(tmp_path: Path, monkeypatch: Any) -> None:
    model = nn.ModuleList(nn.Linear(30, 30, bias=False) for _ in range(4)).bfloat16()
    monkeypatch.setattr(manifests, "CHUNK_NUMEL", 900)
    with zero.Publisher(model, tmp_path / "own") as publisher:
        publisher.publish()
        model[2].weight.data.view(-1)[17] += 1
        publisher.publish()
        publisher.publish()
        model[1].weight.data.zero_()
        publisher.publish()
        model[1].weight.data.neg_()  # equal numbers, other bits
        publisher.publish()
    read: dict[str, Tensor] = {}
    names = [sorted(c.number for c in m.changes) for m in replayed(tmp_path / "own", read, [1, 2, 3, 4, 5])]
    assert names == [[], [2], [], [1], [1]]
    assert bits(read) == _state_of(model)


def test_a_subscriber_reads_only_the_patches_it_lacks(tmp_path: Path, published: Any) -> None:
    model, publisher = published
    ours = new_model(torch.bfloat16, seed=1)
    subscriber = zero.Subscriber(tmp_path, ours)
    assert subscriber.update() == []
    assert subscriber.version is None
    _publish(model, publisher, 1)
    subscriber.update()
    for version in (2, 3):
        expected = _publish(model, publisher, version)
    with patch.object(manifests, "open_own", wraps=manifests.open_own) as opened:
        assert set(subscriber.update()) == {name for name, _ in model.named_parameters()}
    read = [call.args[0].parent.name for call in opened.call_args_list]
    assert read == ["n0000000001", "n0000000002", "n0000000003"], "manifests, the own one first"
    assert subscriber.version == 3
    assert _state_of(ours) == expected
    assert subscriber.update() == []
    late = new_model(torch.bfloat16, seed=2)
    zero.Subscriber(tmp_path, late).update()
    assert _state_of(late) == expected


def test_old_publications_are_pruned_but_for_those_since_the_last_snapshot(tmp_path: Path, published: Any) -> None:
    model, publisher = published
    ours = new_model(torch.bfloat16, seed=1)
    subscriber, left = zero.Subscriber(tmp_path, ours), []
    for version in range(1, 11):
        expected = _publish(model, publisher, version)
        left.append(manifests.numbers_in(tmp_path))
        if version in (1, 2, 7):  # at 7 its next patches are gone
            subscriber.update()
            assert _state_of(ours) == expected
        late: dict[str, Tensor] = {}
        zero.Subscriber(tmp_path, late).update()
        assert bits(late) == expected
    assert left[3:] == [[1, 2, 3, 4], [4, 5], [5, 6], [5, 6, 7], [5, 6, 7, 8], [8, 9], [9, 10]]
    assert len(list(tmp_path.glob("layout-*"))) == 1


def test_fewer_bytes_are_read_where_there_is_a_choice(tmp_path: Path) -> None:
    model = nn.Linear(100, 100, bias=False).bfloat16()
    ours = copy.deepcopy(model)
    subscriber = zero.Subscriber(tmp_path, ours)
    with zero.Publisher(model, tmp_path, keep=9) as publisher:
        publisher.publish()
        publisher.wait()
        subscriber.update()
        for version in range(3):
            torch.nn.init.normal_(model.weight)  # a patch has the bits of a copy
            publisher.publish(snapshot=version == 2)
        publisher.wait()
        with patch.object(subscriber, "_apply", side_effect=AssertionError("a snapshot has fewer bytes")):
            subscriber.update()
        model.weight.data[0, 0] += 1
        publisher.publish(snapshot=True)
        publisher.wait()
        with patch.object(subscriber, "_load", side_effect=AssertionError("a patch has fewer bytes")):
            subscriber.update()
    assert torch.equal(ours.weight, model.weight)


def test_the_root_is_the_digest_of_the_bits_by_the_layout(tmp_path: Path, published: Any) -> None:
    model, publisher = published
    _publish(model, publisher, 1)
    expected = _publish(model, publisher, 2)
    layout = json.loads(next(tmp_path.glob("layout-*.json")).read_text())["content"]
    chunks = [
        b"".join(expected[layout["tensors"][tensor][0]][2 * start : 2 * stop] for tensor, start, stop in pieces)
        for _, pieces in layout["chunks"]
    ]
    assert sum(map(len, chunks)) == sum(2 * p.numel() for p in model.parameters())
    document = json.loads((tmp_path / "n0000000002" / "manifest.json").read_text())["content"]
    assert document["root"] == hashlib.sha256(b"".join(hashlib.sha256(c).digest() for c in chunks)).hexdigest()


def test_a_weight_that_was_changed_here_is_found_and_repaired(tmp_path: Path, published: Any) -> None:
    model, publisher = published
    ours = new_model(torch.bfloat16)
    subscriber = zero.Subscriber(tmp_path, ours)
    with pytest.raises(zero.PublicationError, match="call update"):
        subscriber.verify()
    _publish(model, publisher, 1)
    subscriber.update()
    ours.position.data[0, 0] += 1
    with pytest.raises(zero.PublicationError, match="was changed"):
        subscriber.verify()
    subscriber.update()
    assert _state_of(ours) == _state_of(model)
    ours.position.data[0, 0] += 1
    for version in (2, 3):
        _publish(model, publisher, version)
        with pytest.raises(zero.PublicationError, match=r"stay at version 1: .*weights were changed here"):
            subscriber.update()
    expected = _publish(model, publisher, 4), publisher.publish(5, snapshot=True), publisher.wait()
    subscriber.update()
    assert _state_of(ours) == expected[0]


def test_training_goes_on_while_a_thread_writes(tmp_path: Path, published: Any, monkeypatch: Any) -> None:
    model, publisher = published
    _publish(model, publisher, 1)
    may_write, fsync = threading.Event(), os.fsync

    def late(number: int) -> None:
        assert may_write.wait(30)
        fsync(number)

    monkeypatch.setattr(os, "fsync", late)
    changed(model, 2)
    expected = _state_of(model)
    publisher.publish(2)
    changed(model, 3)
    read: dict[str, Tensor] = {}
    subscriber = zero.Subscriber(tmp_path, read)
    subscriber.update()
    assert subscriber.version == 1
    may_write.set()
    publisher.wait()
    subscriber.update()
    assert (subscriber.version, bits(read)) == (2, expected)


def test_the_lock_is_held_only_while_weights_are_written(tmp_path: Path) -> None:
    model, ours, seen = new_model(torch.bfloat16), new_model(torch.bfloat16, seed=1), list[dict[str, bytes]]()
    folder, away = tmp_path / "own", tmp_path / "away"

    class Lock(nullcontext[None]):
        def __enter__(self) -> None:
            seen.append(_state_of(ours))
            folder.rename(away)  # no file is needed any more

        def __exit__(self, *_: object) -> None:
            seen.append(_state_of(ours))
            away.rename(folder)

    subscriber = zero.Subscriber(folder, ours, lock=Lock())
    states = [_state_of(ours)]
    with zero.Publisher(model, folder) as publisher:
        for version in (1, 2):
            states.append(_publish(model, publisher, version))
            subscriber.update()
            subscriber.update()
    assert seen == [states[0], states[1], states[1], states[2]]


def test_the_default_device_is_not_that_of_values(tmp_path: Path) -> None:
    model, ours, empty = new_model(torch.bfloat16), new_model(torch.bfloat16, seed=1), dict[str, Tensor]()
    subscribers = [zero.Subscriber(tmp_path, ours), zero.Subscriber(tmp_path, empty)]
    with torch.device("meta"), zero.Publisher(model, tmp_path) as publisher:
        for version in (1, 2):
            changed_here = model.position.data.view(-1)[version]
            changed_here.fill_(version)
            publisher.publish(version)
            publisher.wait()
            for subscriber in subscribers:
                subscriber.update()
    assert _state_of(ours) == bits(empty) == _state_of(model)


def test_a_relative_folder_stays_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    subscriber = zero.Subscriber("own", {})
    with zero.Publisher(new_model(), "own") as publisher:
        monkeypatch.chdir("/")
        publisher.publish(3)
    subscriber.update()
    assert subscriber.version == 3


def test_extra_state_is_not_published_and_a_model_may_have_it(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return torch.ones(2)

        def set_extra_state(self, state: Tensor) -> None:
            pass

    model, ours = nn.Sequential(Scaled(4, 4)), nn.Sequential(Scaled(4, 4))
    with zero.Publisher(model, tmp_path) as publisher:
        publisher.publish()
    assert zero.Subscriber(tmp_path, ours).update() == ["0.weight", "0.bias"]
    assert torch.equal(ours[0].weight, model[0].weight)


def _check_odd_folder(rank: int, folder: str) -> None:
    path = Path(folder) / os.fsdecode(b"\xff")
    model = new_model(torch.bfloat16)
    with zero_optimizer(model, stage=2) as optimizer, zero.Publisher(optimizer, path) as publisher:
        publisher.publish(5)
        publisher.wait()
        with pytest.raises(zero.PublicationError, match="has a publisher that runs"):
            zero.Publisher(optimizer, path)
    if rank == 0:
        subscriber = zero.Subscriber(path, {})
        subscriber.update()
        assert subscriber.version == 5


def test_a_folder_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    run_ranks(2, _check_odd_folder, str(tmp_path))


def test_waiting_ends_with_a_new_version_or_in_time(tmp_path: Path, published: Any) -> None:
    _, publisher = published
    subscriber = zero.Subscriber(tmp_path, new_model(torch.bfloat16))
    assert subscriber.wait(0.01, poll_s=0.001) == []
    timer = threading.Timer(0.05, publisher.publish, [7])
    timer.start()
    assert subscriber.wait(30, poll_s=0.01)
    assert subscriber.version == 7
    timer.join()


def test_an_engine_is_published_and_a_managed_model_is_not(tmp_path: Path) -> None:
    model = new_model()
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = zero.initialize(model=model, config={**config, "zero_optimization": {"stage": 2}})
    with pytest.raises(StateError, match="publish the ZeroOptimizer"):
        zero.Publisher(model, tmp_path)
    with pytest.raises(LayoutError, match="got dict"):
        zero.Publisher({}, tmp_path)
    with zero.Publisher(engine, tmp_path) as publisher:
        publisher.publish()
    read: dict[str, Tensor] = {}
    zero.Subscriber(tmp_path, read).update()
    assert bits(read) == _state_of(model)
    with pytest.raises(StateError, match="must be open"):
        publisher.publish()
    engine.optimizer.close()


def test_the_command_inspects_verifies_and_materializes(tmp_path: Path, capsys: Any) -> None:
    model = new_public("GPT-2").bfloat16()
    folder, output = tmp_path / "published", tmp_path / "out"
    assert main(["publish", str(folder), "--inspect"]) == 1
    assert "nothing is published" in capsys.readouterr().err
    with zero.Publisher(model, folder, snapshot_every=3) as publisher:
        for version in range(40, 44):
            publisher.publish(version)
            expected = _state_of(model)
            publisher.wait()
            changed(model, version)
    assert main(["publish", str(folder), "--inspect"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["patch of" in line for line in lines] == [False, True, True, True]
    assert ["snapshot" in line for line in lines] == [True, False, False, True]
    assert main(["publish", str(folder), "--verify"]) == 0
    assert "4 publications are whole: versions 40 to 43" in capsys.readouterr().out
    assert main(["publish", str(folder), "--materialize", str(output)]) == 0
    assert bits(safetensors.torch.load_file(output / "model.safetensors")).items() <= expected.items()
    assert (output / "config.json").read_text() == (folder / "n0000000001" / "config.json").read_text()
    path = folder / "n0000000002" / "patch-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["publish", str(folder), "--verify"]) == 1
    assert "patch-00000.bin is truncated" in capsys.readouterr().err
    assert main(["publish", str(folder), "--materialize", str(tmp_path / "again")]) == 0  # the newest is whole
    assert bits(safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")).items() <= expected.items()
    (folder / "n0000000001").rename(folder / "n0000000005")  # the newest has a manifest of another number
    assert main(["publish", str(folder), "--materialize", str(tmp_path / "none")]) == 1
    assert "publication 5 cannot be reached" in capsys.readouterr().err


def test_a_folder_is_verified_while_a_training_publishes(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """What is published meanwhile is not looked at, nor missed if that has pruned what was to be read."""
    model = new_model(torch.bfloat16)
    with zero.Publisher(model, tmp_path, snapshot_every=2, keep=1) as publisher:
        for version in (1, 2):
            _publish(model, publisher, version)
        read, between = commands.replayed, [3, 5, 3]

        def replayed_late(*args: Any) -> Iterator[Any]:
            for manifest in read(*args):
                for _ in range(between.pop() if between else 0):
                    _publish(model, publisher, 9)
                yield manifest

        line = commands._line

        def late_line(folder: Path, number: int) -> str:
            _publish(model, publisher, 9)
            return line(folder, number)

        monkeypatch.setattr(commands, "_line", late_line)
        assert main(["publish", str(tmp_path), "--inspect"]) == 0
        monkeypatch.setattr(commands, "replayed", replayed_late)
        for _ in range(2):
            assert main(["publish", str(tmp_path), "--verify"]) == 0
            assert "publications are whole" in capsys.readouterr().out
