"""What cannot be published or followed is refused by name, and the same on every rank."""

# covers zero/_publish/publisher.py zero/_publish/subscriber.py zero/_publish/weights.py zero/_ranks/first_rank.py

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero
from tests.ranks import run_ranks
from tests.zero.models import new_model
from zcomm import ConfigError, LayoutError, StateError
from zero._publish import manifest as manifests
from zero._publish import publisher as publishers
from zero._ranks.first_rank import on_first_rank


def _linears(*, is_tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    if is_tied:
        model[1].weight = model[0].weight
    return model


def _overlapping() -> dict[str, Tensor]:
    memory = torch.zeros(31)
    return {"0.weight": memory[:16].view(4, 4), "1.weight": memory[15:].view(4, 4)}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (_linears(is_tied=True), "'0.weight' and '1.weight' share memory"),
        (_overlapping(), "'0.weight' and '1.weight' share memory"),
        (_linears().to("meta"), "on meta"),
    ],
)
def test_targets_that_cannot_hold_the_published_values(tmp_path: Path, target: Any, words: str) -> None:
    with zero.Publisher(_linears(), tmp_path) as publisher:
        publisher.publish()
    with pytest.raises(LayoutError, match=words):
        zero.Subscriber(tmp_path, target).update()


def test_a_target_that_a_zero_optimizer_manages(tmp_path: Path) -> None:
    """Its masters would not follow."""
    with zero.Publisher(_linears(), tmp_path) as publisher:
        publisher.publish()
    model = _linears()
    subscriber = zero.Subscriber(tmp_path, model)
    with closing(zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=2)):
        for each in (subscriber, zero.Subscriber(tmp_path, dict(model.named_parameters()))):
            with pytest.raises(StateError, match="a ZeroOptimizer manages the target"):
                each.update()


def test_a_target_whose_state_dict_has_copies(tmp_path: Path) -> None:
    with zero.Publisher(_linears(), tmp_path) as publisher:
        publisher.publish()
    model = _linears()
    before = model[1].weight.clone()
    model.register_state_dict_post_hook(lambda _, state, *__: state.update({k: v.clone() for k, v in state.items()}))
    model.register_buffer("scratch", torch.eye(2).to_sparse(), persistent=False)  # has no address
    with pytest.raises(LayoutError, match=r"returns a copy of '0\.weight'"):
        zero.Subscriber(tmp_path, model).update()
    assert torch.equal(model[1].weight, before)


def test_tensors_that_fill_an_empty_dict_can_be_trained_and_changed(tmp_path: Path) -> None:
    with zero.Publisher(_linears(), tmp_path) as publisher:
        publisher.publish()
    read: dict[str, Tensor] = {}
    with torch.inference_mode():
        zero.Subscriber(tmp_path, read).update()
    assert not any(value.is_inference() for value in read.values())
    read["0.weight"].add_(1)
    torch.func.functional_call(_linears(), read, (torch.ones(1, 4, requires_grad=True),)).sum().backward()


def test_what_is_published_tied_may_be_tied(tmp_path: Path) -> None:
    model, ours = _linears(is_tied=True), _linears(is_tied=True)
    with zero.Publisher(model, tmp_path) as publisher:
        publisher.publish()
    assert zero.Subscriber(tmp_path, ours).update() == ["0.weight"]
    assert torch.equal(ours.state_dict()["1.weight"], model.state_dict()["0.weight"])
    halves = torch.zeros(32)
    apart = {"0.weight": halves[:16].view(4, 4), "1.weight": halves[16:].view(4, 4)}
    with zero.Publisher(_linears(), tmp_path) as publisher:
        publisher.publish()
    zero.Subscriber(tmp_path, apart).update()


@pytest.mark.parametrize("waits", [False, True])
def test_a_folder_that_was_emptied_and_filled_up_to_the_same_number(tmp_path: Path, *, waits: bool) -> None:
    ours = _linears()
    subscriber = zero.Subscriber(tmp_path, ours)
    for _ in range(2):
        shutil.rmtree(tmp_path)
        model = _linears()
        with zero.Publisher(model, tmp_path) as publisher:
            publisher.publish(5)
        assert subscriber.wait(0.0) if waits else subscriber.update()
        assert torch.equal(ours.state_dict()["1.weight"], model.state_dict()["1.weight"])
        assert subscriber.update() == []


def test_a_folder_that_was_emptied_under_a_publisher(tmp_path: Path) -> None:
    """A subscriber that was at the last number before, and looks again when there are as many, sees new ones."""
    ours, model = _linears(), _linears()
    subscriber = zero.Subscriber(tmp_path, ours)
    with zero.Publisher(model, tmp_path) as publisher:
        for _ in range(2):
            nn.init.normal_(model[0].weight)
            _publish_and_wait(publisher)
            subscriber.update()
            assert torch.equal(ours[0].weight, model[0].weight)
            for path in tmp_path.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "publisher":
                    path.unlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *[({"dtype": dtype}, "a floating-point torch.dtype") for dtype in (torch.int8, torch.bool, torch.complex128)],
        ({"dtype": "bfloat16"}, "got 'bfloat16'"),
        ({"keep": 2.5}, "keep must be a whole number of at least 1: got 2.5"),
        ({"keep": True}, "keep must be"),
        ({"snapshot_every": 0}, "snapshot_every must be a whole number of at least 1: got 0"),
    ],
)
def test_arguments_of_a_publisher(tmp_path: Path, arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        zero.Publisher(_linears(), tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_versions_are_whole_numbers(tmp_path: Path) -> None:
    subscriber = zero.Subscriber(tmp_path, _linears())
    with zero.Publisher(_linears(), tmp_path) as publisher:
        bad: tuple[Any, ...] = (1.5, True, np.True_, -1, 2**63, "3", torch.tensor(0.5))
        for version in bad:
            with pytest.raises(StateError, match="a version must be a whole number"):
                publisher.publish(version)
        good: tuple[Any, ...] = (np.int64(3), torch.tensor(4), np.uint8(5))
        for version in good:
            publisher.publish(version, snapshot=np.bool_(1))  # type: ignore[arg-type]
            publisher.wait()
            subscriber.update()
            assert type(subscriber.version) is int
            assert subscriber.version == version
    assert len(list(tmp_path.glob("n*/model.safetensors"))) == 3


def _publish_and_wait(publisher: zero.Publisher) -> None:
    publisher.publish()
    publisher.wait()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, dtype=torch.int32), r"'count' was torch.int64 \(3,\).*is torch.int32"),
        (torch.zeros(4, dtype=torch.int64), r"is torch.int64 \(4,\): close it, and make another"),
        (None, "is missing"),
    ],
)
@pytest.mark.parametrize("is_managed", [False, True])
def test_a_buffer_that_changes_its_form(tmp_path: Path, value: Tensor | None, words: str, *, is_managed: bool) -> None:
    model: Any = _linears()
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    source = zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1) if is_managed else model
    with zero.Publisher(source, tmp_path) as publisher:
        publisher.publish()
        publisher.wait()
        model.count = value
        with pytest.raises((LayoutError, zero.PublicationError), match=words):
            _publish_and_wait(publisher)
        model.count = torch.ones(3, dtype=torch.int64)
        publisher.publish()
    read: dict[str, Tensor] = {}
    zero.Subscriber(tmp_path, read).update()
    assert read["count"].tolist() == [1, 1, 1]
    if isinstance(source, zero.ZeroOptimizer):
        source.close()


def _untied(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_untied, "1.weight"),
        (lambda model: model.append(nn.Linear(4, 4, bias=False)), "2.weight"),
        (lambda model: model.register_buffer("more", torch.zeros(3)), "more"),
    ],
)
def test_a_tensor_that_the_model_did_not_have(tmp_path: Path, change: Callable[[Any], object], name: str) -> None:
    model = _linears(is_tied=True)
    with zero.Publisher(model, tmp_path) as publisher:
        publisher.publish()
        change(model)
        with pytest.raises(LayoutError, match=rf"had no '{name}' of its own .* make another"):
            publisher.publish()


def test_a_parameter_of_another_dtype(tmp_path: Path) -> None:
    model = _linears()
    with zero.Publisher(model, tmp_path) as publisher:
        model.half()
        with pytest.raises(LayoutError, match=r"'0.weight' was torch.float32 .*, and is torch.float16"):
            publisher.publish()


def _mine(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return re.sub(r"^rank \d: ", "", f"{error}")
    return ""


def _check_errors_of_one_rank(rank: int, folder: str, bad: int) -> None:
    """Whatever one rank does wrong, all raise the same, and go on."""
    model = new_model(torch.bfloat16)
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=3)
    model.bad = nn.Buffer(torch.zeros(2, device="meta")) if rank == bad else nn.Buffer(torch.zeros(2))
    errors = [_mine(lambda: zero.Publisher(optimizer, folder))]
    model.bad = torch.zeros(2)
    for arguments in ({"keep": 0.5}, {"dtype": torch.int8}, {"dtype": torch.float32}, {"folder": None}):
        own: Any = {"folder": folder, **(arguments if rank == bad else {})}
        errors.append(_mine(lambda own=own: zero.Publisher(optimizer, **own)))  # type: ignore[misc]
    with zero.Publisher(optimizer, folder) as publisher:
        for version in (1.5, True, "3"):
            publisher.publish(version if rank == bad else 1)  # type: ignore[arg-type]
            errors.append(_mine(publisher.wait))
        publisher.publish(7)
        publisher.wait()
        publisher.publish(8)
        publisher.wait()
        optimizer.close()
        errors.append(_mine(publisher.publish))
    of_ranks: list[Any] = [None] * 2
    torch.distributed.all_gather_object(of_ranks, errors)
    words = [
        "'bad' is a",
        "keep must be",
        "floating-point torch.dtype",
        "dtype=torch.float32",
        "",
        *["whole number"] * 3,
    ]
    for ours, theirs, expected in zip(*of_ranks, [*words, "ZeroOptimizer is closed"], strict=True):
        assert ours
        assert theirs
        assert expected in ours
        assert expected in theirs
    read = zero.Subscriber(folder, {})
    read.update()
    assert read.version == 8


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_one_rank_is_that_of_all(tmp_path: Path, bad: int) -> None:
    run_ranks(2, _check_errors_of_one_rank, str(tmp_path), bad)


def _check_results_that_are_no_json(rank: int) -> None:
    group = torch.distributed.group.WORLD
    with pytest.raises(StateError, match=r"TypeError: .*set is not JSON serializable"):
        on_first_rank(lambda: {1} if rank else 0, lambda _: [1, 2], group, StateError)
    with pytest.raises(StateError, match=r"TypeError: .*set is not JSON serializable"):
        on_first_rank(lambda: 0, lambda _: [1, {2}], group, StateError)
    assert on_first_rank(lambda: rank, lambda of_ranks: of_ranks[::-1], group, StateError) == 1 - rank


def test_results_that_are_no_json_are_an_error_on_every_rank() -> None:
    run_ranks(2, _check_results_that_are_no_json)


def test_a_closed_publisher_leaves_its_folder_although_a_child_lives(tmp_path: Path) -> None:
    publisher = zero.Publisher(_linears(), tmp_path)
    ready, end = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.write(ready[1], b"1")
        os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(zero.PublicationError, match="has a publisher that runs"):
            zero.Publisher(_linears(), tmp_path)
        publisher.close()
        zero.Publisher(_linears(), tmp_path).close()
    finally:
        os.write(end[1], b"1")
        os.waitpid(child, 0)


def test_a_closed_publisher_frees_its_folder_although_its_lock_was_inherited(tmp_path: Path) -> None:
    publisher = zero.Publisher(_linears(), tmp_path)
    assert publisher._first is not None
    inherited = os.dup(publisher._first._lock)  # as by a child that was forked by other means than os.fork
    publisher.close()
    zero.Publisher(_linears(), tmp_path).close()
    os.close(inherited)


def test_a_publisher_that_could_not_be_made_or_was_dropped_leaves_its_folder(tmp_path: Path) -> None:
    fails = patch.object(publishers, "numbers_in", side_effect=zero.PublicationError("cannot be read"))
    with fails, pytest.raises(zero.PublicationError, match="cannot be read"):
        zero.Publisher(_linears(), tmp_path)
    dropped: zero.Publisher | None = zero.Publisher(_linears(), tmp_path)
    assert dropped is not None
    _publish_and_wait(dropped)
    dropped = None
    gc.collect()
    zero.Publisher(_linears(), tmp_path).close()


def test_a_child_does_not_hold_or_free_the_folder(tmp_path: Path) -> None:
    def lock_is_open() -> bool:
        return any(path.resolve() == tmp_path / "publisher" for path in Path("/proc/self/fd").iterdir())

    with zero.Publisher(_linears(), tmp_path) as publisher:
        assert lock_is_open()
        if not (child := os.fork()):
            is_open = lock_is_open()
            publisher.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            os._exit(is_open)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(zero.PublicationError, match="has a publisher that runs"):
            zero.Publisher(_linears(), tmp_path)


def test_an_error_within_the_block_leaves_no_thread_and_no_values(tmp_path: Path) -> None:
    model, before = _linears(), set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), zero.Publisher(model, tmp_path) as publisher:  # noqa: PT012
        publisher.publish()
        raise KeyboardInterrupt
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()
    assert not publisher._values
    zero.Publisher(model, tmp_path).close()


def test_other_names_than_those_of_publications_are_ignored(tmp_path: Path) -> None:
    for name in (f"n{chr(0x669) * 10}", "n000000009", "n00000000099", "n+000000009", "n9999999999.old"):
        (tmp_path / name).mkdir()
    with zero.Publisher(_linears(), tmp_path) as publisher:
        _publish_and_wait(publisher)
        assert (tmp_path / "n0000000001").is_dir()
        subscriber = zero.Subscriber(tmp_path, _linears())
        subscriber.update()
        assert subscriber.version == 1


def test_the_last_number_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "n9999999998").mkdir()
    with zero.Publisher(_linears(), tmp_path) as publisher:
        _publish_and_wait(publisher)
        with pytest.raises(zero.PublicationError, match="has publication 9999999999, the last: use another folder"):
            _publish_and_wait(publisher)
    assert sorted(path.name for path in tmp_path.glob("n*")) == ["n9999999998", "n9999999999"]


def test_only_verify_finds_a_change_in_what_no_patch_touches(tmp_path: Path) -> None:
    model: Any = _linears()
    ours: Any = _linears()
    for each in (model, ours):
        each.register_buffer("steps", torch.zeros(2, dtype=torch.int64))  # a chunk of its own
    subscriber = zero.Subscriber(tmp_path, ours)
    with zero.Publisher(model, tmp_path) as publisher:
        _publish_and_wait(publisher)
        subscriber.update()
        ours.steps += 1
        with torch.no_grad():
            model[0].weight += 1
        _publish_and_wait(publisher)
        subscriber.update()
        assert subscriber.version == 2
        with pytest.raises(zero.PublicationError, match="'steps', or a tensor beside it, was changed"):
            subscriber.verify()
        subscriber.update()
        subscriber.verify()
        assert ours.steps.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["n0000000001/manifest.json", "layout-*.json"])
def test_documents_are_bounded_by_the_targets_tensors_before_they_are_parsed(tmp_path: Path, name: str) -> None:
    with zero.Publisher(_linears(), tmp_path) as publisher:
        publisher.publish()
    document = next(tmp_path.glob(name))
    whole = document.read_bytes()
    document.write_bytes(whole + b" " * 2**23 + b" " * 600)
    with patch.object(json, "loads", wraps=json.loads) as parsed:
        with pytest.raises(zero.PublicationError, match=r"for the tensors of this reader it has at most 83"):
            zero.Subscriber(tmp_path, _linears()).update()
        assert all(len(call.args[0]) < 2**20 for call in parsed.call_args_list)
    zero.Subscriber(tmp_path, {}).update()  # knows no tensors
    document.write_bytes(whole + b" " * 2**23)
    zero.Subscriber(tmp_path, _linears()).update()


def test_documents_of_many_small_tensors_with_long_names_are_read(tmp_path: Path) -> None:
    count = 5000
    tensors = {f"{chr(0xFC) * 60}{n}": nn.Parameter(torch.zeros([1] * 8)) for n in range(count)}
    model = nn.ParameterDict(tensors)
    with patch.object(manifests, "CHUNK_NUMEL", 1), zero.Publisher(model, tmp_path) as publisher:
        publisher.publish()
        publisher.wait()
        ours = {name: torch.ones([1] * 8) for name in tensors}
        assert len(zero.Subscriber(tmp_path, ours).update()) == count
